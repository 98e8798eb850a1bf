"""Workers that leave in the middle, in processes and in this one."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import numpy as np
import pytest
from distributed import Client, wait
from distributed.core import Status

from dask_hoplite import Hoplite, ObjectLostError
from dask_hoplite.transfer import pull
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.shared import SharedBuffer
from tests.helpers import array, first_blocks, hoplite_cluster, hosted, plugin, until


@hoplite_cluster()
async def test_losing_scattered_data_fails_all_who_wait_and_names_it(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    [x] = await c.scatter([array()], workers=[a.address], hash=False)
    waiting = c.submit(np.sum, x, workers=[b.address], key="waiting")
    gate = c.submit(lambda: None, workers=["127.0.0.1:1"], allow_other_workers=False, key="gate")
    later = c.submit(lambda x, gate: None, x, gate, key="later")
    done = c.submit(len, x, workers=[a.address], key="done")
    await wait([waiting, done])
    pending = c.submit(np.max, x, gate, key="pending")
    await until(lambda: "pending" in s.tasks)
    for worker in (a, b, *workers):
        if x.key in worker.data:
            await worker.close()
    for future in (x, later, pending):
        with pytest.raises(ObjectLostError, match=r"97\.66 kiB is lost") as caught:
            await future
        assert caught.value.key == x.key
        assert set(caught.value.tried) <= {a.address, b.address}
        assert set(caught.value.tried.values()) <= {"left", "died, or was cut off"}
        assert isinstance(caught.value, CancelledError), "as Dask's own"
    del x, later, pending, waiting, done, gate
    await until(lambda: not s.tasks)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_forgets_tasks_whose_data_are_lost(c, s, a, b):
    await c.register_plugin(Hoplite())
    x = await c.scatter(array(), workers=[a.address], hash=False)
    b.plugins["hoplite"].stall_timeout = 100
    a.plugins["hoplite"].serve = a.handlers["hoplite_pull"] = never
    y = c.submit(np.sum, x, workers=[b.address])
    await until(lambda: b.plugins["hoplite"].puller.incoming)
    await a.close()
    with pytest.raises(ObjectLostError):
        await y
    await until(lambda: not b.state.tasks)
    await until(lambda: not b.plugins["hoplite"].puller.incoming)
    assert not s.workers[b.address].occupancy, "it does not wait for it any more"


async def never(**kwargs):
    await asyncio.Event().wait()


@hoplite_cluster()
async def test_what_was_lost_can_be_scattered_again(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as plain:
        x = await plain.scatter(array(), workers=[a.address])
        await a.close()
        with pytest.raises(ObjectLostError):
            await x
        again = await plain.scatter(array(), workers=[b.address])
        assert again.key == x.key
        assert await plain.submit(np.sum, again) == array().sum(dtype=int)


@hoplite_cluster()
async def test_what_can_be_computed_is_computed_again(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    x = c.submit(array, workers=[a.address], allow_other_workers=True)
    await x
    a.handlers["hoplite_pull"] = never
    y = c.submit(np.sum, x, workers=[b.address])
    await until(lambda: plugin(s).directory.trees)
    await a.close()
    assert await y == array().sum(dtype=int)


@hoplite_cluster()
async def test_losing_small_data_is_left_to_dask(c, s, a, *workers):
    await c.register_plugin(Hoplite())
    x = await c.scatter(1, workers=[a.address], hash=False)
    await a.close()
    with pytest.raises(CancelledError) as caught:
        await x
    assert not isinstance(caught.value, ObjectLostError)


@hoplite_cluster()
async def test_unregistering_puts_the_transition_back(c, s, *workers):
    await c.register_plugin(Hoplite())
    assert "_TRANSITIONS_TABLE" in s.__dict__
    await c.unregister_scheduler_plugin("hoplite")
    assert "_TRANSITIONS_TABLE" not in s.__dict__
    x = hosted(c)
    await wait(x)


def breaks_after(worker, nbytes, then):
    """Let a worker send only the first bytes of anything, and then break the connection."""

    async def serve(comm, key, **kwargs):
        async with worker.plugins["hoplite"].shelf.reading(key) as buffer:
            await comm.write({"status": "OK", "offset": 0, **buffer.layout.to_message()})
            await comm.stream.write(first_blocks(buffer, nbytes))
            then()
            comm.abort()
            return Status.dont_reply

    worker.handlers["hoplite_pull"] = serve


@pytest.mark.parametrize("equal", [True, False])
def test_another_serialisation_is_gone_on_with_if_it_begins_equally(equal, monkeypatch):
    @hoplite_cluster()
    async def test(c, s, a, b, receiver, *workers):
        await c.register_plugin(Hoplite())
        x = hosted(c, 900_000, worker=a.address)
        await x
        value = array(900_000, seed=0 if equal else 1)
        b.update_data({x.key: value}, stimulus_id="test")
        ts = s.tasks[x.key]
        breaks_after(a, 512 * 2**10, lambda: s.add_replica(ts, s.workers[b.address]))
        extension, begun = receiver.plugins["hoplite"], []
        monkeypatch.setattr(
            pull, "make_room", lambda layout, _: begun.append(layout.nbytes) or Buffer(layout)
        )
        assert await extension.acquire({x.key: 900_000}) == {"status": "OK"}
        np.testing.assert_array_equal(receiver.data[x.key], value)
        await until(lambda: "finished" in [row["status"] for row in plugin(s).directory.log()])
        first, second = plugin(s).directory.log()
        assert (first["source"], second["source"]) == (a.address, b.address)
        # The directory knows nothing of serialisations.
        assert second["resumed_from"] == first["received"] == 512 * 2**10
        assert begun == [900_000] if equal else [900_000] * 2

    test()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_what_was_begun_in_shared_memory_and_ended_otherwise(c, s, a, b, *rest):
    """Others must not look for the rest in memory of the process in which it was begun."""
    await c.register_plugin(Hoplite())
    nbytes = 5_000_000
    x = hosted(c, nbytes, worker=a.address)
    await x
    receiver, last = rest
    ts = s.tasks[x.key]
    async with a.plugins["hoplite"].shelf.reading(x.key) as whole:
        partial = SharedBuffer(whole.layout)

    async def begin_only(comm, key, **kwargs):
        partial.write(0, whole.piece(0, 2_000_000))
        partial.advance(2_000_000)
        await comm.write(
            {"status": "OK", "offset": 0, "shared": partial.handle, **whole.layout.to_message()}
        )
        await comm.read()
        await comm.write({"received": 2_000_000})
        b.update_data({x.key: array(nbytes)}, stimulus_id="test")
        s.add_replica(ts, s.workers[b.address])
        comm.abort()
        return Status.dont_reply

    a.handlers["hoplite_pull"] = begin_only
    extension = receiver.plugins["hoplite"]
    assert await extension.acquire({x.key: nbytes}) == {"status": "OK"}
    np.testing.assert_array_equal(receiver.data[x.key], array(nbytes))
    s.remove_replica(ts, s.workers[a.address])
    s.remove_replica(ts, s.workers[b.address])
    s.add_replica(ts, s.workers[receiver.address])
    assert await last.plugins["hoplite"].acquire({x.key: nbytes}) == {"status": "OK"}
    np.testing.assert_array_equal(last.data[x.key], array(nbytes))
