"""Trackers whose libraries need an account or too much room: the calls that reach the library."""

import numpy as np
import pytest
import torch

from orc.runtime import Accelerator

CONFIG = {"num_iterations": 5, "learning_rate": torch.tensor(0.5), "net": {"layers": [1, 2]}}
PLAIN = {"num_iterations": 5, "learning_rate": 0.5, "net": {"layers": [1, 2]}}


def accelerator(tracker, tmp_path, **init):
    """One that has started *tracker* with the configuration."""
    result = Accelerator(log_with=tracker, project_dir=tmp_path)
    result.init_trackers("my_project", CONFIG, init_kwargs={tracker: init})
    return result


def test_comet(stand_in, tmp_path, caplog):
    calls = stand_in("comet_ml")
    run = accelerator("comet_ml", tmp_path, online=False)
    values = {"loss": torch.tensor(1.5, requires_grad=True), "note": "good", "parts": {"a": 1.0}, "bad": [1]}
    for step in (3, 4):
        run.log(values, step=step, log_kwargs={"comet_ml": {}})
    run.get_tracker("comet_ml").log({"loss": 2}, epoch=7)
    run.end_training()
    assert calls == [
        ("start", "my_project", False),
        ("log_parameters", PLAIN),
        *(
            call
            for step in (3, 4)
            for call in [
                ("set_step", step),
                ("log_metric", "loss", 1.5, step, None),
                ("log_other", "note", "good"),
                ("log_metrics", {"a": 1.0}, "parts", step),
            ]
        ),
        ("log_metric", "loss", 2, None, 7),
        ("end",),
    ]
    assert caplog.messages == ["comet_ml cannot log 'bad', it is left out: a list"]


def test_aim(stand_in, tmp_path):
    calls = stand_in("aim")
    run = accelerator("aim", tmp_path, experiment="first")
    run.log({"loss": torch.tensor(1.5)}, step=3, log_kwargs={"aim": {"context": {"subset": "train"}}})
    tracker = run.get_tracker("aim")
    options = {"aim_image": {"quality": 10}, "track": {"context": {"a": 1}}}
    tracker.log_images({"one": ("pixels", "a cat"), "two": ["x", "y"]}, 4, options)
    run.end_training()
    assert calls == [
        ("Run", str(tmp_path), "first"),
        ("set", "hparams", PLAIN),
        ("track", 1.5, "loss", 3, {"subset": "train"}),
        ("track", ("pixels", "a cat", 10), "one", 4, {"a": 1}),
        ("track", [("x", "", 10), ("y", "", 10)], "two", 4, {"a": 1}),
        ("close", "my_project"),
    ]


def test_clearml(stand_in, tmp_path, monkeypatch, caplog):
    calls = stand_in("clearml")
    monkeypatch.setenv("CLEARML_PROJECT", "other")
    run = accelerator("clearml", tmp_path, tags=["x"])
    run.log({"eval_loss": torch.tensor(1.5), "lr": 0.1, "note": "good"}, step=3)
    run.log({"final": 2.0})
    tracker = run.get_tracker("clearml")
    tracker.log_images({"test_cat": "pixels"}, step=4)
    tracker.log_table("rows", columns=["a"], data=[[1]], step=5)
    tracker.log_table("train_frame", dataframe="frame")
    with pytest.raises(ValueError, match="needs data or dataframe"):
        tracker.log_table("none")
    run.end_training()
    assert calls == [
        ("init", "other", "my_project", ["x"]),
        ("connect_configuration", PLAIN),
        ("report_scalar", "loss", "eval", 1.5, 3),
        ("report_scalar", "lr", "train", 0.1, 3),
        ("report_single_value", "final", 2.0),
        ("report_image", "cat", "test", 4, "pixels"),
        ("report_table", "rows", "train", 5, [["a"], [1]]),
        ("report_table", "frame", "train", None, "frame"),
        ("close",),
    ]
    assert caplog.messages == ["clearml cannot log 'note', it is left out: a str"]


def test_a_clearml_task_of_the_script_is_used_and_left_open(stand_in, tmp_path):
    calls = stand_in("clearml")
    import clearml

    clearml.CURRENT.append(task := clearml.Task())
    run = accelerator("clearml", tmp_path)
    assert run.get_tracker("clearml", unwrap=True) is task
    run.end_training()
    assert [call[0] for call in calls] == ["connect_configuration"]


def test_dvclive(stand_in, tmp_path):
    calls = stand_in("dvclive")
    run = accelerator("dvclive", tmp_path, dir="metrics")
    run.log({"loss": torch.tensor(1.5), "note": "good", "bad": {}}, step=3, log_kwargs={"dvclive": {"plot": False}})
    run.log({"loss": 1.0})
    run.end_training()
    assert calls == [
        ("Live", "metrics", False),
        ("log_params", PLAIN),
        ("log_metric", "loss", 1.5, 3, False),
        ("log_metric", "note", "good", 3, False),
        ("next_step", 3),
        ("log_metric", "loss", 1.0, 4, True),
        ("next_step", 4),
        ("end",),
    ]


def test_a_live_of_the_script_is_used(stand_in, tmp_path):
    stand_in("dvclive")
    from dvclive import Live

    live = Live("mine")
    assert accelerator("dvclive", tmp_path, live=live).get_tracker("dvclive", unwrap=True) is live


def test_trackio(stand_in, tmp_path):
    calls = stand_in("trackio")
    run = accelerator("trackio", tmp_path, name="first")
    run.log({"loss": torch.tensor([1.5]), "note": "good", "parts": {"a": np.float32(2)}}, step=3)
    run.end_training()
    assert calls == [
        ("init", "my_project", "first"),
        ("log", {"loss": 1.5, "note": "good", "parts": {"a": 2.0}}, 3),
        ("finish", {"_Username": "me", **PLAIN}),
    ]


def test_swanlab(stand_in, tmp_path):
    calls = stand_in("swanlab")
    run = accelerator("swanlab", tmp_path, mode="local")
    run.log({"loss": torch.tensor(1.5), "note": "good"}, step=3)
    run.get_tracker("swanlab").log_images({"cats": ["x", "y"]}, step=4)
    run.end_training()
    assert calls == [
        ("init", "my_project", "local"),
        ("log", {"loss": 1.5, "note": ("Text", "good")}, 3),
        ("log", {"cats": [("Image", "x"), ("Image", "y")]}, 4),
        ("finish", PLAIN),
    ]
