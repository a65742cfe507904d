"""Names from outside: whatever they are, what is written by them lies where it belongs."""

import json
import os

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import Manifest
from orc.runtime.checkpoint.storage.durable import FileRecord
from orc.runtime.core.names import safe_name, safe_relative_name
from orc.runtime.weights.loading import weight_files
from orc.runtime.weights.offload import offload_state_dict

# Mostly of the characters that paths are made of.
NAMES = st.text(st.sampled_from("./\\:aC\0\n\x1b\x7f\u2028\ud800~ -") | st.characters(), max_size=12)
BAD = ["", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "a//b", "a/", "./a", "a/.", "a\0", "a\nb", "a\x1b]0;b"]
BAD += ["C:\\a", "c:/a", "\\\\server\\a", "..\\a", "a\\..\\b", "\ud800", "a\n"]


def accepted(check, name):
    try:
        return check(name) == name
    except ValueError:
        return False


@given(NAMES)
@example("a/..")
@example("a\\..")
def test_an_accepted_name_is_a_file_below_any_directory(name):
    if accepted(safe_relative_name, name):
        for top in ("/", "/some/where", "some/where"):
            assert os.path.normpath(os.path.join(top, name)) == os.path.join(top, name)
        assert not set(name.split("/")) & {"", ".", ".."}
        assert not set(name.replace("\\", "/").split("/")) & {"", ".", ".."}
        assert "".join(name.splitlines()) == name
        os.fsencode(name)
        assert accepted(safe_name, name) is ("/" not in name)
    else:
        assert not accepted(safe_name, name)


@pytest.mark.parametrize("name", BAD)
def test_names_that_lead_elsewhere_are_refused(name):
    assert not accepted(safe_relative_name, name)


@pytest.mark.parametrize(
    "name", ["a", "a/b.c", "...", "..a", ".hidden", "~", "-rf", "a b", "größe", "a\\b", "C:", "x:y/z"]
)
def test_ordinary_names_are_taken(name):
    assert accepted(safe_relative_name, name)


@given(NAMES)
def test_a_manifest_is_read_when_all_its_names_are_safe(name):
    data = Manifest("x", 1, 0, 0, 1, 0.0, {name: FileRecord(0, 0)}).to_json()
    try:
        read = Manifest.from_json(data)
    except ValueError:
        assert not accepted(safe_relative_name, name)
    else:
        assert list(read.files) == [name]
        assert accepted(safe_relative_name, name)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_an_index_of_weights_names_files_beside_it(tmp_path, name):
    (tmp_path / "secret").touch()
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="is not the relative name of a file"):
        weight_files(index)


@pytest.mark.parametrize("name", ["../stolen", "/stolen"])
def test_offloaded_weights_stay_in_their_folder(tmp_path, name):
    with pytest.raises(ValueError, match="is not the relative name of a file"):
        offload_state_dict(tmp_path / "folder", {name: torch.ones(1)})
    assert [found.name for found in tmp_path.rglob("*")] == ["folder"]
