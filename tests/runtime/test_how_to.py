"""The how-to pages on the runtime: their examples run."""

import contextlib
import io
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from orc.runtime.core.context import reset_default

RANKS_IMPORT = (
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "deepspeed"),
    *("orc.runtime.engine.megatron.model", "orc.runtime.engine.megatron.gpt2"),
)
PAGES = Path(__file__).parents[2] / "docs/how-to"


def test_the_first_example_of_resuming_works_without_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.search(r"^```python\n(.*?)^```", (PAGES / "resume.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    seen = []
    for epochs in (2, 3):
        reset_default()
        model = torch.nn.Linear(1, 1)
        namespace = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "loader": torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2),
            "epochs": epochs,
        }
        exec(compile(text, "resume.md", "exec"), namespace)
        namespace["accelerator"].end_training()
        seen.append((namespace["resumed"] is not None, namespace["epoch"]))
    reset_default()
    assert seen == [(False, 1), (True, 2)]


@pytest.mark.parametrize(
    "page",
    [
        "track-experiments",
        "profile",
        "local-sgd",
        "notebooks",
        "big-models",
        "fp8",
        "quantization",
        "test-distributed-code",
        "../reference/utilities",
        "../explanation/runtime-core",
    ],
)
def test_examples_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {"__name__": page}
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), namespace)
    if page == "track-experiments":
        assert (tmp_path / "run.txt").read_text() == "config {'learning_rate': 0.01}\n1 {'loss': 0.5}\n"
    if page == "profile":
        assert sorted(path.name for path in tmp_path.rglob("*.json")) == [
            "profile_0.json",
            "profile_0.json",
            "profile_0_cycle0.json",
        ]


@pytest.mark.parametrize("number", range(3), ids=["context", "sequence", "sequence by DeepSpeed"])
def test_the_page_on_long_sequences_runs_on_two_ranks(run_ranks, number):
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / "context-parallel.md").read_text(), re.MULTILINE | re.DOTALL)

    def run():
        namespace = {"__name__": "page"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for the page's all_gather
            exec(compile(blocks[number], "context-parallel.md", "exec"), namespace)
        weights = [parameter.sum().item() for parameter in namespace["model"].parameters()]
        return namespace["labels"].shape, len(namespace["texts"]), weights

    first, second = run_ranks(2, run, env={"ORC_USE_CPU": "1"})
    assert first == second
    assert first[:2] == ((2, 16), 4)


def test_the_page_on_fsdp_runs_on_two_ranks(run_ranks, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / "fsdp.md").read_text(), re.MULTILINE | re.DOTALL)

    def run():
        namespace = {"__name__": "fsdp"}
        exec(compile("\n".join(blocks), "fsdp.md", "exec"), namespace)
        return float(namespace["norm"]), len(namespace["state"]), namespace["large"](torch.ones(1, 32)).item()

    (norm, names, output), (other_norm, none, other_output) = run_ranks(2, run, env={"ORC_USE_CPU": "1"})
    assert norm == other_norm > 0
    assert (names, none) == (10, 0)
    assert output == other_output


def test_the_page_on_tensor_parallelism_shows_what_two_ranks_print(run_ranks):
    page = (PAGES / "tensor-parallel.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^\$ orc launch -n 2 .*-tp-size 2 train.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]

    def printed():
        with contextlib.redirect_stdout(io.StringIO()) as found:
            exec(compile(script, "train.py", "exec"), {"__name__": "tensor"})
        return found.getvalue()

    tensor = {"PARALLELISM_CONFIG_TP_SIZE": "2", "ORC_USE_CPU": "1"}
    assert run_ranks(2, printed, env=tensor) == [shown, ""]


def test_the_page_on_pipelines_runs_on_two_ranks(run_ranks):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (PAGES / "pipeline-inference.md").read_text(), re.MULTILINE | re.DOTALL
    )

    def run():
        namespace = {"__name__": "pipelines"}
        exec(compile("\n".join(blocks), "pipeline-inference.md", "exec"), namespace)
        return namespace["output"], namespace["model"].hf_split_points

    first, last = run_ranks(2, run, env={"ORC_USE_CPU": "1"})
    assert first == (None, ["1"])
    assert last[0].shape == (10, 64)


def test_the_page_on_training_in_stages_runs_on_two_ranks(run_ranks, tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (PAGES / "pipeline-training.md").read_text(), re.MULTILINE | re.DOTALL
    )

    def run():
        os.chdir(tmp_path)
        namespace = {"__name__": "pipelines"}
        exec(compile("\n".join(blocks), "pipeline-training.md", "exec"), namespace)
        return namespace["loss"].item(), len(namespace["state"]), sorted(dict(namespace["inside"].named_parameters()))

    (loss, names, first), (other_loss, none, last) = run_ranks(2, run, env={"ORC_USE_CPU": "1"}, timeout=120)
    assert loss == other_loss > 0
    assert (names, none) == (18, 0)
    assert len(first) + len(last) == 18
    assert {one.partition(".")[0] for one in last} == {"blocks", "head"}


def test_the_figures_of_the_guide_to_parallelism_are_those_of_the_calculator():
    import transformers

    from orc.runtime.weights.parallel_memory import Training, estimate_parallel_memory, parse_parallelism

    text = (PAGES / "choose-parallelism.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "choose-parallelism.md", "exec"), {})
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    rows = re.findall(r"^\| `(\w+=[\w=,]+)`(.*?) \| ([\d.| ]+) \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for sizes, words, figures in rows:
        training = Training(
            parse_parallelism(sizes),
            mixed_precision="bf16",
            batch=8 if "pp" in sizes else 1,
            sequence=65536 if "64 k" in words else 8192,
            checkpointing="checkpointing" in words,
        )
        found = estimate_parallel_memory(model, training).largest
        parts = (found.parameters, found.gradients, found.optimizer, found.gathered, found.activations, found.total)
        assert [float(one) for one in figures.split("|")] == pytest.approx([one / 2**30 for one in parts], abs=0.051)


def printed(code, folder):
    """Run *code* in *folder*, in a process that nobody has launched; return the lines that it prints."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as found:
        exec(compile(code, "page.py", "exec"), {"__name__": "__main__"})
    return found.getvalue().splitlines()


def test_examples_of_deepspeed_run_one_after_the_other(run_ranks, tmp_path):
    text = (PAGES / "deepspeed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (lines,) = run_ranks(1, printed, "".join(blocks), tmp_path, timeout=160)
    assert "4" in lines
    assert lines[-1] == "torch.Size([1, 8])"
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_examples_of_megatron_run_one_after_the_other(run_ranks, tmp_path):
    text = (PAGES / "megatron.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    again = "\naccelerator.state._reset_state()\nplugin = MegatronLMPlugin(**settings)\n" + (
        "model = GPT2LMHeadModel(model.config)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "accelerator = Accelerator(megatron_lm_plugin=plugin)\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "plain = tokens.clamp(max=6)\nwith torch.no_grad():\n"
        "    found = [float(model(input_ids=one, labels=plain).loss) for one in (plain, torch.full_like(plain, 7))]\n"
        "print(found)\n"
    )
    (lines,) = run_ranks(1, printed, "".join(blocks) + again, tmp_path, timeout=160)
    assert "4" in lines
    without, weighed = json.loads(lines[-1])
    assert weighed > 3 * without  # each of twelve key tokens adds a quarter
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()
