"""The starters' scripts as their job files start them, on forked ranks; each reaches the figure that it promises."""

import contextlib
import io
import json
import operator
import os
import re
import runpy
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest

from orc.launchers.spec import load_job
from orc.runtime.core.config import to_env
from orc.runtime.stand_ins.switch import stand_in_from_environment

RANKS_IMPORT = (
    *("sklearn.datasets", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection"),
    *("sklearn.neural_network", "pydoc_data.topics", "orc.runtime.inference", "orc.runtime.utils", "deepspeed"),
)
ROOT = Path(__file__).parents[2] / "templates/starters"
FOLDERS = {path.parent.name: path.parent for path in sorted(ROOT.rglob("job.yaml"))}
COMPARE = {">=": operator.ge, "<=": operator.le, "=": operator.eq}

pytestmark = pytest.mark.distributed


def rank(script, directory, arguments):
    """Run *script* as a program in *directory*; return what it printed."""
    stand_in_from_environment()  # as the hook at the start of ranks does
    # Between transformers and peft; of no interest here.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.fixture
def start(run_ranks, tmp_path):
    """``start(name, *arguments, world=None)``: the outputs of the ranks; later *arguments* win over the job's."""

    def start(name, *arguments, world=None, env=None):
        job = load_job(FOLDERS[name] / "job.yaml").spec
        checkpoint = {f"checkpoint_{key}": getattr(job.checkpoint, key) for key in ("every", "keep")}
        env = {**to_env({**job.runtime, **checkpoint}), **job.env, **(env or {})}
        world = world or job.resources.nproc * job.resources.max_nodes
        program = (str(FOLDERS[name] / job.script), str(tmp_path), [*job.args, *arguments])
        return run_ranks(world, rank, *program, env=env, timeout=120)

    return start


def promise(name):
    """What the docstring of a starter's script expects: the figure's name, the comparison, the bound."""
    text = (FOLDERS[name] / load_job(FOLDERS[name] / "job.yaml").spec.script).read_text()
    ((figure, sign, bound),) = re.findall(r"^Expected: (.+?) (>=|<=|=) (\S+)$", text, re.MULTILINE)
    return figure, COMPARE[sign], float(bound)


def figures(output, name):
    return [float(value) for value in re.findall(rf"{re.escape(name)} (-?\d+\.?\d*)", output)]


def check(name, outputs):
    figure, compare, bound = promise(name)
    reached = figures(outputs[0], figure)
    assert reached, f"{figure!r} is not in\n{outputs[0]}"
    assert compare(reached[-1], bound), outputs[0]


def test_gradients_are_accumulated_over_four_batches(start):
    outputs = start("gradient-accumulation")
    check("gradient-accumulation", outputs)
    assert "232 batches per process, 64 optimizer steps" in outputs[0]


def test_tokens_weigh_the_same_however_the_batches_are_cut(start):
    outputs = start("gradient-accumulation-lm")
    check("gradient-accumulation-lm", outputs)
    whole = start(
        "gradient-accumulation-lm", "--batch-size", "64", world=1, env={"ORC_GRADIENT_ACCUMULATION_STEPS": "1"}
    )
    assert figures(whole[0], "token") == pytest.approx(figures(outputs[0], "token"), abs=2e-3)


def test_the_batch_size_is_halved_until_it_fits(start):
    outputs = start("automatic-batch-size")
    check("automatic-batch-size", outputs)
    assert figures(outputs[0], "trying batch size") == [256, 128, 64]


def test_samples_per_step_stay_the_same_when_the_batch_shrinks(start):
    small = start("automatic-gradient-accumulation")
    check("automatic-gradient-accumulation", small)
    assert figures(small[0], "trying batch size") == [64, 32, 16]
    whole = start("automatic-gradient-accumulation", "--pretend-memory", "64")
    assert figures(whole[0], "trying batch size") == [64]
    assert re.search(r"\d+ optimizer steps", small[0])[0] == re.search(r"\d+ optimizer steps", whole[0])[0]


def test_a_run_in_two_parts_ends_as_one_in_a_single_part(start, tmp_path):
    first = start("checkpointing", "--epochs", "2")
    second = start("checkpointing")
    check("checkpointing", second)
    assert "after epoch 2" in second[0]
    assert sorted(path.name for path in (tmp_path / "runs/checkpoints").iterdir())[-1] == "checkpoint_5"
    (tmp_path / "runs").rename(tmp_path / "before")
    once = start("checkpointing")
    assert figures(first[0], "test error") + figures(second[0], "test error") == figures(once[0], "test error")


def test_every_fold_gives_a_model_and_all_vote(start):
    outputs = start("cross-validation")
    check("cross-validation", outputs)
    assert len(figures(outputs[0], "accuracy")) == 4


def test_all_processes_stop_when_one_says_so(start):
    outputs = start("early-stopping")
    check("early-stopping", outputs)
    stops = [int(re.search(rf"process {index} stops after epoch (\d+)", text)[1]) for index, text in enumerate(outputs)]
    assert stops[0] == stops[1] < 100


def test_metrics_see_every_sample_once(start):
    outputs = start("multi-process-metrics")
    check("multi-process-metrics", outputs)
    assert "384 with gather, 361 with gather_for_metrics, 361 verdicts" in outputs[0]


def test_models_part_and_meet_again_with_local_sgd(start):
    outputs = start("local-sgd")
    check("local-sgd", outputs)
    ((within, end),) = re.findall(r"apart by up to (\S+) within, (\S+) at the end", outputs[0])
    assert float(within) > 0.001 > float(end)


def test_a_gpt_is_split_by_megatron_and_writes(start, tmp_path):
    outputs = start("megatron-gpt")
    check("megatron-gpt", outputs[::-1])  # the last process speaks
    assert "matrices over 2, layers over 1 processes, 1 copies, 8 windows per step" in outputs[1]
    assert len(outputs[1].splitlines()[-1]) == len("The ") + 40
    assert (tmp_path / "runs/model/model.safetensors").exists()


def test_gradients_travel_compressed(start):
    outputs = start("ddp-comm-hooks")
    check("ddp-comm-hooks", outputs)
    thin = start("ddp-comm-hooks", "--hook", "power_sgd", "--wrapper", "bf16")
    check("ddp-comm-hooks", thin)
    assert figures(outputs[0], "loss") != figures(thin[0], "loss")


def test_three_steps_are_profiled_on_each_process(start, tmp_path):
    outputs = start("profiler")
    check("profiler", outputs)
    assert "aten::" in outputs[0]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["profile_0.json", "profile_1.json"]


def test_trackers_get_what_the_processes_have_together(start, tmp_path):
    outputs = start("tracking")
    check("tracking", outputs)
    config, *lines = map(json.loads, (tmp_path / "logs/metrics.jsonl").read_text().splitlines())
    assert config == {"config": {"epochs": 6, "lr": 0.01}}
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert list((tmp_path / "logs/tumours").rglob("events.out.tfevents.*"))


def test_answers_are_written_once_also_after_an_interruption(start, tmp_path):
    first = start("distributed-inference", "--break-after", "3")
    assert "300 answers to 300 of 897 inputs" in first[0]
    outputs = start("distributed-inference", world=1)
    check("distributed-inference", outputs)
    assert "process 0 has written 12 shards" in outputs[0]
    assert "897 answers to 897 of 897 inputs" in outputs[0]
    with pytest.raises(Exception, match="another --shard-size: 000000-000050"):
        start("distributed-inference", "--shard-size", "60", world=1)


def killed_at_the_fourth_shard(*program):
    """Run the starter; its process is killed while the fourth shard is half written."""
    replace, written = Path.replace, []

    def replace_or_die(path, target):
        if len(written) == 3:
            path.write_text(path.read_text()[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(target)
        return replace(path, target)

    Path.replace = replace_or_die
    return rank(*program)


def test_answers_are_written_once_also_after_a_kill(start, run_ranks, tmp_path):
    folder = FOLDERS["distributed-inference"]
    program = (str(folder / "predict.py"), str(tmp_path), ["--shard-size", "100"])
    with pytest.raises(Exception, match=r"9|SIGKILL|died|signal"):
        run_ranks(1, killed_at_the_fourth_shard, *program, env={"ORC_USE_CPU": "1"})
    assert len(list((tmp_path / "answers").glob("*.jsonl"))) == 3
    assert [path.stat().st_size for path in (tmp_path / "answers").glob("*.part")] == [100]
    outputs = start("distributed-inference", "--shard-size", "100", world=2)
    check("distributed-inference", outputs)
    assert [figures(output, "has written")[0] for output in outputs] == [3, 3]
    assert "897 answers to 897 of 897 inputs" in outputs[0]
    assert not list((tmp_path / "answers").glob("*.part"))


def test_stages_on_two_processes_answer_as_the_whole_model_does(start):
    outputs = start("pipeline-inference")
    check("pipeline-inference", outputs)
    assert "897 answers" in outputs[0]
    whole = start("pipeline-inference", world=1)
    assert figures(whole[0], "accuracy of the answers") == figures(outputs[0], "accuracy of the answers")


@pytest.mark.parametrize("name", ["text-classification", "image-classification"])
def test_the_smallest_program_reaches_its_figure(start, name):
    check(name, start(name))


def test_the_complete_text_program_goes_on_in_mid_epoch_to_the_same_end(start, tmp_path):
    outputs = start("complete-nlp")
    check("complete-nlp", outputs)
    assert (tmp_path / "runs/best/model.safetensors").is_file()
    assert list((tmp_path / "runs/complete_nlp").rglob("events.out.tfevents.*"))
    again = start("complete-nlp")
    assert figures(again[0], "test loss")[-1] == figures(outputs[0], "test loss")[-1]
    assert len(figures(again[0], "test loss")) < 3


def test_the_complete_image_program_keeps_the_best_model_and_the_newest_checkpoints(start, tmp_path):
    outputs = start("complete-vision")
    check("complete-vision", outputs)
    assert (tmp_path / "runs/best/model.safetensors").is_file()
    names = [path.name for path in (tmp_path / "runs/checkpoints").iterdir()]
    assert sorted(names) == ["checkpoint_5", "checkpoint_6"]
    again = start("complete-vision")
    assert figures(again[0], "accuracy")[-1] == figures(outputs[0], "accuracy")[-1]


def test_an_adapter_learns_and_the_base_model_stays(start, tmp_path):
    # One process, with as many steps as two take in twice the epochs: every process imports what takes seconds.
    outputs = start("lora", "--base-epochs", "2", "--epochs", "4", world=1)
    check("lora", outputs)
    assert "base weights untouched: True" in outputs[0]
    assert figures(outputs[0], "after LoRA")[0] < figures(outputs[0], "first epoch of LoRA")[0]
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["kubernetes", "sagemaker", "slurm", "tpu"])
def test_the_script_for_a_platform_runs_here_too(start, name):
    on_cpu = {"ORC_USE_CPU": "1", "ORC_CHECKPOINT_DIR": "runs"}
    check(name, start(name, world=2, env=on_cpu))


SMALL = ("--context", "16", "--width", "32", "--heads", "2", "--layers", "2", "--sample", "4")


def losses(output):
    return figures(output, " loss")


def test_digits_goes_on_where_it_was_with_other_processes(start):
    start("digits", "--epochs", "2")
    again = start("digits", "--epochs", "3", world=1)
    assert re.findall(r"^epoch +(\d+)/", again[0], re.MULTILINE) == ["3"]
    assert "in epoch 3" in again[0]


def test_digits_goes_on_after_a_checkpoint_with_the_last_batch_of_an_epoch(start, tmp_path):
    batches = -(-1437 // 32)
    first = start("digits", "--epochs", "1", world=1, env={"ORC_CHECKPOINT_EVERY": str(batches)})
    shutil.rmtree(tmp_path / "runs/checkpoints/checkpoint_1")  # the script's own, made after the epoch
    again = start("digits", "--epochs", "2", world=1)
    assert f"in epoch 1, after step {batches}" in again[0]
    epochs = re.findall(r"^epoch +(\d+)/2  loss (\S+)  accuracy (\d\.\d+)$", again[0], re.MULTILINE)
    assert [(epoch, loss == "nan") for epoch, loss, _ in epochs] == [("1", True), ("2", False)]
    assert epochs[0][2] in first[0]


def test_char_gpt_learns_and_writes(start):
    outputs = start("char-gpt", "--steps", "40", env={"ORC_CHECKPOINT_EVERY": "20"})
    first, second = losses(outputs[0])[:2]
    assert second < first < 4.1
    assert "held-out loss" in outputs[0]
    assert len(outputs[0].rpartition("held-out loss")[2]) > 250


def test_char_gpt_counts_optimizer_steps_also_when_it_goes_on(start, tmp_path):
    small = ("--context", "8", "--width", "8", "--heads", "2", "--layers", "1", "--sample", "4")
    for steps, resumed in ((4, False), (6, True)):
        window = {"ORC_GRADIENT_ACCUMULATION_STEPS": "3"}
        outputs = start("char-gpt", *small, "--steps", str(steps), world=1, env=window)
        assert ("after step 4" in outputs[0]) is resumed
        newest = max((tmp_path / "runs/checkpoints").glob("checkpoint_*"))
        assert json.loads((newest / "manifest.json").read_text())["step"] == steps


def test_gpt_fsdp_learns_with_half_of_the_model_on_each_rank_and_goes_on_on_one(start, tmp_path):
    outputs = start("gpt-fsdp", *SMALL, "--steps", "40")
    first, second = losses(outputs[0])[:2]
    assert second < first < 4.5
    (share,) = re.findall(r"^kept by this process: .* \((\d+)%\)$", outputs[0], re.MULTILINE)
    assert 48 <= int(share) <= 55
    assert (tmp_path / "runs/model/model.safetensors").is_file()
    assert "after step 40" in start("gpt-fsdp", *SMALL, "--steps", "41", world=1)[0]


def test_gpt_deepspeed_learns_as_replicas_do_and_goes_on(start, tmp_path):
    shutil.copy(FOLDERS["gpt-deepspeed"] / "zero3.json", tmp_path)
    first = start("gpt-deepspeed", *SMALL, "--steps", "20")[0]
    second = start("gpt-deepspeed", *SMALL, "--steps", "40")[0]
    assert (tmp_path / "runs/model/model.safetensors").is_file()
    shutil.rmtree(tmp_path / "runs")
    replicas = start("gpt-deepspeed", *SMALL, "--steps", "20", env={"ACCELERATE_USE_DEEPSPEED": "false"})[0]
    assert ["ZeRO stage 3" in output for output in (first, second, replicas)] == [True, True, False]
    assert ["after step 20" in output for output in (first, second, replicas)] == [False, True, False]
    assert losses(first)[0] == pytest.approx(losses(replicas)[0], abs=2e-4)
    assert losses(second)[0] < losses(first)[0] < 4.5


def test_the_trainer_of_transformers_runs_as_it_is(start):
    outputs = start("transformers-trainer")
    check("transformers-trainer", outputs)
    assert re.search(r"^\d+ steps on 2 processes$", outputs[0], re.MULTILINE)
