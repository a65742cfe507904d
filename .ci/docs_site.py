"""Hook of mkdocs: the pages of the API reference, from the table of public names; links out of ``docs/`` become text.

A name of `orc.runtime.HOMES` belongs to the page of its room. mkdocstrings fills the page from the docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

# Page of the API reference: title, rooms of the runtime whose public names it has, and other objects.
PAGES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "accelerator": (
        "Accelerator",
        ("accelerator",),
        # Its parts: their methods are also its own.
        (
            "orc.runtime.preparing.Preparation",
            "orc.runtime.checkpointing.Checkpointing",
            "orc.runtime.tracking.methods.Tracking",
            "orc.runtime.observe.profiling.Profiling",
            "orc.runtime.watching.Watching",
        ),
    ),
    "process": (
        "State, configuration and launch",
        ("core", "launch", "launchers", "logging", "stand_ins", "state"),
        (),
    ),
    "data": ("Data", ("data",), ()),
    "training": ("Training", ("train", "parallel", "engine", "local_sgd"), ()),
    "collectives": ("Collectives", ("collectives",), ()),
    "checkpoints": ("Checkpoints", ("checkpoint", "fsdp"), ()),
    "weights": ("Weights and memory", ("weights", "memory"), ()),
    "observe": ("Tracking, profiling, watching", ("tracking", "observe", "preemption"), ()),
    "helpers": ("Helper functions", ("compat", "testing"), ()),
    "client": (
        "Jobs and clusters from Python",
        (),
        ("orc.orchestrator.client.Client", "orc.launchers.connections", "orc.launchers.backends.base.Backend"),
    ),
}
_LINK_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+(?!explanation|how-to|reference|tutorials)[^)\s]+)\)")


def runtime_names() -> dict[str, str]:
    """Return every public name of the runtime with the module that defines it, without importing torch."""
    from orc.runtime import HOMES

    return {name: f"orc.runtime.{module}" for name, module in HOMES.items()}


def page_text(title: str, rooms: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the Markdown of one page of the API reference."""
    names = runtime_names()
    wanted = [f"{home}.{name}" for name, home in names.items() if home.split(".")[2] in rooms]
    lines = [f"# {title}", ""]
    if rooms:
        lines += ["Public names of `orc.runtime`; each is imported as `from orc.runtime import NAME`.", ""]
    if rooms and others:
        lines += ["What comes after the first class are its parts: their methods are also methods of the first.", ""]
    return "\n".join([*lines, *(f"::: {path}\n" for path in (*wanted, *others))])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the API reference. Raises `KeyError` for a public name of a room without a page."""
    rooms = {room for _, own, _ in PAGES.values() for room in own}
    for name, home in runtime_names().items():
        if home.split(".")[2] not in rooms:
            raise KeyError(f"{name} ({home}) belongs to no page of {Path(__file__).name}")
    for name, (title, own, others) in PAGES.items():
        files.append(File.generated(config, f"reference/api/{name}.md", content=page_text(title, own, others)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links to files outside ``docs/`` are names of those files."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        target = (here / match[2].partition("#")[0]).resolve()
        return match[0] if target.is_relative_to(ROOT / "docs") else f"{match[1]} (`{target.relative_to(ROOT)}`)"

    return _LINK_OUTSIDE.sub(name, markdown)
