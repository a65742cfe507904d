"""Every test starts with the signal handlers of a fresh process."""

import signal

import pytest

from orc.runtime.core.context import reset_default
from orc.runtime.preemption import preemption


@pytest.fixture(autouse=True)
def fresh_signals():
    preemption.close_all()
    yield
    preemption.close_all()
    for number in preemption.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    reset_default()
