"""`orc to-fsdp2`: what changes, what stays as written, and what has no counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.errors import SpecError
from orc.orchestrator.cli.commands.models import NotConvertibleError, convert

from ..conftest import Run

JOB = """\
name: x          # kept
script: train.py
args: {lr: 1.10}
runtime:
  seed: 1
  fsdp:
    use_orig_params: true    # gone
    # what is sharded
    sharding_strategy: SHARD_GRAD_OP
    auto_wrap_policy: TRANSFORMER_BASED_WRAP
    transformer_layer_cls_to_wrap: [Block,
      Head]
    state_dict_type: LOCAL_STATE_DICT
env: {A: "1"}
"""

CONVERTED = """\
name: x          # kept
script: train.py
args: {lr: 1.10}
runtime:
  seed: 1
  fsdp:
    version: 2
    # what is sharded
    reshard_after_forward: false
    auto_wrap_policy: TRANSFORMER_BASED_WRAP
    transformer_layer_cls_to_wrap: [Block,
      Head]
    state_dict_type: SHARDED_STATE_DICT
env: {A: "1"}
"""


def test_only_the_settings_change() -> None:
    text, notes = convert(JOB, "job.yaml")
    assert text == CONVERTED
    assert notes[0] == "use_orig_params is left out: version 2 always keeps the parameters of the model"
    assert "SHARDED_STATE_DICT is the nearest" in notes[1]


def test_a_configuration_file_of_accelerate_keeps_its_prefix() -> None:
    text, notes = convert(
        "fsdp_config:\n  fsdp_sharding_strategy: 4\n  fsdp_version: 1\nnum_processes: 2\n", "config.yaml"
    )
    assert text == "fsdp_config:\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\nnum_processes: 2\n"
    assert notes == ["HYBRID_SHARD: give the number of replicas of the sharded model as dp_replicate_size"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "no FSDP settings"),
        ("fsdp_config: {}\n", "no FSDP settings"),
        ("fsdp_config: {fsdp_version: 1}\n", "one a line"),
        ("fsdp_config:\n  fsdp_version: 2\n", "version 2 already"),
        ("fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n", "no counterpart"),
        ("fsdp_config:\n  fsdp_stratgy: 1\n", "line 2: unknown key 'fsdp_stratgy'"),
        ("fsdp_config:\n  fsdp_offload_params: maybe\n", "line 2: fsdp_offload_params: not a truth value"),
    ],
)
def test_what_cannot_be_converted_says_why(text: str, message: str) -> None:
    with pytest.raises(NotConvertibleError, match=message):
        convert(text, "job.yaml")


def test_what_is_no_yaml_is_told_with_its_place() -> None:
    with pytest.raises(SpecError, match="not valid YAML") as caught:
        convert("a: [\n", "job.yaml")
    assert caught.value.where == "job.yaml:2:1"


def test_the_result_is_printed_or_written_where_it_is_wanted(orc_process: Run, place: Path) -> None:
    (place / "job.yaml").write_text(JOB)
    printed = orc_process("to-fsdp2", "job.yaml")
    assert (printed.code, printed.out) == (0, CONVERTED)
    assert "note: use_orig_params is left out" in printed.err
    refused = orc_process("to-fsdp2", "--config_file", "job.yaml", "--output_file", "job.yaml")
    assert refused.code == 2
    assert "add --overwrite" in refused.err
    assert orc_process("to-fsdp2", "job.yaml", "--overwrite").code == 0
    assert (place / "job.yaml").read_text() == CONVERTED
