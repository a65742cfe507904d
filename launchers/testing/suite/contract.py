"""The class of a backend, before anything is run: what it says of itself, and what it uses of orc."""

from __future__ import annotations

from pydantic import BaseModel

from orc.launchers.backends.base import PROTOCOL, Backend
from orc.launchers.testing.surface import unstable_imports


def test_it_speaks_the_version_of_the_protocol_that_this_orc_has(backend_under_test: Backend) -> None:
    own = vars(type(backend_under_test)).get("protocol")
    assert own == PROTOCOL, f"write  protocol = {PROTOCOL}  into the class: without it a later orc cannot tell"


def test_it_imports_nothing_of_orc_that_may_change_without_a_new_version(backend_under_test: Backend) -> None:
    package = type(backend_under_test).__module__.partition(".")[0]
    assert unstable_imports(package) == []


def test_its_options_are_models_whose_keys_say_what_they_mean(backend_under_test: Backend) -> None:
    for model in (backend_under_test.options_model, backend_under_test.job_options_model):
        if model is not None:
            assert issubclass(model, BaseModel)
            unsaid = [name for name, field in model.model_fields.items() if not field.description]
            assert unsaid == [], "Field(description=...) is shown by editors and completion"
