"""Models larger than a device: hooks, dispatch, offload to the CPU and the disk."""

import copy
import errno
import inspect
import pickle

import pytest
import torch
from torch import nn

from orc.runtime import (
    Accelerator,
    align_module_device,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from orc.runtime.memory.device_map import find_tied_parameters
from orc.runtime.weights import offload
from orc.runtime.weights.loading import save_model

META = torch.device("meta")


class Block(nn.Module):
    """A residual block with a buffer that no state dict has."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor, *, negate: bool = False) -> torch.Tensor:
        """Return the block's output for *x*."""
        y = x + self.linear2(torch.relu(self.linear1(self.norm(x)))) * self.scale
        return -y if negate else y


class Model(nn.Module):
    """Two blocks and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block1, self.block2 = Block(), Block()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.block2(self.block1(self.embed(ids))))


IDS = torch.arange(12) % 16
MAP = {"embed": "cpu", "block1": "cpu", "block2": "disk", "head": "disk"}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def on_meta(module: nn.Module) -> list[str]:
    return [name for name, value in module.state_dict().items() if value.is_meta]


class Doubling(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(2 * one for one in args), kwargs

    def post_forward(self, module, output):
        return output + 1


# ---- hooks


def test_hooks_change_what_goes_in_and_out_and_leave_no_trace(model):
    block, x = model.block1, torch.randn(4, 8)
    plain, forward = block(x), block.forward
    add_hook_to_module(block, Doubling())
    assert torch.equal(block(x), model.block1._old_forward(2 * x) + 1)
    assert inspect.signature(block.forward) == inspect.signature(forward)
    assert list(dict(block.named_modules())) == ["", "linear1", "linear2", "norm"]
    add_hook_to_module(block, Doubling(), append=True)
    assert isinstance(block._hf_hook, SequentialHook)
    assert len(block._hf_hook.hooks) == 2
    assert torch.equal(block(x), block._old_forward(4 * x) + 2)
    add_hook_to_module(block, Doubling())  # takes the place of both
    assert torch.equal(block(x), block._old_forward(2 * x) + 1)
    assert remove_hook_from_module(block) is block
    assert not {"_hf_hook", "_old_forward", "forward"} & set(vars(block))
    assert torch.equal(block(x), plain)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_has_hooks_and_weights_of_its_own(model, tmp_path, again):
    expected = model(IDS)
    disk_offload(model, tmp_path / "away")
    other = again(model)
    assert torch.equal(other(IDS), expected)
    assert on_meta(other)
    remove_hook_from_submodules(model)
    assert torch.equal(other(IDS), expected)  # it did not call the original's hooks
    assert other.block1.linear1.forward.module is other.block1.linear1


def test_weights_go_away_again_when_forward_raises(model):
    cpu_offload(model)
    with pytest.raises(RuntimeError):
        model.block1(torch.zeros(4, 9))
    assert set(on_meta(model)) >= {"block1.linear1.weight", "block1.norm.weight"}


def test_a_hooked_module_compiles(model):
    expected = model(IDS)
    cpu_offload(model)
    assert torch.allclose(torch.compile(model, backend="eager")(IDS), expected)


def test_offloaded_modules_run_without_a_graph(model):
    assert model(IDS).requires_grad
    cpu_offload(model)
    assert not model(IDS).requires_grad
    assert next(model.parameters()).requires_grad is not None


def test_aligning_hooks_keep_skipped_arguments_and_return_to_the_input(model):
    hook = AlignDevicesHook(execution_device="meta", io_same_device=True, skip_keys="negate")
    add_hook_to_module(model.block1, hook)
    hook.init_hook(model.block1)
    assert {value.device for value in model.block1.linear1.parameters()} == {torch.device("cpu")}  # its own only
    remove_hook_from_module(model.block1)
    attach_align_device_hook_on_blocks(
        model, {"embed": "cpu", "block1": "cpu", "block2": "cpu", "head": "cpu"}, offload={"block1": True},
        weights_map=model.state_dict(),
    )  # fmt: skip
    assert has_offloaded_params(model.block1.linear1)
    assert not has_offloaded_params(model.block2.linear1)
    assert model._hf_hook.io_same_device
    assert not on_meta(model.block2)


# ---- offload


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_computes_the_same_and_keeps_nothing(model, tmp_path, where, buffers):
    expected = model(IDS)
    if where == "cpu":
        cpu_offload(model, "cpu", offload_buffers=buffers)
    else:
        disk_offload(model, tmp_path, "cpu", offload_buffers=buffers)
        assert (tmp_path / "index.json").is_file()
        assert (tmp_path / "block1.linear1.weight.dat").is_file()
    assert torch.equal(model(IDS), expected)
    away = {name for name, value in model.named_parameters() if value.is_meta}
    assert away == {name for name, _ in model.named_parameters()}
    assert model.block1.norm.running_mean.is_meta == buffers
    assert not model.block1.scale.is_meta
    state = get_state_dict_offloaded_model(model)
    assert all(not value.is_meta for value in state.values())
    remove_hook_from_submodules(model)
    assert not on_meta(model)
    assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("where", ["cpu", "disk", "map"])
def test_tied_weights_stay_one_parameter_while_they_are_away(model, tmp_path, where):
    tied = find_tied_parameters(model)
    if where == "map":
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    else:
        cpu_offload(model) if where == "cpu" else disk_offload(model, tmp_path)
    assert find_tied_parameters(model) == tied
    model(IDS)
    assert find_tied_parameters(model) == tied == [["embed.weight", "head.weight"]]
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    assert find_tied_parameters(model) == tied


def test_a_chain_of_models_takes_turns_on_the_device():
    log = []

    class Stage(nn.Linear):
        def to(self, *args, **kwargs):
            log.append((self.name, str(args[0])))
            return super().to(*args, **kwargs)

    models = [Stage(4, 4) for _ in range(3)]
    hooks = []
    for index, one in enumerate(models):
        one.name = index
        _, hook = cpu_offload_with_hook(one, "cpu:0", prev_module_hook=hooks[-1] if hooks else None)
        hooks.append(hook)
    log.clear()
    x = models[0](torch.ones(1, 4))
    for _ in range(2):
        x = models[1](x)
    models[2](x)
    hooks[2].offload()
    assert log == [
        (0, "cpu:0"),
        (0, "cpu"),
        (1, "cpu:0"),
        (0, "cpu"),
        (1, "cpu:0"),
        (1, "cpu"),
        (2, "cpu:0"),
        (2, "cpu"),
    ]
    hooks[0].remove()
    assert not hasattr(models[0], "_hf_hook")


def test_parameters_are_aligned_for_a_block_of_code(model):
    disk_offload_free = model.block1.linear1.weight.detach().clone()
    cpu_offload(model)
    with align_module_device(model.block1.linear1):
        assert torch.equal(model.block1.linear1.weight, disk_offload_free)
    assert model.block1.linear1.weight.is_meta
    with align_module_device(nn.Linear(2, 2), META):
        pass


# ---- dispatch


def test_a_dispatched_model_computes_as_before(model, tmp_path):
    expected = model(IDS)
    assert dispatch_model(model, MAP, offload_dir=tmp_path) is model
    assert model.hf_device_map == MAP
    assert torch.equal(model(IDS), expected)
    assert model.block2.linear1.weight.is_meta
    assert not model.block1.linear1.weight.is_meta
    assert sorted(path.name for path in tmp_path.glob("block1*")) == []  # what is on the CPU is not written
    with pytest.raises(RuntimeError, match="device_map"):
        model.to("cpu")
    with pytest.raises(RuntimeError, match="offloaded"):
        model.cpu()
    remove_hook_from_submodules(model)
    assert model.to("cpu") is model
    assert Accelerator().verify_device_map(model)


def test_one_device_needs_no_hooks_unless_they_are_asked_for(model):
    dispatch_model(model, {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert not hasattr(model, "_hf_hook")
    assert model.to("cpu") is model
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")


class Sideways(nn.Module):
    """A module that uses the weights of a module inside without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner module's result."""
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def test_weights_that_are_used_sideways_come_with_their_class():
    module, x = nn.Sequential(Sideways()), torch.ones(1, 4)
    expected = module(x)
    cpu_offload(module, preload_module_classes=["Sideways"])
    assert torch.equal(module(x), expected)
    assert module[0].inner.weight.is_meta


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"embed": "cpu", "block1": "cpu", "head": "cpu"}, "does not give any device"),
        ({"": "cpu", "blok1": "disk"}, "did you mean 'block1'"),
        ({"": "cpu", "block1": 99}, "does not have"),
        ({"": None}, "does not have"),
        (["cpu"], "by the names of modules"),
        (MAP, "offload_dir"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_and_changes_nothing(model, device_map, message):
    with pytest.raises(ValueError, match=message):
        dispatch_model(model, device_map)
    assert not on_meta(model)
    assert not any(hasattr(one, "_hf_hook") for one in model.modules())


@pytest.mark.parametrize(
    "use",
    [
        lambda model, folder: cpu_offload(model, "cuda:99"),
        lambda model, folder: disk_offload(model, folder, "cuda:99"),
        lambda model, folder: cpu_offload_with_hook(model, "cuda:99"),
        lambda model, folder: dispatch_model(model, MAP, main_device="cuda:99", offload_dir=folder),
    ],
    ids=["cpu", "disk", "hook", "main"],
)
def test_a_device_that_is_not_there_is_refused_before_anything_moves(model, tmp_path, use):
    with pytest.raises(ValueError, match="which this machine does not have"):
        use(model, tmp_path / "away")
    assert not any(hasattr(one, "_hf_hook") for one in model.modules())
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, folder: cpu_offload(model),
        disk_offload,
        lambda model, folder: dispatch_model(model, {"": "cpu"}),
        lambda model, folder: dispatch_model(model, MAP, offload_dir=folder),
        lambda model, folder: dispatch_model(model, MAP, offload_index={"head.weight": {"safetensors_file": "x"}}),
    ],
    ids=["cpu", "disk", "one", "map", "index"],
)
def test_a_model_without_values_is_refused(tmp_path, use):
    target = empty()
    with pytest.raises(ValueError, match=r"have no values|offload_index holds the weights of another model: it lacks"):
        use(target, tmp_path / "away")
    assert not any(hasattr(one, "_hf_hook") for one in target.modules())
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize(
    "use", [disk_offload, lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder)]
)
@pytest.mark.parametrize(
    ("other", "message"),
    [(nn.Linear(8, 16), r"weight has shape \(16, 8\)"), (nn.Linear(16, 8, bias=False), "lacks bias")],
)
def test_the_offload_folder_of_another_model_is_refused(tmp_path, use, other, message):
    disk_offload(copy.deepcopy(other), tmp_path)
    target = nn.Linear(16, 8)
    with pytest.raises(ValueError, match=message):
        use(target, tmp_path)
    assert not on_meta(target)


@pytest.mark.parametrize("damage", ["cut", "gone", "index"])
def test_a_damaged_offload_folder_is_found_before_it_is_used(model, tmp_path, damage):
    disk_offload(copy.deepcopy(model), tmp_path)
    file = tmp_path / ("index.json" if damage == "index" else "block1.linear1.weight.dat")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="index.json" if damage == "index" else r"of block1\.linear1\.weight"):
        disk_offload(model, tmp_path)
    assert not on_meta(model)


@pytest.mark.parametrize(
    "load",
    [
        lambda model, weights, away: load_checkpoint_and_dispatch(
            model, weights, device_map=MAP, dtype="bfloat16", offload_folder=away
        ),
        lambda model, weights, away: load_checkpoint_in_model(model, weights, MAP, away),
        lambda model, weights, away: dispatch_model(Model(), MAP, offload_dir=away),
    ],
    ids=["dispatch", "in-model", "offload"],
)
def test_a_full_disk_is_said_and_left_as_it_was(model, tmp_path, monkeypatch, load):
    save_model(model, tmp_path / "weights")
    count = []

    def write(array, path):
        path.write_bytes(b"half")
        count.append(path)
        if len(count) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(offload, "_write", write)
    target = empty()
    with pytest.raises(CheckpointError, match=r"No space left .* are free\); name another folder"):
        load(target, tmp_path / "weights", tmp_path / "away")
    assert not list((tmp_path / "away").iterdir())


# ---- loading


@pytest.fixture(params=["safetensors", "bin", "shards"])
def checkpoint(request, model, tmp_path):
    folder = tmp_path / "weights"
    save_model(
        model,
        folder,
        safe_serialization=request.param != "bin",
        max_shard_size="600" if request.param == "shards" else "1GB",
    )
    return folder


def test_a_checkpoint_is_spread_without_being_copied(model, checkpoint, tmp_path):
    expected = model(IDS)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    loaded = load_checkpoint_and_dispatch(empty(), checkpoint, device_map=MAP)
    assert torch.equal(loaded(IDS), expected)
    assert torch.equal(loaded(IDS), expected)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert loaded.block2.linear1.weight.is_meta
    assert loaded.embed.weight.device.type == "cpu"
    save_model(loaded, tmp_path / "again")
    fresh = Model().eval()
    load_checkpoint_in_model(fresh, tmp_path / "again", strict=True)
    assert torch.equal(fresh(IDS), expected)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_strategies_fill_the_memory_that_there_is(model, tmp_path, strategy):
    expected = model(IDS)
    save_model(model, tmp_path)
    loaded = load_checkpoint_and_dispatch(
        empty(), tmp_path, device_map=strategy, max_memory={"cpu": 1700}, no_split_module_classes=["Block"]
    )
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(loaded(IDS), expected)


def test_weights_are_converted_where_that_is_asked_for(model, tmp_path):
    save_model(model, tmp_path / "weights")
    half = copy.deepcopy(model).to(torch.bfloat16)
    for folder in (None, tmp_path / "away"):
        loaded = load_checkpoint_and_dispatch(
            empty(), tmp_path / "weights", device_map=MAP, dtype="bfloat16", offload_folder=folder
        )
        assert loaded.block2.linear1.weight.dtype == loaded.embed.weight.dtype == torch.bfloat16
        loaded.block1.scale, loaded.block2.scale = loaded.block1.scale.bfloat16(), loaded.block2.scale.bfloat16()
        half.block1.scale, half.block2.scale = loaded.block1.scale, loaded.block2.scale
        assert torch.equal(loaded(IDS), half(IDS))


def test_files_of_the_old_format_are_read_into_memory(model, tmp_path):
    expected = model(IDS)
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_checkpoint_and_dispatch(empty(), tmp_path / "old.bin")(IDS), expected)
    spread = load_checkpoint_and_dispatch(empty(), tmp_path / "old.bin", MAP, offload_folder=tmp_path / "away")
    assert torch.equal(spread(IDS), expected)
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_and_dispatch(empty(), tmp_path / "old.bin", MAP)


@pytest.mark.parametrize("device_map", ["autp", {"embed": "cpu"}])
def test_a_plan_that_is_none_is_refused(model, tmp_path, device_map):
    save_model(model, tmp_path)
    with pytest.raises(ValueError, match=r"did you mean 'auto'|does not give any device"):
        load_checkpoint_and_dispatch(empty(), tmp_path, device_map=device_map)


def test_a_checkpoint_of_another_model_is_refused_as_a_whole(model, tmp_path):
    state = model.state_dict()
    state["block1.linear3.weight"] = state.pop("block1.linear1.weight")
    torch.save(state, tmp_path / "weights.bin")
    target = empty()
    with pytest.raises(CheckpointError, match=r"lacks block1\.linear1\.weight \(is it block1\.linear3\.weight\?\)"):
        load_checkpoint_and_dispatch(target, tmp_path / "weights.bin", device_map=MAP)
    with pytest.raises(CheckpointError, match=r"lacks block1\.linear1\.weight"):
        load_checkpoint_and_dispatch(target, tmp_path / "weights.bin")
    assert set(on_meta(target)) >= {"embed.weight", "block1.linear2.weight"}  # no half-loaded model
    torch.save({**model.state_dict(), "head.weight": torch.ones(2, 2)}, tmp_path / "weights.bin")
    with pytest.raises(CheckpointError, match=r"head\.weight has shape \(2, 2\)"):
        load_checkpoint_and_dispatch(target, tmp_path / "weights.bin", device_map=MAP)


def test_attaching_to_every_module_with_weights(model):
    attach_align_device_hook(model, "cpu", offload=True, weights_map=dict(model.state_dict()))
    hooked = [name for name, one in model.named_modules() if hasattr(one, "_hf_hook")]
    assert hooked == [
        "embed",
        *(f"{block}{part}" for block in ("block1", "block2") for part in ("", ".linear1", ".linear2", ".norm")),
        "head",
    ]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("places", ["disk disk", "disk cpu", "cpu disk"])
def test_a_tied_weight_that_the_checkpoint_has_once_is_found_under_both_names(tmp_path, places, dtype):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model = Tied()
    torch.save({"embed.weight": model.embed.weight}, tmp_path / "weights.bin")
    with init_empty_weights():
        empty_one = Tied()
    plan = dict(zip(("embed", "head"), places.split(), strict=True))
    loaded = load_checkpoint_and_dispatch(
        empty_one, tmp_path / "weights.bin", plan, offload_folder=tmp_path / "away", dtype=dtype
    )
    ids = torch.arange(3)
    assert torch.equal(loaded(ids), (model if dtype is None else model.to(dtype))(ids))
