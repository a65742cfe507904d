"""`MegatronLMPlugin`: a script's options of Megatron-LM, completed from the environment. Torch-free.

With the placeholders that scripts prepare in the place of what Megatron-LM makes by itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from orc.runtime.core.megatron_keys import KEYS, check_value, conflict, from_environment

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import GradientRecord

# Documented settings that nothing here follows: refused by name, with what to do instead.
_UNSERVED = {
    "pipeline_model_parallel_split_rank": "megatron-core computes encoder and decoder of T5 in one stage",
    "train_samples": "count optimizer steps: MegatronLMDummyScheduler(total_num_steps=...)",
    "lr_decay_samples": "count optimizer steps: lr_decay_iters",
    "lr_warmup_samples": "count optimizer steps: lr_warmup_iters",
    "tensorboard_dir": "log with Accelerator(log_with='tensorboard', project_dir=...)",
    "set_all_logging_options": "log with Accelerator(log_with=...)",
    "custom_model_provider_function": "prepare a model of Transformers",
    "custom_prepare_model_function": "prepare a model of Transformers",
    "custom_megatron_datasets_provider_function": "prepare a MegatronLMDummyDataLoader or a DataLoader of tokens",
}
_OTHER = {
    "position_embedding_type": ("absolute", "learned_absolute", "rotary", "alibi"),
    "attention_head_type": ("multihead", "multiquery"),
}
_DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
_INCREASES = ("constant", "linear", "cosine")


@dataclass
class MegatronLMPlugin:
    """Plug-in that makes an `Accelerator` train with Megatron-LM.

    A value comes from the first of: an argument, ``MEGATRON_LM_<NAME>`` in the environment, the default.

    Args:
        tp_degree: processes that share the matrices of each layer; 1 when nobody says it.
        pp_degree: stages of consecutive layers, each on processes of its own; 1 when nobody says it.
        num_micro_batches: parts that a batch goes through the stages in; 1 when nobody says it.
        gradient_clipping: largest L2 norm of all gradients, 0 is any; 1.0 when nobody says it.
        sequence_parallelism: share the sequence between the layers among the tensor parallel processes.
        recompute_activations: recompute the attention in backward, to save memory.
        use_distributed_optimizer: shard the optimizer's state over the data parallel processes.
        pipeline_model_parallel_split_rank: refused: encoder and decoder of T5 are one stage.
        num_layers_per_virtual_pipeline_stage: layers of one piece, for the interleaved schedule.
        is_train_batch_min: of several loaders the smallest batch size is the micro batch size, else the largest.
        train_iters: optimizer steps of the whole training, where `MegatronLMDummyScheduler` does not say it.
        weight_decay_incr_style: how the weight decay grows: ``constant``, ``linear`` or ``cosine``.
        start_weight_decay: where it starts; the optimizer's when nobody says it.
        end_weight_decay: where it ends; the optimizer's when nobody says it.
        lr_decay_style: how the learning rate falls: ``constant``, ``linear``, ``cosine``, ``inverse-square-root``.
        lr_decay_iters: optimizer steps until it has fallen; the total number of steps when nobody says it.
        lr_warmup_iters: optimizer steps of warm-up, where `MegatronLMDummyScheduler` does not say it.
        lr_warmup_fraction: the same as a part of the steps until it has fallen.
        min_lr: the learning rate in the end.
        no_wd_decay_cond: function of a parameter's name and the parameter, true for those without weight decay.
        scale_lr_cond: the same for those whose learning rate is multiplied by *lr_mult*.
        lr_mult: that factor.
        seq_length: longest sequence; the model's own number of positions when nobody says it.
        encoder_seq_length: longest sequence that the encoder of T5 reads.
        decoder_seq_length: longest sequence of labels of T5.
        eval_iters: kept, for scripts that read it.
        eval_interval: kept, for scripts that read it.
        return_logits: let the model return logits beside the loss, on the last stage.
        custom_train_step_class: subclass of `GPTTrainStep` or `AbstractTrainStep`, made in `prepare`.
        custom_train_step_kwargs: keyword arguments for it.
        custom_get_batch_function: replaces `GPTTrainStep.get_batch`: function of an iterator of micro batches.
        custom_loss_function: replaces the function that `GPTTrainStep.get_loss_func` returns.
        other_megatron_args: more settings by Megatron-LM's names: fields of ``TransformerConfig``, and
            ``make_vocab_size_divisible_by``; for GPT-2 ``position_embedding_type`` (``absolute``, ``rotary``,
            ``alibi``) and ``attention_head_type`` (``multihead``, ``multiquery``).
        megatron_dataset_flag: kept, for scripts that set it; a `MegatronLMDummyDataLoader` needs no flag.
        consumed_samples: samples of an indexed dataset that training, validation and test had before.
        train_samples, lr_decay_samples, lr_warmup_samples: refused by name, as are tensorboard_dir,
            set_all_logging_options, custom_model_provider_function, custom_prepare_model_function,
            custom_megatron_datasets_provider_function.

    Attributes:
        global_batch_size: samples of one optimizer step, known when a loader is prepared.
        micro_batch_size: samples of one micro batch on one process, known then too.
        data_parallel_size: copies of the model, known when an Accelerator is made.
        padded_vocab_size: rows of the embedding, known when a model is prepared.
        model_config: that of the Transformers model, known then too.

    Raises:
        ValueError: a value that cannot be used, or a setting without its partner; the text names it.
    """

    engine: ClassVar[str] = "megatron"
    title: ClassVar[str] = "Megatron-LM"
    distributed_type: ClassVar[str] = "MEGATRON_LM"
    last_is_main: ClassVar[bool] = True  # losses and logits come out of the last stage

    tp_degree: Any = None
    pp_degree: Any = None
    num_micro_batches: Any = None
    gradient_clipping: Any = None
    sequence_parallelism: Any = None
    recompute_activations: Any = None
    use_distributed_optimizer: Any = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: Any = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    global_batch_size: int | None = field(default=None, init=False)
    micro_batch_size: int | None = field(default=None, init=False)
    data_parallel_size: int | None = field(default=None, init=False)
    padded_vocab_size: int | None = field(default=None, init=False)
    model_config: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        told = from_environment(os.environ)
        for name, key in KEYS.items():
            given = getattr(self, name)
            setattr(self, name, told.get(name, key.default) if given is None else check_value(name, given))
        self.refuse_unserved()
        for name, known in (("lr_decay_style", _DECAYS), ("weight_decay_incr_style", _INCREASES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"MegatronLMPlugin({name}={getattr(self, name)!r}): expected one of {', '.join(known)}"
                )
        if (problem := conflict(self.settings)) is not None:
            raise ValueError(f"MegatronLMPlugin: {problem}")
        if self.num_layers_per_virtual_pipeline_stage is not None:
            self._check_virtual(self.num_layers_per_virtual_pipeline_stage)

    def refuse_unserved(self) -> None:
        """Raise `ValueError` for a documented setting that nothing here follows; also at `prepare`."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, reason in _UNSERVED.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"MegatronLMPlugin({name}=...) is not supported: {reason}")
        for name, served in _OTHER.items():
            if (value := self.others.get(name, served[0])) not in served:
                raise ValueError(f"other_megatron_args: {name}={value!r}: expected one of {', '.join(served)}")

    def apply_accumulation(self, gradient: GradientRecord) -> None:
        """Bring nothing into force: each batch is one optimizer step, which the Accelerator has checked.

        Args:
            gradient: the record of gradient accumulation.
        """

    def agreed(self) -> Mapping[str, Any]:
        """Return the settings that a launcher can give too."""
        return self.settings

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a launcher can give too, by name."""
        return {name: getattr(self, name) for name in KEYS}

    @property
    def others(self) -> Mapping[str, Any]:
        """``other_megatron_args``, empty where there are none."""
        return self.other_megatron_args or {}

    def _check_virtual(self, layers: int) -> None:
        check = "MegatronLMPlugin(num_layers_per_virtual_pipeline_stage=...)"
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ValueError(f"{check}: expected a whole number above 0, not {layers!r}")
        if self.pp_degree == 1:
            raise ValueError(f"{check}: virtual stages are pieces of a pipeline: set pp_degree above 1")
        if self.num_micro_batches % self.pp_degree:
            raise ValueError(
                f"{check}: the interleaved schedule needs a multiple of pp_degree {self.pp_degree} micro batches, and "
                f"num_micro_batches is {self.num_micro_batches}"
            )


class MegatronLMDummyScheduler:
    """Placeholder of a schedule; `prepare` makes Megatron-LM's own, which warms up and decays by optimizer steps.

    Args:
        optimizer: the optimizer whose learning rate is the highest of the schedule.
        total_num_steps: optimizer steps until the rate has come down to ``min_lr`` of the plug-in.
        warmup_num_steps: optimizer steps of warm-up.
        kwargs: kept, for scripts that pass the arguments of another schedule.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """Placeholder of the loaders of an indexed dataset of Megatron-LM.

    Prepare it once, twice or three times in one call: it becomes the loaders of training, validation and test, which
    give the tokens of a batch to ``model(**next(loader))`` without end. A split without documents becomes `None`.

    Args:
        dataset_kwargs: ``data_path`` (of the files without ``.bin`` and ``.idx``), ``splits_string`` (``969,30,1``),
            ``seq_length``, ``micro_batch_size`` and ``seed``.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)
