"""A tokenizer and a language model of a few thousand parameters, made in place: nothing is downloaded."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def tokenizer():
    """Words to numbers."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def language_model():
    """A Llama with two layers, the same each time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=44,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config)


def texts(count, length=8, seed=0):
    """Lines of random words."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(WORDS), (count, length), generator=generator).tolist()
    return [" ".join(WORDS[number] for number in line) for line in drawn]


def history(trainer, *names):
    """What a trainer has logged under *names*, step by step."""
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def fingerprint(model):
    """One number that differs where any parameter differs."""
    return sum(float(value.detach().double().abs().sum()) for value in model.parameters())
