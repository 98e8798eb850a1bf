"""``reduce``, ``allreduce``, ``allgather``, ``reduce_scatter``: values, places, what is left."""

from __future__ import annotations

import asyncio
import functools
import gc
import operator
from collections import Counter, namedtuple

import dask
import numpy as np
import pytest
from distributed import Client, Event, Future, Scheduler, Worker, get_client, wait, worker_client
from distributed.utils_test import gen_test

import dask_hoplite as hoplite
from dask_hoplite import Hoplite
from tests.helpers import apart, hoplite_cluster, plugin, until

Point = namedtuple("Point", "x y")


def put(c, values, workers=None, **kwargs):
    """Futures of values, each held by one worker."""
    addresses = [w.address for w in workers or ()] or [None]
    return [
        c.submit(
            lambda v: v,
            value,
            workers=addresses[i % len(addresses)],
            pure=False,
            **kwargs,
        )
        for i, value in enumerate(values)
    ]


def powers(count, n=20_000, dtype="i8"):
    """Arrays whose sum tells which of them went in."""
    return [np.full(n, 2**i, dtype) for i in range(count)]


def holders(s, future):
    return {ws.address for ws in s.tasks[future.key].who_has or ()}


def when(name, value):
    """A value that is there when an event is set."""
    Event(name).wait()
    return value


def leftovers(s, workers):
    """All that remains of anything."""
    reductions = plugin(s).reductions
    places = {
        "tasks": s.tasks,
        "runs": reductions.runs,
        "users": reductions.users,
        "groups": reductions.groups,
        "gatherings": reductions.gatherings.gatherings,
        "contributors": reductions.contributors,
        "clients": [client for client in s.clients if client.startswith("hoplite-reduction")],
        "wishes": plugin(s).wishes._wishes,
        "trees": plugin(s).directory.trees,
    }
    for w in workers:
        side = w.plugins["hoplite"]
        places |= {
            (w.name, "data"): dict(w.data),
            (w.name, "sums"): side.reducer.sums,
            (w.name, "results"): side.reducer.results,
            (w.name, "shelf"): [k for k, e in side.shelf.entries.items() if e.expiry is None],
            (w.name, "incoming"): side.puller.incoming,
        }
    return {place: list(found) for place, found in places.items() if found}


async def nothing_left(s, workers):
    gc.collect()  # what errors hold by their tracebacks
    try:
        await until(lambda: not leftovers(s, workers))
    except AssertionError:
        raise AssertionError(leftovers(s, workers)) from None


def same(a, b):
    """Equal in all that NumPy and Python tell apart."""
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, np.ndarray | np.generic):
        nan = b.dtype.kind in "fcmM"
        return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a, b, equal_nan=nan)
    return type(a) is type(b) and a == b


OPS = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "mean": lambda values: np.mean(values, axis=0),
    np.hypot: np.hypot.reduce,
    np.logaddexp: np.logaddexp.reduce,
}


@hoplite_cluster()
async def test_operations(c, s, *workers):
    await c.register_plugin(Hoplite())
    values = [np.random.default_rng(i).random(20_000) for i in range(6)]
    futures = put(c, values, workers)
    for op, by_numpy in OPS.items():
        got = await hoplite.reduce(futures, op, client=c)
        np.testing.assert_allclose(await got, by_numpy(values), rtol=1e-12)
        ordered = await hoplite.reduce(futures, op, client=c, ordered=True)
        assert same(await ordered, by_numpy(values))
    del futures, got, ordered
    await nothing_left(s, workers)


DTYPES = ["?", "i1", "u1", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8"]


@hoplite_cluster()
async def test_dtypes(c, s, *workers):
    await c.register_plugin(Hoplite())
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        values = [rng.integers(0, 100, 3000).astype(dtype) for _ in range(5)]
        futures = put(c, values, workers)
        for op in ("sum", "prod", "max", "mean"):
            got = await (await hoplite.reduce(futures, op, client=c, ordered=True))
            with np.errstate(all="ignore"):
                assert same(got, np.asarray(OPS[op](values))), (dtype, op)


@hoplite_cluster()
async def test_mixed_item_sizes(c, s, *workers):
    """As if all were brought to the common type first, wherever they are and whoever is first."""
    await c.register_plugin(Hoplite())
    rng = np.random.default_rng(0)
    for dtypes in (("f4", "f8"), ("f8", "f4"), ("f2", "f4", "f2"), ("i2", ">i8"), ("c8", "c16")):
        values = [rng.integers(0, 9, 3000).astype(dtypes[i % len(dtypes)]) / 1 for i in range(7)]
        values = [value.astype(dtypes[i % len(dtypes)]) for i, value in enumerate(values)]
        futures = put(c, values, workers)
        for call in (hoplite.reduce, hoplite.allreduce):
            got = await call(futures, "prod", client=c)
            assert same(await got, np.multiply.reduce(np.stack(values)))
    tiny = put(c, [np.full(3000, 1e-9), np.ones(3000, "f4"), np.ones(3000, "f4")], workers)
    got = await (await hoplite.reduce(tiny, client=c, ordered=True))
    assert same(got, np.full(3000, 1e-9 + 1 + 1)), "nothing was rounded to float32"


@hoplite_cluster()
async def test_overflow_and_nan(c, s, *workers):
    await c.register_plugin(Hoplite())
    top = np.full(3000, np.iinfo("i8").max)
    got = await hoplite.reduce(put(c, [top] * 4, workers), client=c)
    assert same(await got, np.add.reduce([top] * 4))
    small = np.full(3000, 120, "i1")
    got = await hoplite.reduce(put(c, [small] * 4, workers), client=c)
    assert same(await got, np.full(3000, 480)), "as np.add.reduce: formed in int64"
    nan = put(c, [np.array([1.0, np.nan, 2.0]), np.array([np.nan, 1.0, 3.0])], workers)
    assert same(await (await hoplite.reduce(nan, "max", client=c)), np.array([np.nan, np.nan, 3]))
    days = [np.array(["2020-01-02", "NaT"], "M8[D]"), np.array(["2019-01-02", "2020-01-01"], "M8")]
    got = await hoplite.reduce(put(c, days, workers), "min", client=c)
    assert same(await got, np.minimum.reduce(days))


@hoplite_cluster()
async def test_objects_of_python(c, s, *workers):
    await c.register_plugin(Hoplite())
    numbers = np.array([10**30, 1, None], object)[:2]
    got = await hoplite.reduce(put(c, [numbers] * 3, workers), client=c)
    assert same(await got, np.array([3 * 10**30, 3], object))
    got = await hoplite.reduce(put(c, [10**30, 2, 3], workers), client=c)
    assert same(await got, 10**30 + 5)
    words = [Counter(text) for text in ("abc", "bcd", "cde", "x" * 3000)]
    for call in (hoplite.reduce, hoplite.allreduce):
        got = await call(put(c, words, workers), operator.add, client=c)
        assert same(await got, sum(words, Counter()))
    strings = put(c, [{3}, {1, 2}, {4}], workers)
    assert await (await hoplite.reduce(strings, operator.or_, client=c)) == {1, 2, 3, 4}
    merged = await hoplite.reduce(put(c, "abc", workers), max, client=c)
    assert await merged == "c"


STRUCTURES = {
    "nested": lambda x: {"w": [x, (x[:5], None)], "b": {"c": x[:0]}, "p": Point(x[0], x[:1])},
    "scalars": lambda x: (x[0], float(x[1])),
    "0-d": lambda x: x[0].reshape(()),
    "empty": lambda x: x[:0].reshape(0, 3),
    "no leaf": lambda x: {"a": None, "b": []},
    "strided": lambda x: x[::3],
    "reversed": lambda x: x[::-1],
    "Fortran": lambda x: np.asfortranarray(x.reshape(100, -1)),
    "transposed": lambda x: x.reshape(10, 20, -1).transpose(2, 0, 1),
    "broadcast": lambda x: np.broadcast_to(x[0], (40, 50)),
    "one byte": lambda x: x[:1].astype("u1"),
}


def expected_sum(values):
    """np.add.reduce, leaf by leaf."""
    first = values[0]
    if isinstance(first, dict):
        return {key: expected_sum([v[key] for v in values]) for key in first}
    if isinstance(first, list | tuple):
        parts = [expected_sum(list(column)) for column in zip(*values, strict=True)]
        return first._make(parts) if hasattr(first, "_make") else type(first)(parts)
    return None if first is None else np.add.reduce(np.asarray(values))


@pytest.mark.parametrize("name", STRUCTURES)
@hoplite_cluster()
async def test_structures(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    x = np.arange(4000.0)
    values = [STRUCTURES[name](x + i) for i in range(5)]
    futures = put(c, values, workers)
    for call in (hoplite.reduce, hoplite.allreduce):
        got = await (await call(futures, client=c))
        want = expected_sum(values)
        if name == "0-d":
            want = np.asarray(want)
        assert same(got, want)


@pytest.mark.parametrize("size", [0, 1, 7, 100, 999, 65_536, 1_000_003, 4_000_001])
@hoplite_cluster()
async def test_sizes_and_numbers_of_operands(c, s, *workers, size):
    await c.register_plugin(Hoplite())
    for count in (1, 2, 4, 9) if size < 10**6 else (1, 5):
        futures = put(c, [np.full(size, 1 + i, "u1") for i in range(count)], workers)
        for op, want in (("sum", count * (count + 1) // 2), ("max", count)):
            for call in (hoplite.reduce, hoplite.allreduce):
                got = await (await call(futures, op, client=c))
                assert same(got, np.full(size, want, "u8" if op == "sum" else "u1"))


@pytest.mark.parametrize("count", [1, 2, 6])
@hoplite_cluster()
async def test_all_on_one_worker(c, s, *workers, count):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(count), workers[2:3])
    got = await hoplite.reduce(futures, client=c)
    assert same(await got, np.full(20_000, 2**count - 1))
    everywhere = await hoplite.allreduce(futures, client=c)
    assert same(await everywhere, np.full(20_000, 2**count - 1))
    assert workers[2].address in holders(s, everywhere)


def read_only(n, i):
    x = np.full(n, 2**i, "i8")
    x.flags.writeable = False
    return x


@hoplite_cluster()
async def test_operands_stay_as_they_were(c, s, *workers):
    await c.register_plugin(Hoplite())
    for count, make in ((1, np.full), (5, np.full), (5, read_only), (1, read_only)):
        args = [(20_000, 2**i if make is np.full else i) for i in range(count)]
        futures = [
            c.submit(make, *a, workers=[workers[i % 4].address], pure=False)
            for i, a in enumerate(args)
        ]
        before = [x.tobytes() for x in await c.gather(futures)]
        for call in (hoplite.reduce, hoplite.allreduce):
            got = await call(futures, client=c)
            await got
            for w in workers:
                if got.key in w.data:
                    result = w.data[got.key]
                    assert result.flags.writeable
                    for f in futures:
                        assert f.key not in w.data or not np.shares_memory(result, w.data[f.key])
                    result[:] = -1
        assert [x.tobytes() for x in await c.gather(futures)] == before


@hoplite_cluster()
async def test_operands_that_several_workers_hold(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(4), workers)
    await hoplite.broadcast(futures[0], client=c)
    await c.replicate(futures[1:3], n=2)
    for _ in range(5):
        for call in (hoplite.reduce, hoplite.allreduce):
            got = await call(futures, client=c)
            assert same(await got, np.full(20_000, 15))


@hoplite_cluster(
    worker_kwargs={"memory_limit": "1 GiB"},
    config={
        "hoplite.min-size": 1000,
        "distributed.worker.memory.target": 1e-9,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
    },
)
async def test_operands_that_are_spilled(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(8), workers)
    await wait(futures)
    assert all(len(w.data.slow) == 2 for w in workers)
    for call in (hoplite.reduce, hoplite.allreduce):
        assert same(await (await call(futures, client=c)), np.full(20_000, 255))


@hoplite_cluster()
async def test_keys_that_are_tuples(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [
        c.submit(np.full, 3000, 2**i, key=("x", i), workers=[w.address])
        for i, w in enumerate(workers)
    ]
    got = await hoplite.reduce(futures, client=c)
    assert same(await got, np.full(3000, 15))
    got = await hoplite.reduce(futures, num_objects=3, client=c)
    await got
    used = await hoplite.contributors(got, client=c)
    assert len(used) == 3 and {f.key for f in used} < {f.key for f in futures}
    assert len(await (await hoplite.allgather(futures, client=c))) == 4
    blocks = await hoplite.reduce_scatter(futures, client=c)
    assert same(np.concatenate(await c.gather(blocks)), np.full(3000, 15))


@hoplite_cluster()
async def test_a_fixed_order_gives_equal_bits(c, s, *workers):
    await c.register_plugin(Hoplite())
    rng = np.random.default_rng(1)
    values = [(rng.random(5000) * 10.0 ** rng.integers(-8, 8)).astype("f4") for _ in range(9)]
    want = functools.reduce(operator.add, values)
    for seed in range(4):
        places = np.random.default_rng(seed).integers(0, 4, 9)
        futures = put(c, values, [workers[p] for p in places])
        for call in (hoplite.reduce, hoplite.allreduce):
            got = await call(futures, client=c, ordered=True)
            assert (await got).tobytes() == want.tobytes()
    joined = await hoplite.reduce(put(c, "abcdefg", workers), operator.add, ordered=True, client=c)
    assert await joined == "abcdefg"


# What it is in Dask


@hoplite_cluster()
async def test_the_result_is_where_it_was_asked_for(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers[:3])
    for w in workers:
        for name in (w.address, w.name):
            got = await hoplite.reduce(futures, root=name, client=c)
            await got
            assert holders(s, got) == {w.address}


@hoplite_cluster()
async def test_the_first_that_are_ready(c, s, *workers):
    await c.register_plugin(Hoplite())
    values = powers(6)
    gates = [Event(f"gate-{i}", client=c) for i in range(6)]
    futures = [
        c.submit(when, f"gate-{i}", values[i], workers=[workers[i % 4].address], pure=False)
        for i in range(4)
    ]
    got = await hoplite.reduce(futures, num_objects=2, client=c)
    await gates[3].set()
    await wait(futures[3])
    assert not got.done()
    await gates[1].set()
    assert same(await got, values[1] + values[3])
    used = await hoplite.contributors(got, client=c)
    assert [f.key for f in used] == [futures[1].key, futures[3].key], "in the order given"
    assert all(f.client is c for f in used)
    assert [f.status for f in futures] == ["pending", "finished", "pending", "finished"]
    assert [s.tasks[f.key].state for f in futures][::2] == ["processing"] * 2
    rest = await hoplite.reduce([futures[0], futures[2]], client=c)
    for gate in gates:
        await gate.set()
    assert same(await rest, values[0] + values[2])
    all_at_once = await hoplite.reduce(futures, num_objects=3, client=c)
    used = await hoplite.contributors(all_at_once, client=c)
    assert same(await all_at_once, sum(await c.gather(used)))
    del futures, got, used, rest, all_at_once
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_the_first_of_several_everywhere(c, s, *workers):
    await c.register_plugin(Hoplite())
    values = powers(4)
    futures = [
        c.submit(when, f"gate-{i}", values[i], workers=[workers[i].address], pure=False)
        for i in range(4)
    ]
    got = await hoplite.allreduce(futures, num_objects=2, client=c)
    await Event("gate-2", client=c).set()
    await Event("gate-0", client=c).set()
    assert same(await got, values[0] + values[2])
    await until(lambda: holders(s, got) >= {workers[0].address, workers[2].address})
    assert [f.key for f in await hoplite.contributors(got, client=c)] == [
        futures[0].key,
        futures[2].key,
    ]
    await Event("gate-1", client=c).set()
    await Event("gate-3", client=c).set()


@pytest.mark.parametrize("some", [None, 4], ids=["all", "some"])
@hoplite_cluster()
async def test_as_an_argument_before_it_exists(c, s, *workers, some):
    await c.register_plugin(Hoplite())
    futures = [
        c.submit(when, "go", x, workers=[w.address], pure=False)
        for x, w in zip(powers(4), workers, strict=True)
    ]
    first = await hoplite.reduce(futures, num_objects=some, client=c)
    everywhere = await hoplite.allreduce([first], num_objects=some and 1, client=c)
    second = await hoplite.reduce([first, everywhere], client=c)
    used = c.submit(np.sum, second, pure=False)
    await until(lambda: used.key in s.tasks)
    assert not first.done()
    await Event("go", client=c).set()
    assert await used == 20_000 * 30
    assert len(await hoplite.contributors(first, client=c)) == 4
    del futures, first, everywhere, second
    used = None
    await nothing_left(s, workers)


@pytest.mark.parametrize("some", [None, 3], ids=["all", "some"])
@hoplite_cluster()
async def test_it_is_made_again_if_it_is_lost(c, s, *workers, some):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers[:3])
    await wait(futures)
    got = await hoplite.reduce(futures, num_objects=some, root=workers[3].address, client=c)
    await wait(got)
    used = [f.key for f in await hoplite.contributors(got, client=c)]
    await workers[3].close()
    assert same(await got, np.full(20_000, 7))
    assert [f.key for f in await hoplite.contributors(got, client=c)] == used
    total = c.submit(np.sum, got, pure=False)
    assert await total == 7 * 20_000


@pytest.mark.parametrize("some", [None, 2], ids=["all", "some"])
@hoplite_cluster()
async def test_operands_that_were_released_are_computed_again(c, s, *workers, some):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers[:3], allow_other_workers=True)
    await wait(futures)
    got = await hoplite.reduce(futures, num_objects=some, root=workers[3].address, client=c)
    value = await got
    used = {f.key for f in await hoplite.contributors(got, client=c)}
    keys = {f.key for f in futures}
    del futures
    await until(lambda: not any(keys & set(w.data) for w in workers))
    assert {ts.key for ts in s.tasks.values()} == used | {got.key}, "kept, as what it is made of"
    await workers[3].close()
    assert same(await got, value)
    del got
    await nothing_left(s, workers[:3])


@hoplite_cluster()
async def test_scattered_operands_that_were_released(c, s, *workers):
    """They stay for as long as they may be needed to make the result again."""
    await c.register_plugin(Hoplite())
    futures = await c.scatter(powers(4))
    for some in (None, 4, 2):
        got = await hoplite.reduce(futures, num_objects=some, client=c)
        await got
    del futures
    assert await c.submit(np.sum, got, pure=False)
    del got
    await nothing_left(s, workers)


CALLS = {
    "reduce": lambda futures, c: hoplite.reduce(futures, client=c),
    "some": lambda futures, c: hoplite.reduce(futures, num_objects=2, timeout=100, client=c),
    "allreduce": lambda futures, c: hoplite.allreduce(futures, client=c),
    "some to all": lambda futures, c: hoplite.allreduce(futures, num_objects=2, client=c),
    "allgather": lambda futures, c: hoplite.allgather(futures, client=c),
    "reduce-scatter": lambda futures, c: hoplite.reduce_scatter(futures, client=c),
}


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_cancelled_before_operands_are_there(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    if name == "reduce-scatter":
        names = [w.address for w in workers]
        call = lambda futures, c: hoplite.reduce_scatter(futures, workers=names, client=c)  # noqa: E731
    else:
        call = CALLS[name]
    for release in (False, True):
        futures = [c.submit(when, "go", x, pure=False) for x in powers(3)]
        got = await call(futures, c)
        got = got if isinstance(got, list) else [got]
        await until(lambda: len(s.tasks) > 3)
        if not release:
            await c.cancel(got)
            assert all(f.cancelled() for f in got)
        del got
        await until(lambda: len(s.tasks) == 3)
        if name == "some":
            await until(lambda: not plugin(s).reductions.users)
        await Event("go", client=c).set()
        await wait(futures)
        assert len(s.tasks) == 3, "operands are there, and nothing else"
        await Event("go", client=c).clear()
        del futures
        await nothing_left(s, workers)


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_cancelled_in_the_middle(c, s, *workers, name):
    """After so many turns of the event loop."""
    await c.register_plugin(Hoplite())
    futures = put(c, powers(4, 200_000), workers)
    await wait(futures)
    for steps in (0, 1, 2, 3, 5, 8, 12, 20, 40, 80):
        got = await CALLS[name](futures, c)
        for _ in range(steps):
            await asyncio.sleep(0)
        del got
        assert same(await (await hoplite.reduce(futures, client=c)), np.full(200_000, 15))
        await until(lambda: len(s.tasks) == 4)
    del futures
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_it_is_a_task_among_others(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(2), workers)
    for call in (hoplite.reduce, hoplite.allreduce, hoplite.allgather):
        got = await call(futures, client=c)
        await got
        assert s.tasks[got.key].prefix.name == call.__name__
        assert got.type is (list if call is hoplite.allgather else np.ndarray)
        assert {d.key for d in s.tasks[got.key].dependencies} == {f.key for f in futures}
    blocks = await hoplite.reduce_scatter(futures, client=c)
    await wait(blocks)
    assert {s.tasks[b.key].prefix.name for b in blocks} == {"reduce-scatter"}
    assert all(s.task_prefixes[p].state_counts["memory"] for p in ("reduce", "reduce-scatter"))


@hoplite_cluster()
async def test_annotations_of_the_user(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(2), workers)
    with dask.annotate(priority=7, purpose="training", retries=2):
        for call in CALLS.values():
            made = await call(futures, c)
            for got in made if isinstance(made, list) else [made]:
                await got
                ts = s.tasks[got.key]
                assert ts.annotations["purpose"] == "training"
                assert ts.priority[0] == -7, "the user's word counts"
                assert ts.retries == 2


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_waiting_takes_no_thread(c, s, a, b):
    await c.register_plugin(Hoplite())
    kept = put(c, powers(1), [a])
    late = [c.submit(when, "go", x, workers=[b.address], pure=False) for x in powers(1)]
    waiting = []
    for _ in range(5):
        waiting.append(await hoplite.reduce(kept + late, root=a.address, client=c))
        waiting.append(await hoplite.reduce(kept + late, num_objects=2, root=a.address, client=c))
        waiting.append(await hoplite.allreduce(kept + late, num_objects=2, client=c))
    assert await c.submit(lambda: 5, workers=[a.address]) == 5
    assert not any(f.done() for f in waiting)
    await Event("go", client=c).set()
    for got in await c.gather(waiting):
        assert same(got, np.full(20_000, 2))


class Kept:
    """Futures that a task gets as they are."""

    def __init__(self, futures):
        self.keys = [f.key for f in futures]


def reduce_in_a_task(kept, how):
    def run(client):
        futures = [Future(key, client) for key in kept.keys]
        everywhere = hoplite.allreduce(futures)
        first = hoplite.reduce(futures, "max", num_objects=1)
        assert len(hoplite.contributors(first)) == 1
        blocks = hoplite.reduce_scatter(futures)
        listed = hoplite.allgather(futures)
        return (
            int(everywhere.result().sum()),
            len(listed.result()),
            sum(len(block.result()) for block in blocks),
        )

    if how == "worker_client":
        with worker_client() as client:
            return run(client)
    return run(get_client())


@pytest.mark.parametrize("how", ["worker_client", "get_client"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_in_tasks(c, s, *workers, how):
    """On all threads at once."""
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers)
    await wait(futures)
    for _ in range(3):
        results = [
            c.submit(reduce_in_a_task, Kept(futures), how, workers=[w.address], pure=False)
            for w in workers
        ]
        assert await c.gather(results) == [(7 * 20_000, 3, 20_000)] * 3
    del futures, results
    await nothing_left(s, workers)


async def reduce_in_an_async_task(kept):
    client = get_client()
    futures = [Future(key, client) for key in kept.keys]
    everywhere = await hoplite.allreduce(futures)
    return int((await everywhere).sum())


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_in_coroutine_tasks(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(2), workers)
    await wait(futures)
    tasks = [c.submit(reduce_in_an_async_task, Kept(futures), pure=False) for _ in range(4)]
    assert await c.gather(tasks) == [3 * 20_000] * 4


@hoplite_cluster()
async def test_several_clients_at_once(c, s, *workers):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as other:  # has not registered anything

        async def steps(client):
            futures = put(client, powers(4), workers)
            for _ in range(10):
                got = await hoplite.allreduce(futures, client=client)
                assert same(await got, np.full(20_000, 15))

        await asyncio.gather(steps(c), steps(other), steps(c))
        futures = put(c, powers(2), workers)
        got = await hoplite.reduce(futures, num_objects=1, client=c)
        await got
        with pytest.raises(ValueError, match=got.key):
            await hoplite.contributors(got, client=other)
        mine = await hoplite.contributors(got, client=c)
        assert mine[0].key in {f.key for f in futures}


@gen_test()
async def test_preloaded():
    """The client need not know."""
    with dask.config.set({"distributed.scheduler.preload": ["dask_hoplite"]}):
        async with (
            Scheduler(dashboard_address=":0") as s,
            Worker(s.address) as a,
            Worker(s.address) as b,
            Client(s.address, asynchronous=True) as c,
        ):
            futures = put(c, powers(4), [a, b])
            got = await hoplite.allreduce(futures)
            assert same(await got, np.full(20_000, 15))


def test_a_synchronous_client(loop):
    with Client(n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", loop=loop) as c:
        c.register_plugin(Hoplite(min_size=1000))
        futures = c.map(np.full, [20_000] * 4, [1, 2, 4, 8])
        got = hoplite.reduce(futures, num_objects=3)
        used = hoplite.contributors(got)
        assert same(got.result(), sum(c.gather(used)))
        with dask.annotate(priority=5, purpose="training"):
            everywhere = hoplite.allreduce(futures)
        assert same(everywhere.result(), np.full(20_000, 15))
        assert len(hoplite.allgather(futures).result()) == 4
        blocks = hoplite.reduce_scatter(futures)
        assert same(np.concatenate(c.gather(blocks)), np.full(20_000, 15))
        annotations = c.run_on_scheduler(
            lambda key, dask_scheduler: dask_scheduler.tasks[key].annotations, everywhere.key
        )
        assert annotations["purpose"] == "training" and annotations["priority"] == 5


# On several workers


def rings(sent):
    return [m["combine"]["ring"] for op, m in sent if op == "hoplite-combine"]


@pytest.mark.parametrize("way", ["ring", "tree", "one host"])
@pytest.mark.parametrize("size", [1, 1000, 100_000, 700_001])
@hoplite_cluster()
async def test_allreduce(c, s, *workers, way, size):
    await c.register_plugin(Hoplite())
    sent = []
    if way != "one host":
        sent = apart(s, workers, 1e-6 if way == "ring" else 0.1)
    futures = put(c, powers(6, size), workers)
    await wait(futures)
    for op, want in (("sum", 63), ("max", 32), ("mean", 10.5)):
        got = await hoplite.allreduce(futures, op, client=c)
        assert same(await got, np.full(size, want))
        assert holders(s, got) == {w.address for w in workers}
        assert len(await hoplite.contributors(got, client=c)) == 6
        for _ in range(2):
            s.extensions["amm"].run_once()
        await c.submit(int, 1, pure=False)
        assert len(holders(s, got)) == 4, "the copies stay"
        if size * 8 > 1000:
            first = workers[0].data[got.key]
            first[:] = -1
            assert all(same(w.data[got.key], np.full(size, want)) for w in workers[1:])
    if sent and size == 700_001:
        assert all(rings(sent)) == (way == "ring")
    sums = [c.submit(np.sum, futures[0], workers=[w.address], pure=False) for w in workers]
    assert await c.gather(sums) == [size] * 4
    del futures, got, sums
    await nothing_left(s, workers)


@pytest.mark.parametrize("way", ["ring", "one host"])
@hoplite_cluster()
async def test_allreduce_of_structures_in_a_ring(c, s, *workers, way):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    values = [
        {
            "w": np.arange(30_000.0).reshape(300, 100) + i,
            "b": [np.full(7, i, "f4"), 2 * i],
            "n": None,
        }
        for i in range(4)
    ]
    futures = put(c, values, workers)
    await wait(futures)
    got = await hoplite.allreduce(futures, client=c)
    assert same(await got, expected_sum(values))
    mixed = put(c, [x.astype("f4" if i % 2 else "f8") for i, x in enumerate(powers(4))], workers)
    await wait(mixed)
    got = await hoplite.allreduce(mixed, client=c)
    assert same(await got, np.full(20_000, 15.0))


@hoplite_cluster()
async def test_allreduce_to_named_workers(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers[:3])
    for names in ([workers[3].address], [workers[2].name, workers[3].address], workers[1].address):
        got = await hoplite.allreduce(futures, workers=names, client=c)
        assert same(await got, np.full(20_000, 7))
        if isinstance(names, str):
            names = [names]
        wanted = {w.address for w in workers if w.address in names or w.name in names}
        assert holders(s, got) == wanted
        s.extensions["amm"].run_once()
        await c.submit(int, 1, pure=False)
        assert holders(s, got) == wanted


@pytest.mark.parametrize("call", [hoplite.allreduce, hoplite.allgather])
@hoplite_cluster()
async def test_consumers_on_all_workers(c, s, *workers, call):
    """Asked for before there is anything; each takes its own worker's copy."""
    await c.register_plugin(Hoplite())
    futures = [
        c.submit(when, "go", x, workers=[w.address], pure=False)
        for x, w in zip(powers(4), workers, strict=True)
    ]
    everywhere = await call(futures, client=c)
    used = [c.submit(np.sum, everywhere, workers=[w.address], pure=False) for w in workers]
    await Event("go", client=c).set()
    assert await c.gather(used) == [15 * 20_000] * 4
    moved = [t for t in await hoplite.transfers(client=c) if t["key"] == everywhere.key]
    assert len(moved) <= 4
    del futures, everywhere, used
    await nothing_left(s, workers)


@pytest.mark.parametrize("way", ["ring", "one host"])
@pytest.mark.parametrize("size", [1, 1000, 300_001])
@hoplite_cluster()
async def test_allgather(c, s, *workers, way, size):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    values = powers(7, size)
    futures = put(c, values, workers)
    futures = futures[::-1]
    got = await hoplite.allgather(futures, client=c)
    assert same(await got, values[::-1]), "in the order given"
    assert holders(s, got) == {w.address for w in workers}
    for _ in range(2):
        s.extensions["amm"].run_once()
    await c.submit(int, 1, pure=False)
    assert holders(s, got) == {w.address for w in workers}
    for w in workers:
        assert same(w.data[got.key], values[::-1])
    some = await hoplite.allgather(futures[:3], workers=[workers[0].name], client=c)
    assert same(await some, values[::-1][:3])
    assert holders(s, some) == {workers[0].address}
    del futures, got, some
    await nothing_left(s, workers)


@pytest.mark.parametrize("way", ["ring", "one host"])
@hoplite_cluster()
async def test_allgather_of_anything(c, s, *workers, way):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    values = ["text", None, {"a": [1, 2]}, b"x" * 5000, np.zeros(0), 3.5, Counter("abc"), [[]]]
    futures = put(c, values, workers)
    await wait(futures)
    got = await hoplite.allgather(futures, client=c)
    assert same(await got, values)
    [alone] = put(c, [np.ones(3000)], workers)
    assert same(await (await hoplite.allgather([alone], client=c)), [np.ones(3000)])


@hoplite_cluster()
async def test_allgather_that_is_lost(c, s, *workers):
    await c.register_plugin(Hoplite())
    values = powers(3)
    futures = put(c, values, workers[:3], allow_other_workers=True)
    got = await hoplite.allgather(futures, workers=[workers[3].address], client=c)
    await wait(got)
    del futures
    await workers[3].close()
    assert same(await got, values), "and its operands were kept for that"


def blocks_of(values, count):
    return np.array_split(np.add.reduce(values), count)


@pytest.mark.parametrize("way", ["ring", "one host"])
@pytest.mark.parametrize("shape", [(4000,), (4001, 3), (1003, 7, 2), (3, 900), (1, 2000), (0, 5)])
@hoplite_cluster()
async def test_reduce_scatter(c, s, *workers, way, shape):
    await c.register_plugin(Hoplite())
    sent = apart(s, workers) if way == "ring" else []
    values = [np.random.default_rng(i).integers(0, 99, shape) for i in range(4)]
    futures = put(c, values, workers)
    blocks = await hoplite.reduce_scatter(futures, client=c)
    assert len(blocks) == 4
    for block, want, w in zip(blocks, blocks_of(values, 4), workers, strict=True):
        assert same(await block, want)
        assert holders(s, block) == {w.address}
        assert len(await hoplite.contributors(block, client=c)) == 4
    if sent and len(np.ravel(values[0])) > 10_000:
        assert rings(sent) == [4] * 4
    more = await hoplite.reduce_scatter(
        put(c, values * 2, workers), "mean", workers=[w.name for w in workers[1::-1]], client=c
    )
    want = np.array_split(np.mean(values, axis=0), 2)
    assert [holders(s, b) for b in more if await wait(b)] == [
        {workers[1].address},
        {workers[0].address},
    ]
    assert all(map(same, await c.gather(more), want))
    del futures, blocks, block, more
    await nothing_left(s, workers)


@pytest.mark.parametrize("way", ["ring", "one host"])
@hoplite_cluster()
async def test_reduce_scatter_of_structures(c, s, *workers, way):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    values = [
        {"w": np.arange(30_000.0).reshape(300, 100) + i, "b": (np.arange(7) * i, None)}
        for i in range(4)
    ]
    futures = put(c, values, workers)
    blocks = await c.gather(await hoplite.reduce_scatter(futures, client=c))
    total = expected_sum(values)
    ws, bs = np.array_split(total["w"], 4), np.array_split(total["b"][0], 4)
    for block, w, b in zip(blocks, ws, bs, strict=True):
        assert same(block, {"w": w, "b": (b, None)})
    blocks = await c.gather(
        await hoplite.reduce_scatter(put(c, powers(4), workers), maximum, client=c)
    )
    assert same(np.concatenate(blocks), np.full(20_000, 8))


def maximum(a, b):
    return np.maximum(a, b)


@pytest.mark.parametrize("way", ["ring", "one host"])
@hoplite_cluster()
async def test_a_block_that_is_not_wanted_any_more(c, s, *workers, way):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    futures = put(c, powers(4, 400_000), workers)
    await wait(futures)
    for dropped in range(4):
        blocks = await hoplite.reduce_scatter(futures, client=c)
        del blocks[dropped]
        for block in await c.gather(blocks):
            assert same(block, np.full(100_000, 15))
        del block
    del blocks, futures
    await nothing_left(s, workers)


@pytest.mark.parametrize("way", ["ring", "one host"])
@hoplite_cluster()
async def test_a_block_that_is_lost(c, s, *workers, way):
    await c.register_plugin(Hoplite())
    if way == "ring":
        apart(s, workers)
    futures = put(c, powers(4, 40_000), workers, allow_other_workers=True)
    blocks = await hoplite.reduce_scatter(futures, client=c)
    await wait(blocks)
    del futures
    await workers[1].close()
    assert all(same(block, np.full(10_000, 15)) for block in await c.gather(blocks))
    del blocks
    await nothing_left(s, [workers[0], *workers[2:]])


@hoplite_cluster()
async def test_results_of_whole_objects_are_nobody_elses(c, s, *workers):
    await c.register_plugin(Hoplite())
    for places in (workers, workers[:1]):
        for count in (1, 3):
            values = [[i, np.full(3000, i)] for i in range(count)]
            futures = put(c, values, places)
            for call in (hoplite.reduce, hoplite.allreduce):
                got = await call(futures, operator.add, client=c)
                await got
                for w in workers:
                    if got.key in w.data:
                        w.data[got.key][1][:] = -1
                assert same(await c.gather(futures), values)
