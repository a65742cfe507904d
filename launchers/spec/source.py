"""Reading YAML with positions: plain data, and where each part of it stands.

Files are read by the rules of YAML 1.2 (core schema): ``no`` and ``on`` are text, ``1:30:00`` and ``2:4`` are text,
``1e-4`` is a number. PyYAML's own rules are those of YAML 1.1, which surprise people in exactly these places. One
deviation: ``007`` is text, because whoever writes it means an account or a date and not seven.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orc.launchers.errors import SpecError
from orc.launchers.paths import refuse_untrusted

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KeyPath = tuple[str | int, ...]
# How scalars at a path are read: "typed" by YAML's rules, "text" always as written, "flags" as text except for
# true, false and null.
Reading = str

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_DEPTH = 64

_TAG = "tag:yaml.org,2002:"
_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
# Patterns are texts: `re` compiles and remembers them on first use.
_INT = r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"


def kind_of(text: str) -> str:
    """Return the type of an unquoted scalar by YAML 1.2's core schema: null, bool, int, float, merge or str."""
    if text in _NULL:
        return "null"
    if text in _TRUE or text in _FALSE:
        return "bool"
    if text[0] in "-+.0123456789":
        if re.fullmatch(_INT, text):
            return "int"
        if re.fullmatch(_FLOAT, text) and not re.match(r"[-+]?0[0-9]", text):
            return "float"
    return "merge" if text == "<<" else "str"


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with the scalar rules of YAML 1.2."""

    def resolve(self, kind: type, value: str, implicit: Any) -> str:
        """Return the tag of a node without a tag of its own."""
        if kind is yaml.ScalarNode:
            return _TAG + (kind_of(value) if implicit[0] else "str")
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")


class Origin(NamedTuple):
    """Place of a value, as text for people, and its rank in a report."""

    where: str
    order: tuple[int, int] = (0, 0)
    plain: bool = False  # an unquoted scalar: its text decides its type


class Document:
    """Plain data and the origins of its keys and values, by path; ``()`` is the whole."""

    def __init__(
        self, data: dict[str, Any], where: str, keys: dict[KeyPath, Origin], values: dict[KeyPath, Origin]
    ) -> None:
        self.data = data
        self.where = where
        self.keys = keys
        self.values = values

    def has_references(self) -> bool:
        """Return True when any text holds something like ``${...}``."""
        return _has_reference(self.data)

    def origin(self, path: KeyPath, *, key: bool = False) -> Origin:
        """Return the place of *path*, or of the nearest part of the document around it."""
        table = self.keys if key else self.values
        if path in table:
            return table[path]
        while path:
            if path in self.values:
                return self.values[path]
            path = path[:-1]
        return self.values.get((), Origin(self.where))


class Placed(dict[str, Any]):
    """Mapping from a document with the places of its parts, for checks long after the file was read."""

    def __init__(self, data: Mapping[str, Any], document: Document, path: KeyPath) -> None:
        """Hold *data*, which was made from the part of *document* at *path*."""
        super().__init__(data)
        keys, values = (
            {place[len(path) :]: origin for place, origin in table.items() if place[: len(path)] == path}
            for table in (document.keys, document.values)
        )
        self.document = Document(dict(data), document.origin(path).where, keys, values)


class PlacedText(str):
    """Text from a document, with its place there."""

    where: str = ""

    @classmethod
    def at(cls, text: str, where: str) -> PlacedText:
        """Return *text* with the place *where*."""
        placed = cls(text)
        placed.where = where
        return placed


def place_of(text: str, otherwise: str) -> str:
    """Return the place of *text* in the file it came from, or *otherwise*."""
    return text.where if isinstance(text, PlacedText) else otherwise


def document_of(mapping: Mapping[str, Any], where: str) -> Document:
    """Return *mapping* with the places of its parts, which are *where* unless it was read from a file."""
    return mapping.document if isinstance(mapping, Placed) else Document(dict(mapping), where, {}, {})


def _has_reference(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(map(_has_reference, value.values()))
    return isinstance(value, list) and any(map(_has_reference, value))


def typed(path: KeyPath) -> Reading:
    """Return the reading by YAML's own rules everywhere."""
    return "typed"


def read_file(path: Path, what: str) -> str:
    """Return the text of a YAML file. Raises `SpecError` when missing, unreadable, too large or not UTF-8."""
    where = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"there is no such {what}", where=where) from None
    except IsADirectoryError:
        inside = path / "job.yaml"
        hint = f"name the file in it: {inside}" if inside.is_file() else ""
        raise SpecError(f"this is a directory, not a {what}", where=where, hint=hint) from None
    except OSError as error:
        raise SpecError(f"the {what} cannot be read: {error.strerror}", where=where) from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"the file is larger than {MAX_BYTES >> 20} MiB; that is no {what}", where=where)
    if b"\0" in raw:
        raise SpecError(f"this is a binary file, not a {what}", where=where)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise SpecError("the file is not UTF-8 text", where=f"{where}:{line}:{column}") from None


def read_settings(path: Path, what: str, reading: Callable[[KeyPath], Reading] = typed) -> Document:
    """Return the document in a file of settings that only its user may have written; an empty one has no keys.

    *what* names the file in messages. Raises `SpecError` as `read_file` and `parse` do.
    """
    refuse_untrusted(path, what, SpecError)
    text = read_file(path, what)
    return Document({}, str(path), {}, {}) if compose(text, str(path)) is None else parse(text, str(path), reading)


def parse(text: str, where: str, reading: Callable[[KeyPath], Reading] = typed) -> Document:
    """Return the document in *text*, a mapping. Raises `SpecError` with ``where:line:column``."""
    node = compose(text, where)
    if node is None:
        raise SpecError("the file is empty", where=where, hint="a mapping of keys and values is expected")
    builder = _Builder(lambda mark: Origin(_place(where, mark), (mark.line, mark.column)), reading)
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(
            "expected a mapping of keys and values at the top of the file", where=builder.at(node.start_mark).where
        )
    data = builder.build(node, ())
    return Document(data, where, builder.keys, builder.values)


def parse_value(text: str, where: str, path: KeyPath, reading: Callable[[KeyPath], Reading] = typed) -> Document:
    """Return one value, as after ``--set key=``, at *path*; ``data`` is ``{"": value}``, all origins *where*."""
    node = compose(text, where)
    origin = Origin(where, (1 << 30, 0))
    builder = _Builder(lambda mark: origin, reading)
    if node is None:
        value: Any = None
        builder.values[path] = origin
    else:
        value = builder.build(node, path)
    return Document({"": value}, where, builder.keys, builder.values)


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar. Raises `ValueError` for a huge number."""
    return _convert(kind_of(text), text)


def compose(text: str, where: str) -> Any:
    """Return the node graph of the one document in *text*, or `None` when it is empty. Raises `SpecError`."""
    try:
        _limit_depth(text, where)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if quote := _open_quote(text, error):
            raise SpecError(
                "not valid YAML: this quote is not closed, or closed by one that was meant to open another text",
                where=_place(where, quote),
                hint='close the quote on its line; inside \'...\' a quote is written twice, inside "..." as \\"',
            ) from None
        place = _place(where, mark) if mark else where
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(f"not valid YAML: {what}", where=place, hint=_syntax_hint(what, text, mark)) from None
    except yaml.reader.ReaderError:
        # The error counts bytes or characters, depending on the parser; look again.
        found = yaml.reader.Reader.NON_PRINTABLE.search(text)
        before = text[: found.start() if found else 0]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise SpecError("contains a control character", where=f"{where}:{line}:{column}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"not valid YAML: {error}", where=where) from None
    # A lone `---` is a document that holds an empty scalar.
    return None if isinstance(node, yaml.ScalarNode) and not node.value and not node.style else node


def _place(where: str, mark: Any) -> str:
    return f"{where}:{mark.line + 1}:{mark.column + 1}"


def _open_quote(text: str, error: yaml.MarkedYAMLError) -> Any:
    """Return the mark of a quote that *error* comes from: one that is never closed, or lines below; `None` for none."""
    if "quoted scalar" in (error.context or ""):
        return None if "escape" in (error.problem or "") else error.context_mark
    last = None
    with contextlib.suppress(yaml.YAMLError):
        for token in yaml.scan(text, Loader=_Loader):
            quoted = isinstance(token, yaml.ScalarToken) and token.style in ("'", '"')
            if quoted and token.start_mark.line != token.end_mark.line:
                last = token
            if error.problem_mark and token.end_mark.line > error.problem_mark.line:
                break
    same_line = last is not None and error.problem_mark and last.end_mark.line == error.problem_mark.line
    return last.start_mark if last is not None and same_line else None


def _syntax_hint(what: str, text: str, mark: Any) -> str:
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "cannot start any token" in what and line[mark.column : mark.column + 1] == "\t":
        return "indent with spaces, not tabs"
    if "escape" in what:
        return "inside \"...\" a backslash is written twice; inside '...' it stands for itself"
    if "flow" in what and "${" in line:
        return "quote a text with ${...} inside {} or []"
    if "mapping values are not allowed" in what:
        return "check the indentation, or quote a value that contains a colon"
    return ""


def _limit_depth(text: str, where: str) -> None:
    """Refuse deep nesting: PyYAML's composer recurses in C and would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SpecError(f"nests deeper than {MAX_DEPTH} levels", where=_place(where, event.start_mark))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _convert(kind: str, text: str) -> Any:
    """Return the value of *text* as *kind*. Raises `ValueError` for other text and for too many digits."""
    if kind == "null":
        return None
    if kind == "bool":
        if text not in _TRUE and text not in _FALSE:
            raise ValueError(text)
        return text in _TRUE
    if kind == "int":
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if base != 10 else int(text)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Builder:
    """Builder of plain data from a node graph: refuses duplicate keys, applies merges, limits expansion."""

    def __init__(self, at: Callable[[Any], Origin], reading: Callable[[KeyPath], Reading]) -> None:
        self.at = at
        self._reading = reading
        self.keys: dict[KeyPath, Origin] = {}
        self.values: dict[KeyPath, Origin] = {}
        self._nodes = 0
        self._open: set[int] = set()  # aliases may make a node its own descendant

    def build(self, node: Any, path: KeyPath) -> Any:
        """Return the value of *node*, which stands at *path*."""
        origin = self.at(node.start_mark)
        self._count(origin)
        if isinstance(node, yaml.ScalarNode):
            plain = not node.style
            self.values[path] = Origin(origin.where, origin.order, plain)
            return self._scalar(node, path, origin)
        if id(node) in self._open:
            raise SpecError("an alias refers to a value that contains it", where=origin.where)
        self.values[path] = origin
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self._expect_tag(node, "seq", origin)
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            self._expect_tag(node, "map", origin)
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _count(self, origin: Origin) -> None:
        """Count one node more. Aliases are cheap to write and dear to follow, so their number is limited."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            what = f"expands to more than {MAX_NODES} values"
            raise SpecError(what, where=origin.where, hint="check the aliases (*name)")

    def _scalar(self, node: Any, path: KeyPath, origin: Origin) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text: str = node.value
        if kind not in ("str", "null", "bool", "int", "float", "merge"):
            raise SpecError(f"the tag !{kind.lstrip('!')} is not supported", where=origin.where)
        reading = self._reading(path)
        if reading == "flags":
            reading = "typed" if kind in ("bool", "null") else "text"
        if kind in ("null", "merge", "str") or reading == "text":
            return None if kind == "null" else text
        try:
            return _convert(kind, text)
        except ValueError:
            raise SpecError(f"{text[:40]!r} is not a value of type {kind}", where=origin.where) from None

    def _expect_tag(self, node: Any, kind: str, origin: Origin) -> None:
        if node.tag != _TAG + kind:
            raise SpecError(f"the tag {node.tag.replace(_TAG, '!!')} is not supported", where=origin.where)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merges = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge" and not key_node.style:
                merges.append(value_node)
                continue
            key_origin = self.at(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError("a key must be a plain text", where=key_origin.where)
            key: str = key_node.value  # always as written: `on:` and `1:` are texts
            if key in result:
                first = self.keys[(*path, key)].where
                raise SpecError(f"duplicate key {key!r}", where=key_origin.where, hint=f"it is first given at {first}")
            self.keys[(*path, key)] = key_origin
            result[key] = self.build(value_node, (*path, key))
        for merge in merges:
            sources = merge.value if isinstance(merge, yaml.SequenceNode) else [merge]
            for source in sources:
                self._merge(source, path, result)
        return result

    def _merge(self, source: Any, path: KeyPath, result: dict[str, Any]) -> None:
        """Add the keys of *source* that the mapping at *path* has not; earlier sources win."""
        if not isinstance(source, yaml.MappingNode):
            raise SpecError("<< merges mappings only", where=self.at(source.start_mark).where)
        self._count(self.at(source.start_mark))
        if id(source) in self._open:
            raise SpecError("an alias refers to a value that contains it", where=self.at(source.start_mark).where)
        self._open.add(id(source))
        own = [(key, value) for key, value in source.value if key.tag != _TAG + "merge" and key.value not in result]
        node = yaml.MappingNode(_TAG + "map", own, source.start_mark, source.end_mark)
        result.update(self._mapping(node, path))
        for key, value in source.value:
            if key.tag == _TAG + "merge":
                for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self._merge(inner, path, result)
        self._open.discard(id(source))
