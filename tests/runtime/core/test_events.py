"""Events: who listens is told, in order, and nobody else pays for it."""

import pytest
import torch
from torch.utils.data import DataLoader

from orc.runtime import Accelerator
from orc.runtime.core.events import Events


def test_callbacks_are_kept_in_order_once_and_can_leave():
    events, first, second = Events(), print, repr
    assert not any(getattr(events, name) for name in Events.__slots__)
    for callback in (first, second, first):
        events.subscribe("on_step", callback)
    assert events.on_step == (first, second)
    events.unsubscribe("on_step", first)
    events.unsubscribe("on_step", first)
    assert events.on_step == (second,)
    for change in (events.subscribe, events.unsubscribe):
        with pytest.raises(ValueError, match="there is no event 'on_lunch'; choose from before_step, on_backward"):
            change("on_lunch", first)


def test_a_loop_tells_what_happens_and_a_veto_leaves_the_update_out(tmp_path):
    accelerator, told = Accelerator(cpu=True), []
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.ones(2, 1), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    events = accelerator.events
    events.subscribe("on_backward", lambda loss, normalized: told.append(("backward", loss.item() == 1.0, normalized)))
    events.subscribe("on_clip", lambda norm: told.append(("clip", norm.item() > 0)))
    events.subscribe("before_step", lambda one: told.append(("before", one is optimizer)))
    events.subscribe("before_step", lambda one: one.steps == 1)
    events.subscribe("on_step", lambda one: told.append(("step", one.steps)))
    events.subscribe("on_batch", lambda one: told.append(("batch", one is loader)))
    events.subscribe("on_save", lambda place: told.append(("save", place.name)))
    for batch in loader:
        before = model.weight.clone()
        loss = model(batch).sum()
        accelerator.backward(loss / loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == torch.equal(before, model.weight)
    accelerator.save_state(tmp_path / "state")
    step = [("backward", True, False), ("clip", True), ("before", True)]
    assert told == [*step, ("step", 1), ("batch", True), *step, ("batch", True), ("save", "state")]
