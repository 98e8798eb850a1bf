"""What objects a client holds, by what is in them."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from typing import Any

from dask.sizeof import sizeof
from dask.tokenize import tokenize
from distributed import Client, Future
from distributed.utils import offload

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.shelf import OFFLOAD


class Contents:
    """Names objects, and knows those again that are held."""

    def __init__(self) -> None:
        #: The key under which a content is held, by its token
        self.tokens: dict[str, Key] = {}
        self.hashing: dict[Key, asyncio.Future[str]] = {}
        self.sizes: defaultdict[int, set[Key]] = defaultdict(set)

    async def name(
        self, client: Client, value: Any, hash: bool, anywhere: bool
    ) -> tuple[Key, Future | None]:
        """A key for an object; and its future, if the client holds it and it may be anywhere."""
        key = f"{type(value).__name__}-{uuid.uuid4().hex}"
        if not hash:
            return key, None
        size = sizeof(value)
        if size > OFFLOAD and not any(known in client.futures for known in self.sizes[size]):
            # It can be none that we hold. What it is can be found out while it is sent.
            self.hashing[key] = asyncio.ensure_future(offload(tokenize, value))
        else:
            await self.note(client)
            token = await offload(tokenize, value) if size > OFFLOAD else tokenize(value)
            known = self.tokens.get(token)
            state = client.futures.get(known) if known is not None else None
            if anywhere and known is not None and state is not None and state.status == "finished":
                return known, Future(known, client)  # at once: others may be letting go of it
            self.tokens[token] = key
        self.sizes[size].add(key)
        return key, None

    async def note(self, client: Client) -> None:
        """Note what is being found out, and forget what is not held any more."""
        while self.hashing:
            key, task = self.hashing.popitem()
            self.tokens[await task] = key
        held = client.futures
        if len(self.tokens) > 2 * len(held) + 100:
            self.tokens = {t: k for t, k in self.tokens.items() if k in held}
            for keys in self.sizes.values():
                keys.intersection_update(held)
