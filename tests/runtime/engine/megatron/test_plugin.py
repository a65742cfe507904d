"""The plug-in, its arithmetic, and what is refused before anything is allocated."""

import types

import pytest

from orc.runtime import MegatronLMPlugin
from orc.runtime.core.errors import ContextError
from orc.runtime.engine.megatron import rules


def test_the_arithmetic_of_the_documentation():
    assert rules.layers_per_stage(24, 4) == 6
    assert rules.padded_vocabulary(50257, tp_degree=2) == 50257 + 175 == 50432
    copies = rules.data_parallel_size(4, tp_degree=2, pp_degree=2)
    total = rules.global_batch_size(24, 2, copies)
    assert (copies, total) == (1, 48)
    assert (rules.steps_per_epoch(2318, total), 5 * rules.steps_per_epoch(2318, total)) == (49, 245)
    assert rules.virtual_stages(24, 4, layers_per_virtual_stage=2) == 3
    assert rules.virtual_stages(24, 4, layers_per_virtual_stage=None) == 1


def test_settings_come_from_arguments_then_the_environment_then_defaults(monkeypatch):
    plain = MegatronLMPlugin()
    assert list(plain.settings.values()) == [1, 1, 1, False, False, False, 1.0]
    for name, value in (("TP_DEGREE", "2"), ("PP_DEGREE", "4"), ("SEQUENCE_PARALLELISM", "true"),
                        ("NUM_MICRO_BATCHES", "8"), ("GRADIENT_CLIPPING", "0.5")):  # fmt: skip
        monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    told = MegatronLMPlugin(pp_degree=2)
    assert list(told.settings.values()) == [2, 2, 8, True, False, False, 0.5]
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    with pytest.raises(ValueError, match="MEGATRON_LM_TP_DEGREE='two'"):
        MegatronLMPlugin()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_degree": 0}, "tp_degree=0 of Megatron-LM: expected a whole number of at least 1"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1 of Megatron-LM"),
        ({"sequence_parallelism": True}, "set tp_degree above 1"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "set pp_degree above 1"),
        ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, "a multiple of pp_degree 2 micro batches"),
        ({"lr_decay_style": "steep"}, "lr_decay_style='steep'\\): expected one of constant, linear, cosine"),
        ({"lr_decay_samples": 5}, "lr_decay_samples=...\\) is not supported: count optimizer steps: lr_decay_iters"),
        ({"pipeline_model_parallel_split_rank": 1}, "encoder and decoder of T5"),
        ({"other_megatron_args": {"position_embedding_type": "sinus"}}, "expected one of absolute, learned_absolute"),
    ],
)
def test_a_setting_without_its_partner_or_its_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MegatronLMPlugin(**settings)


@pytest.mark.parametrize(
    ("settings", "run", "message"),
    [
        ({"tp_degree": 2, "pp_degree": 2}, (6, "no"), "needs a multiple of 4 processes, and there are 6"),
        ({}, (1, "fp8"), "trains in no, fp16 or bf16"),
    ],
)
def test_a_run_that_does_not_go_with_it_is_refused(settings, run, message):
    with pytest.raises(ContextError, match=message):
        rules.check_run(MegatronLMPlugin(**settings), *run)


def described(name="GPT2LMHeadModel", **changed):
    values = {"model_type": "gpt2", "n_head": 4, "n_embd": 16, "n_inner": None, "n_layer": 6, "n_positions": 32,
              "activation_function": "gelu_new", "embd_pdrop": 0.1, "resid_pdrop": 0.1}  # fmt: skip
    return type(name, (), {"config": types.SimpleNamespace(**{**values, **changed})})()


def t5(**changed):
    values = {"model_type": "t5", "num_heads": 4, "num_layers": 2, "d_ff": 32, "dense_act_fn": "relu"}
    return described("T5ForConditionalGeneration", **{**values, **changed})


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (described(n_head=3), {"tp_degree": 2}, "3 attention heads cannot be shared out over tp_degree 2"),
        (described(n_inner=33), {"tp_degree": 2}, "inner width 33"),
        (described(), {"pp_degree": 4}, "6 layers cannot be shared out evenly over pp_degree 4"),
        (described(), {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 2},
         "a stage has 3 layers, which is no multiple"),
        (t5(), {"pp_degree": 2}, "encoder and decoder of kind t5 in one stage"),
        (t5(), {"return_logits": True}, "return the loss alone"),
        (t5(), {"tp_degree": 2, "sequence_parallelism": True}, "set it to false"),
        (t5(), {"other_megatron_args": {"position_embedding_type": "alibi"}}, "is for gpt2"),
        (t5(dense_act_fn="tanh"), {}, "activation function 'tanh' has no counterpart"),
        (described("MegatronBertForQuestionAnswering", model_type="megatron-bert"), {}, "MegatronBertForMaskedLM"),
        (described("LlamaForCausalLM", model_type="llama"), {}, "is of kind 'llama'"),
        (described("GPT2ForSequenceClassification"), {}, "of kind gpt2 Megatron-LM trains GPT2LMHeadModel"),
        (object(), {}, "object is none of Transformers"),
        (described(activation_function="silu"), {}, "activation_function='silu' has no counterpart"),
        (described(embd_pdrop=0.0), {}, "embd_pdrop=0.0 and resid_pdrop=0.1"),
        (described(), {"seq_length": 64}, "the model has 32 positions"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_or_split_is_refused(model, settings, message):
    rules.check_model(MegatronLMPlugin(), described())
    with pytest.raises(ValueError, match=message):
        rules.check_model(MegatronLMPlugin(**settings), model)
