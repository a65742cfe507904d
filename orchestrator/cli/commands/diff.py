"""`orc diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from orc.orchestrator.cli.options import output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.output import echo


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--stat", is_flag=True, help="For the code, only the names of the files.")
@output_options("json", "yaml")
def command(a: str, b: str, stat: bool, form: str | None) -> None:
    """Show what differs between two jobs: specification, environment, code, outcome and metrics."""
    client = open_client()
    found = client.diff(client.resolve(a), client.resolve(b))
    if not output.document(found, form):
        echo("\n".join(_lines(found, stat)))


def _lines(found: Mapping[str, Any], stat: bool) -> Iterator[str]:
    first, second = found["jobs"]
    yield output.style(f"{first} .. {second}", bold=True)
    for title in ("spec", "environment"):
        yield from _section(title, list(_keys(found[title])))
    yield from _section("code", list(_code(found["code"], stat)))
    yield from _section("outcome", [_outcome(found["outcome"])])
    yield from _section("metrics", list(_metrics(found["metrics"], first, second)))


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield output.style(title, bold=True)
    yield from lines or ["  the same"]


def _keys(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in entries:
        yield f"  {entry['key']}"
        for side, sign, colour in (("a", "-", "red"), ("b", "+", "green")):
            if side in entry:
                yield output.style(f"    {sign} {_value(entry[side])}", fg=colour)


def _value(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _code(code: Mapping[str, Any], stat: bool) -> Iterator[str]:
    if code["missing"]:
        yield f"  differs; {code['missing']}"
    for file in code["files"]:
        note = f" ({file['note']})" if file.get("note") else ""
        yield f"  {file['change']:8} {file['path']}{note}"
    for file in () if stat else code["files"]:
        for line in file["diff"].splitlines():
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            yield output.style(line, fg=colour) if colour else line


def _outcome(sides: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["state", *(output.state(side["state"]) for side in sides)],
        ["reason", *(jobtext.first_line(side["reason"]) or "-" for side in sides)],
        ["cluster", *(side["cluster"] for side in sides)],
        ["attempts", *(str(side["attempts"]) for side in sides)],
        ["ended by", *(", ".join(side["causes"]) or "-" for side in sides)],
        ["took", *(output.duration(side["duration_s"]) for side in sides)],
        ["hosts", *(",".join(side["hosts"]) or "-" for side in sides)],
    ]
    return output.table(["", *(side["job"] for side in sides)], rows)


def _metrics(metrics: Mapping[str, Any], first: str, second: str) -> Iterator[str]:
    for job, why in zip((first, second), metrics["missing"], strict=True):
        if why:
            yield f"  {job}: {why}"
    rows = []
    for entry in metrics["values"]:
        cells = [entry["name"]]
        for what in ("last", "min", "max"):
            cells += ["-" if not entry[side] else f"{entry[side][what]:.4g}" for side in ("a", "b")]
        rows.append(cells)
    if rows:
        header = ["", *(f"{what} {side}" for what in ("LAST", "MIN", "MAX") for side in ("A", "B"))]
        yield output.table(header, rows)
    elif not any(metrics["missing"]):
        yield "  neither has measured anything"
