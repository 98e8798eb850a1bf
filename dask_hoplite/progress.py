"""``hoplite.progress``: Dask's progress bars, of bytes and copies in place of tasks."""

from __future__ import annotations

import asyncio
import sys
import weakref
from contextlib import suppress
from html import escape
from typing import Any

from dask.utils import format_bytes
from distributed import Client, Future
from distributed.client import futures_of
from distributed.comm.core import CommClosedError
from distributed.core import connect, send_recv
from distributed.diagnostics.progress import format_time
from distributed.diagnostics.progressbar import ProgressBar, ProgressWidget, TextProgressBar
from distributed.utils import is_kernel

from dask_hoplite.client import check, extension, or_current

#: Of what the scheduler says when the futures of the client are not wanted any more
GONE = {"status": "error", "all": 0, "remaining": 0, "wanted": 0, "copies": 0, "waiting": 0}


class _Bytes(ProgressBar):
    """Asks the scheduler for the progress of copies, and not of tasks.

    The rest, from the connection to who draws when, is Dask's.
    """

    async def listen(self) -> None:
        """Draw, until all copies are there, or will not be."""
        client = self.client() if self.client is not None else None
        arguments = client.connection_args if client is not None else {}
        self.comm = await connect(self.scheduler, **arguments)
        del client  # only the user keeps it alive
        while True:
            told = await self._ask()
            self.status = told["status"]
            self._draw_bar(**told)
            if self.status != "running":
                await self.comm.close()
                self._draw_stop(**told)
                return
            await asyncio.sleep(self.interval)

    def _draw_bar(self, **told: Any) -> None:  # type: ignore[override]
        """To be told how."""

    async def _ask(self) -> dict[str, Any]:
        try:
            told = await send_recv(self.comm, op="hoplite_progress", keys=list(self.keys))
        except CommClosedError:
            return {**GONE, "reason": "the scheduler is gone"}
        return self._look(told)

    def _look(self, told: dict[str, Any] | None) -> dict[str, Any]:
        """What the scheduler says, unless the client knows better."""
        if told is None:
            return {**GONE, "reason": "the scheduler has no Hoplite any more"}
        client = self.client() if self.client is not None else None
        futures = client.futures if client is not None else {}
        for key in self.keys:
            state = futures.get(key)
            if state is None or state.status == "cancelled":
                how = "released" if state is None else "cancelled"
                return {**GONE, "reason": f"{key!r} was {how}"}
            if state.status == "error" and key in told["unknown"]:
                return {**GONE, "reason": f"{key!r} failed: {state.exception!r}"}
        return told


class TextBar(_Bytes, TextProgressBar):
    """For terminals: one line, which stays when it is at its end."""

    def _draw_bar(self, **told: Any) -> None:  # type: ignore[override]
        share = _share(told)
        bar = "#" * int(self.width * share)
        line = f"[{bar:<{self.width}}] | {int(100 * share):3}% | {_words(told)}"
        with suppress(ValueError):  # the file is closed
            sys.stdout.write(f"\r\33[2K{line} | {format_time(self.elapsed)}")
            sys.stdout.flush()

    def _draw_stop(self, **told: Any) -> None:  # type: ignore[override]
        failed = told["status"] == "error"
        with suppress(ValueError):
            sys.stdout.write(f" | failed: {told['reason']}\n" if failed else "\n")
            sys.stdout.flush()


class WidgetBar(_Bytes, ProgressWidget):
    """For notebooks with ipywidgets."""

    def _draw_bar(self, **told: Any) -> None:  # type: ignore[override]
        self._say("Moving:")
        self.bar.value = _share(told)
        self.bar_text.value = f'<div style="padding: 0px 10px">{_words(told)}</div>'

    def _draw_stop(self, **told: Any) -> None:  # type: ignore[override]
        failed = told["status"] == "error"
        self.bar.bar_style = "danger" if failed else "success"
        self._say("Finished:", f"<tt>{escape(told['reason'])}</tt>" if failed else "")

    def _say(self, what: str, why: str = "") -> None:
        what = f"<b>Failed:</b> {why}" if why else f"<b>{what}</b>"
        self.elapsed_time.value = (
            f'<div style="padding: 0px 10px 5px 10px">{what} {format_time(self.elapsed)}</div>'
        )


def _share(told: dict[str, Any]) -> float:
    if told["all"]:
        return (told["all"] - told["remaining"]) / told["all"]
    return float(told["status"] == "finished")


def _words(told: dict[str, Any]) -> str:
    done = format_bytes(told["all"] - told["remaining"])
    words = f"{done} of {format_bytes(told['all'])} | {told['copies']} of {told['wanted']} copies"
    if told["waiting"]:
        words += f" | {told['waiting']} not made yet"
    return words


def progress(
    futures: Any,
    notebook: bool | None = None,
    client: Client | None = None,
    *,
    interval: float | str = "100ms",
) -> Any:
    """Show how far the copies of objects are: bytes, and workers that have them.

    All copies count that are there, on their way, asked for by :func:`broadcast` and the like, or
    needed by a task that a worker is to run. It ends when all of them are there, or when a future
    has failed, was cancelled or released. It raises nothing then: the future does.

    In a terminal, it blocks until then. In a notebook with ipywidgets it returns a widget at once,
    which has to be the last expression of its cell, as that of :func:`distributed.progress`; in one
    without, it is as in a terminal.

    Parameters
    ----------
    futures : Future or nested container of Future
        The objects. Copies of several are added up.
    notebook : bool, optional
        Whether this is a notebook. Default: as it seems.
    client : Client, optional
        Default: that of the futures.
    interval : float or str
        Seconds after which to look again.

    Returns
    -------
    WidgetBar or None
        In a terminal None, or with an asynchronous client an awaitable of it.

    Raises
    ------
    TypeError
        If there is no future.
    ValueError
        If a future is another client's.
    FutureCancelledError
        If one was cancelled or released before.
    NotInstalledError
        If the cluster has no Hoplite. A widget of an asynchronous client says so itself.

    Notes
    -----
    Receivers tell how far they are about as often as the stall timeout, so bytes come in steps.

    Examples
    --------
    >>> hoplite.progress(weights)  # doctest: +SKIP
    [################        ] |  67% | 171.66 MiB of 256.00 MiB | 5 of 8 copies | 1.2s
    """
    found: list[Future] = futures_of(futures)
    if not found:
        raise TypeError(f"progress is of futures, and there is none in a {type(futures).__name__}")
    client = or_current(client or found[0].client)
    check(client, found)
    kind = _kind(is_kernel() if notebook is None else notebook)
    bar = kind(found, scheduler=client.scheduler.address, interval=interval, start=False)
    bar.client = weakref.ref(client)
    if kind is TextBar:
        return client.sync(_draw, client, bar)
    if not client.asynchronous:
        client.sync(extension, client)
    return bar


async def _draw(client: Client, bar: TextBar) -> None:
    await extension(client)
    await bar.listen()


def _kind(notebook: bool) -> type[TextBar] | type[WidgetBar]:
    if notebook:
        with suppress(ImportError):
            import ipywidgets  # noqa: F401

            return WidgetBar
    return TextBar
