"""No part of the runtime asks which platform or kind of run it is in; the engine and the library that computes know."""

import ast
import re
from pathlib import Path

import orc.runtime

ROOT = Path(orc.runtime.__file__).parent
# Where the device is found, where torch_xla is talked to, and where the documented kinds of runs are defined or taken.
ALLOWED = {
    "launch/xla.py",
    "launch/process_group.py",
    "engine/xla.py",
    "parallel/xla.py",
    "train/seeding.py",  # "xla" is one of the documented kinds of generators
}
KINDS_ALLOWED = {
    "core/enums.py",
    "core/compute.py",
    "core/context.py",
    "core/process_control.py",
    "state.py",
    "launch/xla.py",
    "train/amp.py",  # takes a kind as an argument, as documented
    "local_sgd.py",  # documented for some kinds only
}


def branches(tree):
    """Names in *tree* that tell platforms apart: attributes called ``xla``, imports of it, kinds of runs."""
    for node in ast.walk(tree):
        module = (node.module or "").split(".")[-1] if isinstance(node, ast.ImportFrom) else ""
        attribute = node.attr if isinstance(node, ast.Attribute) else ""
        owner = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
        if attribute == "xla" or module == "xla":
            yield "xla", node.lineno
        if attribute == "distributed_type" or owner == "DistributedType":
            yield "kind", node.lineno


def test_platforms_are_told_apart_in_their_own_files_only():
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for kind, line in branches(ast.parse(path.read_text())):
            if name not in (ALLOWED if kind == "xla" else KINDS_ALLOWED) and "deepspeed" not in name:
                found.add(f"{name}:{line}: {kind}")
    assert not found


def test_one_function_makes_engines():
    makers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")).endswith("Engine")
    }
    assert makers == set()


def replaced_methods(tree):
    """Lines in *tree* that put a function of their own in the place of a method."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        function = isinstance(node.value, ast.Lambda) or getattr(node.value, "id", "") in functions
        methods = ("backward", "step", "clip_grad_norm_", "clip_grad_value_", "zero_grad")
        if function and any(getattr(target, "attr", "") in methods for target in node.targets):
            yield node.lineno


def test_nothing_replaces_a_method_of_an_engine_or_an_optimizer():
    source = "def seen(): ...\nengine.backward = seen\noptimizer.step = lambda: 1"
    assert list(replaced_methods(ast.parse(source))) == [2, 3]
    found = [f"{path}:{line}" for path in ROOT.rglob("*.py") for line in replaced_methods(ast.parse(path.read_text()))]
    assert not found


PARTS = "engine|checkpointing|checkpoints|watching|preparation|tracking|profiling|boundary|watch|spikes|prepared|ctx"


def test_parts_of_the_accelerator_touch_no_private_attribute_of_another():
    private = re.compile(rf"\bself\._?(?:{PARTS})\._[a-z]\w*")
    assert private.search("self._engine._scaler")
    found = [f"{path}: {use}" for path in ROOT.rglob("*.py") for use in private.findall(path.read_text())]
    assert not found
