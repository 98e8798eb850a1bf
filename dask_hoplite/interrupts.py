"""Ctrl-C, for commands that are to end by it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
