"""The files of the page: contrast of its colours, nothing inline, nothing from elsewhere, the libraries as released."""

from __future__ import annotations

import hashlib
import re

import pytest

import orc.orchestrator.service.web.pages as pages

STATIC, TEMPLATES = pages.HERE / "static", pages.HERE / "templates"
OURS = [path for path in (*STATIC.rglob("*"), *TEMPLATES.rglob("*")) if path.is_file() and "vendor" not in path.parts]
COLORS = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "style.css").read_text())
PALETTES = {theme: {row[0]: row[1 + index] for row in COLORS} for index, theme in enumerate(("light", "dark"))}
# What is written in which colour on what.
PAIRS = [(text, ground) for text in ("text", "muted", "accent") for ground in ("bg", "surface", "sunken")]
PAIRS += [(text, ground) for text in ("ok", "fail", "wait") for ground in ("surface", "sunken", f"{text}-bg")]
PAIRS += [(f"c{number}", ground) for number in range(2, 9) for ground in ("surface", "sunken")]  # ranks, runs
PAIRS += [("accent", "run-bg"), ("on-accent", "accent"), ("text", "fail-bg"), ("text", "run-bg")]


def luminance(color: str) -> float:
    """Relative luminance, by WCAG."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", PALETTES)
def test_every_text_can_be_read_on_what_is_behind_it(theme):
    palette = PALETTES[theme]
    too_low = {}
    for text, ground in PAIRS:
        dark, bright = sorted((luminance(palette[text]), luminance(palette[ground])))
        if (contrast := (bright + 0.05) / (dark + 0.05)) < 4.5:  # WCAG AA
            too_low[text, ground] = round(contrast, 2)
    assert not too_low


def test_no_page_loads_or_names_anything_of_another_host():
    for path in OURS:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of a language
        assert not re.search(r"https?://|@import|\burl\([^)]", text), path.name


def test_no_script_or_style_stands_in_a_template():
    for path in TEMPLATES.iterdir():
        text = path.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|\|\s*safe", text), path.name


def test_no_script_makes_elements_of_text():
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        makes = r"\.(inner|outer)HTML\s*=[^=]|insertAdjacentHTML|document\.write|\beval\("
        assert not re.search(makes, text), path.name


def test_libraries_are_the_released_files_and_named_with_licence_and_version():
    digests = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    vendor = STATIC / "vendor"
    for name, digest in digests.items():
        assert hashlib.sha256((vendor / "uplot" / name).read_bytes()).hexdigest() == digest
    for folder in (path for path in vendor.iterdir() if path.is_dir()):
        assert (folder / "LICENSE").is_file()
        row = rf"\| \[{folder.name}\]\S+ \| [\d.]+ \| MIT"
        assert re.search(row, (vendor / "README.md").read_text(), re.IGNORECASE)


def test_templates_link_only_to_files_that_are_shipped():
    for path in TEMPLATES.iterdir():
        for name in re.findall(r'(?:src|href)="/static/([^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name}: {name}"
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"', path.read_text()):
            assert (STATIC / "".join(name)).is_file(), f"{path.name}: {name}"


def test_every_id_that_a_script_uses_is_in_a_template():
    known = set(re.findall(r'\bid="([\w-]+)"', "".join(path.read_text() for path in TEMPLATES.iterdir())))
    for path in STATIC.glob("*.js"):
        assert set(re.findall(r'\$\("([\w-]+)"\)', path.read_text())) <= known, path.name


def test_a_name_in_the_address_stays_text():
    body = bytes(pages.page("job.html", job_id='"><script>alert(1)</script>').body).decode()
    assert "<script>alert" not in body


def test_all_scripts_together_are_small():
    assert sum(path.stat().st_size for path in STATIC.rglob("*.js")) <= 200_000
