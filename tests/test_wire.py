"""Blocks and their digests: what arrives is what was sent."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from distributed import Security
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_hoplite import Hoplite
from dask_hoplite.exceptions import CorruptedError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import DIGEST, SMALLEST, Layout
from dask_hoplite.transfer.wire import Wire
from tests.helpers import array, hoplite_cluster, hosted, plugin, until

SIZES = [0, 1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 3 * SMALLEST, 5 * SMALLEST + 77]


def layout(*lengths: int) -> Layout:
    return Layout("i", b"", lengths)


def random_frames(rng: random.Random, lengths: list[int]) -> Buffer:
    return Buffer(layout(*lengths), [memoryview(rng.randbytes(n)) for n in lengths])


def on_the_wire(buffer: Buffer, offset: int = 0) -> bytearray:
    wire = Wire(buffer)
    data, position = bytearray(), wire.position(offset)
    while position < wire.nbytes:
        for piece in wire.sealed(position, wire.nbytes):
            data += piece
            position += len(piece)
    return data


def content(buffer: Buffer) -> bytes:
    return b"".join(buffer.frames)


def test_sizes_of_blocks():
    kib = {0: 16, 1: 16, 2**20: 16, 2**24: 32, 2**25: 32, 2**27: 64, 2**30: 256, 2**40: 256}
    assert {nbytes: layout(nbytes).block // 2**10 for nbytes in kib} == kib


@pytest.mark.parametrize("nbytes", SIZES)
def test_lengths_of_streams(nbytes):
    whole = random_frames(random.Random(0), [nbytes])
    wire = Wire(whole)
    assert wire.position(0) == 0
    assert wire.position(nbytes) == wire.nbytes == len(on_the_wire(whole))
    for offset in range(0, nbytes, SMALLEST):
        assert wire.position(offset) == offset // SMALLEST * (SMALLEST + DIGEST)
        assert wire.offset(wire.position(offset)) == offset
        assert whole.layout.stream_length(offset) == len(on_the_wire(whole, offset))
        assert wire.offset(wire.position(offset) + SMALLEST + DIGEST - 1) in (offset, nbytes)


@settings(deadline=None)
@given(
    lengths=st.lists(st.sampled_from([*SIZES, 3, 100]), max_size=8),
    seed=st.integers(0, 1000),
    most=st.integers(1, 3 * SMALLEST),
)
def test_whatever_comes_at_a_time_is_put_in_its_place(lengths, seed, most):
    rng = random.Random(seed)
    source = random_frames(rng, lengths)
    data = memoryview(on_the_wire(source))
    target = Buffer(source.layout)
    wire = Wire(target)
    position = 0
    while position < wire.nbytes:
        came = data[position : position + rng.randint(1, most)]
        wire.put(position, came)
        position += len(came)
        wire.check(position)
        assert target.received == wire.offset(position)
        assert target.arrived == max(position, target.received)
    assert target.complete
    assert content(target) == content(source)
    assert on_the_wire(target) == data, "a relay passes on what came"


def test_very_many_frames():
    source = random_frames(random.Random(0), [1] * 3 * SMALLEST)
    target = Buffer(source.layout)
    wire = Wire(target)
    wire.put(0, memoryview(on_the_wire(source)))
    wire.check(wire.nbytes)
    assert content(target) == content(source)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_one_wrong_bit_is_found(seed):
    rng = random.Random(seed)
    source = random_frames(rng, [1000, 2 * SMALLEST, 500])
    data = on_the_wire(source)
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    target = Buffer(source.layout)
    wire = Wire(target)
    wire.put(0, memoryview(data))
    with pytest.raises(CorruptedError, match="not those that were sent"):
        wire.check(wire.nbytes)
    begin = bit // 8 // (SMALLEST + DIGEST) * SMALLEST
    assert target.received == begin, "what came before it is kept"
    wire.put(wire.position(begin), memoryview(on_the_wire(source, begin)))
    wire.check(wire.nbytes)
    assert content(target) == content(source)


def test_blocks_in_each_others_place_are_found():
    source = random_frames(random.Random(0), [2 * SMALLEST])
    data = on_the_wire(source)
    unit = SMALLEST + DIGEST
    target = Buffer(source.layout)
    wire = Wire(target)
    wire.put(0, memoryview(data[unit:] + data[:unit]))
    with pytest.raises(CorruptedError):
        wire.check(wire.nbytes)


def flips(worker, times: int):
    """Let a worker damage a byte of what it sends, in its own memory, some times."""
    extension = worker.plugins["hoplite"]
    plain, left = worker.handlers["hoplite_pull"], times

    async def serve(comm, key, **kwargs):
        nonlocal left
        async with extension.shelf.reading(key) as buffer:
            on_the_wire(buffer)  # its digests are there
            where = buffer.piece(buffer.nbytes // 2, buffer.nbytes // 2 + 1)
            where = np.frombuffer(where, dtype="u1")
            where.flags.writeable = True
            left -= 1
            if left < 0:
                return await plain(comm, key=key, **kwargs)
            where ^= 1
            try:
                return await plain(comm, key=key, **kwargs)
            finally:
                where ^= 1

    worker.handlers["hoplite_pull"] = serve


@pytest.mark.parametrize("security", [None, Security.temporary()], ids=["tcp", "tls"])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_relay_that_damages_bytes(times, security):
    """Damage on the way is mended by asking again, and damage at a source by asking another one."""

    address = "tls://127.0.0.1" if security else "127.0.0.1"

    @hoplite_cluster(nthreads=[(address, 1)] * 3, security=security)
    async def test(c, s, a, b, receiver):
        await c.register_plugin(Hoplite())
        x = hosted(c, 900_000, worker=a.address)
        await x
        ts = s.tasks[x.key]
        extension = receiver.plugins["hoplite"]
        flips(a, times)
        damage, begun, both = a.handlers["hoplite_pull"], asyncio.Event(), asyncio.Event()

        async def serve(comm, **kwargs):
            begun.set()
            await both.wait()  # or it may be asked for the last time before there is another one
            return await damage(comm, **kwargs)

        a.handlers["hoplite_pull"] = serve
        asked = asyncio.create_task(extension.acquire({x.key: 900_000}))
        await begun.wait()
        b.update_data({x.key: array(900_000)}, stimulus_id="test")
        s.add_replica(ts, s.workers[b.address])
        both.set()
        assert await asked == {"status": "OK"}
        np.testing.assert_array_equal(receiver.data[x.key], array(900_000))
        await until(lambda: "finished" in [row["status"] for row in plugin(s).directory.log()])
        *failed, last = plugin(s).directory.log()
        if times == 1:
            assert not failed
        else:
            assert "not those that were sent" in failed[-1]["status"]
            assert 0 < last["resumed_from"] <= 450_000

    test()
