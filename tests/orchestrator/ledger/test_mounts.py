from __future__ import annotations

import subprocess
import sys

import pytest

from orc.orchestrator.ledger import database
from orc.orchestrator.ledger.database import SqliteDatabase
from orc.orchestrator.ledger.opening import open_database

TABLE = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /mnt/with\040space rw master:3 propagate_from:2 - fuse.sshfs me@host:/ rw
33 22 0:43 / /over rw - nfs server:/a rw
34 33 0:44 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib", "ext4"),
        ("/homestead", "ext4"),
        ("/home", "nfs4"),
        ("/home/ada/.local/state/orc", "nfs4"),
        ("/home/local/state", "xfs"),
        ("/mnt/with space/x", "fuse.sshfs"),
        ("/over/x", "tmpfs"),
    ],
)
def test_the_innermost_and_newest_mount_holds_the_path(path, kind):
    assert database.kind_of(path, TABLE) == kind


def test_only_file_systems_that_other_machines_write_to_count(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    found = [database.network_file_system(database.Path(path), table) for path in ("/home/x", "/home/local", "/tmp")]
    assert found == ["nfs4", None, None]
    assert database.network_file_system(tmp_path, tmp_path / "nothing") is None


def journal_mode(opened: SqliteDatabase) -> str:
    with opened.read() as connection:
        return str(connection.tuples("PRAGMA journal_mode")[0][0])


def test_a_ledger_on_a_network_file_system_has_a_rollback_journal(tmp_path, monkeypatch):
    local = open_database(tmp_path)
    assert (journal_mode(local), local.network) == ("wal", None)
    local.close()
    monkeypatch.setattr(database, "network_file_system", lambda _: "nfs4")
    shared = open_database(tmp_path)
    assert (journal_mode(shared), shared.network) == ("delete", "nfs4")
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.db", "ledger.db.reserve"}
    shared.close()


WRITERS = """
import sys
from pathlib import Path
from orc.orchestrator.ledger import database
from orc.orchestrator.ledger.opening import open_database
database.network_file_system = lambda _: "nfs4"
opened = open_database(Path(sys.argv[1]))
opened._raw.execute("PRAGMA foreign_keys = OFF")  # tags of no job are enough here
for n in range(30):
    with opened.write() as connection:
        tag = {"key": f"{sys.argv[2]}-{n}"}
        connection.execute("INSERT INTO job_tags (job_id, key, value) VALUES ('j', :key, '')", tag)
    with opened.read() as connection:
        connection.tuples("SELECT count(*) FROM job_tags")
"""


def test_processes_that_share_a_rollback_journal_wait_for_each_other(tmp_path):
    opened = open_database(tmp_path)
    opened.close()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITERS, str(tmp_path), str(n)], stderr=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    said = [line for writer in writers for line in writer.communicate(timeout=120)[1].splitlines()]
    assert [line for line in said if not line.startswith("waiting for the ledger ")] == []  # where the disk is slow
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    opened = open_database(tmp_path)
    with opened.read() as connection:
        assert connection.tuples("SELECT count(*) FROM job_tags") == [(90,)]
    opened.close()
