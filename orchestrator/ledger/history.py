"""An exported ledger: JSON lines, one for each row of the tables that make history; its import into another ledger.

The first line is the header, the last one counts the rows of each table, so that a file that was cut is recognised. In
between each line is ``[table, {column: value}]``; columns that hold JSON are kept as text, exactly as they are stored.
No secrets, no tokens or their hashes, no leases, claims and messages under way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import IO, TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.launchers.ids import JOB_ID
from orc.orchestrator.ledger import schema
from orc.orchestrator.ledger.database import HEAD, Connection, batches, insert, one_of
from orc.orchestrator.ledger.lifecycle import TERMINAL_ATTEMPT, TERMINAL_JOB, AttemptState, Event, JobState, Kind
from orc.orchestrator.ledger.records import columns_of_attempt, dump
from orc.orchestrator.ledger.transaction import event_row

if TYPE_CHECKING:
    from sqlalchemy import Column

    from orc.orchestrator.ledger.store import Ledger


FORMAT = 1
BATCH = 1_000  # rows that are read, or written, at a time


@dataclass(frozen=True)
class ExportedTable:
    """Table of the file, with its columns and the key that gives the order of its rows."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    job: str = ""  # the column that names the job that a row belongs to; empty for rows of no job


def _table(name: str, key: str, job: str = "", without: str = "") -> ExportedTable:
    columns = (column.name for column in schema.metadata.tables[name].columns)
    return ExportedTable(name, tuple(c for c in columns if c not in without.split()), tuple(key.split()), job)


# Each after those that it refers to.
TABLES = (
    _table("groups", "id"),
    _table("jobs", "created_at id", "id", "claim_owner claim_expires_at"),
    _table("job_tags", "job_id key", "job_id"),
    # Without what `columns_of_attempt` says.
    _table("attempts", "job_id number", "job_id", "cluster owner project gpus_per_node machine nodes"),
    _table("culprits", "job_id attempt host", "job_id"),
    _table("reservations", "job_id attempt node", "job_id"),
    _table("sightings", "job_id", "job_id"),
    _table("dependencies", "job_id on_job", "job_id"),
    _table("events", "id", "job_id"),
    _table("schedules", "id"),
    _table("quotas", "scope name resource"),
    _table("audit", "id"),
    _table("pruned_jobs", "job_id"),
)


def export(ledger: Ledger, file: IO[str]) -> dict[str, int]:
    """Write the ledger as it is at one moment into *file*; the number of rows of each table.

    Others write meanwhile. Memory does not grow with the ledger. Raises `LedgerError`, `OSError`.
    """
    counts = dict.fromkeys((table.name for table in TABLES), 0)
    _write(file, {"orc_ledger": FORMAT, "schema": HEAD, "exported_at": ledger.now()})
    with ledger.database.read() as connection:
        for table in TABLES:
            for row in _rows(connection, table):
                _write(file, [table.name, _without_secrets(dict(zip(table.columns, row, strict=True)))])
                counts[table.name] += 1
    _write(file, {"end": counts})
    return counts


def _write(file: IO[str], value: Any) -> None:
    file.write(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    file.write("\n")


def _without_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a schedule with what no key opens in place of its sealed secrets; others as they are."""
    if "cron" not in row or '"sealed"' not in row["spec"]:
        return row
    spec = json.loads(row["spec"])
    return {**row, "spec": dump({**spec, "sealed": "-"} if "sealed" in spec else spec)}


def _rows(connection: Connection, table: ExportedTable) -> Iterator[tuple[Any, ...]]:
    """Yield all rows by the table's key, some of them in each query."""
    names = ", ".join(table.key)
    places = [table.columns.index(column) for column in table.key]
    marks = ", ".join(f":k{i}" for i in range(len(table.key)))
    last: tuple[Any, ...] | None = None
    while True:
        after = f"WHERE ({names}) > ({marks})" if last is not None else ""
        rows = connection.tuples(
            f"SELECT {', '.join(table.columns)} FROM {table.name} {after} "  # noqa: S608
            f"ORDER BY {names} LIMIT {BATCH}",
            {f"k{i}": last[place] for i, place in enumerate(places)} if last is not None else {},
        )
        yield from rows
        if len(rows) < BATCH:
            return
        last = rows[-1]


_BY_NAME = {table.name: table for table in TABLES}
# What never changes of a job: two that differ here are two jobs.
_FIXED = ("name", "cluster", "backend", "created_at", "owner", "source", "digests", "spec")
_STATES = {"jobs": frozenset(map(str, JobState)), "attempts": frozenset(map(str, AttemptState))}
_JSON = frozenset({"spec", "digests", "handle", "hosts", "progress", "exit", "sent_to", "data"})
# What decides about other jobs, or about what orc does: an archive does not bring it.
_IN_FORCE = ("reservations", "quotas")
_LARGEST = 1 << 62  # of numbers, in either direction
Row = dict[str, Any]


class InvalidImport(LaunchError):
    """A file that cannot be imported: nothing was changed."""


@dataclass
class ImportReport:
    """Rows by table: those that are new, and those that were there already."""

    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_BY_NAME, 0))
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_BY_NAME, 0))
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_IN_FORCE, 0))  # by an archive
    ended: int = 0  # jobs that were live in the file and are history here
    disabled: int = 0  # schedules that were enabled in the file


@dataclass(frozen=True)
class LiveWork:
    """Work that a file would make this ledger go on with: a live job, or an enabled schedule."""

    what: str  # "job" or "schedule"
    name: str
    owner: str
    state: str  # of a job; of a schedule its cron expression
    spec: Mapping[str, Any]


def live_work(lines: Iterable[str], where: str = "") -> list[LiveWork]:
    """Return the jobs of a file that have not ended, and its enabled schedules. Raises `InvalidImport`."""
    work = []
    for table, row in _checked_lines(lines, where):
        if table.name == "jobs" and row["state"] not in TERMINAL_JOB:
            work.append(LiveWork("job", row["id"], row["owner"], row["state"], json.loads(row["spec"])))
        elif table.name == "schedules" and row["enabled"]:
            work.append(LiveWork("schedule", row["name"], row["owner"], row["cron"], json.loads(row["spec"])))
    return work


def import_history(ledger: Ledger, lines: Iterable[str], where: str = "", *, take_over: bool = False) -> ImportReport:
    """Write what `export` has written into *ledger*, all of it or nothing; a second time changes nothing.

    It is an archive: jobs that have not ended come in as cancelled, schedules as disabled, and attempts without their
    handles, so that nothing of the file runs, ends or is asked about here. With *take_over* this ledger goes on with
    the live jobs and the schedules in place of the other one.

    A job that is there already is left as it is. Events get new ids, in their old order. Raises `InvalidImport` for a
    file that is cut, damaged or of a newer orc, for one that knows more of a job than the ledger, and for another job
    of the same id; raises `LedgerError`.
    """
    report = ImportReport()
    with ledger.transaction() as tx:
        importing = _Import(tx.connection, report, where, take_over=take_over)
        for table, rows in groupby(_checked_lines(lines, where), key=lambda pair: pair[0]):
            kept = (row for _, row in rows)
            while batch := list(islice(kept, BATCH)):
                importing.add(table, batch)
        importing.end_live_jobs(tx.now)
    return report


def _checked_lines(lines: Iterable[str], where: str) -> Iterator[tuple[ExportedTable, Row]]:
    """Yield the rows of the file. Raises `InvalidImport` for what is no whole file of this format."""
    counts = dict.fromkeys(_BY_NAME, 0)
    order = {name: number for number, name in enumerate(_BY_NAME)}
    reached, ended = 0, False
    for number, line in enumerate(lines, 1):
        place = f"{where}:{number}" if where else f"line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidImport("not a line of JSON", where=place, hint="the file is damaged; export again") from None
        if number == 1:
            _check_header(value, place)
        elif ended:
            raise InvalidImport("there is more after the end", where=place, hint="import one exported file at a time")
        elif isinstance(value, dict) and "end" in value:
            if value["end"] != counts:
                raise InvalidImport("rows are missing", where=place, hint="the file was changed or cut; export again")
            ended = True
        else:
            table, row = _checked_row(value, place)
            if order[table.name] < reached:
                raise InvalidImport(f"a row of {table.name} too late", where=place, hint="keep the order of the lines")
            reached = order[table.name]
            counts[table.name] += 1
            yield table, row
    if not ended:
        raise InvalidImport("the file is cut: its last line is missing", where=where, hint="export again")


def _check_header(value: Any, place: str) -> None:
    version = value.get("orc_ledger") if isinstance(value, dict) else None
    if version is None:
        raise InvalidImport("not an exported ledger", where=place, hint="`orc export FILE` writes one")
    if version != FORMAT or str(value.get("schema")) > HEAD:
        raise InvalidImport(
            f"a ledger of schema {value.get('schema')!r} in format {version!r}; this orc knows {HEAD!r} and {FORMAT}",
            where=place,
            hint="a newer orc wrote it: upgrade orc",
        )


def _checked_row(value: Any, place: str) -> tuple[ExportedTable, Row]:
    """Return the row of a line: known columns with plain values. Raises `InvalidImport`."""
    table = _BY_NAME.get(value[0]) if isinstance(value, list) and len(value) == 2 and _is_text(value[0]) else None
    if table is None or not isinstance(value[1], dict):
        raise InvalidImport("not a row of a table", where=place, hint="the file is damaged; export again")
    row: Row = value[1]
    if unknown := row.keys() - set(table.columns):
        raise InvalidImport(f"{table.name} has no column {min(unknown)!r}", where=place, hint="upgrade orc")
    if missing := set(table.columns) - row.keys():
        raise InvalidImport(f"the column {min(missing)!r} is missing", where=place, hint="export again")
    for column in schema.metadata.tables[table.name].columns:
        if column.name in row and not _fits(column, row[column.name]):
            raise InvalidImport(f"not a value of the column {column.name!r}", where=place, hint="export again")
    job = row[table.job] if table.job else None
    # Ids become names of directories.
    if job is not None and not (_is_text(job) and JOB_ID.fullmatch(job)):
        raise InvalidImport("not a job id", where=place, hint="the file is damaged; export again")
    if table.name in _STATES and row["state"] not in _STATES[table.name]:
        raise InvalidImport("not a state", where=place, hint="the file is damaged; export again")
    return table, row


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _fits(column: Column[Any], value: Any) -> bool:
    """Return True for a value that orc itself could have written into *column*: SQLite would take any."""
    if value is None:
        return bool(column.nullable)
    kind = column.type.python_type
    if kind is bool:
        return value in (False, True)
    if kind is float:
        return isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    if kind is int:
        return isinstance(value, int) and -_LARGEST < value < _LARGEST
    if not _is_text(value) or len(value) > (getattr(column.type, "length", None) or len(value)):
        return False
    if column.name not in _JSON:
        return True
    try:
        return isinstance(json.loads(value), (dict, list))
    except (ValueError, RecursionError):
        return False


class _Import:
    """Import under way, in one transaction."""

    def __init__(self, connection: Connection, report: ImportReport, where: str, *, take_over: bool) -> None:
        self._connection = connection
        self._report = report
        self._where = where
        self._take_over = take_over
        self._live: list[str] = []  # jobs that are new here and have not ended in the file
        self._there: set[str] = set()  # jobs of the file that the ledger has had before
        self._new: set[str] = set()
        self._audited: set[tuple[Any, ...]] | None = None

    def add(self, table: ExportedTable, rows: list[Row]) -> None:
        """Write those of *rows* that are new."""
        if table.name in _IN_FORCE and not self._take_over:
            self._report.left_out[table.name] += len(rows)
            return
        chosen: Mapping[str, Callable[[list[Row]], list[Row]]] = {
            "jobs": self._new_jobs,
            "groups": self._new_groups,
            "schedules": self._new_schedules,
            "quotas": self._new_quotas,
            "audit": self._new_entries,
            "pruned_jobs": self._newly_pruned,
        }
        fresh = chosen[table.name](rows) if table.name in chosen else self._of_new_jobs(table, rows)
        # Numbers of events and of the audit log are the ledger's own.
        own = {"id"} if table.name in ("events", "audit") else set()
        insert(self._connection, table.name, *({name: row[name] for name in row.keys() - own} for row in fresh))
        self._report.added[table.name] += len(fresh)
        self._report.known[table.name] += len(rows) - len(fresh)

    def _of_new_jobs(self, table: ExportedTable, rows: list[Row]) -> list[Row]:
        if lost := next((row for row in rows if not self._holds(row[table.job])), None):
            raise self._refused(f"{table.name} of the job {lost[table.job]}, which is not in the file")
        fresh = [row for row in rows if row[table.job] in self._new]
        if table.name == "attempts" and not self._take_over:
            # A handle says where logs are read and what is ended: that of a stranger's file is not followed.
            fresh = [{**row, "handle": None, "sent_to": None} for row in fresh]
        if table.name == "attempts":
            columns = ("id", "cluster", "owner", "project", "backend", "spec")
            jobs = {job["id"]: job for job in self._stored("jobs", columns, "id", [row["job_id"] for row in fresh])}
            try:
                fresh = [row | columns_of_attempt(jobs[row["job_id"]], len(json.loads(row["hosts"]))) for row in fresh]
            except (AttributeError, TypeError, ValueError) as error:
                raise self._refused(f"the specification of a job is none: {error}") from None
        return fresh

    def _holds(self, job_id: str) -> bool:
        return job_id in self._new or job_id in self._there

    def _new_jobs(self, rows: list[Row]) -> list[Row]:
        columns = ("id", *_FIXED, "revision", "state")
        there = {row["id"]: row for row in self._stored("jobs", columns, "id", [row["id"] for row in rows])}
        for row in rows:
            found = there.get(row["id"])
            if found is None:
                self._new.add(row["id"])
                continue
            self._there.add(row["id"])
            if any(found[column] != row[column] for column in _FIXED):
                raise self._refused(f"there is another job {row['id']}")
            if row["revision"] > found["revision"]:
                raise self._refused(f"the file knows more of the job {row['id']} than the ledger")
            if row["revision"] == found["revision"] and row["state"] != found["state"]:
                raise self._refused(f"the job {row['id']} has gone on in both ledgers")
        fresh = [row for row in rows if row["id"] not in there]
        self._live += [row["id"] for row in fresh if row["state"] not in TERMINAL_JOB]
        # One that was removed by retention comes back from an archive.
        self._connection.executemany("DELETE FROM pruned_jobs WHERE job_id = :id", [{"id": row["id"]} for row in fresh])
        return fresh

    def _new_groups(self, rows: list[Row]) -> list[Row]:
        fixed = ("id", "kind", "name", "owner", "created_at", "spec")
        there = {row["id"]: row for row in self._stored("groups", fixed, "id", [row["id"] for row in rows])}
        for row in rows:
            if row["id"] in there and any(there[row["id"]][column] != row[column] for column in fixed):
                raise self._refused(f"there is another group {row['id']}")
        return [row for row in rows if row["id"] not in there]

    def _new_schedules(self, rows: list[Row]) -> list[Row]:
        there = {row["id"] for row in self._stored("schedules", ("id",), "id", [row["id"] for row in rows])}
        fresh = [row for row in rows if row["id"] not in there]
        for row in fresh:
            enabled = bool(row["enabled"])
            row["enabled"] = enabled and self._take_over
            self._report.disabled += enabled and not self._take_over
            same = "SELECT id FROM schedules WHERE owner = :owner AND name = :name"
            if self._connection.tuples(same, {"owner": row["owner"], "name": row["name"]}):
                raise self._refused(f"there is another schedule {row['name']!r} of {row['owner']!r}")
        return fresh

    def _new_quotas(self, rows: list[Row]) -> list[Row]:
        there = set(self._connection.tuples("SELECT scope, name, resource FROM quotas"))
        return [row for row in rows if (row["scope"], row["name"], row["resource"]) not in there]

    def _new_entries(self, rows: list[Row]) -> list[Row]:
        columns = _BY_NAME["audit"].columns[1:]
        if self._audited is None:
            self._audited = set(self._connection.tuples(f"SELECT {', '.join(columns)} FROM audit"))  # noqa: S608
        return [row for row in rows if tuple(row[column] for column in columns) not in self._audited]

    def _newly_pruned(self, rows: list[Row]) -> list[Row]:
        ids = [row["job_id"] for row in rows]
        there = {row["job_id"] for row in self._stored("pruned_jobs", ("job_id",), "job_id", ids)}
        there |= {row["id"] for row in self._stored("jobs", ("id",), "id", ids)}
        return [row for row in rows if row["job_id"] not in there]

    def end_live_jobs(self, now: float) -> None:
        """End the jobs that came in live, unless they are taken over; no notification is sent for them.

        Raises `InvalidImport` where the states of a job and of its attempts do not go together.
        """
        if self._take_over:
            return
        for job_id in self._live:
            (state,) = self._connection.tuples("SELECT state, attempt FROM jobs WHERE id = :id", {"id": job_id})
            reason = f"imported as history: it was {state[0]} in the ledger that it came from"
            events = [Event(Kind.JOB_CANCELLED, None, {"reason": reason})]
            for number, attempt in self._connection.tuples(
                "SELECT number, state FROM attempts WHERE job_id = :id", {"id": job_id}
            ):
                if attempt in TERMINAL_ATTEMPT:
                    continue
                if number != state[1]:
                    raise self._refused(f"attempt {number} of the job {job_id} is live and not its newest")
                events = [Event(Kind.CANCELLED, number, {"reason": reason}), *events]
                if attempt == AttemptState.SUBMITTING:
                    events = [Event(Kind.AMBIGUOUS, number, {"reason": reason}), *events]
                self._connection.execute(
                    "UPDATE attempts SET state = :state, reason = :reason, ended_at = :now "
                    "WHERE job_id = :id AND number = :number",
                    {"state": AttemptState.CANCELLED, "reason": reason, "now": now, "id": job_id, "number": number},
                )
            self._connection.execute(
                "UPDATE jobs SET state = :state, reason = :reason, ended_at = :now, updated_at = :now, "
                "next_attempt_at = NULL, revision = revision + 1 WHERE id = :id",
                {"state": JobState.CANCELLED, "reason": reason, "now": now, "id": job_id},
            )
            insert(self._connection, "events", *(event_row(job_id, event, now) for event in events))
        self._report.ended = len(self._live)

    def _stored(self, table: str, columns: tuple[str, ...], key: str, values: list[Any]) -> list[Row]:
        found: list[Row] = []
        for some in batches(values):
            these, parameters = one_of(key, some)
            query = f"SELECT {', '.join(columns)} FROM {table} WHERE {these}"  # noqa: S608
            found += [dict(zip(columns, row, strict=True)) for row in self._connection.tuples(query, parameters)]
        return found

    def _refused(self, what: str) -> InvalidImport:
        return InvalidImport(what, where=self._where, hint="nothing was changed; import it into an empty ledger")
