from __future__ import annotations

import json
from pathlib import Path

import pytest

from orc.orchestrator.cli.commands.metrics import chart, overlay
from orc.orchestrator.cli.ui import jobtext

JOB = """\
name: curve
command: [/bin/sh, -c, 'cat lines >> $ORC_JOB_DIR/metrics.jsonl']
launcher: python
"""


def lines(count: int) -> list[dict[str, float]]:
    return [
        {"at": 1.7e9 + n, "attempt": 1, "restart": 0, "step": n * 10, "epoch": 0, "loss": 1 / n, "samples_per_s": 50.0}
        for n in range(1, count + 1)
    ]


@pytest.fixture
def measured(orc, job_file):
    """A job that has ended and has measured *count* lines; its id."""

    def run(count: int) -> str:
        path = Path(job_file(JOB))
        path.with_name("lines").write_text("".join(json.dumps(line) + "\n" for line in lines(count)))
        job = orc("submit", str(path)).out.strip()
        assert orc("wait", job).code == 0
        return job

    return run


def test_the_newest_values_are_a_table_and_the_loss_is_a_curve(orc, measured):
    shown = orc("metrics", measured(30), "--tail", "2")
    assert shown.code == 0, shown.err
    text = shown.out.splitlines()
    assert text[0].split() == ["AT", "ATTEMPT", "EPOCH", "STEP", "LOSS", "SAMPLES/S"]
    assert text[1].split()[2:] == ["1", "0", "290", "0.03448", "50.0"]
    assert text[2].split()[2:] == ["1", "0", "300", "0.03333", "50.0"]
    assert text[4] == "loss  0.03333 at step 300"
    assert text[5].startswith("      1  ")
    assert text[-2].startswith("0.03333  ")
    assert text[-1].split() == ["10", "300"]
    assert len(text) == 14
    assert max(map(len, text)) <= 80


def test_any_measurement_can_be_drawn_and_an_unknown_one_is_refused(orc, measured):
    job = measured(3)
    assert "samples_per_s  50 at step 30" in orc("metrics", job, "--name", "samples_per_s").out
    refused = orc("metrics", job, "--name", "accuracy")
    assert refused.code == 2
    assert "accuracy" in refused.err
    assert "loss, samples_per_s" in refused.err


def test_json_is_every_line_as_it_was_written(orc, measured):
    shown = orc("metrics", measured(3), "--json")
    assert [json.loads(text) for text in shown.out.splitlines()] == lines(3)


def test_a_job_that_has_measured_nothing_says_so(orc, measured):
    job = measured(0)
    for options in ((), ("--follow",), ("--follow", "--json")):
        refused = orc("metrics", job, *options)
        assert refused.code == 2
        assert "measured nothing" in refused.err + refused.out


def test_following_shows_what_comes_until_the_job_has_ended(orc, orc_process, job_file):
    path = Path(job_file(JOB.replace("'cat lines", "'for i in 1 2 3; do sleep 0.3; cat lines; done")))
    path.with_name("lines").write_text('{"at": 1.0, "attempt": 1, "step": 1, "loss": 2.5}\n')
    job = orc("submit", str(path)).out.strip()
    followed = orc_process("metrics", "--follow", job)
    assert followed.code == 0, followed.err
    rows = [text.split() for text in followed.out.splitlines()]
    assert rows[0] == ["AT", "ATTEMPT", "EPOCH", "STEP", "LOSS"]
    assert [row[2:] for row in rows[1:4]] == [["1", "-", "1", "2.5"]] * 3


def test_a_curve_falls_where_its_values_fall():
    assert chart([(x, 10 - x) for x in range(10)], width=14, height=2) == [
        "10  █▆▄▃▁",
        " 1  █████▇▅▄▂▁",
        "    0        9",
    ]


@pytest.mark.parametrize("plain", [False, True])
def test_a_curve_keeps_its_size_and_its_bounds(plain):
    drawn = chart([(x, (x * 7) % 13) for x in range(1000)], width=60, height=6, plain=plain)
    assert len(drawn) == 7
    assert max(map(len, drawn)) == 60
    assert drawn[0].startswith("12")
    assert drawn[5].startswith(" 0")
    assert not plain or all(text.isascii() for text in drawn)


def test_a_curve_of_one_value_is_flat_and_of_none_is_nothing():
    assert chart([], width=40, height=4) == []
    drawn = chart([(1, 3.0), (2, 3.0)], width=12, height=2)
    assert len(set(drawn[1].split()[-1])) == 1
    assert chart([(5, 3.0)], width=12, height=2)[-1].split() == ["5"]


def test_progress_begins_with_epoch_step_and_loss():
    told = {"at": 1.7e9, "rate": 2.0, "loss": 0.123456, "samples": 32, "step": 12000, "epoch": 3}
    assert jobtext.progress(told) == "epoch 3  step 12000  loss 0.1235  rate 2"


def test_curves_of_several_jobs_are_drawn_over_one_another(orc, measured):
    short, long = measured(5), measured(30)
    shown = orc("metrics", short, long, "--name", "loss", "--name", "samples_per_s")
    assert shown.code == 0, shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows[:3] == [
        ["JOB", "STEP", "LOSS", "SAMPLES_PER_S"],
        ["a", short, "50", "0.2", "50"],
        ["b", long, "300", "0.03333", "50"],
    ]
    assert ["loss"] in rows
    assert max(map(len, shown.out.splitlines())) <= 80
    found = [json.loads(line) for line in orc("metrics", short, long, "--json").out.splitlines()]
    assert [line["job"] for line in found] == [short] * 5 + [long] * 30
    assert orc("metrics", short, long, "-f").code == 2


def test_an_overlay_has_one_scale_for_all_its_curves():
    drawn = overlay([[(0, 0.0), (10, 10.0)], [(0, 10.0), (5, 10.0), (10, 10.0)]], width=15, height=3)
    assert drawn == ["10  b    b    *", "", " 0  a", "    0        10"]
    assert overlay([[], []], width=20, height=3) == []
