"""Files between machines, one rank at a time: what goes over the store, who shares a directory, who sends what."""

import os
import re
import socket
import threading
from types import SimpleNamespace

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import MARK, NAME, Manifest, examined, read_manifest
from orc.runtime.checkpoint.replication import relay as relay_module
from orc.runtime.checkpoint.replication import sites
from orc.runtime.checkpoint.replication.relay import Relay
from orc.runtime.checkpoint.replication.sites import Sites, Survey, complete, provide
from orc.runtime.checkpoint.storage.durable import HashingFile, checksum, write_file
from orc.runtime.core.store import LocalStore, StoreError


def said(act, kind=CheckpointError):
    with pytest.raises(kind) as told:
        act()
    assert type(told.value) is kind
    return str(told.value)


# Over the store


class Store(LocalStore):
    """A store on which nobody is waited for: what is not there is late."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, keys, timeout):
        self.waits.append((list(keys), timeout.total_seconds()))
        if not self.check(keys):
            raise StoreError("nobody is there")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(relay_module, "PIECE", 10)
    return Store()


def number(value):
    return value.to_bytes(4, "big")


def pieces(store):
    """What lies on the store by its number: for how many readers, of which kind, what."""
    found = {}
    for key in store.list_keys():
        if re.fullmatch(r"p/\d+", key):
            value = store.get(key)
            found[int(key[2:])] = int.from_bytes(value[:4], "big"), value[4:5], value[5:]
    return found


def there(store, *contents, readers=1):
    """Put the pieces of a sender on the store."""
    for index, content in enumerate(contents):
        store.set(f"p/{index}", number(readers) + content)


class File:
    """A file that is received."""

    def __init__(self, log, name, fails=()):
        self.log, self.name, self.fails = log, name, fails

    def write(self, data):
        if "write" in self.fails:
            raise OSError("no room")
        self.log.append((self.name, "write", bytes(data)))

    def close(self):
        self.log.append((self.name, "close"))
        return f"record of {self.name}"

    def abandon(self):
        self.log.append((self.name, "abandon"))
        if "abandon" in self.fails:
            raise OSError("no room for that either")


def test_files_go_in_pieces_that_say_whose_they_are(store, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(b"a" * 10 + b"b" * 10 + b"c" * 5)
    for index in range(5):
        store.set(f"p/read/{index}", "")
    Relay(store, "p/", 3.0).send(tmp_path, ["empty", "large"], 2)
    assert pieces(store) == {
        0: (2, b"d", number(0)),
        1: (2, b"d", number(1)),
        2: (2, b"d", number(1) + b"a" * 10),
        3: (2, b"d", number(1) + b"b" * 10),
        4: (2, b"d", number(1) + b"c" * 5),
        5: (2, b".", b""),
    }
    assert store.waits == [([f"p/read/{index}"], 3.0) for index in range(5)], "each once, the first before the last"
    assert not store.check(["p/read/0"])
    assert len(store.list_keys()) == 6


def test_a_sender_waits_until_everything_was_read(store, tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    for index in range(2):
        store.set(f"p/read/{index}", "")
    Relay(store, "p/", 3.0).send(tmp_path, ["a"], 1)
    assert store.waits == [(["p/read/0"], 3.0), (["p/read/1"], 3.0)]


def test_no_more_than_four_pieces_are_on_their_way(store, tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    text = said(lambda: Relay(store, "p/", 3.0).send(tmp_path, ["large"], 1))
    assert text == "a rank that receives files did not come within 3 s (nobody is there)"
    assert sorted(pieces(store)) == [0, 1, 2, 3, 4]


def test_nothing_but_the_end_is_sent_where_there_are_no_files(store, tmp_path):
    Relay(store, "p/", 3.0).send(tmp_path, [], 1)
    assert pieces(store) == {0: (1, b".", b"")}
    assert store.waits == []


def test_a_sender_that_cannot_read_says_so_in_the_next_piece(store, tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(FileNotFoundError) as told:
        Relay(store, "p/", 3.0).send(tmp_path, ["a", "b"], 1)
    assert pieces(store)[2] == (1, b"!", str(told.value).encode())


def test_what_is_received_is_written_and_taken_off_the_store(store):
    there(store, b"d" + number(0), b"d" + number(1), b"d" + number(1) + b"xy", b"d" + number(1) + b"z", b".")
    log = []
    found = Relay(store, "p/", 3.0).receive(["empty", "large"], lambda name: File(log, name))
    assert found == {"empty": "record of empty", "large": "record of large"}
    assert log == [("empty", "close"), ("large", "write", b"xy"), ("large", "write", b"z"), ("large", "close")]
    assert store.list_keys() == [f"p/read/{index}" for index in range(4)], "what the sender waits for; not of the end"
    assert store.multi_get(store.list_keys()) == [b""] * 4
    assert store.waits == [([f"p/{index}"], 3.0) for index in range(5)]


def test_the_last_reader_takes_a_piece_off_the_store(store):
    there(store, b"d" + number(0) + b"x", b".", readers=2)
    log = []
    first, second = Relay(store, "p/", 3.0), Relay(store, "p/", 3.0)
    first.receive(["a"], lambda name: File(log, name))
    assert store.list_keys() == ["p/0", "p/1", "p/count/0", "p/count/1"]
    second.receive(["a"], lambda name: File(log, name))
    assert store.list_keys() == ["p/read/0"]


def test_a_file_that_is_here_is_read_past(store):
    there(store, b"d" + number(0) + b"x", b"d" + number(1) + b"y", b".")
    log = []
    found = Relay(store, "p/", 3.0).receive(["a", "b"], lambda name: None if name == "a" else File(log, name))
    assert found == {"b": "record of b"}
    assert log == [("b", "write", b"y"), ("b", "close")]


@pytest.mark.parametrize("fails", [["write"], ["write", "abandon"]])
def test_a_reader_that_cannot_write_reads_on_for_the_others_and_fails_in_the_end(store, fails):
    there(store, b"d" + number(0), b"d" + number(0) + b"x", b"d" + number(1) + b"y", b".")
    log, asked = [], []
    create = lambda name: asked.append(name) or File(log, name, fails)  # noqa: E731
    assert said(lambda: Relay(store, "p/", 3.0).receive(["a", "b"], create), OSError) == "no room"
    assert asked == ["a"]
    assert log == [("a", "abandon")]
    assert store.list_keys() == ["p/read/0", "p/read/1", "p/read/2"]


def test_what_a_sender_could_not_read_leaves_no_file_open(store):
    there(store, b"d" + number(0) + b"x", b"!no such file")
    log = []
    text = said(lambda: Relay(store, "p/", 3.0).receive(["a"], lambda name: File(log, name)))
    assert text == "another rank cannot read what it has to send: no such file"
    assert log == [("a", "write", b"x"), ("a", "abandon")]
    assert store.list_keys() == ["p/read/0"]


def test_a_sender_that_does_not_come_is_told(store):
    text = said(lambda: Relay(store, "p/", 0.5).receive(["a"], None))
    assert text == "the rank that sends files did not come within 0.5 s (nobody is there)"


def test_several_readers_get_the_same_files_and_the_store_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(relay_module, "PIECE", 1000)
    store, results = LocalStore(), {}
    names = ["empty", "large", "small"]
    contents = {"empty": b"", "large": os.urandom(9500), "small": b"abc"}
    for folder in ("from", "1", "2"):
        (tmp_path / folder).mkdir()
    for name, content in contents.items():
        (tmp_path / "from" / name).write_bytes(content)

    def receive(folder):
        create = lambda name: HashingFile(tmp_path / folder / name)  # noqa: E731
        results[folder] = Relay(store, "p/", 30.0).receive(names, create)

    readers = [threading.Thread(target=receive, args=(folder,)) for folder in "12"]
    for reader in readers:
        reader.start()
    Relay(store, "p/", 30.0).send(tmp_path / "from", names, 2)
    for reader in readers:
        reader.join(30)
    for folder in "12":
        assert {name: (tmp_path / folder / name).read_bytes() for name in names} == contents
        assert results[folder] == {name: checksum(tmp_path / folder / name) for name in names}
    assert store.list_keys() == []


# Who shares a directory


class Table:
    """A barrier of this rank with others, who bring one of *calls* at each question; *at* does something before one."""

    timeout_s = 600.0

    def __init__(self, *calls, mine=0, at=None, relay=None):
        self.calls, self.mine, self.at, self._relay = list(calls), mine, at or {}, relay
        self.log, self.brought, self.results = [], [], []

    def hold(self, what, value, verdict, *, timeout_s=None, absence=None):
        index = len(self.log)
        self.log.append((what, timeout_s))
        self.brought.append(value)
        self.at.get(index, lambda table: None)(self)
        values = list(self.calls[index]) if index < len(self.calls) else []
        values.insert(self.mine, value)
        self.results.append(verdict(values))
        return self.results[-1]

    def relay(self):
        return self._relay


def context(rank=0, world_size=4, local_world_size=2, node_rank=0):
    return SimpleNamespace(rank=rank, world_size=world_size, local_world_size=local_world_size, node_rank=node_rank)


HERE, OTHER = [0, socket.gethostname()], [1, "other"]


def test_a_site_is_its_lowest_rank_and_those_who_share_with_it():
    first, last, alone = Sites(1, (0, 0, 2, 2)), Sites(3, (0, 0, 2, 2)), Sites(1, (0, 0))
    assert [one.several for one in (first, last, alone)] == [True, True, False]
    assert [one.mine for one in (first, last, alone)] == [0, 2, 0]
    assert [one.leads for one in (first, Sites(2, last.of_rank))] == [False, True]
    assert (Sites(0, (0, 3, 1, 3)).leaders, first.leaders) == ([0, 1, 3], [0, 2])
    assert (first.share, last.share, Sites(2, (0, 0, 2, 0)).share) == ((1, 2), (1, 2), (0, 1))


@pytest.mark.parametrize(("local_world_size", "shared"), [(4, "auto"), (4, "0"), (2, "1")])
def test_one_machine_or_a_shared_directory_by_configuration_needs_no_look(tmp_path, local_world_size, shared):
    table = Table()
    survey = Survey(context(2, local_world_size=local_world_size), table, shared)
    assert survey.at(tmp_path / "a", "saving") == Sites(2, (0, 0, 0, 0))
    assert table.log == []
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("others", [[HERE, HERE, HERE], [HERE, OTHER, OTHER]])
def test_machines_are_told_apart_once_by_number_and_name_and_no_look_is_needed_where_none_share(tmp_path, others):
    table = Table(others)
    survey = Survey(context(), table, "0")
    expected = Sites(0, (0, 0, 0, 0) if OTHER not in others else (0, 0, 2, 2))
    assert survey.at(tmp_path / "a", "saving") == survey.at(tmp_path / "b", "loading") == expected
    assert (table.log, table.brought) == ([("saving", None)], [HERE])


def mark(folder, leader):
    """What another machine does before all look."""
    return lambda table: (folder / f".orc-shared-{table.results[1]}-{leader}").touch()


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("sees", [True, False])
def test_who_sees_the_mark_of_another_shares_the_directory_with_it(tmp_path, sees, there):
    folder = tmp_path / "a" / "b"
    if there:
        folder.mkdir(parents=True)
    at = {2: mark(folder, 2)} if sees else {}
    table = Table([HERE, OTHER, OTHER], [None] * 3, [None] * 3, [[], [2], []], at=at)
    survey = Survey(context(), table, "auto")
    expected = Sites(0, (0, 0, 0, 0) if sees else (0, 0, 2, 2))
    assert survey.at(folder, "saving") == expected
    assert table.log == [("saving", None)] * 4
    assert table.brought == [HERE, None, None, [0, 2] if sees else [0]]
    assert re.fullmatch("[0-9a-f]{16}", table.results[1])
    left = [f".orc-shared-{table.results[1]}-2"] if sees else []
    assert [path.name for path in folder.iterdir()] == left, "its own mark is gone"
    assert all(MARK.fullmatch(name) for name in left)
    assert survey.at(folder, "loading") == expected
    assert len(table.log) == 4, "one look for each directory"


def test_a_rank_that_does_not_lead_makes_and_looks_at_nothing(tmp_path):
    table = Table([HERE, OTHER, OTHER], [None] * 3, [None] * 3, [[0], [2], []], mine=1)
    assert Survey(context(rank=1), table, "auto").at(tmp_path / "a", "saving") == Sites(1, (0, 0, 2, 2))
    assert not (tmp_path / "a").exists()
    at = {2: mark(tmp_path, 0)}
    table = Table([HERE, OTHER, OTHER], [None] * 3, [None] * 3, [[0], [2], []], mine=1, at=at)
    Survey(context(rank=1), table, "auto").at(tmp_path, "saving")
    assert table.brought == [HERE, None, None, []]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_machine_that_cannot_write_is_one_by_itself_and_marks_go_when_others_fail(tmp_path):
    (tmp_path / "file").touch()
    table = Table([HERE, OTHER, OTHER], [None] * 3, [None] * 3, [[], [2], []])
    assert Survey(context(), table, "auto").at(tmp_path / "file" / "a", "saving") == Sites(0, (0, 0, 2, 2))
    assert table.brought[3] == []

    def fail(table):
        raise CheckpointError("gone")

    table = Table([HERE, OTHER, OTHER], [None] * 3, [None] * 3, at={3: fail})
    assert said(lambda: Survey(context(), table, "auto").at(tmp_path / "b", "saving")) == "gone"
    assert list((tmp_path / "b").iterdir()) == []


def test_a_mark_that_cannot_be_looked_for_is_not_seen(tmp_path, monkeypatch):
    assert not sites._exists(tmp_path / "a")
    assert sites._exists(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "exists", refuse)
    assert not sites._exists(tmp_path)


# Who sends what

SEVERAL = Sites(0, (0, 0, 2, 3))


class Link:
    """A relay that notes what it is asked for, and brings *received*."""

    def __init__(self, received=None, error=None):
        self.received, self.error, self.asked = received or {}, error, []

    def send(self, directory, names, readers):
        self.asked.append(("send", directory, names, readers))
        if self.error:
            raise self.error

    def receive(self, names, create):
        self.asked.append(("receive", names))
        if self.error:
            raise self.error
        return {name: put(create(name), content) for name, content in self.received.items()}


def put(file, content):
    if file is None:
        return None
    file.write(content)
    return file.close()


def test_the_first_that_has_a_file_sends_it_to_all_that_lack_one():
    present = [["a", "b", "own"], ["not asked"], ["b", "c"], ["c", "own"]]
    assert sites._transfers(SEVERAL, present) == [
        (0, ["a", "b", "own"], [2, 3]),
        (2, ["c"], [0]),
    ]
    assert sites._transfers(SEVERAL, [["a"], [], ["a"], ["a"]]) == []


def place(folder, *names):
    """A destination on this machine where *names* are already."""
    folder.mkdir(exist_ok=True)
    return SimpleNamespace(
        present=lambda: sorted(names), path=lambda: folder, create=lambda name: HashingFile(folder / name)
    )


def test_a_site_sends_what_others_lack_and_gets_what_it_lacks(tmp_path):
    link = Link({"a": b"theirs", "c": b"1"})
    table = Table([[], ["b", "c"], ["b", "c"]], relay=link)
    found = complete(table, SEVERAL, place(tmp_path / "s", "a", "b"))
    assert table.log == [("save_state (exchanging)", None)]
    assert table.brought == [["a", "b"]]
    assert link.asked == [("send", tmp_path / "s", ["a"], 2), ("receive", ["c"])]
    assert found == {"a": None, "c": checksum(tmp_path / "s" / "c")}
    assert os.listdir(tmp_path / "s") == ["c"], "what is here already is not written"


def test_a_site_may_get_files_from_several_others(tmp_path):
    received = iter([{"a": b"1"}, {"c": b"2"}])
    link = Link()
    link.receive = lambda names, create: {name: put(create(name), data) for name, data in next(received).items()}
    table = Table([["a"], [], ["c"]], mine=2, relay=link)
    found = complete(table, Sites(2, SEVERAL.of_rank), place(tmp_path / "s"))
    assert found == {name: checksum(tmp_path / "s" / name) for name in ("a", "c")}


def test_a_rank_that_does_not_lead_has_no_part_in_it(tmp_path):
    link = Link()
    table = Table([["a"], [], []], mine=1, relay=link)
    assert complete(table, Sites(1, SEVERAL.of_rank), place(tmp_path / "s", "b")) == {}
    assert table.brought == [[]]
    assert link.asked == []


@pytest.mark.parametrize("error", [OSError("no room"), CheckpointError("no line")])
def test_a_transfer_that_fails_fails_in_the_end_and_the_others_go_on(tmp_path, error):
    link = Link(error=error)
    table = Table([[], ["c"], ["c"]], relay=link)
    with pytest.raises(type(error)) as told:
        complete(table, SEVERAL, place(tmp_path / "s", "a"))
    assert told.value is error
    assert [what for what, *_ in link.asked] == ["send", "receive"]


def checkpoint(directory, identity="0af3", **contents):
    directory.mkdir(parents=True)
    records = {name: write_file(directory / name, content) for name, content in contents.items()}
    manifest = Manifest(identity, 7, 1, 20, 1, 5.5, records)
    (directory / NAME).write_bytes(manifest.to_json())
    return manifest


def test_what_keeps_a_site_from_having_a_checkpoint_is_told_apart(tmp_path):
    folder = tmp_path / "c"
    told = lambda sites=SEVERAL: examined(folder, *sites.share, "0af3")[1]  # noqa: E731
    assert told() == ("lacking", f"{folder}: there is no such checkpoint")
    checkpoint(folder, a=b"1", b=b"2", c=b"3")
    assert told() is None
    assert examined(folder, *SEVERAL.share, "0af4")[1] == ("lacking", f"{folder} is another checkpoint of this name")
    (folder / "b").write_bytes(b"x")
    advice = ". Nothing was loaded; use another checkpoint"
    assert told() is None, "the other rank of the site reads this one"
    wrong = f"{folder} is damaged: b does not hold what was saved (checksum differs){advice}"
    assert told(Sites(1, SEVERAL.of_rank)) == ("damaged", wrong)
    (folder / "c").unlink()
    assert told(Sites(1, SEVERAL.of_rank)) == ("damaged", f"{folder} is damaged: c is missing{advice}")
    (folder / NAME).write_bytes(b"")
    assert told()[0] == "damaged"


def test_who_holds_it_is_who_has_no_trouble_on_any_of_its_ranks():
    bad, gone = ["damaged", "a is damaged"], ["lacking", "there is none"]
    assert sites._holders(SEVERAL, [None] * 4) == ([0, 2, 3], [])
    assert sites._holders(SEVERAL, [None, bad, gone, None]) == (
        [3],
        ["rank 1: a is damaged (copied from the machine of rank 3)"],
    )
    assert said(lambda: sites._holders(SEVERAL, [bad, None, gone, bad])) == (
        "rank 0: a is damaged\nrank 3: a is damaged"
    )
    assert said(lambda: sites._holders(SEVERAL, [gone, None, gone, ["lacking", "another"]])) == (
        "another\nthere is none"
    )


PATIENCE = 3600.0


def test_a_checkpoint_that_every_site_has_is_read_where_it_is(tmp_path):
    manifest = checkpoint(tmp_path / "c.replaced", a=b"1")
    table = Table([None] * 3)
    assert provide(table, SEVERAL, tmp_path / "c", "0af3") == (tmp_path / "c.replaced", manifest)
    assert table.log == [("load_state (verifying)", PATIENCE)]
    table = Table([None] * 3)
    table.timeout_s = 9000.0
    provide(table, SEVERAL, tmp_path / "c", "0af3")
    assert table.log[0][1] == 9000.0


def test_the_first_that_holds_it_sends_it_to_those_that_lack_it(tmp_path, monkeypatch):
    manifest, told, link = checkpoint(tmp_path / "c", b=b"2", a=b"1"), [], Link()
    monkeypatch.setattr(sites, "tell", told.append)
    bad = ["damaged", "a is damaged"]
    table = Table([None, bad, ["lacking", "none"]], [None] * 3, [None] * 3, relay=link)
    assert provide(table, SEVERAL, tmp_path / "c", "0af3") == (tmp_path / "c", manifest)
    assert told == ["rank 2: a is damaged (copied from the machine of rank 0)"]
    assert link.asked == [("send", tmp_path / "c", [NAME, "a", "b"], 2)]
    assert table.log[1:] == [("load_state (copying)", None), ("load_state (copying)", PATIENCE)]
    assert table.brought == [None, [NAME, "a", "b"], None]


def test_a_site_that_lacks_it_gets_it_and_only_rank_0_tells(tmp_path, monkeypatch):
    manifest, told = checkpoint(tmp_path / "there", a=b"1"), []
    monkeypatch.setattr(sites, "tell", told.append)
    link = Link({NAME: manifest.to_json(), "a": b"1"})
    bad = ["damaged", "a is damaged"]
    table = Table([bad, bad, None], [None, None, [NAME, "a"]], [None] * 3, mine=2, relay=link)
    mine = Sites(2, SEVERAL.of_rank)
    target = tmp_path / "x" / "y" / "c"
    assert provide(table, mine, target, "0af3") == (target, manifest)
    assert link.asked == [("receive", [NAME, "a"])]
    assert told == []
    assert (target / "a").read_bytes() == b"1"
    assert os.listdir(target.parent) == ["c"]
    assert table.brought[1:] == [None, None]


def test_what_a_site_gets_that_is_damaged_on_the_way_is_told_to_all(tmp_path):
    manifest = checkpoint(tmp_path / "there", a=b"1")
    link = Link({NAME: manifest.to_json(), "a": b"x"})
    table = Table([None, None, None], [[NAME, "a"], None, None], [None] * 3, mine=2, relay=link)
    text = said(lambda: provide(table, Sites(2, SEVERAL.of_rank), tmp_path / "c", "0af3"))
    assert text.startswith(
        f"rank 2: {tmp_path}/c cannot be copied: {tmp_path}/c.site-2.tmp is damaged: a does not hold"
    )
    assert os.listdir(tmp_path) == ["there"]


def test_ranks_that_neither_have_nor_lack_it_look_on(tmp_path):
    manifest, link = checkpoint(tmp_path / "c", a=b"1"), Link()
    table = Table([None, ["lacking", "none"], None], [[NAME, "a"], None, None], [None] * 3, mine=1,
                  relay=link)  # fmt: skip
    assert provide(table, Sites(1, SEVERAL.of_rank), tmp_path / "c", "0af3") == (tmp_path / "c", manifest)
    assert link.asked == []


@pytest.mark.parametrize("error", [OSError("no room"), CheckpointError("no line")])
def test_a_copy_that_fails_is_told_to_all(tmp_path, error):
    checkpoint(tmp_path / "c", a=b"1")
    table = Table([None, None, ["lacking", "none"]], [None] * 3, [None] * 3, relay=Link(error=error))
    text = said(lambda: provide(table, SEVERAL, tmp_path / "c", "0af3"))
    assert text == f"rank 0: {tmp_path}/c cannot be copied: {error}"
    assert table.brought[2] == f"{tmp_path}/c cannot be copied: {error}"


# What arrives


def received(folder, contents, site=2):
    return sites._receive(
        lambda create: [put(create(name), content) for name, content in contents.items()], folder, site
    )


def test_what_arrives_whole_takes_the_place_of_what_was_there_and_keeps_what_is_not_ours(tmp_path):
    new = checkpoint(tmp_path / "new", a=b"1")
    checkpoint(tmp_path / "c", "old", b=b"2")
    (tmp_path / "c" / "notes").write_text("mine")
    (tmp_path / "c.site-2.tmp").mkdir()
    (tmp_path / "c.site-2.tmp" / "left").touch()
    received(tmp_path / "c", {NAME: new.to_json(), "a": b"1"})
    assert sorted(os.listdir(tmp_path / "c")) == ["a", NAME, "notes"]
    assert read_manifest(tmp_path / "c") == new
    assert sorted(os.listdir(tmp_path)) == ["c", "new"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a": b"x"}, "a does not hold what was saved (checksum differs)"),
        ({"a": b"12"}, "a has 2 bytes"),
        ({}, "a is missing"),
    ],
)
def test_what_arrives_otherwise_than_its_manifest_says_is_refused(tmp_path, contents, message):
    new = checkpoint(tmp_path / "new", a=b"1")
    text = said(lambda: received(tmp_path / "c", {NAME: new.to_json()} | contents))
    assert text.startswith(f"{tmp_path}/c.site-2.tmp is damaged: {message}")
    assert os.listdir(tmp_path) == ["new"]


def test_what_cannot_be_removed_after_a_failure_does_not_hide_it(tmp_path, monkeypatch):
    real, removed = sites.remove_tree, []

    def remove(path):
        removed.append(path)
        real(path)
        if len(removed) == 2:
            raise OSError("busy")

    monkeypatch.setattr(sites, "remove_tree", remove)
    assert said(lambda: received(tmp_path / "c", {"a": b"1"})).startswith(
        f"{tmp_path}/c.site-2.tmp has no manifest.json"
    )
    assert removed == [tmp_path / "c.site-2.tmp"] * 2


@pytest.mark.parametrize("name", ["../a", "/a", ".."])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    text = said(lambda: received(tmp_path / "x" / "c", {name: b"1"}))
    assert text.startswith("what another machine sends is no checkpoint: ")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_reader_without_room_reads_past_everything_and_fails_in_the_end(tmp_path):
    (tmp_path / "file").touch()
    seen = []
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        sites._receive(lambda create: seen.append(create("a")), tmp_path / "file" / "c", 2)
    assert seen == [None]
