"""Models without memory, made from a name: a folder or configuration of Transformers, a class, a name on the Hub."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = ("timm", "transformers")
_UNREACHABLE = "the Hub cannot be asked"


class ModelNotFound(ValueError):
    """A name that leads to no model, or to one that cannot be made here."""


def empty_model(name: str, library_name: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """Return the model *name* on the meta device: no weights are loaded, or even downloaded.

    Args:
        name: a folder with a ``config.json``, such a file, ``package.module:Class`` or ``file.py:Class`` (called
            without arguments), or a name on the Hub, which needs the network.
        library_name: ``"transformers"`` or ``"timm"``, where the Hub does not say it.
        trust_remote_code: run the code that the model's repository brings along.

    Raises:
        ModelNotFound: there is no such model, or what makes it is not installed.
    """
    if library_name is not None and library_name not in LIBRARIES:
        raise ModelNotFound(f"library_name {library_name!r} is none of {', '.join(LIBRARIES)}")
    path = Path(name)
    if path.exists() or name.endswith(".json"):
        return _of_config(path, trust_remote_code)
    if ":" in name:
        return _of_class(name)
    return _of_hub(name, library_name, trust_remote_code)


def _of_config(path: Path, trust_remote_code: bool) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelNotFound(f"{file} is no configuration of a model")
    if "architecture" in config and "model_type" not in config:
        # Where the model was trained further, its number of classes stands beside the arguments.
        classes = {"num_classes": config["num_classes"]} if "num_classes" in config else {}
        return _of_timm(str(config["architecture"]), classes | (config.get("model_args") or {}))
    transformers = _library("transformers", str(file))
    try:
        loaded = transformers.AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        _refuse_own_code(str(path), error)
        raise ModelNotFound(f"{file} is no configuration that Transformers knows: {_first_line(error)}") from None
    return _made(transformers, loaded, str(file), trust_remote_code)


def _of_hub(name: str, library_name: str | None, trust_remote_code: bool) -> nn.Module:
    said, problem = _library_on_the_hub(name)
    library = library_name or said
    if library is None:
        raise ModelNotFound(
            f"{name} is no folder or file here, and {problem}. Give a folder with a config.json, package.module:Class, "
            f"or library_name ({', '.join(LIBRARIES)})"
        )
    if library not in LIBRARIES:
        raise ModelNotFound(f"{name} is a model of {library}; only {' and '.join(LIBRARIES)} can be estimated")
    if library == "timm":
        if said is None and problem.startswith(_UNREACHABLE):
            raise ModelNotFound(f"{name} is no folder or file here, and {problem}")
        return _of_timm(f"hf-hub:{name}", {})
    transformers = _library("transformers", name)
    # Where the Hub did not answer just now, what was downloaded before is left; asking again would take half a minute.
    local = problem.startswith(_UNREACHABLE)
    try:
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        _refuse_own_code(name, error)
        why = problem if local else f"not found on the Hub: {_first_line(error)}"
        raise ModelNotFound(f"{name} is no folder or file here, and {why}") from None
    return _made(transformers, config, name, trust_remote_code)


def _library_on_the_hub(name: str) -> tuple[str | None, str]:
    """Return the library that the Hub names for the model *name*, or else why there is none."""
    hub = _library("huggingface_hub", name)
    try:
        info = hub.model_info(name)
    except Exception as error:  # noqa: BLE001 - the network has many ways to fail, and all mean the same here
        return None, f"{_UNREACHABLE}: {_first_line(error)}"
    library = getattr(info, "library_name", None)
    return (str(library), "") if library else (None, "the Hub does not say which library it is for")


def _refuse_own_code(name: str, error: BaseException) -> None:
    if "trust_remote_code" in str(error):
        raise ModelNotFound(f"{name} brings code of its own along: read it, then give trust_remote_code") from None


def _made(transformers: Any, config: Any, name: str, trust_remote_code: bool) -> nn.Module:
    for kind in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):  # what has no headless model
        try:
            with torch.device("meta"):
                model: nn.Module = getattr(transformers, kind).from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            problem = error
        else:
            return model
    raise ModelNotFound(f"{name}: Transformers makes no model of it: {_first_line(problem)}")


def _of_timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    timm = _library("timm", name)
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except RuntimeError as error:
        raise ModelNotFound(f"timm makes no model of {name}: {_first_line(error)}") from None
    return model


def _of_class(name: str) -> nn.Module:
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        source = importlib.util.spec_from_file_location(Path(place).stem, place)
        if source is None or source.loader is None or not Path(place).is_file():
            raise ModelNotFound(f"there is no file {place}")
        module = importlib.util.module_from_spec(source)
        source.loader.exec_module(module)
    else:
        sys.path.insert(0, os.curdir)
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ModelNotFound(f"{place} cannot be imported: {error}") from None
        finally:
            sys.path.remove(os.curdir)
    kind = getattr(module, attribute, None)
    if not callable(kind):
        raise ModelNotFound(f"{place} has no {attribute}")
    with torch.device("meta"):
        try:
            model = kind()
        except TypeError as error:
            raise ModelNotFound(
                f"{name} is called without arguments: {error}; name a function that makes the model"
            ) from None
    if not isinstance(model, nn.Module):
        raise ModelNotFound(f"{name} makes no torch module, but {type(model).__name__}")
    return model


def _library(name: str, of: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ModelNotFound(f"{of} needs {name}, which is not installed: pip install {name}") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
