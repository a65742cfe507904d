"""Tags of jobs, changed after they were submitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orc.launchers.errors import SpecError
from orc.orchestrator.ledger.database import insert

if TYPE_CHECKING:
    from orc.orchestrator.ledger.transaction import Transaction

_LONGEST = 255


def checked_tags(tags: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return *tags* if a job can have them; `None` removes one. Raises `SpecError`."""
    for key, value in tags.items():
        if not key or len(key) > _LONGEST or not key.isprintable() or "=" in key:
            raise SpecError(f"not the name of a tag: {key[:80]!r}", hint="a name is one printable word without `=`")
        if value is not None and (len(value) > _LONGEST or not value.isprintable()):
            raise SpecError(f"not the value of a tag: {value[:80]!r}", where=key, hint="a value is one printable line")
    return dict(tags)


def write_tags(tx: Transaction, job_id: str, tags: Mapping[str, str | None]) -> None:
    """Set tags of a job, and remove those that are `None`."""
    tx.connection.executemany(
        "DELETE FROM job_tags WHERE job_id = :id AND key = :key", [{"id": job_id, "key": key} for key in tags]
    )
    rows = ({"job_id": job_id, "key": key, "value": value} for key, value in tags.items() if value is not None)
    insert(tx.connection, "job_tags", *rows)
