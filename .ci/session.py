"""Record docs/images/session.svg: the commands of the README's tour, run for real (make session)."""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "session.svg"
COLUMNS = 100
COMMANDS = ("orc init digits", "orc submit digits/job.yaml --follow", "orc list", "orc status JOB")
SHOWN = 14  # lines of one command: of more, the first and the last
# The picture fetches nothing: the fonts are the reader's own.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
JOB = re.compile(r"\bdigits-[0-9a-z]+\b")
SPINNER = re.compile("[\u2800-\u28ff]")  # progress, which the next line writes over
MOVES = re.compile(r"\x1b\[\?25[lh]|\x1b\[\d*[ABCDGJK]|\x1b\]8;[^\x1b]*\x1b\\")


def output_of(command: str, directory: str, env: dict[str, str]) -> list[str]:
    """Return the lines that *command* shows on a terminal, with their colours."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(shlex.split(command), cwd=directory, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the last process has closed the terminal
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{command}: status {process.returncode}\n{shown.decode(errors='replace')}")
    # What a line showed last: progress begins its line again.
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in shown.decode().split("\n")]
    lines = [MOVES.sub("", line) for line in lines]
    return [line for line in lines if (text := Text.from_ansi(line).plain.strip()) and not SPINNER.match(text)]


def shortened(lines: list[str]) -> list[str]:
    """Return *lines*, of many the first and the last."""
    if len(lines) <= SHOWN:
        return lines
    return [*lines[: SHOWN - 5], "…", *lines[-4:]]


def main() -> int:
    """Run the commands, and write the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        env = {**os.environ, "ORC_STATE_DIR": f"{directory}/.orc", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": directory}
        job = "JOB"
        for number, command in enumerate(COMMANDS):
            if number:
                console.print()
            console.print(Text.assemble(("$ ", "bold green"), (command.replace("JOB", job), "bold")))
            lines = output_of(command.replace("JOB", job), directory, env)
            job = next((found[0] for line in lines if (found := JOB.search(Text.from_ansi(line).plain))), job)
            for line in shortened(lines):
                console.print(Text.from_ansi(line.replace(directory, "~")), no_wrap=True, crop=True)
    svg = FONTS.sub("", console.export_svg(title="orc", unique_id="session"))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg.replace("Fira Code", "ui-monospace"))
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {len(svg) // 1024} KiB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
