"""Ctrl-C, for commands that are to end by it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds after which an interrupt comes again that came where nothing can be raised.
AGAIN = 0.1


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end what is within, wherever it comes. To be used in the main thread.

    Python raises `KeyboardInterrupt` in whatever the main thread does just then. In a callback of
    the garbage collector, such as Dask's own, or in a destructor, the exception is only printed,
    and the program would go on as if nobody had asked it to end.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        main = threading.main_thread().ident
        # Not at once: this is called before the callback is left.
        again = threading.Timer(AGAIN, lambda: signal.pthread_kill(main or 0, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def insistent() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the end if Ctrl-C came and what is within took it for its own.

    As scikit-learn does, for which it is the end of a fit. In other threads than the main one,
    where nothing comes, and where signals are ignored, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
