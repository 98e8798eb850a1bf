"""Hoplite in a client: large objects go to and come from the workers themselves, streamed."""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

from distributed import Client, Future, get_client
from distributed.client import FutureCancelledError, no_default

import dask_hoplite
from dask_hoplite import seams, sizes, versions
from dask_hoplite.aside import NAME
from dask_hoplite.config import seconds, setting
from dask_hoplite.contents import Contents
from dask_hoplite.core.events import Key
from dask_hoplite.entry import enter, lay_out
from dask_hoplite.exceptions import NotInstalledError
from dask_hoplite.fetch import Asking, Fetch
from dask_hoplite.pace import Pace
from dask_hoplite.scheduler import Hoplite
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.push import push
from dask_hoplite.transfer.relay import Connections, Relay

logger = logging.getLogger(__name__)

#: Objects that a client sends, or receives, at a time.
SLOTS = 8

#: Methods of a client in whose place ours are
REPLACED = (
    "_scatter",
    "_gather",
    "_gather_remote",
    "_send_to_scheduler_safe",
    "unregister_scheduler_plugin",
)

#: What the user said of ``direct=`` in the gather that is going on; None: nothing.
_direct: ContextVar[bool | None] = ContextVar("direct", default=None)

_extensions: weakref.WeakKeyDictionary[Client, ClientExtension] = weakref.WeakKeyDictionary()


@Client.__dict__["_register_plugin"].register(Hoplite)
def _register(client: Client, plugin: Hoplite, name: str, idempotent: bool) -> Any:
    """What ``client.register_plugin(Hoplite())`` does: the cluster first, then this client."""
    return client.sync(_register_async, client, plugin, name, idempotent)


async def _register_async(client: Client, plugin: Hoplite, name: str, idempotent: bool) -> None:
    await client._register_scheduler_plugin(plugin=plugin, name=name, idempotent=idempotent)
    try:
        await extension(client)
    except NotInstalledError as error:
        warnings.warn(f"{error}; this client goes on as a plain Dask client", stacklevel=2)


def or_current(client: Client | None) -> Client:
    """A client, or the current one if none is given; inside a task the worker's.

    Raises
    ------
    TypeError
        If it is something else, as the address of a scheduler.
    """
    if client is not None and not isinstance(client, Client):
        raise TypeError(f"client is a distributed.Client, not {client!r}")
    return client or get_client()


async def extension(client: Client) -> ClientExtension:
    """The client's half of Hoplite, installed if it was not yet.

    Raises
    ------
    NotInstalledError
        If the scheduler has no Hoplite, or one of another version, or this client's Dask is not as
        it is known.
    """
    known = _extensions.get(client)
    if known is not None and known.installed:
        return known
    hello = await client.scheduler.hoplite_hello()
    if hello is None:
        raise NotInstalledError(
            "the scheduler has no Hoplite: call client.register_plugin(Hoplite()) first"
        )
    if reason := hello.get("refused"):
        raise NotInstalledError(f"the scheduler has no Hoplite: {reason}")
    own = dask_hoplite.__version__
    others = {"the scheduler": hello["version"], **hello.get("workers", {})}
    differing = versions.differing({**others, "this client": own})
    if hello["version"] != own:
        raise NotInstalledError(differing)
    if differing:
        warnings.warn(differing, stacklevel=2)
    if reason := versions.check(seams.CLIENT, client):
        raise NotInstalledError(reason)
    return install(client, hello["min_size"], hello["stall_timeout"], hello["push_timeout"])


async def ask(client: Client, what: str, **arguments: Any) -> Any:
    """What the scheduler's Hoplite answers.

    Raises
    ------
    NotInstalledError
        As :func:`extension` does, also if somebody else has uninstalled it meanwhile.
    """
    known = await extension(client)
    answer = await getattr(client.scheduler, what)(**arguments)
    if answer is None:
        known.uninstall()
        await extension(client)
    return answer


def install(
    client: Client,
    min_size: int,
    stall_timeout: float,
    push_timeout: float,
    fetch: Callable[[Key, int], Awaitable[Any]] | None = None,
) -> ClientExtension:
    """Install Hoplite in a client, unless it is there. See :class:`ClientExtension`."""
    known = _extensions.get(client)
    if known is None or not known.installed:
        known = _extensions[client] = ClientExtension(
            client, min_size, stall_timeout, push_timeout, fetch
        )
        known.install()
    return known


class ClientExtension:
    """Replaces how one client scatters and gathers.

    Parameters
    ----------
    client : Client
        The client.
    min_size : int
        Objects of fewer bytes take Dask's own path.
    stall_timeout : float
        Seconds without a byte after which another holder of an object is asked.
    push_timeout : float
        Seconds without a byte after which an object is sent to another worker.
    fetch : callable, optional
        How to get a large object by key and size. Default: from a worker that holds it. A client
        that lives in a worker uses that worker's own pulls.
    """

    def __init__(
        self,
        client: Client,
        min_size: int,
        stall_timeout: float,
        push_timeout: float,
        fetch: Callable[[Key, int], Awaitable[Any]] | None = None,
    ):
        self._client = weakref.ref(client)
        self.min_size = min_size
        self.stall_timeout = stall_timeout
        self.push_timeout = push_timeout
        self.fetch = fetch
        self.installed = False
        self.slots = asyncio.Semaphore(SLOTS)
        self.reached: set[str] = set()
        self.unreachable: set[str] = set()
        self.contents = Contents()
        self.pace = Pace()
        #: What must come to its end, whatever becomes of the call that it was a part of
        self.giving_up: set[asyncio.Future[Any]] = set()
        self.connect_timeout = seconds("connect-timeout", setting("connect-timeout"))

    @property
    def client(self) -> Client:
        """The client, which must be alive."""
        client = self._client()
        assert client is not None
        return client

    def install(self) -> None:
        """Replace the client's methods."""
        self.plain_scatter = type(self.client)._scatter
        self.plain_gather = type(self.client)._gather
        self.plain_gather_remote = type(self.client)._gather_remote
        self.client._scatter = self._scatter  # type: ignore[method-assign]
        self.client._gather = self._gather  # type: ignore[method-assign]
        self.client._gather_remote = self._gather_remote  # type: ignore[method-assign]
        self.client.unregister_scheduler_plugin = self._unregister  # type: ignore[method-assign]
        self.client._send_to_scheduler_safe = self._send  # type: ignore[method-assign]
        sizes.install(self)
        self.installed = True

    def uninstall(self) -> None:
        """Put the client's methods back."""
        if (client := self._client()) is not None:
            for name in REPLACED:
                client.__dict__.pop(name, None)
        self.pace.stop()
        sizes.uninstall(self)
        self.installed = False

    def _unregister(self, name: str) -> Any:
        """In place of :meth:`distributed.Client.unregister_scheduler_plugin`."""
        if name == NAME:
            self.uninstall()
        return type(self.client).unregister_scheduler_plugin(self.client, name)

    def _send(self, msg: Any) -> None:
        """In place of :meth:`distributed.Client._send_to_scheduler_safe`."""
        client = self.client
        if client.scheduler_comm is not None:
            self.pace.follow(client.scheduler_comm)
        type(client)._send_to_scheduler_safe(client, msg)

    # Scatter

    async def _scatter(
        self,
        data: Any,
        workers: Any = None,
        broadcast: bool | int = False,
        direct: bool | None = None,
        local_worker: Any = None,
        timeout: Any = no_default,
        hash: bool = True,
    ) -> Any:
        """In place of :meth:`distributed.Client._scatter`; large objects are streamed to a worker.

        Each object gets a key of its own, unless this client still holds the same content: then
        that is used, and no byte moves. So no late release of an earlier object can end a new one.
        """
        client = self.client
        if isinstance(data, range | Iterator):
            data = list(data)
        futures: dict[Key, Future] = {}
        if type(data) is dict:
            names, fresh = list(data), dict(data)
        else:
            names, fresh = [], {}
            anywhere = workers is None and broadcast in (False, True)
            for value in data if _is_collection(data) else [data]:
                key, future = await self.contents.name(client, value, hash, anywhere)
                names.append(key)
                if future is not None:
                    futures[key] = future
                else:
                    fresh[key] = value
        if futures and broadcast:
            await asyncio.gather(*(client.scheduler.hoplite_broadcast(key=key) for key in futures))
        large = {} if local_worker else await lay_out(fresh, self.min_size)
        if large:
            try:
                await self._put(large, workers, broadcast, direct, timeout)
            except NotInstalledError as error:
                logger.info("%s: scattered as by a plain Dask client", error)
            else:
                for key in large:
                    futures[key] = Future(key, client)
                    client.futures[key].finish(type=type(fresh.pop(key)))
        if fresh:
            # Nothing calls it back: if we are cancelled it ends without us, and its futures go.
            plain = self.plain_scatter(
                client, fresh, workers, broadcast, direct, local_worker, timeout, hash
            )
            futures |= await asyncio.shield(self._beside(plain))
        await self.contents.note(client)  # before the caller may change what it has given us
        if type(data) is dict:
            return {key: futures[key] for key in names}
        ordered = [futures[key] for key in names]
        if not _is_collection(data):
            return ordered[0]
        make = getattr(type(data), "_make", type(data))
        return make(ordered)

    async def _put(
        self,
        puts: dict[Key, Buffer],
        workers: Any,
        broadcast: bool | int,
        direct: bool | None,
        timeout: Any,
    ) -> dict[Key, dict[str, str]]:
        """Send objects to workers; return when they, and the copies asked for, are there.

        Returns
        -------
        dict
            For each key the workers that could not get a copy, and why.

        Raises
        ------
        TransferError
            If workers do not take them, or leave with them, one after the other.
        NotInstalledError
            If the scheduler has no Hoplite any more.
        """
        client = self.client
        scheduler = client.scheduler
        if isinstance(workers, str | int):
            workers = [workers]
        if direct is None:
            direct = client.direct_to_workers
        placing: asyncio.Future[Any] | None = None
        committing = False

        async def place(nbytes: dict[Key, int], avoid: list[str]) -> dict[Key, tuple[str, int]]:
            nonlocal placing
            placing = asyncio.ensure_future(
                scheduler.hoplite_place(
                    client=client.id,
                    nbytes=nbytes,
                    workers=workers,
                    broadcast=broadcast,
                    timeout=client._timeout if timeout is no_default else timeout,
                    avoid=avoid,
                )
            )
            return self._known(await asyncio.shield(placing))

        async def send(worker: str, key: Key, buffer: Buffer, epoch: int) -> int:
            async with self.slots:
                rpc = await self._reach(worker, direct)
                return await push(rpc, worker, key, buffer, epoch, self.push_timeout)

        async def commit(nbytes: dict[Key, int]) -> dict[str, Any]:
            nonlocal committing
            committing = True
            done = self._known(await scheduler.hoplite_commit(client=client.id, nbytes=nbytes))
            committing = not done["lost"]
            return done

        async def abort(keys: list[Key], reason: str) -> None:
            await scheduler.hoplite_abort(keys=keys, reason=reason)

        try:
            return await enter(puts, place, send, commit, abort)
        except BaseException as error:
            assert placing is not None
            reason = f"{type(error).__name__}: {error}"
            giving_up = self._beside(self._give_up(list(puts), reason, placing, committing))
            if placing.done():
                await asyncio.shield(giving_up)
            raise

    def _known(self, answer: Any) -> Any:
        """What the scheduler's Hoplite answered."""
        if answer is None:
            self.uninstall()
            raise NotInstalledError("the scheduler has no Hoplite any more")
        return answer

    def _beside(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run something to its end, also if whoever waits for it is cancelled."""
        task = asyncio.ensure_future(coroutine)
        self.giving_up.add(task)
        task.add_done_callback(self.giving_up.discard)
        return task

    async def _give_up(
        self, keys: list[Key], reason: str, placing: asyncio.Future[Any], committing: bool
    ) -> None:
        """Leave nothing behind of objects that were to be sent."""
        await asyncio.wait({placing})  # before, there may be nothing yet that could be given up
        client = self._client()
        if client is None or client.scheduler is None:
            return  # it was closed; the scheduler gives up what it was about to send
        if placing.cancelled() or placing.exception() is not None or placing.result() is None:
            return
        await client.scheduler.hoplite_abort(keys=keys, reason=reason)
        if committing:  # they may be ours already, and only the answer has not come
            release = {"op": "client-releases-keys", "keys": keys, "client": client.id}
            client._send_to_scheduler(release)

    async def _reach(self, worker: str, direct: bool | None) -> Connections:
        """Where connections to a worker are had: by way of the scheduler, if there is no other way.

        So it stays for workers that were never reached. One that was is only frozen or gone.
        """
        client = self.client
        relay = Relay(client.rpc, client.scheduler.address)
        if direct is False or worker in self.unreachable:
            return relay
        try:
            # Dask's own timeout leaves out the answer, which a frozen worker does not give.
            async with asyncio.timeout(self.connect_timeout):
                comm = await client.rpc.connect(worker, timeout=self.connect_timeout)
        except OSError as error:
            logger.info("Hoplite: %s is asked by way of the scheduler: %s", worker, error)
            if worker not in self.reached:
                self.unreachable.add(worker)
            return relay
        self.reached.add(worker)
        client.rpc.reuse(worker, comm)
        return client.rpc

    # Gather

    async def _gather(
        self,
        futures: Any,
        errors: str = "raise",
        direct: bool | None = None,
        local_worker: Any = None,
    ) -> Any:
        """In place of :meth:`distributed.Client._gather`, which forgets whether ``direct`` was the
        user's wish."""
        client = self.client
        before = _direct.set(client.direct_to_workers if direct is None else direct)
        try:
            return await self.plain_gather(client, futures, errors, direct, local_worker)
        finally:
            _direct.reset(before)

    async def _gather_remote(self, direct: bool, local_worker: Any) -> dict[str, Any]:
        """In place of :meth:`distributed.Client._gather_remote`."""
        client = self.client
        async with client._gather_semaphore:
            keys = list(client._gather_keys)
            client._gather_keys = None
            client._gather_future = None
        located = await client.scheduler.hoplite_locate(keys=keys)
        if located is None:  # it was uninstalled
            self.uninstall()
        large = {key: where for key, where in (located or {}).items() if where[0] >= self.min_size}
        found = await asyncio.gather(
            *(self._get(key, *where) for key, where in large.items()), return_exceptions=True
        )
        data = {
            key: value
            for key, value in zip(large, found, strict=True)
            if not isinstance(value, BaseException)
        }
        # What could not be had, whatever the reason, is Dask's to get, or to say why not.
        rest = [key for key in keys if key not in data]
        if not rest:
            return {"status": "OK", "data": data}
        asking: Any = Asking(client, rest)
        response: dict[str, Any] = await self.plain_gather_remote(asking, direct, local_worker)
        if response["status"] == "OK":
            response["data"].update(data)
        return response

    async def _get(self, key: Key, nbytes: int, holders: Collection[str]) -> Any:
        """Get one object, from whichever of its holders."""
        if self.fetch is not None:
            return await self.fetch(key, nbytes)
        client, direct = self.client, _direct.get()

        async def reach(worker: str) -> Connections:
            return await self._reach(worker, direct)

        async def locate() -> Collection[str]:
            located = await client.scheduler.hoplite_locate(keys=[key]) or {}
            return located[key][1] if key in located else ()

        fetch = Fetch(key, client.id, reach, locate, self.stall_timeout, self.slots)
        return await fetch.run(holders)


def check(client: Client, futures: Collection[Future]) -> None:
    """Refuse futures that cannot be used with this client, at once and by name."""
    for future in futures:
        if not isinstance(future, Future):
            raise TypeError(f"{future!r} is not a future, but of type {type(future).__name__}")
        if future.client is not client:
            raise ValueError(
                f"{future.key!r} is a future of client {future.client.id}, not of {client.id}"
            )
        if future.cancelled() or future.key not in client.futures:
            raise FutureCancelledError(future.key, "it was released or cancelled")


async def gathered(client: Client, future: Future) -> Any:
    """The value of a future, for somebody who may be cancelled.

    Dask gathers together what several ask for at a time, and whoever is cancelled would cancel all.
    """
    return await asyncio.shield(asyncio.ensure_future(client._gather(future)))


def _is_collection(data: Any) -> bool:
    """Whether Dask scatters the items of this, rather than the whole."""
    return type(data) in (list, tuple, set, frozenset) or (
        isinstance(data, tuple) and hasattr(data, "_fields")
    )
