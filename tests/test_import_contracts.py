"""What import-linter cannot say: what a file that travels may need, and what start-up may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME_NEEDS = {"orc", "torch", "numpy", "safetensors"}
# Optional packages: imported where they are used, never with the module.
RUNTIME_CAN_USE = {"aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboardX", "trackio", "wandb"}
RUNTIME_CAN_USE |= {
    "boto3",
    "bitsandbytes",
    "botocore",
    "deepspeed",
    "fsspec",
    "megatron",
    "msamp",
    "peft",
    "torchao",
    "torchdata",
    "transformer_engine",
    "transformers",
    "timm",
    "huggingface_hub",
}
# Parts of an engine that derive from classes of its library: the engine imports them when it prepares a model.
WITH_LIBRARY = {
    f"engine/megatron/{name}.py": {"megatron"}
    for name in ("bert", "generation", "gpt2", "layers", "layout", "masters", "model", "optimizer", "states", "t5")
}


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports anywhere, relative imports as ``.``."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module)


def imported_on_use(path: Path) -> set[str]:
    """Full names of the modules that a file imports inside functions, or for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or typing_only:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    names |= {alias.name for alias in inner.names}
                elif isinstance(inner, ast.ImportFrom):
                    names.add(str(inner.module))
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_runtime_needs_torch_and_itself_alone(path: Path) -> None:
    on_use = imported_on_use(path)
    together = WITH_LIBRARY.get(path.relative_to(ROOT / "runtime").as_posix(), set())
    for name in imported(path):
        top = name.partition(".")[0]
        allowed = sys.stdlib_module_names | RUNTIME_NEEDS | together | (RUNTIME_CAN_USE if name in on_use else set())
        assert top in allowed, f"{path} imports {name}"
        assert top != "orc" or name.startswith("orc.runtime"), f"{path} imports {name}"


def test_importing_the_whole_launch_layer_loads_nothing_heavy() -> None:
    code = """
import importlib, json, pkgutil, sys
import orc.launchers
using_fabric = [f"orc.launchers.remote.ssh.{name}" for name in ("connection", "link", "process")]  # of a reached host
for module in pkgutil.walk_packages(orc.launchers.__path__, "orc.launchers."):
    if module.name not in using_fabric and not module.name.startswith("orc.launchers.testing"):  # which is pytest's
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    heavy = {
        "torch",
        "numpy",
        "sqlalchemy",
        "alembic",
        "jinja2",
        "rich",
        "paramiko",
        "fabric",
        "psutil",
        "platformdirs",
    }
    heavy |= {"boto3", "kubernetes", "sagemaker", "google.cloud", "submitit", "pathspec", "importlib.metadata"}
    assert "orc.launchers.snapshot.content_store" in loaded
    assert loaded & heavy == set()


def import_graph(*rooms: str) -> dict[str, set[str]]:
    """The modules of *rooms*, and which of them each imports: inside functions and for type checkers, too."""
    paths = {name_of(path): path for room in rooms for path in (ROOT / room).rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                found |= {full if (full := f"{base}.{alias.name}") in paths else base for alias in node.names}
        graph[name] = (found & paths.keys()) - {name}
    return graph


def name_of(path: Path) -> str:
    """``orc.launchers.spec.job`` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("orc", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What *start* imports, and what that imports, and so on."""
    found: set[str] = set()
    left = [start]
    while left:
        for name in graph[left.pop()] - found:
            found.add(name)
            left.append(name)
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules each of which imports all others of its group, by itself or through them."""
    beyond = {name: reachable(graph, name) for name in graph}
    return {frozenset(other for other in beyond[name] if name in beyond[other]) for name in graph} - {frozenset()}


def test_no_modules_import_each_other_in_a_circle_not_even_in_functions_or_annotations() -> None:
    assert circles(import_graph("launchers", "orchestrator")) == set()


KINDS = {path.parent.name for path in (ROOT / "launchers" / "backends").glob("*/__init__.py")}
# What serves one platform by its nature.
OF_ONE_PLATFORM = {
    "orchestrator/submitit_executor.py": {"slurm"},  # the parameters of submitit's executor
}


def kinds_named(path: Path) -> Iterator[str]:
    """Kinds of cluster that a file compares with, or whose backend it imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Compare) and ".kind" in ast.unparse(node):
            yield from (c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and c.value in KINDS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orc.launchers.backends."):
            yield from KINDS & {str(node.module).split(".")[3]}


def test_no_kind_of_cluster_is_named_outside_its_folder() -> None:
    backends = ROOT / "launchers" / "backends"
    files = [path for room in ("launchers", "orchestrator") for path in (ROOT / room).rglob("*.py")]
    outside = [path for path in files if path.parent == backends or not path.is_relative_to(backends)]
    named = {str(path.relative_to(ROOT)): set(kinds_named(path)) for path in outside}
    assert {path: kinds for path, kinds in named.items() if kinds - OF_ONE_PLATFORM.get(path, set())} == {}


def yaml_readers(path: Path) -> Iterator[str]:
    """Calls in a file that make PyYAML read a text, by their source."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("yaml.load", "yaml.safe_load", "yaml.compose"):
            yield ast.unparse(node)


def test_yaml_is_read_by_one_reader_with_places_and_the_rules_of_yaml_1_2() -> None:
    files = [path for room in ("launchers", "orchestrator", "runtime") for path in (ROOT / room).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in files if list(yaml_readers(path))}
    assert readers == {"launchers/spec/source.py"}


# A run's context makes itself when somebody first asks for it, and its topology is seen from it.
ON_FIRST_USE = {"core.context", "core.topology", "launch.process_group", "testing"}


def test_no_modules_of_the_runtime_import_each_other_in_a_circle_not_even_in_annotations() -> None:
    assert circles(import_graph("runtime")) == {frozenset(f"orc.runtime.{name}" for name in ON_FIRST_USE)}


# The rooms of the runtime from the bottom to the top; "" are the public names and the single modules beside the rooms.
ROOMS = [
    "core",
    "compat",
    "collectives",
    "launch",
    "testing",
    "logging",
    "memory",
    "parallel",
    "train",
    "observe",
    "data",
]
ROOMS += ["checkpoint", "weights", "engine", "preemption", "tracking", "", "stand_ins", "utils"]
# What imports from a room above its own, annotations included: what makes itself on first use, as above.
UPWARD = {
    "core.context": {"launch.process_group", "testing"},
    "core.topology": {"launch.process_group"},
}


def test_rooms_of_the_runtime_import_what_is_below_them() -> None:
    def height(name: str) -> int:
        room = name.split(".")[2] if name.count(".") > 1 else ""
        return ROOMS.index(room if room in ROOMS else "")

    graph = import_graph("runtime")
    upward = {name: {other for other in graph[name] if height(other) > height(name)} for name in graph}
    short = "orc.runtime."
    found = {name.removeprefix(short): {one.removeprefix(short) for one in above} for name, above in upward.items()}
    assert {name: above for name, above in found.items() if above} == UPWARD


def test_checkpoints_ask_the_engine_for_its_own_state_and_import_none() -> None:
    graph = import_graph("runtime")
    engines = {name for name in graph if name.startswith("orc.runtime.engine.") and name != "orc.runtime.train.engine"}
    for name in graph:
        if name.startswith("orc.runtime.checkpoint."):
            assert not graph[name] & engines, name
