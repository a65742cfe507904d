"""Finding the batch size that fits, giving memory back."""

import gc
import weakref

import pytest
import torch

from orc.runtime import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Collections look at this module's objects alone: there are many of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def trying(limit, error, **options):
    """The sizes that were tried, and the decorated function."""
    tried = []

    @find_executable_batch_size(**options)
    def train(batch_size, *args, **kwargs):
        tried.append(batch_size)
        if batch_size > limit:
            raise error
        return batch_size, args, kwargs

    return tried, train


OUT_OF_MEMORY = [
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("XPU out of memory."),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_sizes_go_down_by_a_tenth_until_one_fits(error):
    tried, train = trying(32, error, starting_batch_size=128)
    assert train() == (32, (), {})
    assert tried == [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32]


def test_arguments_are_passed_on():
    _, train = trying(28, OUT_OF_MEMORY[0], starting_batch_size=32)
    assert train("a", key=1) == (28, ("a",), {"key": 1})


def test_the_default_begins_at_128_and_needs_no_brackets():
    tried = []

    @find_executable_batch_size
    def train(batch_size):
        """Trains."""
        tried.append(batch_size)

    train()
    train()
    assert tried == [128, 128]
    assert (train.__name__, train.__doc__) == ("train", "Trains.")


def test_other_exceptions_pass_through():
    for error in (ValueError("no"), RuntimeError("size mismatch")):
        tried, train = trying(32, error)
        with pytest.raises(type(error), match=str(error)):
            train()
        assert tried == [128]


def test_reaching_zero_is_an_error():
    tried, train = trying(0, OUT_OF_MEMORY[0], starting_batch_size=4)
    with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero.* from 4 down.*CUDA out of"):
        train()
    assert tried == [4, 3, 2, 1]


def test_a_batch_size_from_the_caller_is_refused():
    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size, first, second):
        raise AssertionError

    with pytest.raises(TypeError) as caught:
        train(128, "hello", "world")
    assert str(caught.value) == (
        "Batch size was passed into `train` as the first argument when called. "
        "Remove this as the decorator already does so: `train(first=hello, second=world)`"
    )


def test_another_reduction():
    tried, train = trying(80, OUT_OF_MEMORY[0], starting_batch_size=100, reduce_batch_size_fn=lambda size: size - 10)
    assert train()[0] == 80
    assert tried == [100, 90, 80]
    sizes = iter([50, 20])
    tried, train = trying(20, OUT_OF_MEMORY[0], starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    train()
    assert tried == [100, 50, 20]
    _, train = trying(1, OUT_OF_MEMORY[0], reduce_batch_size_fn=lambda size: size)
    with pytest.raises(ValueError, match="gave 128 after 128; it has to give smaller sizes"):
        train()


def test_what_failed_is_freed_before_the_next_try():
    seen = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        assert all(reference() is None for reference in seen)
        model = torch.nn.Linear(2, 2)
        model.itself = model  # a cycle
        seen.append(weakref.ref(model))
        if batch_size > 1:
            raise torch.OutOfMemoryError

    train()
    assert len(seen) == 4


def test_release_memory_gives_as_many_nones():
    first, second = torch.ones(2), torch.nn.Linear(1, 1)
    references = weakref.ref(first), weakref.ref(second)
    first, second = release_memory(first, second)
    assert (first, second) == (None, None)
    assert [reference() for reference in references] == [None, None]
    assert release_memory() == []


def test_clearing_collects_garbage_when_asked():
    class Cycle:
        pass

    gc.disable()
    try:
        one = Cycle()
        one.itself = one
        reference = weakref.ref(one)
        del one
        clear_device_cache()
        assert reference() is not None
        clear_device_cache(garbage_collection=True)
        assert reference() is None
    finally:
        gc.enable()


def test_clearing_does_not_touch_a_device_that_is_not_used(monkeypatch):
    cleared = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append("cuda"))
    clear_device_cache()
    assert cleared == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    clear_device_cache()
    assert cleared == ["cuda"]


def test_what_counts_as_out_of_memory():
    assert should_reduce_batch_size(OUT_OF_MEMORY[1])
    assert not should_reduce_batch_size(KeyError("out of memory"))
    assert not should_reduce_batch_size(RuntimeError("broken"))
