"""Amazon SageMaker: an attempt is a training job. What is sent is rendered without the SDK and without a network."""

from orc.launchers.backends.sagemaker.backend import SagemakerBackend, training_job

BACKEND = SagemakerBackend

__all__ = ["BACKEND", "SagemakerBackend", "training_job"]
