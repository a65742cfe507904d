"""MLflow: a file store, a database or a server, as MLflow is configured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from orc.runtime.core.config import parse_bool
from orc.runtime.tracking.base import LibraryTracker, numbers, on_main_process, plain


class MLflowTracker(LibraryTracker):
    """A run of MLflow. The environment variables named below win over the arguments.

    Args:
        experiment_name: made if it is not there (``MLFLOW_EXPERIMENT_NAME``).
        logging_dir: where a new experiment keeps its artifacts; else where MLflow is configured to.
        run_id: carry on with this run (``MLFLOW_RUN_ID``).
        tags: of the run; a mapping or its JSON text (``MLFLOW_TAGS``).
        nested_run: the run is part of the one that is active (``MLFLOW_NESTED_RUN``).
        run_name: name of a new run.
        description: of the run.
    """

    name = "mlflow"
    package = "mlflow"
    modules = ("mlflow",)

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        env = os.environ
        self.experiment_name = env.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = env.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(env.get("MLFLOW_TAGS", tags))
        nested = env.get("MLFLOW_NESTED_RUN")
        self.nested_run = bool(nested_run) if nested is None else parse_bool(nested)
        self.description = description

    def _open(self) -> Any:
        import mlflow

        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=None if self.run_id else self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self) -> str | None:
        import mlflow

        if self.experiment_name is None:
            return None
        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            return experiment.experiment_id
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return mlflow.create_experiment(self.experiment_name, artifact_location=place)

    def _close(self, run: Any) -> None:
        import mlflow

        active = mlflow.active_run()
        if active is not None and active.info.run_id == run.info.run_id:  # else the script has ended it
            mlflow.end_run()

    active_run = property(lambda self: self.tracker, doc="The run.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values* as parameters; those whose text is longer than MLflow takes are left out with a warning."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        fitting = []
        for key, value in plain(values).items():
            if len(str(value)) > MAX_PARAM_VAL_LENGTH:
                self._leave_out(key, value, f"its text is longer than {MAX_PARAM_VAL_LENGTH} characters")
            else:
                fitting.append((key, value))
        run_id = self.tracker.info.run_id
        for start in range(0, len(fitting), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(fitting[start : start + MAX_PARAMS_TAGS_PER_BATCH]), run_id=run_id)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; MLflow takes nothing else, other values are left out with a warning.

        *kwargs* go to ``mlflow.log_metrics``.
        """
        import mlflow

        metrics = {}
        for key, value in numbers(values).items():
            if isinstance(value, (int, float)):
                metrics[key] = value
            else:
                self._leave_out(key, value)
        mlflow.log_metrics(metrics, **{"step": step, "run_id": self.tracker.info.run_id, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly as *artifact_file* of the run.

        Args:
            save_kwargs: of ``mlflow.log_figure``.
        """
        import mlflow

        self.tracker  # noqa: B018 (opens the run)
        mlflow.log_figure(figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of *local_dir* with the run.

        Args:
            artifact_path: the folder of the run that gets them.
        """
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path, run_id=self.tracker.info.run_id)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store the file *local_path* with the run.

        Args:
            artifact_path: the folder of the run that gets it.
        """
        import mlflow

        mlflow.log_artifact(local_path, artifact_path, run_id=self.tracker.info.run_id)


def _tags(tags: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if isinstance(tags, str):
        try:
            tags = json.loads(tags)
        except json.JSONDecodeError as error:
            raise ValueError(f"MLflow tags are no JSON: {tags!r} ({error})") from None
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f"MLflow tags must be a mapping, not {tags!r}")
    return None if tags is None else dict(tags)
