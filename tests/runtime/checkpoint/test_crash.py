"""A save that is killed at any of its file operations leaves a checkpoint that loads."""

import os

import pytest

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "close")


def kill_everywhere(root, numbered, swaps):
    """Save, then kill a second save before its 1st, 2nd, ... file operation; what was loaded after each."""
    import torch

    from orc.runtime import Accelerator, ProjectConfiguration
    from orc.runtime.checkpoint.storage import durable

    os.fsync = lambda fd: None  # what a killed process has written stays; hundreds of these take minutes on a busy disk
    if not swaps:
        durable.exchange = lambda one, other: False
    project = ProjectConfiguration(root, automatic_checkpoint_naming=numbered, total_limit=1 if numbered else None)
    accelerator = Accelerator(project_config=project)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    target = None if numbered else os.path.join(root, "state")

    def fill(value):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def killed_at(count):
        """Save in a forked process that ends at operation *count*; whether it ended there."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        left = count

        def step(real, name):
            def operation(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    if name == "write":  # half of it arrives
                        real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os._exit(9)
                return real(*args, **kwargs)

            return operation

        for name in OPERATIONS:
            setattr(os, name, step(getattr(os, name), name))
        swap = durable.exchange
        durable.exchange = step(swap, "exchange")
        accelerator.save_state(target)
        os._exit(0)

    fill(1.0)
    accelerator.save_state(target)
    fill(2.0)
    results, count = [], 1
    while killed_at(count):
        fill(0.0)
        accelerator.load_state(target)
        results.append({value for parameter in model.parameters() for value in parameter.flatten().tolist()})
        fill(2.0)
        count += 1
    fill(0.0)
    accelerator.load_state(target)
    results.append({value for parameter in model.parameters() for value in parameter.flatten().tolist()})
    accelerator.save_state(target)
    accelerator.end_training()
    left = sorted(os.listdir(os.path.join(root, "checkpoints") if numbered else root))
    return results, left


@pytest.mark.parametrize(("numbered", "swaps"), [(False, True), (False, False), (True, True)])
def test_killed_at_any_file_operation_a_whole_checkpoint_stays(tmp_path, run_ranks, numbered, swaps):
    [(results, left)] = run_ranks(1, kill_everywhere, str(tmp_path), numbered, swaps)
    assert len(results) > 30
    assert results[0] == {1.0}
    assert results[-1] == {2.0}
    # First the old one, from some operation on the new one, never a mixture and never none.
    assert results == [{1.0}] * results.count({1.0}) + [{2.0}] * results.count({2.0})
    assert len(left) == 1  # nothing half-made is left behind
