"""Hoplite in a client: large objects go to and come from the workers themselves, streamed."""

from __future__ import annotations

import asyncio
import logging
import uuid
import warnings
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Any

from dask.sizeof import sizeof
from dask.tokenize import tokenize
from dask.utils import parse_timedelta
from distributed import Client, Future
from distributed.client import no_default
from distributed.utils import offload

import dask_hoplite
from dask_hoplite.config import setting
from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import NotInstalledError, UnreachableError
from dask_hoplite.scheduler import NAME, Hoplite
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout, dump
from dask_hoplite.transfer.pull import take, unpack
from dask_hoplite.transfer.push import push
from dask_hoplite.transfer.shared import AttachedBuffer
from dask_hoplite.transfer.shelf import OFFLOAD

logger = logging.getLogger(__name__)

#: Objects that a client sends, or receives, at a time.
SLOTS = 8

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


async def extension(client: Client) -> ClientExtension:
    """The client's half of Hoplite, installed if it was not yet.

    Raises
    ------
    NotInstalledError
        If the scheduler has no Hoplite, or one of another version.
    """
    known = _extensions.get(client)
    if known is not None and known.installed:
        return known
    hello = await client.scheduler.hoplite_hello()
    if hello is None:
        raise NotInstalledError(
            "the scheduler has no Hoplite: call client.register_plugin(Hoplite()) first"
        )
    if hello["version"] != dask_hoplite.__version__:
        raise NotInstalledError(
            f"the scheduler has dask-hoplite {hello['version']}, "
            f"this client {dask_hoplite.__version__}"
        )
    return install(client, hello["min_size"])


def install(
    client: Client, min_size: int, fetch: Callable[[Key, int], Awaitable[Any]] | None = None
) -> ClientExtension:
    """Install Hoplite in a client, unless it is there. See :class:`ClientExtension`."""
    known = _extensions.get(client)
    if known is None or not known.installed:
        known = _extensions[client] = ClientExtension(client, min_size, fetch)
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
    fetch : callable, optional
        How to get a large object by key and size. Default: from a worker that holds it. A client
        that lives in a worker uses that worker's own pulls.
    """

    def __init__(
        self,
        client: Client,
        min_size: int,
        fetch: Callable[[Key, int], Awaitable[Any]] | None = None,
    ):
        self._client = weakref.ref(client)
        self.min_size = min_size
        self.fetch = fetch
        self.installed = False
        self.slots = asyncio.Semaphore(SLOTS)
        self.reached: set[str] = set()
        self.unreachable: set[str] = set()
        #: The key under which this client holds a content, by its token
        self.tokens: dict[str, Key] = {}
        self.hashing: dict[Key, asyncio.Future[str]] = {}
        self.sizes: defaultdict[int, set[Key]] = defaultdict(set)
        #: What must come to its end, whatever becomes of the call that it was a part of
        self.giving_up: set[asyncio.Future[Any]] = set()
        self.connect_timeout = parse_timedelta(setting("connect-timeout"))

    @property
    def client(self) -> Client:
        """The client, which must be alive."""
        client = self._client()
        assert client is not None
        return client

    def install(self) -> None:
        """Replace the client's methods."""
        self.plain_scatter = type(self.client)._scatter
        self.plain_gather_remote = type(self.client)._gather_remote
        self.client._scatter = self._scatter  # type: ignore[method-assign]
        self.client._gather_remote = self._gather_remote  # type: ignore[method-assign]
        self.client.unregister_scheduler_plugin = self._unregister  # type: ignore[method-assign]
        self.installed = True

    def uninstall(self) -> None:
        """Put the client's methods back."""
        for name in ("_scatter", "_gather_remote", "unregister_scheduler_plugin"):
            self.client.__dict__.pop(name, None)
        self.installed = False

    def _unregister(self, name: str) -> Any:
        """In place of :meth:`distributed.Client.unregister_scheduler_plugin`."""
        if name == NAME:
            self.uninstall()
        return type(self.client).unregister_scheduler_plugin(self.client, name)

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
                key, future = await self._name(value, hash, anywhere)
                names.append(key)
                if future is not None:
                    futures[key] = future
                else:
                    fresh[key] = value
        if futures and broadcast:
            await asyncio.gather(*(client.scheduler.hoplite_broadcast(key=key) for key in futures))
        large = {} if local_worker else await self._lay_out(fresh)
        if large:
            try:
                await self._put(large, workers, broadcast, timeout)
            except UnreachableError as error:
                logger.info("Hoplite: no way to the workers, data go by the scheduler: %s", error)
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
        await self._note_tokens()  # before the caller may change what it has given us
        if type(data) is dict:
            return {key: futures[key] for key in names}
        ordered = [futures[key] for key in names]
        if not _is_collection(data):
            return ordered[0]
        make = getattr(type(data), "_make", type(data))
        return make(ordered)

    async def _lay_out(self, values: dict[Key, Any]) -> dict[Key, Buffer]:
        """The bytes of those objects that are to be streamed."""
        large = {}
        for key, value in values.items():
            if sizeof(value) >= self.min_size and not isinstance(value, Future):
                buffer = Buffer(*await offload(dump, value))
                if buffer.nbytes >= self.min_size:
                    large[key] = buffer
        return large

    async def _name(self, value: Any, hash: bool, anywhere: bool) -> tuple[Key, Future | None]:
        """A key for an object; and its future, if this client holds it and it may be anywhere."""
        if not hash:
            return f"{type(value).__name__}-{uuid.uuid4().hex}", None
        key = f"{type(value).__name__}-{uuid.uuid4().hex}"
        size = sizeof(value)
        if size > OFFLOAD and not any(known in self.client.futures for known in self.sizes[size]):
            # It can be none that we hold. What it is can be found out while it is sent.
            self.hashing[key] = asyncio.ensure_future(offload(tokenize, value))
        else:
            await self._note_tokens()
            token = await offload(tokenize, value) if size > OFFLOAD else tokenize(value)
            known = self.tokens.get(token)
            state = self.client.futures.get(known) if known is not None else None
            if anywhere and known is not None and state is not None and state.status == "finished":
                return known, Future(known, self.client)  # at once: others may be letting go of it
            self.tokens[token] = key
        self.sizes[size].add(key)
        return key, None

    async def _note_tokens(self) -> None:
        """Note what is being found out, and forget what is not held any more."""
        while self.hashing:
            key, task = self.hashing.popitem()
            self.tokens[await task] = key
        held = self.client.futures
        if len(self.tokens) > 2 * len(held) + 100:
            self.tokens = {t: k for t, k in self.tokens.items() if k in held}
            for keys in self.sizes.values():
                keys.intersection_update(held)

    async def _put(
        self, puts: dict[Key, Buffer], workers: Any, broadcast: bool | int, timeout: Any
    ) -> dict[Key, dict[str, str]]:
        """Send objects to workers; return when they, and the copies asked for, are there.

        Returns
        -------
        dict
            For each key the workers that could not get a copy, and why.

        Raises
        ------
        UnreachableError
            If the workers cannot be reached from here, or the scheduler has no Hoplite any more.
        """
        client = self.client
        scheduler = client.scheduler
        if isinstance(workers, str | int):
            workers = [workers]
        placing = asyncio.ensure_future(
            scheduler.hoplite_place(
                client=client.id,
                nbytes={key: buffer.nbytes for key, buffer in puts.items()},
                workers=workers,
                broadcast=broadcast,
                timeout=client._timeout if timeout is no_default else timeout,
            )
        )

        async def send(key: Key, worker: str, epoch: int) -> int:
            try:
                async with self.slots:
                    await self._connect(worker)
                    return await push(client.rpc, worker, key, puts[key], epoch)
            except OSError as error:
                raise UnreachableError(f"{worker}: {error}") from error

        sending: list[asyncio.Task[int]] = []
        committing = False
        try:
            placement = await asyncio.shield(placing)
            if placement is not None:
                sending += [asyncio.create_task(send(k, *where)) for k, where in placement.items()]
                nbytes = dict(zip(placement, await asyncio.gather(*sending), strict=True))
                committing = True
                done = await scheduler.hoplite_commit(client=client.id, nbytes=nbytes)
                return dict(done["failed"])
        except BaseException as error:
            for task in sending:
                task.cancel()
            reason = f"{type(error).__name__}: {error}"
            giving_up = self._beside(self._give_up(list(puts), reason, placing, committing))
            if placing.done():
                await asyncio.shield(giving_up)
            raise
        self.uninstall()
        raise UnreachableError("the scheduler has no Hoplite any more")

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
        if placing.cancelled() or placing.exception() is not None:
            return
        await client.scheduler.hoplite_abort(keys=keys, reason=reason)
        if committing:  # they may be ours already, and only the answer has not come
            release = {"op": "client-releases-keys", "keys": keys, "client": client.id}
            client._send_to_scheduler(release)

    async def _connect(self, worker: str) -> None:
        """Make sure that a worker can be reached, and remember if it never can be.

        One that could be reached before is only frozen or gone.
        """
        if worker in self.unreachable:
            raise ConnectionError(f"{worker} cannot be reached from this client")
        try:
            comm = await self.client.rpc.connect(worker, timeout=self.connect_timeout)
        except OSError:
            if worker not in self.reached:
                self.unreachable.add(worker)
            raise
        self.reached.add(worker)
        self.client.rpc.reuse(worker, comm)

    # Gather

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
        asking: Any = _Asking(client, rest)
        response: dict[str, Any] = await self.plain_gather_remote(asking, direct, local_worker)
        if response["status"] == "OK":
            response["data"].update(data)
        return response

    async def _get(self, key: Key, nbytes: int, holders: Collection[str]) -> Any:
        """Get one object, from whichever of its holders."""
        if self.fetch is not None:
            return await self.fetch(key, nbytes)
        buffer: Buffer | None = None

        def begin(layout: Layout, handle: dict[str, Any] | None) -> Buffer:
            nonlocal buffer
            buffer = Buffer(layout) if handle is None else AttachedBuffer(layout, handle)
            return buffer

        error: OSError = ConnectionError(f"{key!r} is held by nobody")
        for worker in holders:
            try:
                async with self.slots:
                    await self._connect(worker)
                    await take(
                        self.client.rpc,
                        worker,
                        key,
                        receiver=self.client.id,
                        buffer=buffer,
                        begin=begin,
                    )
            except OSError as failure:
                error = failure
                continue
            assert buffer is not None
            return await unpack(buffer)
        raise error


class _Asking:
    """A client as Dask's gather sees it, with keys of its own to ask for.

    Those that wait in the client itself are another call's, which will come for them.
    """

    def __init__(self, client: Client, keys: Collection[Key]):
        self._client = client
        self._gather_keys: set[Key] | None = set(keys)
        self._gather_future = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _is_collection(data: Any) -> bool:
    """Whether Dask scatters the items of this, rather than the whole."""
    return type(data) in (list, tuple, set, frozenset) or (
        isinstance(data, tuple) and hasattr(data, "_fields")
    )
