"""Ctrl-C is heard wherever it comes."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest

from dask_hoplite.interrupts import insistent, interruptible


@pytest.fixture(autouse=True)
def usual_handler():
    """Ctrl-C as Python has it; other tests' libraries leave handlers behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_in_the_middle_of_something():
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)


def test_in_a_callback_of_the_garbage_collector():
    def interrupt(phase, info):
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interruptible():
        gc.callbacks.append(interrupt)
        gc.collect()
        threading.Event().wait(30)
        pytest.fail("it was not heard")


def test_in_a_destructor():
    class Last:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interruptible():
        Last()
        threading.Event().wait(30)
        pytest.fail("it was not heard")


def test_other_errors_there_are_printed_as_before(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: printed.append(said.exc_type))
    hook = sys.unraisablehook

    class Bad:
        def __del__(self):
            raise ValueError

    with interruptible():
        Bad()
    assert printed == [ValueError]
    assert sys.unraisablehook is hook


def test_taken_for_something_else():
    went_on = []
    with pytest.raises(KeyboardInterrupt), insistent():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            went_on.append(True)
    assert went_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_came():
    with insistent():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_does_nothing():
    def within():
        with insistent():
            done.append(True)

    done = []
    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert done


def test_where_it_is_ignored_it_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with insistent():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
