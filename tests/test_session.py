"""The pictures of the documentation: what the recorder of a session keeps, and what each of them shows."""

import html
import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def recorder():
    spec = importlib.util.spec_from_file_location("session", ROOT / ".ci" / "session.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recorded_line_is_what_a_terminal_showed_last(tmp_path):
    script = tmp_path / "shows.py"
    script.write_text("print('\\u280b 1 s\\r\\u2819 2 s')\nprint('10 %\\r100 %')\nprint()\nprint('done')\n")
    assert recorder().output_of(f"{sys.executable} {script}", str(tmp_path), dict(os.environ)) == ["100 %", "done"]


def test_many_lines_are_shown_by_their_beginning_and_their_end():
    lines = [str(number) for number in range(40)]
    shown = recorder().shortened(lines)
    assert len(shown) == 14
    assert shown[:2] == ["0", "1"]
    assert shown[-5:] == ["…", "36", "37", "38", "39"]
    assert recorder().shortened(lines[:5]) == lines[:5]


def test_the_picture_shows_the_commands_of_the_tour_and_its_figures():
    text = html.unescape(re.sub("<[^>]+>", "", recorder().PICTURE.read_text())).replace("\xa0", " ")
    for command in recorder().COMMANDS:
        assert command.partition(" JOB")[0] in text
    readme = (ROOT / "README.md").read_text()
    assert "](docs/images/session.svg)" in readme
    (accuracy,) = set(re.findall(r"test accuracy \d\.\d+", text))
    assert accuracy in readme, "make session records it again"


def test_the_pictures_of_the_page_are_small_and_shown():
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs" / "how-to" / "web-page.md").read_text()
    pictures = sorted((ROOT / "docs" / "images").glob("page-*"))
    assert [picture.name for picture in pictures] == ["page-compare.png", "page-job.png", "page-jobs.png"]
    for picture in pictures:
        assert picture.stat().st_size <= 150_000
        assert f"images/{picture.name})" in shown
