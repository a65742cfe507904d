"""The manifest: what it says, what it refuses, and what it finds wrong with the files it names."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import (
    NAME,
    Manifest,
    content_problems,
    damaged,
    foreign_entries,
    locate,
    plain,
    read_manifest,
    size_problems,
)
from orc.runtime.checkpoint.storage.durable import FileRecord, write_file

FILES = {"b.bin": FileRecord(7, 5), "a.bin": FileRecord(3, 12)}


def make(files=FILES, **others):
    return Manifest("0af3", 12, 2, 48, 4, 1700000000.5, files, **others)


def content(**changes):
    """The content of a manifest of today without its own checksum."""
    data = json.loads(make().to_json()) | changes
    del data["own_checksum"]
    return {name: value for name, value in data.items() if value is not None}


def sealed(data):
    own = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return json.dumps(data | {"own_checksum": own}).encode()


def checkpoint(directory, files):
    directory.mkdir(parents=True)
    records = {name: write_file(directory / name, data) for name, data in files.items()}
    made = make(records)
    (directory / NAME).write_bytes(made.to_json())
    return made


def test_the_file_is_the_one_that_is_documented():
    expected = """{
 "format": 4,
 "id": "0af3",
 "step": 12,
 "epoch": 2,
 "offset": 48,
 "world_size": 4,
 "created_at": 1700000000.5,
 "files": {
  "a.bin": {
   "size": 3,
   "sum": 12
  },
  "b.bin": {
   "size": 7,
   "sum": 5
  }
 },
 "own_checksum": "OWN"
}
"""
    own = hashlib.sha256(json.dumps(content(), sort_keys=True).encode()).hexdigest()
    assert make().to_json().decode() == expected.replace("OWN", own)
    assert '"created_at": 1700000000.5,\n "prefix": ".t-",\n "files"' in make(prefix=".t-").to_json().decode()


@pytest.mark.parametrize("others", [{}, {"prefix": ".t-"}, {"files": {}}])
def test_a_manifest_is_read_as_it_was_written(others):
    made = make(**others)
    assert Manifest.from_json(made.to_json()) == made
    assert Manifest.from_json(json.dumps(json.loads(made.to_json()), sort_keys=True).encode()) == made


@pytest.mark.parametrize("own", [{}, {"own_checksum": "0" * 64}])
def test_a_checksum_of_its_own_must_be_right(own):
    assert Manifest.from_json(sealed(content())).step == 12
    with pytest.raises(ValueError, match=r"^it does not hold what was written: its own checksum differs$"):
        Manifest.from_json(json.dumps(content() | own).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "format [1, 2], expected 4"),
        ("text", "format 'text', expected 4"),
        ({"step": 3}, "format None, expected 4"),
        (content(format=0), "format 0, expected 4"),
        (content(format=5), "format 5, expected 4"),
        (content(id=None), "KeyError: 'id'"),
        (content(step=None), "KeyError: 'step'"),
        (content(epoch=None), "KeyError: 'epoch'"),
        (content(offset=None), "KeyError: 'offset'"),
        (content(world_size=None), "KeyError: 'world_size'"),
        (content(created_at=None), "KeyError: 'created_at'"),
        (content(files=None), "KeyError: 'files'"),
        (content(files=3), "TypeError: 'int' object is not iterable"),
        (content(files=["a"]), "AttributeError: 'list' object has no attribute 'items'"),
        (content(files={"a": {"sum": 1}}), "KeyError: 'size'"),
        (content(files={"a": {"size": 1, "sums": [1]}}), "KeyError: 'sum'"),
        (content(step="twelve"), "invalid literal for int() with base 10: 'twelve'"),
        (content(files={"../a": {"size": 1, "sum": 1}}), "'../a' is not the relative name of a file"),
        (content(prefix="/", files={"a": {"size": 1, "sum": 1}}), "'/a' is not the relative name of a file"),
    ],
)
def test_what_is_no_manifest_is_told_in_words(data, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Manifest.from_json(json.dumps(data).encode())


def test_a_name_must_be_safe_before_its_prefix_makes_it_so():
    data = content(prefix="x", files={"/../a": {"size": 1, "sum": 1}})
    with pytest.raises(ValueError, match=r"^'/\.\./a' is not the relative name of a file$"):
        Manifest.from_json(sealed(data))


def test_a_directory_is_looked_for_under_its_second_name_only_while_it_is_away(tmp_path):
    directory, replaced = tmp_path / "c", tmp_path / "c.replaced"
    assert locate(directory) == directory
    replaced.mkdir()
    assert locate(directory) == replaced
    directory.mkdir()
    assert locate(directory) == directory
    replaced.rmdir()
    assert locate(directory) == directory


def test_what_is_no_checkpoint_is_told_apart(tmp_path):
    def told(directory):
        with pytest.raises(CheckpointError) as error:
            read_manifest(directory)
        return str(error.value)

    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / NAME).write_text("hello")
    (tmp_path / "folder" / NAME).mkdir(parents=True)
    assert told(tmp_path / "none") == f"{tmp_path}/none: there is no such checkpoint"
    assert told(tmp_path / "file") == f"{tmp_path}/file is a file, not a checkpoint directory"
    assert told(tmp_path / "empty") == (
        f"{tmp_path}/empty has no manifest.json: it is no complete checkpoint. Either saving it was interrupted, or it "
        "was written by another program"
    )
    assert told(tmp_path / "text") == (
        f"{tmp_path}/text/manifest.json cannot be read: Expecting value: line 1 column 1 (char 0)"
    )
    assert told(tmp_path / "folder").startswith(f"{tmp_path}/folder/manifest.json cannot be read: [Errno 21]")


def test_missing_short_and_long_files_are_named(tmp_path):
    directory = tmp_path / "c"
    made = checkpoint(directory, {"gone": b"1", "short": b"12345", "right": b"123", "long": b"1", "gone too": b""})
    assert size_problems(directory, made) == []
    assert read_manifest(directory) == made
    (directory / "gone").unlink()
    (directory / "gone too").unlink()
    (directory / "short").write_bytes(b"1234")
    (directory / "long").write_bytes(b"12")
    assert size_problems(directory, made) == [
        "gone is missing",
        "short has 4 bytes instead of 5",
        "long has 2 bytes instead of 1",
        "gone too is missing",
    ]


def test_damage_is_found_wherever_it_is_and_its_file_is_named_once(tmp_path):
    directory = tmp_path / "c"
    made = checkpoint(directory, {name: bytes(range(250)) for name in ("a", "b", "c")})
    assert content_problems(directory, made, ["a", "b", "c"]) == []
    for at in (0, 99, 100, 199, 200, 249):
        data = bytearray(range(250))
        data[at] ^= 1
        (directory / "b").write_bytes(data)
        assert content_problems(directory, made, ["a", "b", "c"]) == [
            "b does not hold what was saved (checksum differs)"
        ]
        assert content_problems(directory, made, ["a", "c"]) == []
    (directory / "b").write_bytes(bytes(250))
    (directory / "a").unlink()
    assert content_problems(directory, made, ["c", "b", "a"]) == [
        "b does not hold what was saved (checksum differs)",
        f"a cannot be read: [Errno 2] No such file or directory: '{directory}/a'",
    ]


def test_what_a_save_did_not_write_is_foreign(tmp_path):
    directory = tmp_path / "c"
    checkpoint(directory, {"model": b"1"})
    (directory / "notes").touch()
    (directory / "logs").mkdir()
    assert foreign_entries(directory) == {"notes", "logs"}
    (directory / NAME).write_text("no manifest any more")
    assert foreign_entries(directory) == {"notes", "logs", "model"}
    (directory / NAME).unlink()
    assert foreign_entries(directory) == {"notes", "logs", "model"}


def test_damage_is_told_with_all_problems():
    error = damaged("/c", ["a is missing", "b is short"])
    assert type(error) is CheckpointError
    assert str(error) == "/c is damaged: a is missing; b is short. Nothing was loaded; use another checkpoint"


def test_numpy_scalars_become_plain_numbers_wherever_they_are():
    class Shaped:
        __module__ = "numpy"
        shape = (2,)

    class Pair(tuple):
        pass

    array, tensor, pair, shaped = np.arange(2), torch.zeros(()), Pair([np.float64(1)]), Shaped()
    found = plain({"a": np.float64(0.5), "b": [np.int32(3), (np.bool_(True), "x")], 3: {"c": np.array(7)}, "d": pair})
    assert found == {"a": 0.5, "b": [3, (True, "x")], 3: {"c": 7}, "d": pair}
    assert [type(one) for one in (found["a"], found["b"][0], found["b"][1][0], found[3]["c"])] == [
        float,
        int,
        bool,
        int,
    ]
    assert type(found["b"]) is list
    assert type(found["b"][1]) is tuple
    for same in (array, tensor, pair, shaped, np.add, "text", None):
        assert plain(same) is same
