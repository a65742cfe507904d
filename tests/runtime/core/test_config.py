"""The configuration table: precedence, provenance, both directions, and clear refusals."""

import copy
import pickle
import re

import pytest

from orc.runtime.core import parsing
from orc.runtime.core.config import JOB_KEYS, KEYS, SECTIONS, ConfigError, check, parse_bool, resolve, to_env


def test_an_argument_beats_orc_beats_accelerate_beats_the_default():
    env = {"ORC_MIXED_PRECISION": "fp16", "ACCELERATE_MIXED_PRECISION": "bf16"}
    cases = [
        ({"mixed_precision": "no"}, env, "no", "argument"),
        ({"mixed_precision": None}, env, "fp16", "ORC_MIXED_PRECISION"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16", "ACCELERATE_MIXED_PRECISION"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf16", "MIXED_PRECISION": "fp16"}, "bf16", "ACCELERATE_MIXED_PRECISION"),
        ({}, {"MIXED_PRECISION": "fp16"}, "fp16", "MIXED_PRECISION"),
        ({}, {}, "no", "default"),
    ]
    for arguments, environment, value, source in cases:
        config = resolve(arguments, environment)
        assert (config.mixed_precision, config.source("mixed_precision")) == (value, source)


def test_what_the_launch_layer_writes_the_runtime_reads():
    wanted = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "debug_mode": True, "seed": 3,
              "downcast_bf16": True, "timeout_s": 2.5, "strategy": "none", "use_cpu": False, "log_level": "INFO",
              "dynamo_backend": "inductor", "dynamo_mode": "default", "dynamo_use_fullgraph": True,
              "dynamo_use_dynamic": False,
              "stall_timeout_s": 600.0, "stall_factor": 20.0, "stall_action": "warn", "spike_action": "raise",
              "spike_factor": 5.0, "spike_every": 2, "metrics": True, "metrics_interval_s": 1.5, "peak_tflops": 312.0,
              "notices": "off", "notice_file": "/tmp/notice", "stand_in": "accelerate"}  # fmt: skip
    assert set(wanted) == set(JOB_KEYS) - set(SECTIONS)
    env = to_env(wanted | {"checkpoint_dir": None})
    assert env["ORC_DEBUG_MODE"] == "true"
    config = resolve({}, env)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.checkpoint_dir is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mixed_precison", "no", "unknown key 'mixed_precison', did you mean 'mixed_precision'"),
        ("mixed_precision", "fp4", "expected one of no, fp16, bf16"),
        ("gradient_accumulation_steps", 0, "a whole number of at least 1"),
        ("gradient_accumulation_steps", True, "expected a whole number"),
        ("debug_mode", "perhaps", "not a truth value"),
        ("timeout_s", "soon", "timeout_s = 'soon'"),
        ("timeout_s", 0.5, "a number of at least 1"),
        ("checkpoint_dir", 3, "expected text"),
    ],
)
def test_bad_values_are_refused_with_key_and_reason(name, value, message):
    with pytest.raises(ConfigError, match=message):
        check(name, value)


@pytest.mark.parametrize(
    ("parse", "value", "found"),
    [
        (parsing.whole(0, 3), "3", 3),
        (parsing.number(0), "0.5", 0.5),
        (parsing.number(1, endless=True), "inf", float("inf")),
        (parsing.choice("no", "E4M3"), "e4m3", "E4M3"),
        (parsing.choice("no", "E4M3"), False, "no"),
    ],
)
def test_numbers_and_choices_are_read(parse, value, found):
    assert parse(value) == found


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parsing.whole(0, 3), 4, "expected a whole number from 0 to 3"),
        (parsing.whole(1), 1.0, "expected a whole number of at least 1"),
        (parsing.number(0), "inf", "expected a number of at least 0"),
        (parsing.number(0), "nan", "expected a number of at least 0"),
        (parsing.choice("no", "E4M3"), "E5M3", "expected one of no, E4M3, did you mean 'E4M3'?"),
    ],
)
def test_what_is_no_number_or_choice_is_refused(parse, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(value)


def test_a_bad_variable_is_named():
    with pytest.raises(ConfigError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='many'"):
        resolve({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"})


def test_yaml_no_is_a_precision():
    assert check("mixed_precision", False) == "no"


@pytest.mark.parametrize("text", ["1", "true", "YES", "on", "y", "T"])
def test_true_words(text):
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", "n", "F", ""])
def test_false_words(text):
    assert parse_bool(text) is False


def test_a_configuration_can_be_copied_and_pickled():
    config = resolve({"seed": 3}, {})
    assert copy.deepcopy(config).seed == pickle.loads(pickle.dumps(config)).seed == 3
    with pytest.raises(AttributeError, match="no configuration key 'sed'"):
        _ = config.sed


def test_every_key_is_documented():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/reference/runtime.md").read_text()
    for key in KEYS.values():
        assert f"`{key.variable}`" in page, key.name
