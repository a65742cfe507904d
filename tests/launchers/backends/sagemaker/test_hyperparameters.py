"""Arguments that are hyperparameters, and arguments that cannot be."""

from __future__ import annotations

import pytest

from orc.launchers.backends.sagemaker.rendering import hyperparameters
from orc.launchers.errors import RenderError


def read(*argv: str) -> dict[str, str]:
    return hyperparameters(argv, "digits: args")


def test_named_arguments_become_texts_and_booleans_are_explicit() -> None:
    assert read("--epochs", "3", "--fp16", "True") == {"epochs": "3", "fp16": "True"}


def test_both_spellings_of_a_value_and_negative_numbers_are_understood() -> None:
    assert read("--lr=0.1", "--shift", "-1e-3", "-b", "32", "--empty=") == {
        "lr": "0.1",
        "shift": "-1e-3",
        "b": "32",
        "empty": "",
    }


def test_no_arguments_are_no_hyperparameters() -> None:
    assert read() == {}


@pytest.mark.parametrize("argv", [["--flag"], ["--epochs", "3", "--flag"], ["--flag", "--epochs", "3"]])
def test_a_bare_flag_is_refused_with_what_to_write(argv) -> None:
    with pytest.raises(RenderError, match="the flag --flag has no value") as caught:
        read(*argv)
    assert "--flag True" in caught.value.hint
    assert "arguments: plain" in caught.value.hint
    assert caught.value.where == "digits: args"


@pytest.mark.parametrize("argv", [["value"], ["--epochs", "3", "value"], ["--", "value"]])
def test_a_positional_is_refused(argv) -> None:
    with pytest.raises(RenderError, match="has no name") as caught:
        read(*argv)
    assert "--name value" in caught.value.hint


def test_several_values_of_one_name_are_refused_with_a_way_out() -> None:
    with pytest.raises(RenderError) as caught:
        read("--tags", "a", "b")
    assert "--tags a,b" in caught.value.hint


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RenderError, match="--tag is given twice"):
        read("--tag", "a", "--tag=b")
