"""The documented enumerations that scripts may name, and nothing here requests. Torch-free."""

from orc.runtime.core.enums import StrEnum


class ComputeEnvironment(StrEnum):
    """Environments in which a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(StrEnum):
    """Kinds of distributed SageMaker jobs."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class PrecisionType(StrEnum):
    """Precision of forward and backward."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
