"""Configuration files of Accelerate: every documented kind, and what is said about one that is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orc.launchers.accelerate.config_file import find_default, read_config
from orc.launchers.accelerate.keys import CONFIG_KEYS
from orc.launchers.accelerate.location import default_path
from orc.launchers.errors import SpecError
from orc.launchers.spec.problems import SpecProblems

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_files_of_every_documented_kind_are_read_whole(file: Path) -> None:
    config = read_config(file)
    data = config.document.data
    leaves = {key for key, value in data.items() if value not in (None, {})}
    assert {str(one.path[0]) for one in config.given.values()} == leaves
    assert all(one.where.startswith(f"{file}:") for one in config.given.values())


def test_values_have_the_types_of_their_keys() -> None:
    config = read_config(CONFIGS / "ipex-mpirun.yaml")
    assert (config.get("num_processes"), config.get("num_machines")) == (16, 4)
    assert config.get("mpirun_ccl") == 1  # '1' in the file
    assert config.get("main_process_ip") == "36.112.23.24"
    assert config.get("cpu") is True
    with pytest.raises(KeyError):
        config.get("use_cpu")  # an option is asked for by its name, not by its key
    assert config.get("downcast_bf16") is False  # 'no' in the file
    assert config.where("mpirun_ccl").endswith("ipex-mpirun.yaml:12:15")
    tampered = read_config(CONFIGS / "deepspeed-file-tampered.yaml")
    assert "main_process_ip" not in tampered.given  # null
    assert tampered.get("gradient_clipping") == 1.0
    assert read_config(CONFIGS / "sagemaker.yaml").get("additional_args")["max_wait"] == 86400


def test_numbers_words_and_older_spellings_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "distributed_type: fsdp\nfp16: true\ndynamo_backend: INDUCTOR\n"
        "fsdp_config: {sharding_strategy: 1, fsdp_backward_prefetch: 2, fsdp_min_num_params: 2000}\n"
        "fp8_config: {amax_history_len: 16, amax_compute_algorithm: max}\n"
    )
    config = read_config(file)
    assert config.get("distributed_type") == "FSDP"
    assert config.get("mixed_precision") == "fp16"
    assert config.get("dynamo_backend") == "INDUCTOR"
    assert config.get("fsdp_sharding_strategy") == "FULL_SHARD"
    assert config.get("fsdp_backward_prefetch_policy") == "BACKWARD_POST"
    assert config.get("fp8_amax_history_len") == 16
    notes = "\n".join(config.notes)
    assert f"{file}:2:1: fp16: is read as mixed_precision: fp16" in notes
    assert "dynamo_backend: is read as dynamo_config.dynamo_backend" in notes
    assert "fsdp_config.sharding_strategy: is read as fsdp_sharding_strategy" in notes


def test_a_bare_no_is_a_precision_and_a_type(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    file.write_text("distributed_type: NO\nmixed_precision: no\n")
    config = read_config(file)
    assert config.values == {"distributed_type": "NO", "mixed_precision": "no"}
    written_by_yaml_1_1 = tmp_path / "config.json"
    written_by_yaml_1_1.write_text('{"distributed_type": false, "mixed_precision": false}')
    assert read_config(written_by_yaml_1_1).values == config.values


def test_empty_values_and_auto_are_as_good_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(
        "tpu_zone: ''\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: ''}\nmegatron_lm_config: null\n"
        "deepspeed_config: {gradient_accumulation_steps: auto, gradient_clipping: auto}\n"
    )
    assert read_config(file).values == {"gradient_clipping": "auto"}


WRONG = """\
compute_environment: LOCAL_MACHIN
distributed_typ: NO
num_processes: two
fsdp_config: {fsdp_versoin: 2, zero_stage: 3}
mixed_precision: fp15
use_cpu: maybe
machine_rank: 3
aws_access_key_id: x
megatron_lm_config: 3
deepspeed_config: {zero_stage: 7, offload_param_device: disk}
"""


def test_everything_that_is_wrong_is_said_at_once_with_its_place_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(WRONG)
    with pytest.raises(SpecProblems) as caught:
        read_config(file)
    found = {one.where.removeprefix(f"{file}:"): one.text for one in caught.value.problems}
    expected = {
        "1:22": "not 'LOCAL_MACHIN', did you mean 'LOCAL_MACHINE'?",
        "2:1": "unknown key 'distributed_typ', did you mean 'distributed_type'?",
        "3:16": "num_processes: expected a whole number of at least 1, not 'two'",
        "4:15": "fsdp_config: unknown key 'fsdp_versoin', did you mean 'fsdp_version'?",
        "4:32": "did you mean deepspeed_config.zero_stage?",
        "5:18": "expected one of no, fp16, bf16, fp8, not 'fp15'",
        "6:10": "use_cpu: not a truth value: 'maybe'",
        "7:15": "3 is no machine of 1",
        "8:1": "credentials do not belong into files",
        "9:21": "expected a mapping of keys and values, not 3",
        "10:32": "from 0 to 3, not 7",
        "10:57": "expected one of none, cpu, nvme, not 'disk'",
    }
    assert found.keys() == expected.keys()
    for place, text in expected.items():
        assert text in found[place]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("num_machines: 3\nnum_processes: 4\n", "4 processes cannot be divided among 3 machines"),
        ("distributed_type: DATA_PARALLEL\n", "is of Amazon SageMaker"),
        ("- a\n", "expected a mapping"),
        ("additional_args: 5\n", "additional_args: expected a mapping, not 5"),
        ("", "is empty"),
        ("num_processes: [1\n", "not valid YAML"),
        ("dynamo_backend: NO\ndynamo_config: {dynamo_backend: INDUCTOR}\n", "is also given as"),
    ],
)
def test_what_cannot_be_is_refused_with_a_place(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=what) as caught:
        read_config(file)
    assert str(file) in str(caught.value)


def test_the_default_file_is_below_hf_home_then_the_cache_then_the_home(tmp_path: Path) -> None:
    both = {"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}
    assert default_path(both) == Path("/a/accelerate/default_config.yaml")
    assert default_path({"XDG_CACHE_HOME": "/b"}) == Path("/b/huggingface/accelerate/default_config.yaml")
    assert default_path({}) == Path("~/.cache/huggingface/accelerate/default_config.yaml").expanduser()
    env = {"HF_HOME": str(tmp_path)}
    assert find_default(env) is None
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.json").write_text("{}")
    assert find_default(env) == folder / "default_config.json"
    (folder / "default_config.yaml").write_text("debug: true\n")
    assert find_default(env) == folder / "default_config.yaml"


def test_a_default_file_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORC_TRUSTED_PATHS", raising=False)
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text("debug: true\n")
    os.chmod(file, 0o666)
    with pytest.raises(SpecError, match="not to be trusted"):
        find_default({"HF_HOME": str(tmp_path)})


def test_every_key_of_the_table_is_taken_in_a_file(tmp_path: Path) -> None:
    """No key is described and then refused as unknown."""
    file = tmp_path / "config.yaml"
    for path in CONFIG_KEYS:
        section, _, key = path.rpartition(".")
        file.write_text(f"{section}:\n  {key}: null\n" if section else f"{key}: null\n")
        assert read_config(file).given == {}


def test_the_reference_has_every_key_and_what_becomes_of_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "accelerate-config.md").read_text()
    rows = {line.split("|")[1].split()[0].strip("`"): line for line in page.splitlines() if line.startswith("| `")}
    options = {str(option.key): option for option in CONFIG_KEYS.values()}
    assert rows.keys() == options.keys()
    for key, option in options.items():
        assert all(f"(`{other}`)" in rows[key] for other in option.keys)
        assert f"| {f'`{option.job}`' if option.job else '–'} |" in rows[key], key
        assert option.does.replace("|", "\\|") in rows[key], key
