"""Unchanged Dask programs: dependencies, scatter, replicate, gather, the memory manager."""

from __future__ import annotations

import asyncio
import operator
from collections import namedtuple

import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed import Client, LocalCluster, wait
from distributed.core import Status
from distributed.utils_test import gen_cluster, gen_test

import dask_hoplite as hoplite
from dask_hoplite import Hoplite
from dask_hoplite.client import extension as extension_of
from dask_hoplite.exceptions import TransferError
from dask_hoplite.transfer import pull, push, shared
from tests.helpers import array, hoplite_cluster, hosted, plugin, until


def finished(s, key=None):
    rows = plugin(s).directory.log()
    return [r for r in rows if r["status"] == "finished" and key in (None, r["key"])]


async def on_each(client, future, workers):
    futures = [client.submit(np.sum, future, workers=[w.address], pure=False) for w in workers]
    return await client.gather(futures)


@hoplite_cluster()
async def test_task_dependencies(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=workers[0].address)
    assert await on_each(c, x, workers) == [array().sum(dtype=int)] * 4
    await until(lambda: len(finished(s)) == 3)
    rows = finished(s, x.key)
    assert {r["receiver"] for r in rows} == {w.address for w in workers[1:]}
    assert len({r["source"] for r in rows}) == 3, "a chain: every source feeds one receiver"
    await until(lambda: all(w.transfer_incoming_log for w in workers[1:]))
    assert not any(w.plugins["hoplite"].puller.incoming for w in workers)
    del x
    await until(lambda: not plugin(s).directory.trees)
    await until(lambda: not any(w.plugins["hoplite"].shelf.entries for w in workers))


@hoplite_cluster()
async def test_performance_metrics(c, s, a, b, *others):
    """What Dask publishes on transfers of its own, it publishes on ours."""
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await on_each(c, x, [b])
    for label in ("serialize", "network"):
        await until(lambda label=label: ("get-data", label, "seconds") in a.digests_total)
    assert ("gather-dep", "network", "seconds") in b.digests_total


@hoplite_cluster()
async def test_second_request_joins_the_first(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, 10_000_000, worker=workers[0].address)
    await x
    extension = workers[1].plugins["hoplite"]
    nbytes = {x.key: 10_000_000}
    answers = await asyncio.gather(
        *(extension.acquire(nbytes) for _ in range(3)),
        on_each(c, x, [workers[1]] * 3),
    )
    assert answers[:3] == [{"status": "OK"}] * 3
    await until(lambda: finished(s, x.key))
    assert len(finished(s, x.key)) == 1
    assert plugin(s).directory.bytes_in[workers[1].address] == x_wire(10_000_000)


def x_wire(n):
    return n  # one frame: an array's memory and nothing else


@hoplite_cluster()
async def test_a_task_brings_the_source_of_its_dependency(c, s, *workers):
    await c.register_plugin(Hoplite())
    asked = []
    s.handlers["hoplite_tell"] = asked.append
    serve = workers[0].handlers["hoplite_pull"]

    async def serve_when_all_have_come(comm, key, **how):
        await until(lambda: len(plugin(s).directory.trees[key].transfers) == 3)
        return await serve(comm, key=key, **how)

    workers[0].handlers["hoplite_pull"] = serve_when_all_have_come
    for seed in range(2):  # tasks come in order of submission, and so do the links of the chain
        x = hosted(c, worker=workers[0].address, seed=seed)
        await x
        assert await on_each(c, x, workers) == [array(seed=seed).sum(dtype=int)] * 4
        await until(lambda key=x.key: len(finished(s, key)) == 3)
        rows = sorted(finished(s, x.key), key=lambda row: row["start"])
        assert [r["receiver"] for r in rows] == [w.address for w in workers[1:]]
        assert [r["source"] for r in rows] == [w.address for w in workers[:3]]
    assert not asked
    tasks = [ts for worker in workers for ts in worker.state.tasks.values()]
    assert not any("hoplite" in (ts.annotations or {}) for ts in tasks)


@hoplite_cluster()
async def test_a_source_that_is_brought_too_early_is_declined(c, s, a, b, *workers):
    """It is Dask that decides when a worker fetches."""
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await x
    b.status = Status.paused
    await until(lambda: s.workers[b.address].status == Status.paused)
    ws = s.workers[b.address]
    ws.status = Status.running  # as long as word is on its way
    s.running.add(ws)
    y = c.submit(np.sum, x, workers=[b.address])
    await until(lambda: "declined" in [r["status"] for r in plugin(s).directory.log()])
    assert not plugin(s).directory.trees
    b.status = Status.running
    assert await y == array().sum(dtype=int)


@hoplite_cluster()
async def test_large_and_small_keys_in_one_request(c, s, *workers):
    await c.register_plugin(Hoplite())
    large = [hosted(c, worker=workers[0].address, seed=i) for i in range(3)]
    small = [c.submit(operator.add, i, 1, workers=[workers[0].address]) for i in range(3)]
    total = c.submit(
        lambda *xs: sum(int(np.sum(x)) for x in xs), *large, *small, workers=[workers[1].address]
    )
    assert await total == sum(int(array(seed=i).sum(dtype=int)) for i in range(3)) + 6
    await until(lambda: len(finished(s)) == 3)


@hoplite_cluster()
async def test_actors_are_left_to_dask(c, s, *workers):
    class Counter:
        n = 0

        def __sizeof__(self):
            return 10_000

        def increment(self):
            self.n += 1
            return self.n

    await c.register_plugin(Hoplite())
    actor = await c.submit(Counter, actor=True, workers=[workers[0].address])

    def use(counter):
        return counter.increment().result()

    assert await c.submit(use, actor, workers=[workers[1].address]) == 1
    assert await actor.increment() == 2


@hoplite_cluster()
async def test_small_objects_take_dasks_own_path(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = c.submit(operator.add, 1, 1, workers=[workers[0].address])
    await on_each(c, x, workers)
    [y] = await c.scatter([1])
    assert await c.gather([x, y]) == [2, 1]
    assert not plugin(s).directory.log()


@hoplite_cluster()
@pytest.mark.parametrize("direct", [None, True, False])
async def test_scatter_forms(c, s, *workers, direct):
    await c.register_plugin(Hoplite())
    a, b = array(seed=1), array(seed=2)
    Pair = namedtuple("Pair", "first second")
    for data in ([a, b], (a, b), {"a": a, "b": b}, {"c": 1, "d": a}, Pair(a, 1), [a, 1, b], [1, 2]):
        futures = await c.scatter(data, direct=direct)
        assert type(futures) is type(data)
        values = await c.gather(futures)
        for got, given in zip(
            values.values() if type(data) is dict else values,
            data.values() if type(data) is dict else data,
            strict=True,
        ):
            assert np.array_equal(got, given)
        if type(data) is dict:
            assert {f.key for f in futures.values()} == set(data)
        del futures
    one = await c.scatter(a, direct=direct)
    assert np.array_equal(await one, a)
    [x] = await c.scatter([a], workers=[workers[2].address])
    assert set((await c.who_has(x))[x.key]) == {workers[2].address}
    [x] = await c.scatter([a + 1], workers=workers[3].address)
    assert set((await c.who_has(x))[x.key]) == {workers[3].address}


@hoplite_cluster()
@pytest.mark.parametrize("registered", [True, False])
async def test_size_of_what_was_scattered(c, s, *workers, registered):
    """Dask counts bytes in memory, not those that were sent."""
    await c.register_plugin(Hoplite())
    value = list(range(1000))
    async with Client(s.address, asynchronous=True) as other:
        futures = await (c if registered else other).scatter({"x": value}, broadcast=True)
        assert s.get_nbytes(summary=False) == dict.fromkeys(futures, sizeof(value))
        assert [ws.nbytes for ws in s.workers.values()] == [sizeof(value)] * 4


@hoplite_cluster()
@pytest.mark.parametrize("together", [True, False])
async def test_scatter_spreads_evenly(c, s, *workers, together):
    """However much memory the workers' processes use for other things."""
    await c.register_plugin(Hoplite())
    chunks = [array(seed=seed) for seed in range(8)]
    futures = await c.scatter(chunks) if together else [await c.scatter(chunk) for chunk in chunks]
    await until(lambda: [len(w.data) for w in workers] == [2] * 4)
    assert len({future.key for future in futures}) == 8


@hoplite_cluster()
async def test_scatter_hash(c, s, *workers):
    await c.register_plugin(Hoplite())
    [x], [y] = await c.scatter([array()]), await c.scatter([array()])
    assert x.key == y.key, "the same content, still held: no byte moves"
    await until(lambda: len(finished(s)) == 1)
    [y] = await c.scatter([array()], broadcast=True)
    assert x.key == y.key
    assert len(s.tasks[x.key].who_has) == 4
    [y] = await c.scatter([array()], workers=[workers[2].address])
    assert {ws.address for ws in s.tasks[y.key].who_has} == {workers[2].address}
    [z] = await c.scatter([array()], hash=False)
    assert z.key != x.key
    del x, y
    await until(lambda: len(s.tasks) == 1)
    [x] = await c.scatter([array()])
    assert np.array_equal(await x, array())


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_that_is_cancelled_leaves_nothing(c, s, a, b):
    await c.register_plugin(Hoplite())
    go_on = asyncio.Event()

    async def acquire(**message):
        await go_on.wait()
        return {"status": "OK"}

    for worker in (a, b):
        worker.handlers["hoplite_acquire"] = acquire
    scattering = asyncio.create_task(c.scatter(array(), broadcast=True))
    await until(lambda: s.tasks)  # Dask has it by now, and we have no future yet
    scattering.cancel()
    await asyncio.wait({scattering})
    await until(lambda: not s.tasks)
    go_on.set()
    await until(lambda: not plugin(s).puts.pending and not plugin(s).wishes)
    await until(lambda: not a.data and not b.data)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_that_is_cancelled_while_it_is_placed_leaves_nothing(c, s, a, b):
    await c.register_plugin(Hoplite())
    asked, go_on = asyncio.Event(), asyncio.Event()
    plain_place = s.handlers["hoplite_place"]

    async def place(**message):
        asked.set()
        await go_on.wait()
        return await plain_place(**message)

    s.handlers["hoplite_place"] = place
    scattering = asyncio.create_task(c.scatter(array(), broadcast=True))
    await asked.wait()
    scattering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scattering
    extension = await extension_of(c)
    assert extension.giving_up
    go_on.set()
    await until(lambda: not extension.giving_up)
    assert not plugin(s).puts.pending and not s.tasks
    await until(lambda: not any(w.plugins["hoplite"].arrivals.expected for w in (a, b)))
    await until(lambda: not plugin(s).directory.trees and not a.data and not b.data)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_scatter_after_its_client_was_closed(c, s, a):
    await c.register_plugin(Hoplite())
    asked, never = asyncio.Event(), asyncio.Event()

    async def accept(comm, **message):
        asked.set()
        await never.wait()

    a.handlers["hoplite_push"] = accept
    async with Client(s.address, asynchronous=True) as other:
        await other.register_plugin(Hoplite())
        scattering = asyncio.create_task(other.scatter(array()))
        await asked.wait()
    scattering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scattering
    await until(lambda: not plugin(s).puts.pending)
    never.set()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_that_is_given_up_leaves_no_copies(c, s, a, b):
    """A copy is complete when its object is given up, but its worker has not said so yet."""
    await c.register_plugin(Hoplite())
    copied, go_on = asyncio.Event(), asyncio.Event()

    def pause(acquire):
        async def acquire_and_pause(**message):
            answer = await acquire(**message)
            copied.set()
            await go_on.wait()
            return answer

        return acquire_and_pause

    for worker in (a, b):
        worker.handlers["hoplite_acquire"] = pause(worker.handlers["hoplite_acquire"])
    hold = asyncio.Event()
    plain_commit = s.handlers["hoplite_commit"]

    async def commit(**message):
        await hold.wait()
        return await plain_commit(**message)

    s.handlers["hoplite_commit"] = commit
    scattering = asyncio.create_task(c.scatter(array(), broadcast=True))
    await copied.wait()
    assert a.data and b.data
    scattering.cancel()
    await asyncio.wait({scattering})
    go_on.set()
    await until(lambda: not a.data and not b.data)
    hold.set()
    assert not plugin(s).puts.pending and not s.tasks


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_by_the_scheduler_that_is_cancelled_leaves_nothing(c, s, a, b):
    """As it would keep what nobody has a future for."""
    await c.register_plugin(Hoplite())
    extension = await extension_of(c)
    asked, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    plain_scatter = s.handlers["scatter"]

    async def scatter(**message):
        asked.set()
        await go_on.wait()
        answer = await plain_scatter(**message)
        assert s.tasks
        done.set()
        return answer

    s.handlers["scatter"] = scatter
    scattering = asyncio.create_task(c.scatter(1, broadcast=True))
    await asked.wait()
    scattering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scattering
    go_on.set()
    await done.wait()
    await until(lambda: not s.tasks and not a.data and not b.data)
    assert not c.futures and not plugin(s).wishes and not plugin(s).puts.pending
    await until(lambda: not extension.giving_up)


@pytest.mark.parametrize("registered", [True, False])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_of_several_sends_again_what_was_lost_meanwhile(c, s, a, b, registered):
    await c.register_plugin(Hoplite())
    puts, pushed = plugin(s).puts, []
    plain_commit = puts.commit

    async def commit(client, nbytes):
        if b.address in s.workers:
            await s.remove_worker(b.address, stimulus_id="test")
            done = await plain_commit(client, nbytes)
            [lost] = [key for key in nbytes if puts.pending[key].root == b.address]
            assert done["lost"] == {lost: b.address} and not s.tasks
            return done
        return await plain_commit(client, nbytes)

    puts.commit = s.handlers["hoplite_commit"] = commit
    plain_accept = a.handlers["hoplite_push"]

    async def accept(comm, key, **message):
        pushed.append(key)
        return await plain_accept(comm, key=key, **message)

    a.handlers["hoplite_push"] = accept
    async with Client(s.address, asynchronous=True) as other:
        futures = await (c if registered else other).scatter([array(), array(seed=1)])
        assert sorted(pushed) == sorted(future.key for future in futures), "each once"
        for seed, future in enumerate(futures):
            assert np.array_equal(await future, array(seed=seed))
        assert not puts.pending


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("when", ["in the middle", "before it is known"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_scatter_whose_workers_leave_one_after_the_other(c, s, *workers, when, registered):
    await c.register_plugin(Hoplite())
    puts, left = plugin(s).puts, []
    plain_commit = puts.commit

    async def leave(worker):
        left.append(worker.address)
        await s.remove_worker(worker.address, stimulus_id="test")

    async def commit(client, nbytes):
        for key in nbytes:
            await leave(s.workers[puts.pending[key].root])
        return await plain_commit(client, nbytes)

    def take_part(worker):
        async def accept(comm, layout, **message):
            await comm.write({"status": "OK", "share": False})
            await comm.stream.read_bytes(10_000)
            await leave(worker)
            comm.abort()
            return Status.dont_reply

        return accept

    if when == "before it is known":
        puts.commit = s.handlers["hoplite_commit"] = commit
    else:
        for worker in workers:
            worker.handlers["hoplite_push"] = take_part(worker)
    async with Client(s.address, asynchronous=True) as other:
        with pytest.raises(TransferError, match="'x': could not be sent to any") as caught:
            await (c if registered else other).scatter({"x": array()})
        assert caught.value.key == "x" and len(left) == 3
        assert list(caught.value.tried) == left
        assert all(caught.value.tried.values())
        await until(lambda: not plugin(s).directory.trees)
        assert not puts.pending and not s.tasks
        assert not any(w.data for w in workers if w.address in s.workers)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_scatter_to_named_workers_that_leave(c, s, a, b, bystander):
    await c.register_plugin(Hoplite())
    never = asyncio.Event()

    def leave(worker):
        async def accept(comm, **message):
            await s.remove_worker(worker.address, stimulus_id="test")
            comm.abort()
            await never.wait()

        return accept

    plain_accept = b.handlers["hoplite_push"]
    for worker in (a, b):
        worker.handlers["hoplite_push"] = leave(worker)
    with pytest.raises(TransferError, match=r"sent again: none of the workers .* there") as caught:
        await c.scatter(array(), workers=[a.address])
    assert set(caught.value.tried) == {a.address}
    b.handlers["hoplite_push"] = plain_accept
    never.set()
    x = await c.scatter(array(), workers=[b.address], broadcast=True)
    assert s.tasks[x.key].who_has == {s.workers[b.address]}
    assert not plugin(s).puts.pending


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("how", ["frozen", "killed"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_passes_over_a_worker_that_does_not_answer(c, s, *workers, registered, how):
    await c.register_plugin(Hoplite())
    asked, never = [], asyncio.Event()

    def expect(worker, plain):
        async def expect_or_not(comm, **message):
            asked.append(worker)
            if asked[0] is not worker:
                return await plain(**message)
            if how == "killed":
                comm.abort()
            return await never.wait()

        return expect_or_not

    for worker in workers:
        worker.handlers["hoplite_expect"] = expect(worker, worker.handlers["hoplite_expect"])
    async with Client(s.address, asynchronous=True) as other:
        x = await (c if registered else other).scatter(array())
        assert len(asked) == 2
        assert s.tasks[x.key].who_has == {s.workers[asked[1].address]}
        assert not asked[0].data and not plugin(s).puts.pending
        never.set()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_scatter_by_the_scheduler_passes_over_a_worker_that_leaves(c, s, *workers):
    await c.register_plugin(Hoplite())
    pushed = []

    def take(worker, plain):
        async def take_or_leave(comm, **message):
            pushed.append(worker)
            if len(pushed) == 1:
                await s.remove_worker(worker.address, stimulus_id="test")
                comm.abort()
                return Status.dont_reply
            return await plain(comm, **message)

        return take_or_leave

    for worker in workers:
        worker.handlers["hoplite_push"] = take(worker, worker.handlers["hoplite_push"])
    async with Client(s.address, asynchronous=True) as other:
        x = await other.scatter(array())
        assert len(pushed) == 2
        assert np.array_equal(await x, array())


@hoplite_cluster()
async def test_scatter_again_right_after_release(c, s, *workers):
    await c.register_plugin(Hoplite())
    expected = array().sum(dtype=int)
    for _ in range(50):
        [x] = await c.scatter([array()], broadcast=True)
        assert await c.submit(np.sum, x, pure=False) == expected
        del x


@hoplite_cluster()
@pytest.mark.parametrize("registered", [True, False])
async def test_scatter_broadcast(c, s, *workers, registered):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as plain:
        client = c if registered else plain
        x = await client.scatter(array(), broadcast=True)
        assert len(s.tasks[x.key].who_has) == 4
        [y] = await client.scatter([array(seed=1)], broadcast=2)
        assert len(s.tasks[y.key].who_has) == 2
        chosen = [w.address for w in workers[:2]]
        z = await client.scatter(array(seed=2), broadcast=True, workers=chosen)
        assert {ws.address for ws in s.tasks[z.key].who_has} == set(chosen)
        for _ in range(3):
            s.extensions["amm"].run_once()
        assert [len(s.tasks[f.key].who_has) for f in (x, y, z)] == [4, 2, 2]
        assert np.array_equal(await x, array())
        await until(lambda: len(finished(s)) == 4 + 2 + 2)  # each a push, and pulls
        assert len({r["source"] for r in finished(s, x.key)}) == 4
        del x, y, z
        await until(lambda: not s.tasks and not any(w.data for w in workers))
        assert not plugin(s).wishes and not plugin(s).puts.pending
        assert not plugin(s).directory.trees


@hoplite_cluster()
async def test_memory_manager_runs_for_all_other_keys(c, s, *workers):
    await c.register_plugin(Hoplite())
    pinned = await hoplite.broadcast(array(), client=c)
    other = hosted(c, worker=workers[0].address, seed=1)
    await on_each(c, other, workers)
    await until(lambda: len(s.tasks[other.key].who_has) == 4)
    s.extensions["amm"].run_once()
    await until(lambda: len(s.tasks[other.key].who_has) == 1)
    assert len(s.tasks[pinned.key].who_has) == 4


@hoplite_cluster()
async def test_replicate(c, s, *workers):
    await c.register_plugin(Hoplite())
    x, y = hosted(c, seed=1), hosted(c, seed=2)
    tiny = c.submit(operator.add, 1, 2)
    await c.replicate([x, tiny])
    assert len(s.tasks[x.key].who_has) == len(s.tasks[tiny.key].who_has) == 4
    s.extensions["amm"].run_once()
    assert len(s.tasks[x.key].who_has) == 4
    await c.replicate(x, n=2)
    assert len(s.tasks[x.key].who_has) == 2
    await c.replicate(y, workers=[workers[1].address, workers[2].address])
    assert {workers[1].address, workers[2].address} <= {ws.address for ws in s.tasks[y.key].who_has}
    with pytest.raises(ValueError, match="replicate to delete"):
        await c.replicate(x, n=0)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("call", ["replicate", "broadcast"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_copies_pass_over_a_worker_that_leaves(c, s, a, b, leaver, size, call):
    await c.register_plugin(Hoplite())
    x = hosted(c, size, worker=a.address)
    await x

    async def leave(comm, **message):
        await s.remove_worker(leaver.address, stimulus_id="test")
        comm.abort()
        return Status.dont_reply

    leaver.handlers["gather"] = leaver.handlers["hoplite_acquire"] = leave
    copying = c.replicate(x) if call == "replicate" else hoplite.broadcast(x, client=c)
    await asyncio.wait_for(copying, 10)
    assert {ws.address for ws in s.tasks[x.key].who_has} == {a.address, b.address}


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_replicate_to_fewer(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [hosted(c, size) for size in (10, 100_000)]
    await c.replicate(futures)
    assert [len(s.tasks[x.key].who_has) for x in futures] == [3, 3]
    await c.replicate(futures, n=2)
    assert [len(s.tasks[x.key].who_has) for x in futures] == [2, 2]
    await until(lambda: sum(x.key in w.data for w in workers for x in futures) == 4)


@hoplite_cluster()
async def test_rebalance(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [hosted(c, worker=workers[0].address, seed=i) for i in range(8)]
    await wait(futures)
    await c.rebalance(futures)
    assert [int(np.sum(x)) for x in await c.gather(futures)] == [
        int(array(seed=i).sum(dtype=int)) for i in range(8)
    ]


@hoplite_cluster()
async def test_retire_worker_hands_over(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=workers[0].address)
    await x
    await c.retire_workers([workers[0].address])
    assert np.array_equal(await x, array())
    await until(lambda: finished(s, x.key))


@hoplite_cluster()
async def test_gather(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [hosted(c, worker=w.address, seed=i) for i, w in enumerate(workers)]
    tiny = c.submit(operator.add, 1, 2)
    await wait([*futures, tiny])
    served = [w.transfer_outgoing_count_total for w in workers]
    values = await hoplite.gather({"large": futures, "small": (tiny,)}, client=c)
    for i, value in enumerate(values["large"]):
        assert np.array_equal(value, array(seed=i))
    assert values["small"] == (3,)
    assert all(w.transfer_outgoing_count_total > n for w, n in zip(workers, served, strict=True))


@hoplite_cluster()
async def test_gather_that_is_left_to_dask_takes_no_keys_of_others(c, s, *workers):
    await c.register_plugin(Hoplite())
    extension = await extension_of(c)
    x, y = hosted(c, seed=1), hosted(c, seed=2)
    await wait([x, y])
    slots = c._gather_semaphore
    taken = 0
    others = []

    async def release():
        await until(lambda: len(slots._waiters) == 2)
        for _ in range(taken):
            slots.release()

    async def fail(*args):
        nonlocal taken
        while not slots.locked():
            await slots.acquire()
            taken += 1
        extension._get = plain_get
        others.append(asyncio.create_task(c.gather(y)))
        await until(lambda: c._gather_keys == {y.key})  # it waits for its turn
        others.append(asyncio.create_task(release()))
        raise OSError("out of reach")

    plain_get, extension._get = extension._get, fail
    assert np.array_equal(await c.gather(x), array(seed=1))
    assert np.array_equal(await others[0], array(seed=2))


@hoplite_cluster()
async def test_gather_of_errors(c, s, *workers):
    await c.register_plugin(Hoplite())

    def fail():
        raise ZeroDivisionError("on purpose")

    bad = c.submit(fail)
    good = hosted(c)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await c.gather([good, bad])
    [value] = await c.gather([good, bad], errors="skip")
    assert np.array_equal(value, array())


@hoplite_cluster()
async def test_inside_tasks(c, s, *workers):
    from distributed import get_client, worker_client

    await c.register_plugin(Hoplite())
    x = hosted(c, worker=workers[0].address)

    def use(future_key):
        with worker_client() as client:
            [y] = client.scatter([array(seed=5)])
            z = client.submit(lambda a, b: int(np.sum(a)) + int(np.sum(b)), y, array(seed=6))
            return z.result()

    def collective():
        client = get_client()
        future = hoplite.broadcast(array(seed=7))
        total = client.submit(np.sum, future, pure=False).result()
        [y] = hoplite.scatter([array(seed=8)])
        return int(total) + int(hoplite.gather(y).sum(dtype=int))

    expected = sum(int(array(seed=i).sum(dtype=int)) for i in (5, 6))
    assert await c.submit(use, x.key, workers=[workers[1].address]) == expected
    expected = sum(int(array(seed=i).sum(dtype=int)) for i in (7, 8))
    assert await c.submit(collective, workers=[workers[1].address]) == expected


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)] * 2,
    config={"hoplite.min-size": 1000},
    worker_kwargs={"memory_limit": "2 GiB"},
)
async def test_spilled_source(c, s, a, b):
    await c.register_plugin(Hoplite())
    x = hosted(c, 100_000, worker=a.address)
    await x
    a.data.evict()
    assert x.key in a.data.slow
    assert await c.submit(np.sum, x, workers=[b.address]) == array().sum(dtype=int)
    await until(lambda: finished(s, x.key))


@gen_test()
async def test_inproc_is_left_to_dask():
    async with (
        LocalCluster(
            n_workers=2,
            processes=False,
            protocol="inproc://",
            asynchronous=True,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await c.wait_for_workers(2)
        await c.register_plugin(Hoplite(min_size=1000))
        x = await c.scatter(array(), broadcast=True)
        assert np.array_equal(await x, array())
        addresses = list(cluster.scheduler.workers)
        y = hosted(c, worker=addresses[0])
        total = c.submit(np.sum, y, workers=[addresses[1]])
        assert await total == array().sum(dtype=int)
        assert not await hoplite.transfers(client=c)


@gen_test()
async def test_other_transports_use_messages(monkeypatch):
    monkeypatch.setattr(shared, "affinity", lambda: "")
    monkeypatch.setattr(pull, "affinity", lambda: "")
    monkeypatch.setattr(push, "affinity", lambda: "")
    async with (
        LocalCluster(
            n_workers=3,
            processes=False,
            protocol="ws://",
            asynchronous=True,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await c.wait_for_workers(3)
        await c.register_plugin(Hoplite(min_size=1000))
        x = await c.scatter(array(20_000_000), broadcast=True)
        assert len(cluster.scheduler.tasks[x.key].who_has) == 3
        s = cluster.scheduler
        await until(lambda: len(finished(s)) == 3)
        rows = await hoplite.transfers(client=c)
        assert {(r["path"], r["status"]) for r in rows} == {("ws messages", "finished")}
        assert {r["received"] for r in rows} == {20_000_000}
        assert np.array_equal(await x, array(20_000_000))


QUICK = {"hoplite.min-size": 1000, "hoplite.push-timeout": "300ms"}


@hoplite_cluster(nthreads=[("127.0.0.1", 1)], config=QUICK)
async def test_an_object_is_expected_for_as_long_as_others_are_sent_first(c, s, a):
    await c.register_plugin(Hoplite())
    (await extension_of(c)).slots = asyncio.Semaphore(1)
    plain_accept, asked, go_on = a.handlers["hoplite_push"], [], asyncio.Event()
    plain_comes = s.handlers["hoplite_comes"]

    async def accept(comm, **message):
        while not go_on.is_set():
            await comm.write({"status": "wait"})
            await asyncio.sleep(0.01)
        return await plain_accept(comm, **message)

    async def comes(key, epoch):
        asked.append(key)
        return await plain_comes(key, epoch)

    a.handlers["hoplite_push"], s.handlers["hoplite_comes"] = accept, comes
    scattering = asyncio.create_task(c.scatter({"x": array(), "y": array(seed=1)}))
    await until(lambda: asked.count("y") == 2)
    go_on.set()
    futures = await scattering
    for seed, future in enumerate(futures.values()):
        assert np.array_equal(await future, array(seed=seed))
    await until(lambda: len(plugin(s).directory.log()) == 2)
    assert {row["status"] for row in plugin(s).directory.log()} == {"finished"}


@hoplite_cluster(nthreads=[("127.0.0.1", 1)], config=QUICK)
async def test_an_object_that_nobody_sends_is_expected_no_longer(c, s, a):
    await c.register_plugin(Hoplite())
    extension = a.plugins["hoplite"]
    await extension.arrivals.expect("x", 1, False)
    reading = asyncio.create_task(read(extension.shelf, "x"))
    with pytest.raises(ConnectionError, match="did not come"):
        await reading
    assert not extension.arrivals.expected and not extension.shelf.entries


async def read(shelf, key):
    async with shelf.reading(key) as buffer:
        return buffer


@pytest.mark.parametrize("direct", [True, False])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)], config=QUICK)
async def test_a_push_that_waits_for_room_is_not_taken_to_be_stuck(c, s, a, direct):
    await c.register_plugin(Hoplite())
    extension, words, pushes = a.plugins["hoplite"], [], []
    plain_accept = a.handlers["hoplite_push"]

    async def accept(comm, **message):
        plain_write = comm.write

        async def write(message, **kwargs):
            words.append(message["status"])
            return await plain_write(message, **kwargs)

        pushes.append(comm)
        comm.write = write
        return await plain_accept(comm, **message)

    a.handlers["hoplite_push"] = accept
    async with extension.arrivals.room.take(10**15):
        scattering = asyncio.create_task(c.scatter(array(), direct=direct))
        await until(lambda: words.count("wait") == 7)
    assert np.array_equal(await (await scattering), array())
    assert len(pushes) == 1


@hoplite_cluster(nthreads=[("127.0.0.1", 1)], config=QUICK)
async def test_a_push_that_is_given_up_while_it_waits_for_room(c, s, a):
    await c.register_plugin(Hoplite())
    extension = a.plugins["hoplite"]
    async with extension.arrivals.room.take(10**15):
        scattering = asyncio.create_task(c.scatter(array()))
        await until(lambda: extension.arrivals.room.waiting)
        scattering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scattering
        await until(lambda: not extension.arrivals.expected and not plugin(s).puts.pending)
    await until(lambda: not extension.arrivals.room.taken)
    assert not extension.arrivals.room.waiting and not a.data and not extension.shelf.entries


@pytest.mark.parametrize("times", [1, 3])
@hoplite_cluster()
async def test_small_objects_that_workers_leave_with_are_sent_again(c, s, *workers, times):
    await c.register_plugin(Hoplite())
    left = []

    def leave(worker):
        plain = worker.handlers["update_data"]

        async def update_data(comm, **message):
            if len(left) == times:
                return plain(**message)
            left.append(worker.address)
            comm.abort()
            await s.remove_worker(worker.address, stimulus_id="test")
            return None

        worker.handlers["update_data"] = update_data

    for worker in workers:
        leave(worker)
    scattering = c.scatter(1)
    if times == 1:
        assert await (await scattering) == 1
    else:
        with pytest.raises(TransferError, match="could not be sent to any worker"):
            await scattering
        assert not s.tasks
    assert len(left) == times
    assert c.status == "running" and await c.submit(sum, [1, 2]) == 3


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_small_objects_that_were_sent_in_vain_are_not_left(c, s, a, b):
    await c.register_plugin(Hoplite())
    plain, tried = b.handlers["update_data"], []

    async def update_data(comm, **message):
        tried.append(message)
        if len(tried) == 1:
            await until(lambda: a.data)
            comm.abort()
            return None
        return plain(**message)

    b.handlers["update_data"] = update_data
    futures = await c.scatter({"x": 1, "y": 2, "z": 3})
    assert await c.gather(futures) == {"x": 1, "y": 2, "z": 3}
    held = {w: {ts.key for ts in s.workers[w.address].has_what} for w in (a, b)}
    await until(lambda: all(set(w.data) == keys for w, keys in held.items()))
