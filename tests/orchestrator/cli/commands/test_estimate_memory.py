"""`orc estimate-memory`: what a model takes, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import Run

BERT = {"model_type": "bert", "vocab_size": 28996}  # bert-base-cased; the rest are defaults
TABLE = {
    "float32": ("413.18 MB", "1.61 GB"),
    "float16": ("206.59 MB", "826.36 MB"),
    "int8": ("103.29 MB", "413.18 MB"),
    "int4": ("51.65 MB", "206.59 MB"),
}  # the largest layer depends on what this version of Transformers keeps together


def test_a_configuration_is_enough(orc: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    lines = orc("estimate-memory", str(tmp_path)).out.splitlines()
    found = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in TABLE}
    assert list(found) == list(TABLE)
    assert all(cell in found[dtype] for dtype, cells in TABLE.items() for cell in cells)
    file = str(tmp_path / "config.json")
    some = orc(
        "estimate-memory", file, "--library_name", "transformers", "--dtypes", "float16", "float32", "--json"
    ).json
    assert [row["dtype"] for row in some["estimates"]] == ["float32", "float16"]
    assert some["estimates"][0]["training"] == 4 * some["estimates"][0]["total"]


def test_a_class_of_ones_own_is_called(orc: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\nNet = lambda: nn.Linear(1024, 1024, bias=False)\nN = 3\n")
    place = str(tmp_path / "nets.py")
    assert "4.0 MB" in orc("estimate-memory", f"{place}:Net", "--dtypes", "float32").out
    for wrong, message in (
        (f"{place}:N", "has no N"),
        (f"{place}:Nets", "has no Nets"),
        ("nowhere.nets:Net", "nowhere"),
    ):
        done = orc("estimate-memory", wrong)
        assert done.code != 0
        assert message in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "no configuration"), ('{"model_type": "brt"}', "Transformers")],
)
def test_what_is_no_configuration_is_named(orc: Run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = orc("estimate-memory", str(tmp_path))
    assert done.code != 0
    assert message in done.err


def test_a_hub_that_cannot_be_asked_says_what_else_there_is(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = orc("estimate-memory", "org/model")
    assert done.code != 0
    assert "config.json" in done.err or "huggingface_hub" in done.err


def test_memory_of_each_process_of_a_parallel_run(orc: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    asked = (
        "estimate-memory",
        str(tmp_path),
        "--parallelism",
        "dp_shard=2,pp=2",
        "--batch",
        "4",
        "--seq-length",
        "128",
    )
    shown = orc(*asked).out
    assert "on 4 processes" in shown
    assert [word for word in shown.split() if word == "stage"] == ["stage", "stage"]
    told = orc(*asked, "--mixed_precision", "bf16", "--activation-checkpointing", "--json").json
    assert told["parallelism"] == {"dp_shard": 2, "pp": 2}
    assert told["largest"]["optimizer"] > 1.9 * told["largest"]["parameters"]
    assert told["largest"] in told["stages"]
    for wrong, message in (
        (("--parallelism", "dp_shrd=2"), "dp_shard"),
        (("--batch", "2"), "--parallelism"),
        (("--parallelism", "tp=2", "--dtypes", "int8"), "--dtype"),
    ):
        done = orc("estimate-memory", str(tmp_path), *wrong)
        assert done.code != 0
        assert message in done.err
