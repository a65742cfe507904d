"""Checkpoints of models that are sharded over the ranks: who resumes them, and what may go wrong."""

import os
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError

pytestmark = pytest.mark.distributed
GLOBAL_BATCH = 8
FOLDERS = ("optimizer_0", "optimizer_1", "pytorch_model_0", "pytorch_model_1")


class Run:
    """Two models that are sharded (or not) and an optimizer for each, prepared; every world size sees the same data."""

    def __init__(self, shard=True, width=10, state=None, seed=0):
        self.accelerator = Accelerator(
            step_scheduler_with_optimizer=False
        )  # one step of the schedule at any world size
        self.accelerator._checkpointing.checkpoints.state = state
        torch.manual_seed(seed)
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3)),
            torch.nn.Linear(3, 5, bias=False),
        ]
        for model in self.models:
            model.double()  # so that the order of sums does not show
        if shard:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.models[0][0])
            for model in self.models:
                fully_shard(model)
        self.optimizers = [
            torch.optim.AdamW(self.models[0].parameters(), lr=0.01),
            torch.optim.SGD(self.models[1].parameters(), lr=0.1, momentum=0.9),
        ]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.models = list(self.accelerator.prepare(*self.models))
        # In another order than the models.
        self.optimizers[1], self.optimizers[0], self.schedule = self.accelerator.prepare(
            self.optimizers[1], self.optimizers[0], self.schedule
        )

    def train(self, first, steps):
        losses = []
        share = GLOBAL_BATCH // self.accelerator.num_processes
        self.models[0][1].eval() if isinstance(self.models[0], torch.nn.Sequential) else self.models[0].eval()
        for number in range(first, first + steps):
            data = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(number)).double()
            mine = data[self.accelerator.process_index * share :][:share]
            loss = (self.models[1](self.models[0](mine)) ** 2).mean()
            self.accelerator.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses


def save(directory, state=None, block=True):
    """Train, save, and train on; what was seen then, and the files."""
    run = Run(state=state)
    run.train(0, 3)
    run.accelerator.save_state(directory, block=block)
    after = run.train(3, 3)
    run.accelerator.end_training()
    return after, sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def load(directory, shard=True):
    """Load into objects of other values, and train on; what is seen then."""
    run = Run(shard, seed=1)
    run.accelerator.load_state(directory)
    return run.train(3, 3)


def shards(folder, world):
    return [f"{folder}/.metadata", *(f"{folder}/__{rank}_0.distcp" for rank in range(world))]


@pytest.mark.parametrize(
    ("saved", "loaded", "block"),
    [(4, [(4, True), (2, True), (1, True), (2, False)], False), (2, [(4, True), (1, False)], True)],
)
def test_shards_resume_exactly_at_their_world_size_and_closely_at_others(tmp_path, run_ranks, saved, loaded, block):
    directory = str(tmp_path / "ckpt")
    expected, files = run_ranks(saved, save, directory, None, block)[0]
    randoms = [f"random_states_{rank}.pkl" for rank in range(saved)]
    assert files == sorted(
        [*(name for one in FOLDERS for name in shards(one, saved)), *randoms, "manifest.json", "scheduler.bin"]
    )
    for world, shard in loaded:
        results = run_ranks(world, load, directory, shard)
        assert all(result == results[0] for result in results)
        if world == saved and shard:
            assert results[0] == expected
        assert results[0] == pytest.approx(expected, abs=1e-9)


def from_a_store(url):
    """Save to a store and load again; how training goes on each time, and what this rank has copied to load."""
    from orc.runtime.checkpoint.storage import remote

    run, copied, fetch = Run(), [], remote.fetch
    run.train(0, 3)
    run.accelerator.save_state(url)
    expected = run.train(3, 3)

    def noted(directory, manifest, names, target):
        names = list(names)
        copied.extend(names)
        return fetch(directory, manifest, names, target)

    remote.fetch = noted
    run.accelerator.load_state(url)
    return run.train(3, 3) == expected, sorted(copied)


@pytest.mark.parametrize("nodes", [1, 4])
def test_each_shard_comes_from_a_store_once_to_the_machines_whose_ranks_read_it(s3_store, run_ranks, nodes):
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    results = run_ranks(4, from_a_store, "s3://bucket/s", env=aws, nodes=nodes)
    assert [same for same, _ in results] == [True] * 4
    copied = [set(names) for _, names in results]
    if nodes == 1:
        assert sorted(name for _, names in results for name in names) == sorted(set.union(*copied))
    for rank, names in enumerate(copied):
        others = {0, 1, 2, 3} - {0, rank}  # rank 0 has written what all have alike
        if nodes == 4:
            assert shards("optimizer_1", rank + 1)[-1] in names
            assert names >= {"scheduler.bin", "optimizer_0/.metadata", "pytorch_model_0/.metadata"}
            assert not names & {shards(folder, other + 1)[-1] for folder in FOLDERS for other in others}
        assert {name for name in names if name.startswith("random")} == {f"random_states_{rank}.pkl"}


def test_full_state_of_sharded_models_is_the_file_of_a_model_that_is_not(tmp_path, run_ranks):
    directory = str(tmp_path / "ckpt")
    expected, files = run_ranks(2, save, directory, "full")[0]
    randoms = [f"random_states_{rank}.pkl" for rank in range(2)]
    models = ["model.safetensors", "model_1.safetensors"]
    assert files == sorted([*models, "optimizer.bin", "optimizer_1.bin", *randoms, "manifest.json", "scheduler.bin"])
    assert run_ranks(2, load, directory, True)[0] == expected
    for world, shard in ((1, False), (4, True)):
        assert run_ranks(world, load, directory, shard)[0] == pytest.approx(expected, abs=1e-9)


def misfits(directory):
    """The errors of loading into another model and another optimizer; what was there stays."""
    errors = []
    run = Run(width=12)
    before = [parameter.to_local().clone() for parameter in run.models[0].parameters()]
    with pytest.raises(CheckpointError) as model:
        run.accelerator.load_state(directory)
    errors.append(str(model.value))
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, run.models[0].parameters(), strict=True))
    run = Run()
    run.optimizers[0].optimizer.add_param_group({"params": [run.optimizers[0].param_groups[0]["params"].pop()]})
    with pytest.raises(CheckpointError) as groups:
        run.accelerator.load_state(directory)
    errors.append(str(groups.value))
    run = Run()
    run.accelerator._prepared.models.pop(0)
    with pytest.raises(CheckpointError) as gone:
        run.accelerator.save_state(directory)
    errors.append(str(gone.value))
    return errors


def test_what_does_not_fit_is_one_error_on_every_rank(tmp_path, run_ranks):
    directory = str(tmp_path / "ckpt")
    run_ranks(2, save, directory)
    (model, groups, gone), second = run_ranks(2, misfits, directory)
    assert (model, groups, gone) == tuple(second)
    assert "optimizer_1 does not fit what is prepared: size mismatch of optimizer.state.0.weight.exp_avg" in model
    assert "it has 1 parameter groups, the optimizer here has 2" in groups
    assert "parameters of no prepared model" in gone


def killed(directory):
    """Save twice; in the second save every rank dies in the middle of its shards."""
    from orc.runtime.checkpoint.state import shard_files

    run = Run()
    run.train(0, 3)
    run.accelerator.save_state(directory)
    run.train(3, 1)
    whole = torch.save

    def half(value, file):
        whole(value, file)
        os.kill(os.getpid(), signal.SIGKILL)

    shard_files.torch.save = half
    run.accelerator.save_state(directory)


def test_a_save_that_is_killed_in_the_middle_leaves_the_checkpoint_before(tmp_path, run_ranks):
    directory = str(tmp_path / "ckpt")
    with pytest.raises(AssertionError, match="rank 0"):
        run_ranks(2, killed, directory)
    assert (tmp_path / "ckpt.tmp").is_dir()
    resumed = run_ranks(2, load, directory)[0]
    expected, _ = run_ranks(2, save, directory)[0]  # over what the killed save has left
    assert resumed == expected
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def blind(directory):
    """Save whole states where rank 1 does not see the directory, and then where it does."""
    from orc.runtime.checkpoint.storage.destination import LocalDestination

    def unseen(self):
        raise CheckpointError("no such directory here")

    run = Run(state="full")
    run.train(0, 1)
    seen = LocalDestination.check_visible
    texts = []
    for block in (True, False):
        if run.accelerator.process_index == 1:
            LocalDestination.check_visible = unseen
        with pytest.raises(CheckpointError) as refused:
            run.accelerator.save_state(directory, block=block)
        texts.append(str(refused.value))
        LocalDestination.check_visible = seen
    run.accelerator.save_state(directory)
    return texts


def test_nobody_gathers_whole_states_where_a_rank_cannot_take_part(tmp_path, run_ranks):
    for texts in run_ranks(2, blind, str(tmp_path / "ckpt")):
        assert all("no such directory here" in text for text in texts)
    assert (tmp_path / "ckpt" / "manifest.json").exists()


def by_itself(root):
    """What is done with one sharded model or optimizer alone; what each rank got."""
    from orc.runtime import utils

    run = Run()
    run.train(0, 2)
    accelerator, model, optimizer = run.accelerator, run.models[0], run.optimizers[0]
    state = accelerator.get_state_dict(model)
    assert accelerator.unwrap_model(model) is model
    accelerator.save_model(model, f"{root}/model", max_shard_size=600)
    full = FullStatePlugin()
    for plugin, directory in ((None, f"{root}/shards"), (full, f"{root}/full")):
        utils.save_fsdp_model(plugin, accelerator, model, directory)
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    expected = run.train(2, 3)
    for plugin, directory in ((full, f"{root}/shards"), (None, f"{root}/full")):  # what is there decides
        other = Run(seed=1)
        utils.load_fsdp_model(plugin, other.accelerator, other.models[0], directory)
        utils.load_fsdp_optimizer(plugin, other.accelerator, other.optimizers[0], other.models[0], directory)
        values = other.accelerator.get_state_dict(other.models[0])
        assert all(torch.equal(values[name], state[name]) for name in state)
        assert other.optimizers[0].state_dict()["state"][0]["step"] == 2
    with pytest.raises(CheckpointError, match="holds neither shards"):
        utils.load_fsdp_model(None, accelerator, model, f"{root}/model")
    for safe in (True, False):
        utils.merge_fsdp_weights(f"{root}/shards/pytorch_model_fsdp_0", f"{root}/merged", safe_serialization=safe)
    with pytest.raises(CheckpointError, match="holds no shards of a model"):
        utils.merge_fsdp_weights(f"{root}/model", f"{root}/merged")
    accelerator.save_state(f"{root}/ckpt")
    return state, len(expected)


class FullStatePlugin:
    state_dict_type = "FULL_STATE_DICT"


def test_a_sharded_model_by_itself_is_gathered_saved_loaded_and_merged(tmp_path, run_ranks):
    from safetensors.torch import load_file

    from orc.runtime.utils import load_state_dict, merge_fsdp_weights

    (state, _), (other, _) = run_ranks(2, by_itself, str(tmp_path))
    assert other == {}
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
    assert state["0.weight"].shape == (10, 6)
    written = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert written == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["optimizer.bin", "pytorch_model_fsdp.bin"]
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    merged = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_state_dict(tmp_path / "merged/pytorch_model.bin"),
    )
    for one in merged:
        assert one.keys() == state.keys()
        assert all(torch.equal(one[name], state[name]) for name in state)
    # The folder of a checkpoint by either of its documented names, without a process group, checked first.
    checkpoint = tmp_path / "ckpt"
    file = merge_fsdp_weights(checkpoint / "pytorch_model_fsdp_1", tmp_path / "second")
    assert load_file(file)["weight"].shape == (5, 3)
    with pytest.raises(CheckpointError, match="the shards of 2 models: give one of pytorch_model_0, pytorch_model_1"):
        merge_fsdp_weights(checkpoint, tmp_path / "second")
    with pytest.raises(CheckpointError, match="holds the state of an optimizer"):
        merge_fsdp_weights(checkpoint / "optimizer_0", tmp_path / "second")
    shard = checkpoint / "pytorch_model_1" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="does not hold what was saved"):
        merge_fsdp_weights(checkpoint / "pytorch_model_1", tmp_path / "second")


def examples(page, directory):
    """Run the examples of a page one after the other."""
    os.chdir(directory)
    namespace = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "sharded-checkpoints.md", "exec"), namespace)
    namespace["accelerator"].end_training()
    return sorted(namespace["state"])


def test_the_examples_of_the_page_run_on_two_ranks(tmp_path, run_ranks):
    page = Path(__file__).parents[3] / "docs/how-to/sharded-checkpoints.md"
    names, none = run_ranks(2, examples, page.read_text(), str(tmp_path))
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert none == []
    folders = [f"{where}/{folder}" for where, folder in (("ckpt", "pytorch_model_0"), ("ckpt", "optimizer_0"))]
    for folder in (*folders, "own/pytorch_model_fsdp_0", "own/optimizer_0"):
        assert sorted(os.listdir(tmp_path / folder)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert os.listdir(tmp_path / "merged") == os.listdir(tmp_path / "weights") == ["model.safetensors"]


def with_plugin(directory, version, kind, saves):
    """Save before the first step and after three, or load both; the losses of three steps from there."""
    from orc.runtime import FullyShardedDataParallelPlugin

    plugin = None
    if version:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type=kind, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=40
        )
    warnings.filterwarnings("error", ".*(deprecated|Multiple backends)")  # torch's, of what our calls do not choose
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(not saves)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    seen = []
    for name in ("fresh", "later"):
        if saves:
            accelerator.save_state(f"{directory}/{name}", block=False)
        else:
            accelerator.load_state(f"{directory}/{name}")
        for number in range(3):
            data = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).double()
            loss = (model(data) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp_version_1_saves_what_it_version_2_and_models_without_it_resume(tmp_path, run_ranks, kind):
    expected = run_ranks(2, with_plugin, str(tmp_path), 1, kind, True)[0]
    assert (tmp_path / "later" / "optimizer.bin").exists() == (kind == "FULL_STATE_DICT")
    for world, version in ((2, 1), (2, 2), (1, None)):
        resumed = run_ranks(world, with_plugin, str(tmp_path), version, kind, False)[0]
        assert resumed == pytest.approx(expected, abs=1e-9)


def with_adapter(width=3):
    """A model of peft: an adapter of one layer, and another layer that is trained whole."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, width))
    return get_peft_model(base, LoraConfig(target_modules=["0"], modules_to_save=["2"], r=2, init_lora_weights=False))


def adapted(root, version):
    """Save an adapter alone, train on, and load it back; the weights that the step changed."""
    from orc.runtime import FullyShardedDataParallelPlugin, utils

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=version == 1 or None)
    )
    model, whole = with_adapter(), with_adapter()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    changed = []
    for kind in (None, FullStatePlugin):
        utils.save_fsdp_model(kind, accelerator, model, root, adapter_only=True)
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()
        stepped = accelerator.get_state_dict(model)
        changed.append(sorted(name for name in before if not torch.equal(before[name], stepped[name])))
        utils.load_fsdp_model(kind, accelerator, model, root, adapter_only=True)
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(before[name], value) for name, value in after.items())
        with torch.no_grad():
            whole.base_model.model[0].lora_A["default"].weight.zero_()
        utils.load_fsdp_model(kind, accelerator, whole, root, adapter_only=True)
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in after.items())
        with pytest.raises(CheckpointError, match=r"size mismatch of base_model\.model\.2\."):
            utils.load_fsdp_model(kind, accelerator, with_adapter(7), root, adapter_only=True)
        if kind is None:
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                Path(root, "pytorch_model_fsdp_0").rename(f"{root}/shards")
            accelerator.wait_for_everyone()
    return changed


@pytest.mark.parametrize("version", [1, 2])
def test_adapters_are_saved_and_loaded_alone_under_the_names_of_peft(tmp_path, run_ranks, version):
    from peft import set_peft_model_state_dict

    from orc.runtime.utils import load_state_dict, merge_fsdp_weights

    changed, _ = run_ranks(2, adapted, str(tmp_path), version)
    assert changed[0] == changed[1]
    assert any("lora_A" in name for name in changed[0])
    for file in (merge_fsdp_weights(tmp_path / "shards", tmp_path), tmp_path / "pytorch_model_fsdp.bin"):
        state = load_state_dict(file)
        names = ("2.bias", "2.weight", "0.lora_A.weight", "0.lora_B.weight")
        assert sorted(state) == sorted(f"base_model.model.{name}" for name in names)
        assert not set_peft_model_state_dict(with_adapter(), state).unexpected_keys
