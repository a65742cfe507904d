"""The threat-model page knows every place where the code does what a reviewer looks for first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "threat-model.md"
ROOMS = ("launchers", "orchestrator", "runtime", "templates")

# The last word of what is called, by what it means.
CALLED = {
    "listens": {"bind", "listen", "create_server", "start_server", "Listener", "HTTPServer", "TCPServer", "TCPStore"},
    "unpickles": {"Unpickler", "read_pickle", "cloudpickle", "unsafe_load", "full_load"},
    "evaluates": {"eval", "exec", "execfile"},
    "shell": {"system", "popen", "getoutput", "getstatusoutput"},
    "unpacks": {"extractall", "extract", "unpack_archive"},
    "temporary": {"mktemp"},
}
QUALIFIED = {  # where the last word alone says too little
    "unpickles": {
        *("pickle.load", "marshal.load", "torch.load", "yaml.load", "shelve.open"),
        *(f"dist.{name}" for name in ("all_gather_object", "gather_object", "recv_object_list")),  # nothing is signed
        *(f"dist.{name}_object_list" for name in ("broadcast", "scatter")),
    },
}
KEYWORDS = {"shell": ("shell", True), "unpickles": ("weights_only", False), "unverified": ("verify", False)}
NAMED = {"AutoAddPolicy": "unverified", "WarningPolicy": "unverified", "CERT_NONE": "unverified"}
READ_AS_TEXT = {"json", "tomllib", "source", "yaml"}  # whose `loads` makes plain values


def _words(node: ast.expr) -> str:
    """``a.b.c`` of an expression, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{_words(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def practices(source: str) -> Iterator[tuple[str, int]]:
    """What a file does of the kinds above, and in which line."""
    tree = ast.parse(source)
    sockets = re.search(r"\bsocket\b|TCPStore|Server", source)  # other things have a `bind` or a `listen` too
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = _words(node.func)
            first, _, last = words.rpartition(".")
            if last == "loads" and first not in READ_AS_TEXT:
                yield "unpickles", node.lineno
            for kind, names in CALLED.items():
                if last not in names or (kind == "listens" and not sockets):
                    continue
                if kind == "evaluates" and isinstance(node.func, ast.Attribute):
                    continue  # model.eval()
                if words == "platform.system":
                    continue
                yield kind, node.lineno
            for kind, names in QUALIFIED.items():
                if words in names:
                    yield kind, node.lineno
            for kind, (name, value) in KEYWORDS.items():
                for keyword in node.keywords:
                    if keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value:
                        yield kind, node.lineno
        elif isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in NAMED:
                yield NAMED[name], node.lineno
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if _words(base).rpartition(".")[2] in CALLED["unpickles"]:
                    yield "unpickles", node.lineno


def found() -> dict[tuple[str, str], int]:
    """``(file, kind)`` of the whole tree, with the first line."""
    places: dict[tuple[str, str], int] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for kind, line in practices(path.read_text()):
                places.setdefault((name, kind), line)
    return places


def listed() -> set[tuple[str, str]]:
    """What the page's table says."""
    rows = re.findall(r"^\| `([\w/.-]+\.py)` \| ([a-z]+) \| \S", PAGE.read_text(), re.MULTILINE)
    return set(rows)


def test_every_such_place_has_its_line_in_the_page():
    places = found()
    missing = [f"{file}:{line} {kind}" for (file, kind), line in places.items() if (file, kind) not in listed()]
    assert not missing, f"say in {PAGE.name} what makes these safe, or do without: {', '.join(missing)}"


def test_the_page_has_no_line_for_what_is_gone():
    assert listed() - set(found()) == set()


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import socket\nsocket.create_server(('', 0))", "listens"),
        ("import socket\nsock.bind(where)", "listens"),
        ("pickle.loads(data)", "unpickles"),
        ("torch.load(path, weights_only=False)", "unpickles"),
        ("class Reader(pickle.Unpickler): pass", "unpickles"),
        ("dist.all_gather_object(found, mine)", "unpickles"),
        ("eval(text)", "evaluates"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("os.system(text)", "shell"),
        ("tar.extractall(path)", "unpacks"),
        ("client.set_missing_host_key_policy(paramiko.AutoAddPolicy())", "unverified"),
        ("requests.get(url, verify=False)", "unverified"),
        ("tempfile.mktemp()", "temporary"),
    ],
)
def test_a_new_one_is_seen(source, kind):
    assert kind in {kind for kind, _ in practices(source)}


@pytest.mark.parametrize(
    "source", ["'pickle.loads(data)'", "re.compile(text)", "model.eval()", "run(argv, shell=False)"]
)
def test_what_only_looks_like_it_is_not(source):
    assert list(practices(source)) == []
