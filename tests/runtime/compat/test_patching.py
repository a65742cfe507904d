"""Reading and changing environment variables."""

import asyncio
import os
import unittest
from typing import ClassVar

import pytest

from orc.runtime import (
    are_libraries_initialized,
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


def test_variables_are_set_in_a_block_and_restored(monkeypatch):
    monkeypatch.setenv("AA", "1")
    monkeypatch.delenv("BB", raising=False)
    with patch_environment(aa=2, BB="x"):
        assert (os.environ["AA"], os.environ["BB"]) == ("2", "x")
        os.environ["AA"] = "changed"
        del os.environ["BB"]
    assert os.environ["AA"] == "1"
    assert "BB" not in os.environ


def test_variables_are_restored_after_an_exception(monkeypatch):
    monkeypatch.setenv("AA", "1")
    with pytest.raises(KeyError), patch_environment(AA=2):
        raise KeyError
    assert os.environ["AA"] == "1"


def test_the_environment_is_empty_in_a_block(monkeypatch):
    monkeypatch.setenv("AA", "1")

    def empty_it():
        with clear_environment():
            assert dict(os.environ) == {}
            os.environ["BB"] = "2"
            raise KeyError

    with pytest.raises(KeyError):
        empty_it()
    assert os.environ["AA"] == "1"
    assert "BB" not in os.environ


def test_our_variables_are_purged_after_a_test(monkeypatch):
    monkeypatch.setenv("ACCELERATE_A", "before")
    monkeypatch.setenv("ORC_B", "before")

    @purge_accelerate_environment
    def change():
        os.environ.update(ACCELERATE_A="during", ORC_NEW="during", OTHER_NEW="stays")
        del os.environ["ORC_B"]
        return "result"

    @purge_accelerate_environment
    class Tests:
        def test_it(self):
            os.environ["ACCELERATE_NEW"] = "during"

        def helper(self):
            os.environ["ORC_HELPER"] = "stays"

    @purge_accelerate_environment
    async def later():
        await asyncio.sleep(0)
        os.environ["ORC_LATER"] = "during"

    try:
        assert change() == "result"
        Tests().test_it()
        Tests().helper()
        asyncio.run(later())
        assert (os.environ["ACCELERATE_A"], os.environ["ORC_B"]) == ("before", "before")
        assert {"ORC_NEW", "ACCELERATE_NEW", "ORC_LATER"}.isdisjoint(os.environ)
        assert (os.environ["OTHER_NEW"], os.environ["ORC_HELPER"]) == ("stays", "stays")
    finally:
        for name in ("OTHER_NEW", "ORC_HELPER"):
            os.environ.pop(name, None)


def test_tests_of_derived_classes_are_purged_in_the_styles_of_pytest_and_unittest():
    @purge_accelerate_environment
    class Base(unittest.TestCase):
        kinds: ClassVar[list[str]] = []

        def __init_subclass__(cls, kind="none", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.kinds.append(kind)

        def setUp(self):
            os.environ.pop("ORC_TEST", None)

        def test_base(self):
            os.environ["ORC_TEST"] = "during"

        @staticmethod
        def test_static():
            os.environ["ORC_TEST"] = "during"

    class Derived(Base, kind="derived"):
        def test_derived(self):
            os.environ["ORC_TEST"] = "during"

        @classmethod
        def test_class(cls):
            os.environ["ORC_TEST"] = "during"

        def test_failing(self):
            os.environ["ORC_TEST"] = "during"
            raise KeyError

    assert Base.kinds == ["derived"]
    for name in ("test_base", "test_static", "test_derived", "test_class", "test_failing"):
        result = unittest.TestResult()
        Derived(name).run(result)
        assert (result.testsRun, len(result.errors)) == (1, name == "test_failing")
        assert "ORC_TEST" not in os.environ


def test_truth_values():
    assert [str_to_bool(word) for word in ("y", "YES", "t", "True", "on", "1")] == [1] * 6
    assert [str_to_bool(word) for word in ("n", "no", "F", "false", "off", "0")] == [0] * 6
    for bad in ("", "2", "maybe"):
        with pytest.raises(ValueError, match="invalid truth value"):
            str_to_bool(bad)


def test_values_of_variables(monkeypatch):
    monkeypatch.setenv("FLAG", "yes")
    monkeypatch.setenv("CHOICE", "bf16")
    monkeypatch.setenv("NUMBER", "4")
    monkeypatch.setenv("NEGATIVE", "-1")
    assert parse_flag_from_env("FLAG") is True
    assert parse_flag_from_env("NO_FLAG") is False
    assert parse_flag_from_env("NO_FLAG", True) is True
    assert (parse_choice_from_env("CHOICE"), parse_choice_from_env("NO_CHOICE")) == ("bf16", "no")
    assert get_int_from_env(["NO_NUMBER", "NEGATIVE", "NUMBER"], 1) == 4
    assert get_int_from_env(["NO_NUMBER"], 1) == 1
    with pytest.raises(ValueError, match="CHOICE='bf16': invalid truth value"):
        parse_flag_from_env("CHOICE")


def test_imported_libraries():
    assert are_libraries_initialized("os", "no_such_module", "pytest") == ["os", "pytest"]
