"""Models whose parameters change when they are prepared: sharded by the script, or by a parallelizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.base import Parallelizer


def sharded_by_the_script(folder):
    """Train a model that the script has sharded; what a single process learns of the same data, and what was saved."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from orc.runtime import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rank = accelerator.process_index

    def parts():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return model, lambda: torch.optim.AdamW(model.parameters(), lr=0.1)

    model, make = parts()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = make()
    optimizer, prepared = accelerator.prepare(optimizer, model)
    kept = prepared is model and all(isinstance(one, DTensor) for one in prepared.parameters())
    plain, make = parts()
    reference = make()
    data = torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    norms = []
    for step in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(data[step, rank]).square().mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        (sum(plain(data[step, other]).square().mean() for other in range(2)) / 4).backward()
        if step % 2:
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
            reference.step()
            reference.zero_grad()
    state = accelerator.get_state_dict(prepared)
    accelerator.save_model(prepared, folder)
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    return kept, [type(norm) is torch.Tensor for norm in norms], torch.stack(norms).tolist(), optimizer.steps


def test_a_model_that_the_script_has_sharded_is_left_alone_and_learns_the_same(run_ranks, tmp_path):
    for kept, plain, norms, steps in run_ranks(2, sharded_by_the_script, str(tmp_path)):
        assert kept
        assert all(plain)
        assert norms[0::2] == pytest.approx(norms[1::2], rel=1e-4)
        assert steps == 2
    from safetensors.torch import load_file

    assert {name: list(one.shape) for name, one in load_file(tmp_path / "model.safetensors").items()} == {
        "0.weight": [8, 4],
        "0.bias": [8],
        "2.weight": [2, 8],
        "2.bias": [2],
    }


def an_optimizer_made_too_early():
    from torch.distributed.fsdp import fully_shard

    from orc.runtime import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(fully_shard(model), optimizer)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(ValueError, match=r"^SGD trains parameters that are gone: no prepared model has them\."):
        optimizer.step()

    # Made when a part of the model was sharded already. A parameter of the script's own is no reason.
    model, extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Parameter(torch.ones(1))
    fully_shard(model[0])
    early = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    fully_shard(model)
    late = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    model, early = accelerator.prepare(model, early)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(ValueError, match=r"^SGD trains 3 .* of 5: .* no optimizer trains 1\.weight, 1\.bias\."):
        early.step()
    accelerator.free_memory()
    model, late = accelerator.prepare(model, late)
    late.step()


def test_an_optimizer_of_parameters_that_are_gone_is_refused_on_every_rank(run_ranks):
    run_ranks(2, an_optimizer_made_too_early)


class Replacing(Parallelizer):
    """Puts new parameters in the place of those of a model, wherever that is, as one that shards would."""

    name = "replacing"
    order = 300
    conflicts = ("ddp",)
    places_parameters = True

    def requires(self, ctx):
        return None

    def apply(self, model, ctx, request):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(torch.ones(parameter.shape, device=ctx.device))
        return model


@pytest.fixture
def among(monkeypatch):
    """Put parallelizers in the place of those of this installation."""
    from orc.runtime import parallel

    def put(*those):
        monkeypatch.setattr(parallel, "parallelizers", lambda ctx, options: those)

    return put


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("order", ["together", "optimizer first", "model first"])
def test_optimizers_train_the_parameters_that_a_model_has_in_the_end(among, order, device):
    from orc.runtime import Accelerator

    among(Replacing())
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(1, 1, device=device), nn.Linear(1, 1, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state["calls"] = {}  # some count there for all parameters
    if order == "together":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert [one.item() for one in model.parameters()] == [0.0, 0.0, -1.0, 0.0]
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_gathered_state_keeps_the_versions_of_its_modules():
    from orc.runtime.parallel.shards import whole

    state = nn.BatchNorm1d(2).state_dict()
    assert whole(state)._metadata == state._metadata == {"": {"version": 2}}


def test_a_model_without_content_is_refused_where_nothing_fills_it():
    from orc.runtime import Accelerator

    with pytest.raises(ValueError, match=r"^2 parameters \(weight, \.\.\.\) are on the meta device, without content: "):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1, device="meta"))


def test_parallelizers_that_need_or_exclude_each_other_are_refused_by_name(among):
    from orc.runtime import Accelerator

    class Other(Replacing):
        name = "other"
        conflicts = ("replacing",)

    class Needy(Replacing):
        name = "needy"
        needs = ("tensor", "replacing")

    class Default(Other):
        default = True

    accelerator = Accelerator(cpu=True)
    for those, message in (
        ((Replacing(), Other()), "the strategies replacing and other cannot be used together; choose one"),
        ((Replacing(), Needy()), "strategy needy works only together with tensor"),
    ):
        among(*those)
        with pytest.raises(ContextError, match=f"^{message}$"):
            accelerator.prepare(nn.Linear(1, 1))
    among(Replacing(), Default())
    assert accelerator.prepare(nn.Linear(1, 1)).weight.item() == 1.0, "a default gives way"


@pytest.mark.parametrize(
    ("sizes", "options", "names"),
    [
        ({"dp_replicate": 4}, {}, ["ddp"]),
        ({"dp_replicate": 2, "tp": 2}, {}, ["tensor", "replicas", "ddp"]),
        ({"dp_shard": 2, "cp": 2}, {"fsdp": SimpleNamespace(fsdp_version=2), "tp": None}, ["context", "fsdp2", "ddp"]),
        ({"dp_replicate": 4}, {"pp": object()}, ["pp", "ddp"]),
    ],
)
def test_a_run_calls_for_the_parallelizers_of_its_layout_and_its_options(sizes, options, names):
    from orc.runtime import RunContext
    from orc.runtime.parallel import parallelizers

    ctx = RunContext.fake(0, 4)
    ctx.set_topology(sizes, by="a test")
    assert [parallelizer.name for parallelizer in parallelizers(ctx, options)] == names


def test_options_of_a_dimension_with_one_rank_have_no_effect():
    from orc.runtime import RunContext, TorchContextParallelConfig, TorchTensorParallelConfig
    from orc.runtime.parallel import Request, chosen

    options = {"tp": TorchTensorParallelConfig(), "cp": TorchContextParallelConfig()}
    ctx = RunContext.fake(0, 4)
    assert [parallelizer.name for parallelizer in chosen(nn.Linear(1, 1), ctx, Request(options=options))] == ["ddp"]


def cut_by_the_script(told):
    """Train a model that the script has cut over ``tp`` of its mesh; the batches seen, and what one process learns."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from orc.runtime import Accelerator, ParallelismConfig

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def one():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    model, plain = one(), one()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    config = ParallelismConfig(device_mesh=mesh) if told else None
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader, optimizer = torch.utils.data.DataLoader(data, batch_size=2), torch.optim.SGD(model.parameters(), lr=0.1)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    reference, seen = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step, batch in enumerate(loader):
        seen.append(data.eq(batch[0]).all(1).nonzero().item())
        accelerator.backward(model(batch).square().mean())
        plain(data[4 * step : 4 * step + 4]).square().mean().backward()
        norms = accelerator.clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    state = accelerator.get_state_dict(model)
    for name, value in plain.state_dict().items() if state else ():
        torch.testing.assert_close(state[name], value)
    return str(accelerator.ctx.topology), seen


@pytest.mark.parametrize("told", [True, False])
def test_the_run_is_laid_out_as_the_mesh_that_a_script_brings_along(run_ranks, told):
    seen = run_ranks(4, cut_by_the_script, told)
    assert seen == [("dp_replicate 2 x tp 2", list(range(2 * (rank // 2), 16, 4))) for rank in range(4)]


def piece_of_the_script():
    """What this rank's loader yields of a sequence that the mesh of a model has several ranks for."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from orc.runtime import Accelerator

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("sp", "tp"))
    model = parallelize_module(nn.Linear(4, 8), mesh["tp"], ColwiseParallel())
    rows = torch.utils.data.DataLoader([{"input_ids": torch.arange(8)}])
    _, rows = Accelerator(cpu=True).prepare(model, rows)
    return next(iter(rows))["input_ids"].tolist()


def test_loaders_cut_sequences_along_the_mesh_that_a_script_brings_along(run_ranks):
    assert run_ranks(2, piece_of_the_script) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
