"""The documented names of experiment trackers. Torch-free."""

from orc.runtime.core.enums import StrEnum


class LoggerType(StrEnum):
    """Experiment trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    AIM = "aim"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
