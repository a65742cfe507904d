"""Effect of an interrupt that comes within a call of paramiko."""

import signal
import threading

import pytest

from orc.launchers.remote.ssh.link import InterruptsWait


def test_an_interrupt_within_a_call_is_raised_after_it():
    done = []

    def call():
        with InterruptsWait():
            signal.raise_signal(signal.SIGINT)
            done.append("to the end")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_no_interrupts_and_change_none():
    seen = []

    def call():
        with InterruptsWait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
