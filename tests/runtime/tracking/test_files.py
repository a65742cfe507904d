"""Trackers that work without a server: what they have written, read back with the library itself."""

import os
import struct
import time

import numpy as np
import pytest
import torch
import yaml

from orc.runtime import Accelerator, MLflowTracker, ProjectConfiguration, TensorBoardTracker, WandBTracker

CONFIG = {"num_iterations": 5, "learning_rate": 1e-5, "name": "first", "flag": True, "net": {"layers": 2}}


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_writes_below_the_project(tmp_path):
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("my_project", CONFIG)
    accelerator.log({"train_loss": torch.tensor(1.12, requires_grad=True), "valid_loss": 0.8, "note": "good"}, step=1)
    accelerator.log({"parts": {"a": 1.0, "b": torch.tensor(2)}}, step=2)
    images = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"cats": images}, step=3, dataformats="NHWC")
    tracker.log_images({"dogs": list(images)}, step=3, dataformats="NHWC")
    accelerator.end_training()

    found = events(tmp_path / "my_project")
    assert {tag: [(e.step, round(e.value, 2)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]} == {
        "train_loss": [(1, 1.12)],
        "valid_loss": [(1, 0.8)],
    }
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"good"]
    assert sorted(found.Tags()["images"]) == ["cats", "dogs"]
    assert [e.value for e in events(tmp_path / "my_project/parts_b").Scalars("parts")] == [2.0]


def test_what_has_one_element_is_logged_as_a_number(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    accelerator = Accelerator(log_with=["tensorboard", "mlflow"], project_dir=tmp_path)
    accelerator.init_trackers("run")
    # What gather() of one loss gives with one process, half a float, and NumPy's forms.
    values = {"gathered": torch.tensor([1.5]), "half": torch.tensor([[0.5]], dtype=torch.bfloat16)}
    accelerator.log({**values, "array": np.array([2.5]), "parts": {"a": torch.tensor([3.5])}}, step=1)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    accelerator.end_training()

    found = events(tmp_path / "run")
    expected = {"gathered": 1.5, "half": 0.5, "array": 2.5}
    assert {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]} == expected
    assert [e.value for e in events(tmp_path / "run/parts_a").Scalars("parts")] == [3.5]
    assert mlflow.get_run(run.info.run_id).data.metrics == expected


def test_tensorboard_stores_the_configuration_twice(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=5)
    tracker.store_init_configuration({**CONFIG, "worst": float("inf"), "big": 1e22, "small": 5.5e-7})
    tracker.finish()
    (path,) = (tmp_path / "run").glob("*/hparams.yml")
    expected = {**CONFIG, "net": "{'layers': 2}", "worst": float("inf"), "big": 1e22, "small": 5.5e-7}
    assert yaml.safe_load(path.read_text()) == expected
    data = events(path.parent).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"learning_rate" in data


@pytest.mark.parametrize("name", ["logs", "another/directory"])
def test_the_logging_directory_may_differ_from_the_projects(tmp_path, name):
    config = ProjectConfiguration(project_dir=tmp_path / "project", logging_dir=tmp_path / name)
    accelerator = Accelerator(log_with="tensorboard", project_config=config)
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert any((tmp_path / name / "run").iterdir())
    assert not (tmp_path / "project").exists()


def wandb_records(folder):
    """The records of the one offline run below *folder*, by kind, as far as they are written.

    The file is a LevelDB log of protobuf messages.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert b":W&B".startswith(data[:4])
    records, message, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a header does not cross blocks
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, message = Record.FromString(message), b""
            records.append((record.WhichOneof("record_type"), record))
    return records


def test_wandb_writes_an_offline_run(tmp_path):
    accelerator = Accelerator(log_with="wandb")
    accelerator.init_trackers("my_project", {"learning_rate": torch.tensor(0.5)}, {"wandb": {"tags": ["a", "b"]}})
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert run.project == "my_project"
    assert run.config["learning_rate"] == 0.5
    accelerator.log({"train_loss": torch.tensor(1.5, requires_grad=True)}, step=1)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"cats": [np.zeros((4, 4, 3), dtype=np.uint8)] * 2}, step=2)
    tracker.log_table("rows", columns=["a", "b"], data=[[1, 2]], step=3)
    accelerator.end_training()

    deadline = time.monotonic() + 60  # a process of wandb's own writes the file
    while not (records := wandb_records(tmp_path)) or records[-1][0] not in ("exit", "final", "footer"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for kind, record in records
        if kind == "history"
    ]
    assert rows[0]["train_loss"] == "1.5"
    assert [row["_step"] for row in rows] == ["1", "2", "3"]
    assert (rows[1]["cats/_type"], rows[1]["cats/count"]) == ('"images/separated"', "2")
    assert rows[2]["rows/_type"] == '"table-file"'
    assert ["a", "b"] in [list(record.run.tags) for kind, record in records if kind == "run"]


def test_mlflow_writes_to_its_store(tmp_path, monkeypatch, caplog):
    import mlflow

    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "x"}')
    accelerator = Accelerator(log_with="mlflow")
    many = {f"p{i}": i for i in range(150)}
    options = {"run_name": "first", "logging_dir": str(tmp_path / "artifacts"), "description": "about"}
    accelerator.init_trackers("my_project", {**many, "long": "x" * 7000}, {"mlflow": options})
    for step in (1, 2):
        accelerator.log({"loss": torch.tensor(1.5), "count": 3, "note": "good"}, step=step)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    (tmp_path / "report.txt").write_text("fine")
    accelerator.get_tracker("mlflow").log_artifact(str(tmp_path / "report.txt"))
    accelerator.end_training()

    stored = mlflow.get_run(run.info.run_id)
    assert mlflow.get_experiment(stored.info.experiment_id).name == "my_project"
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "first")
    assert stored.data.params == {name: str(value) for name, value in many.items()}
    assert stored.data.metrics == {"loss": 1.5, "count": 3.0}
    assert [m.step for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")] == [1, 2]
    assert stored.data.tags["team"] == "x"
    assert stored.data.tags["mlflow.note.content"] == "about"
    assert [path.read_text() for path in (tmp_path / "artifacts").rglob("report.txt")] == ["fine"]
    assert caplog.messages == [
        "mlflow cannot log 'long', it is left out: its text is longer than 6000 characters",
        "mlflow cannot log 'note', it is left out: a str",
    ]

    again = MLflowTracker("ignored", run_id=run.info.run_id)
    again.log({"loss": 0.5}, step=3)
    again.finish()
    assert mlflow.get_run(run.info.run_id).data.metrics["loss"] == 0.5
    parent = MLflowTracker("my_project")
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    child = MLflowTracker("my_project")
    outer, inner = parent.tracker, child.tracker
    assert inner.data.tags["mlflow.parentRunId"] == outer.info.run_id
    child.finish()
    parent.finish()
    assert mlflow.active_run() is None


def test_mlflow_tags_must_be_a_mapping(monkeypatch):
    with pytest.raises(ValueError, match="no JSON: 'team=x'"):
        MLflowTracker("run", tags="team=x")
    with pytest.raises(ValueError, match=r"must be a mapping, not \['x'\]"):
        MLflowTracker("run", tags='["x"]')


def test_a_tracker_can_be_used_without_an_accelerator(tmp_path):
    tracker = WandBTracker("alone", dir=str(tmp_path))
    assert not os.path.exists(tmp_path / "wandb"), "nothing is opened before it is needed"
    tracker.log({"loss": 1.0}, step=4)
    run = tracker.run
    tracker.finish()
    tracker.finish()
    assert run._is_finished
    with pytest.raises(RuntimeError, match=r"the run of the wandb tracker is finished; start\(\) opens another one"):
        tracker.log({"loss": 1.0})
    tracker.start()
    assert tracker.run is not run
    tracker.finish()
