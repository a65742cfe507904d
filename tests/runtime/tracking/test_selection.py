"""Which trackers `log_with` means, and how the Accelerator uses them."""

import os

import pytest
import torch

from orc.runtime import (
    Accelerator,
    GeneralTracker,
    LoggerType,
    TensorBoardTracker,
    WandBTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
)
from orc.runtime.tracking import methods


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name="run"):
        super().__init__()
        self.run_name = run_name
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    @on_main_process
    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append(("log", values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


class Mine(Recorder):
    name = "mine"

    @on_main_process
    def __init__(self):  # as documented: nothing is set up on the other ranks
        super().__init__()


class Everywhere(Mine):
    name = "everywhere"
    main_process_only = False


INSTALLED = [LoggerType.TENSORBOARD, LoggerType.WANDB, LoggerType.MLFLOW]


def test_a_custom_tracker_goes_through_a_whole_run():
    tracker = Recorder()
    accelerator = Accelerator(log_with=tracker)
    assert accelerator.log_with == [tracker]
    assert accelerator.trackers == []
    accelerator.init_trackers("my_project", config={"num_iterations": 5, "learning_rate": 1e-2})
    values = {"loss": torch.tensor(1.0)}
    accelerator.log(values, step=1, log_kwargs={"recorder": {"epoch": 2}})
    accelerator.log({"train_loss": 1.12, "valid_loss": 0.8})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("recorder") is tracker
    assert accelerator.get_tracker("recorder", unwrap=True) is tracker.calls
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.calls == [
        "start",
        ("config", {"num_iterations": 5, "learning_rate": 1e-2}),
        ("log", values, 1, {"epoch": 2}),
        ("log", {"train_loss": 1.12, "valid_loss": 0.8}, None, {}),
        "finish",
    ]
    assert tracker.calls[2][1]["loss"] is values["loss"], "what a custom tracker gets is not converted"


def test_all_means_what_is_installed_and_combines_with_a_custom_tracker(tmp_path):
    tracker = Recorder()
    accelerator = Accelerator(log_with=[tracker, "all"], project_dir=tmp_path / "logs")
    assert accelerator.log_with == [tracker, *INSTALLED]
    accelerator.init_trackers("my_project", {"learning_rate": 1e-2}, {"wandb": {"mode": "disabled"}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert [one.name for one in accelerator.trackers] == ["recorder", "tensorboard", "wandb", "mlflow"]
    assert ("log", {"loss": 0.5}, 1, {}) in tracker.calls
    assert os.listdir(tmp_path / "logs") == ["my_project"]
    import mlflow

    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics == {"loss": 0.5}


def test_names_members_and_repetitions(tmp_path):
    first, second = Recorder(), Recorder()
    assert filter_trackers(None) == []
    assert filter_trackers("WandB") == [LoggerType.WANDB]
    mixed = ["wandb", LoggerType.TENSORBOARD, first, LoggerType.WANDB, second, first, "tensorboard"]
    assert filter_trackers(mixed, tmp_path) == [LoggerType.WANDB, LoggerType.TENSORBOARD, first, second]
    assert filter_trackers(("wandb", "all"), tmp_path) == [LoggerType.WANDB, LoggerType.TENSORBOARD, LoggerType.MLFLOW]
    assert filter_trackers({"wandb"}, tmp_path) == [LoggerType.WANDB]
    assert get_available_trackers() == INSTALLED


def test_what_needs_a_folder_is_refused_without_one_and_left_out_of_all(caplog):
    with pytest.raises(ValueError, match="tensorboard requires a `logging_dir`; give Accelerator project_dir"):
        filter_trackers(["wandb", "tensorboard"])
    assert filter_trackers("all") == [LoggerType.WANDB, LoggerType.MLFLOW]
    assert caplog.messages == ["log_with='all': left out for want of a project_dir or logging_dir: tensorboard"]


def test_what_is_not_installed_is_left_out_with_the_name_of_the_package(caplog, tmp_path, without_library):
    without_library("wandb", "aim", "tensorboard", "tensorboardX")
    accelerator = Accelerator(log_with=["wandb", "aim", "mlflow"], project_dir=tmp_path)
    assert accelerator.log_with == [LoggerType.MLFLOW]
    assert caplog.messages == [
        "log_with: wandb is left out, its library is not installed: pip install wandb",
        "log_with: aim is left out, its library is not installed: pip install aim",
    ]
    assert get_available_trackers() == [LoggerType.MLFLOW]
    with pytest.raises(ImportError, match="the wandb tracker needs its library: pip install wandb"):
        WandBTracker("run").start()
    without_library("mlflow")
    assert filter_trackers("all") == []
    assert caplog.messages[-1] == "log_with='all': no library of a built-in tracker is installed"


def test_a_folder_that_runs_leave_behind_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert LoggerType.SWANLAB not in get_available_trackers()


@pytest.mark.parametrize(
    ("log_with", "error", "message"),
    [
        ("tensorbord", ValueError, "unsupported tracker 'tensorbord', did you mean 'tensorboard'.; choose from all"),
        (["wandb", "neptune"], ValueError, "unsupported tracker 'neptune'; choose from"),
        (3, TypeError, "expected names and trackers, not 3"),
        ([Recorder], TypeError, "not the class Recorder; give an instance"),
    ],
)
def test_other_values_are_refused(log_with, error, message):
    with pytest.raises(error, match=message):
        Accelerator(log_with=log_with)


def test_an_incomplete_tracker_is_refused_with_what_is_missing():
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(NotImplementedError, match="must define `requires_logging_directory`, `tracker`"):
        Incomplete()

    class Late(Incomplete):
        requires_logging_directory = False

        def __init__(self):  # does not call the base, as the documented example
            pass

    with pytest.raises(NotImplementedError, match="Late is no complete tracker: it must define `tracker`"):
        Accelerator(log_with=Late())

    class Silent(Late):
        tracker = None

    accelerator = Accelerator(log_with=Silent())
    with pytest.raises(NotImplementedError, match=r"Silent must define store_init_configuration\(values\)"):
        accelerator.init_trackers("run", {"a": 1})
    with pytest.raises(NotImplementedError, match=r"Silent must define log\(values, step\)"):
        accelerator.log({"a": 1})


def test_unknown_names_are_errors(tmp_path):
    accelerator = Accelerator(log_with=Recorder())
    with pytest.raises(ValueError, match=r"wandb is not an available tracker .*available: none; call init_trackers"):
        accelerator.get_tracker("wandb")
    with pytest.raises(ValueError, match=r"init_kwargs: there is no tracker 'recoder' \(in use: recorder\)"):
        accelerator.init_trackers("run", init_kwargs={"recoder": {}})
    accelerator.init_trackers("run", init_kwargs={"wandb": {"tags": ["not in use, not an error"]}})
    with pytest.raises(ValueError, match=r"log_kwargs: there is no tracker 'wandbb'"):
        accelerator.log({}, log_kwargs={"wandbb": {}})
    with pytest.raises(ValueError, match=r"wandb is not an available tracker .*available: recorder"):
        accelerator.get_tracker("wandb")


def test_logging_before_the_start_is_said_once(caplog):
    methods._warn_early.cache_clear()
    accelerator = Accelerator(log_with=(tracker := Recorder()))
    for _ in range(2):
        accelerator.log({"loss": 1})
    assert caplog.messages == ["Accelerator.log was called before init_trackers: nothing is logged"]
    assert tracker.calls == []


def test_without_trackers_logging_does_nothing():
    accelerator = Accelerator()
    accelerator.init_trackers("run", {"a": 1})
    accelerator.log({"loss": 1}, step=1)
    accelerator.end_training()
    assert accelerator.trackers == accelerator.log_with == []


def test_a_failing_tracker_is_named_and_not_swallowed():
    class Failing(Recorder):
        name = "failing"

        def log(self, values, step=None):
            raise ConnectionError("no route")

        def finish(self):
            raise OSError(self.run_name)

    healthy = Recorder()
    accelerator = Accelerator(log_with=[Failing("one"), healthy])
    accelerator.init_trackers("run")
    with pytest.raises(ConnectionError, match="no route") as caught:
        accelerator.log({"loss": 1})
    assert caught.value.__notes__ == ["in log of the tracker 'failing'"]
    with pytest.raises(OSError, match="one"):
        accelerator.end_training()
    assert healthy.calls[-1] == "finish", "the others finish nevertheless"

    accelerator = Accelerator(log_with=[Failing("one"), Failing("two")])
    accelerator.init_trackers("run")
    with pytest.raises(ExceptionGroup) as group:
        accelerator.end_training()
    assert [str(error) for error in group.value.exceptions] == ["one", "two"]


def test_starting_again_finishes_the_runs_before(tmp_path):
    mine = Recorder()
    accelerator = Accelerator(log_with=["tensorboard", mine], project_dir=tmp_path)
    accelerator.init_trackers("first")
    first = accelerator.get_tracker("tensorboard")
    writer = first.writer
    accelerator.init_trackers("second")
    assert writer.file_writer is None, "closed"
    assert accelerator.get_tracker("tensorboard") is not first
    accelerator.end_training()
    assert mine.calls == ["start", "start", "finish"]
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


@pytest.mark.distributed
def test_only_the_main_process_tracks_unless_told_otherwise(run_ranks, tmp_path):
    def body(folder):
        early = Mine(), Everywhere()
        accelerator = Accelerator(log_with=["tensorboard", *early], project_dir=folder)
        accelerator.init_trackers("run", {"a": 1})
        accelerator.log({"loss": accelerator.process_index}, step=1)
        accelerator.get_tracker("tensorboard").log_images({"anything": [[[[0.0]]]]}, step=1)
        if not accelerator.is_main_process:
            accelerator.get_tracker("mine").anything_at_all(1, a=2)
        raw = accelerator.get_tracker("tensorboard", unwrap=True)
        raw.add_scalar("raw", accelerator.process_index, 1)
        names = [tracker.name for tracker in accelerator.trackers]
        with pytest.raises(ValueError, match="available: tensorboard, mine, everywhere"):
            accelerator.get_tracker("wandb")
        accelerator.end_training()
        return names, accelerator.trackers[-1].calls

    def calls(rank):
        return ["start", ("config", {"a": 1}), ("log", {"loss": rank}, 1, {}), "finish"]

    zero, one = run_ranks(2, body, tmp_path)
    assert zero == (["tensorboard", "mine", "everywhere"], calls(0))
    assert one == (["everywhere"], calls(1))
    assert len([path for path in (tmp_path / "run").iterdir() if path.is_file()]) == 1


@pytest.mark.distributed
def test_built_in_trackers_do_nothing_on_other_ranks_even_by_themselves(run_ranks, tmp_path):
    def body(folder):
        import torch.distributed as dist

        tracker = TensorBoardTracker("run", folder)
        tracker.store_init_configuration({"a": 1})
        tracker.log({"loss": 1.0}, step=1)
        writer = tracker.tracker
        tracker.finish()
        return writer is None, dist.is_initialized()

    assert run_ranks(2, body, tmp_path) == [(False, False), (True, False)]
    assert len([path for path in (tmp_path / "run").iterdir() if path.is_file()]) == 1
