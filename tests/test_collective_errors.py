"""What collectives make of bad input, and of a cluster that is taken from under them."""

from __future__ import annotations

import asyncio
import functools
import operator
from concurrent.futures import CancelledError

import numpy as np
import pytest
from distributed import Client, Event, wait
from distributed.client import FutureCancelledError

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError, ReductionError
from dask_hoplite.collectives.operands import OperandError
from tests.helpers import hoplite_cluster, plugin, until
from tests.test_collectives import leftovers, nothing_left, powers, put, same, when

#: Each collective, as far as they take the same
CALLS = {
    "reduce": hoplite.reduce,
    "some": functools.partial(hoplite.reduce, num_objects=2),
    "ordered": functools.partial(hoplite.reduce, ordered=True),
    "allreduce": hoplite.allreduce,
    "some to all": functools.partial(hoplite.allreduce, num_objects=2),
    "reduce-scatter": hoplite.reduce_scatter,
    "allgather": hoplite.allgather,
}
COMBINING = {name: call for name, call in CALLS.items() if name != "allgather"}
each = pytest.mark.parametrize("name", CALLS)


async def error_of(made):
    """What a call's future, or the first of those that do, fails with."""
    futures = made if isinstance(made, list) else [made]
    found = await asyncio.wait_for(asyncio.gather(*(f.exception() for f in futures)), 15)
    return next(error for error in found if error is not None)


# Known at once


@each
@hoplite_cluster()
async def test_arguments(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    call = CALLS[name]
    futures = put(c, powers(3), workers)
    with pytest.raises(ValueError, match="no operands"):
        await call([], client=c)
    with pytest.raises(ValueError, match=rf"{futures[1].key}.*twice"):
        await call([*futures, futures[1]], client=c)
    for wrong in (1, "x", np.ones(3), None):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            await call([*futures, wrong], client=c)
    for wrong in (5, None, futures[0], np.ones(3)):
        with pytest.raises(TypeError, match=r"several futures|an operand is a future"):
            await call(wrong, client=c)
    with pytest.raises(TypeError, match=r"client is a distributed\.Client, not 'tcp://"):
        call(futures, client=s.address)
    assert not leftovers(s, workers).keys() - {"tasks"} - {(w.name, "data") for w in workers}


@hoplite_cluster()
async def test_num_objects(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers)
    for call in (hoplite.reduce, hoplite.allreduce):
        for wrong in (0, -1, 4, np.int64(9)):
            with pytest.raises(ValueError, match=rf"from 1 to 3, not {wrong}"):
                await call(futures, num_objects=wrong, client=c)
        for wrong in (1.0, True, "2", [1]):
            with pytest.raises(TypeError, match="num_objects"):
                await call(futures, num_objects=wrong, client=c)
        with pytest.raises(ValueError, match="num_objects or ordered"):
            await call(futures, num_objects=2, ordered=True, client=c)
        assert same(await (await call(futures, num_objects=np.int8(3), client=c)), sum(powers(3)))


@hoplite_cluster()
async def test_operations(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers)
    for call in (hoplite.reduce, hoplite.allreduce, hoplite.reduce_scatter):
        with pytest.raises(ValueError, match="'median'"):
            await call(futures, "median", client=c)
        for wrong in (np.sum, sum, np.sin, np.divmod, 7, None):
            with pytest.raises(TypeError):
                await call(futures, wrong, client=c)
        with pytest.raises(Exception, match="pickle"):
            await call(futures, Unpicklable(), client=c)
    assert await c.gather(futures)
    assert len(s.tasks) == 3


class Unpicklable:
    def __call__(self, a, b):
        return a

    def __reduce__(self):
        raise TypeError("cannot pickle this")


@hoplite_cluster()
async def test_workers(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers)
    unknown = "tcp://10.9.8.7:65"
    for wrong in (unknown, "nobody", 99):
        for call in (
            functools.partial(hoplite.reduce, root=wrong),
            functools.partial(hoplite.allreduce, workers=[workers[0].address, wrong]),
            functools.partial(hoplite.allreduce, workers=wrong),
            functools.partial(hoplite.allgather, workers=[wrong]),
            functools.partial(hoplite.reduce_scatter, workers=[wrong]),
        ):
            with pytest.raises(ValueError, match=str(wrong)):
                await call(futures, client=c)
    for call in (hoplite.allreduce, hoplite.allgather, hoplite.reduce_scatter):
        with pytest.raises(ValueError, match="no workers"):
            await call(futures, workers=[], client=c)
    assert len(s.tasks) == 3
    del futures
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_timeouts_that_are_none(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3), workers)
    for wrong in ("soon", [1]):
        with pytest.raises((TypeError, ValueError)):
            await hoplite.reduce(futures, timeout=wrong, client=c)
    got = await hoplite.reduce(futures, timeout="10s", client=c)
    assert same(await got, sum(powers(3)))


@each
@hoplite_cluster()
async def test_futures_of_another_client(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as other:
        futures = put(c, powers(3), workers)
        theirs = put(other, powers(1), workers)
        with pytest.raises(ValueError, match=f"{theirs[0].key}.*{other.id}"):
            await CALLS[name]([*futures, *theirs], client=c)
        with pytest.raises(ValueError, match=theirs[0].key):
            await hoplite.contributors(theirs[0], client=c)
    assert len(s.tasks) <= 4


@each
@hoplite_cluster()
async def test_released_and_cancelled_operands(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(4), workers)
    await wait(futures)
    await c.cancel(futures[0])
    futures[1].release()
    for gone in futures[:2]:
        with pytest.raises(FutureCancelledError, match=gone.key):
            await CALLS[name]([*futures[2:], gone], client=c)
    del gone, futures
    await nothing_left(s, workers)


def fail(text="on purpose"):
    raise ZeroDivisionError(text)


@each
@hoplite_cluster()
async def test_erred_operands(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    futures = [*put(c, powers(1), workers), c.submit(fail), c.submit(fail, "again")]
    await wait(futures)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await CALLS[name](futures, client=c)
    assert len(s.tasks) == 3


@hoplite_cluster()
async def test_erred_operands_that_are_not_needed(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [c.submit(fail), *put(c, powers(2), workers)]
    await wait(futures)
    for call in (hoplite.reduce, hoplite.allreduce):
        got = await call(futures, num_objects=2, client=c)
        assert same(await got, sum(powers(2)))
        assert {f.key for f in await hoplite.contributors(got, client=c)} == {
            f.key for f in futures[1:]
        }


@hoplite_cluster()
async def test_contributors_of_something_else(c, s, *workers):
    await c.register_plugin(Hoplite())
    [x] = put(c, powers(1), workers)
    with pytest.raises(ValueError, match=x.key):
        await hoplite.contributors(x, client=c)
    with pytest.raises(TypeError, match="'a-key' is not a future, but of type str"):
        await hoplite.contributors("a-key", client=c)
    broken = await hoplite.reduce([x, c.submit(when, "go", "text")], client=c)
    asking = asyncio.create_task(hoplite.contributors(broken, client=c))
    await Event("go", client=c).set()
    with pytest.raises(OperandError):
        await asking


# Known when the operands are there


MISMATCHES = {
    "shape": (np.zeros(3000), np.zeros(3001), r"shape.*3000.*3001|shape.*3001.*3000"),
    "rows": (np.zeros((3001, 2)), np.zeros((3000, 2)), r"shape \(300., 2\)"),
    "dimensions": (np.zeros(3000), np.zeros((1, 3000)), "shape"),
    "kind": (np.zeros(3000, "i8"), np.zeros(3000), "int64.*float64|float64.*int64"),
    "unit": (np.zeros(3000, "M8[s]"), np.zeros(3000, "m8[s]"), "datetime64"),
    "no sum": (np.zeros(3000, "M8[s]"), np.zeros(3000, "M8[s]"), "sum cannot.*datetime64"),
    "keys": ({"a": np.zeros(3000)}, {"b": np.zeros(3000)}, "'a'|'b'"),
    "deep": ({"a": [np.zeros(3000), 1]}, {"a": [np.zeros(3000)]}, r"\['a'\]"),
    "types": ([np.zeros(3000)], (np.zeros(3000),), "list.*tuple|tuple.*list"),
    "number": (np.zeros(3000), 1.0, "shape|float|axis"),
    "nothing": (np.zeros(3000), None, "None"),
    "no numbers": (np.zeros(3000), "text", "shape|axis"),
    "records": (np.zeros(9, "i4,i4"), np.zeros(9, "i4,i4"), "sum cannot reduce"),
    "objects": (np.array([{}]), np.array([{}]), "sum cannot reduce"),
}


@pytest.mark.parametrize("what", MISMATCHES)
@hoplite_cluster()
async def test_operands_that_do_not_match(c, s, *workers, what):
    await c.register_plugin(Hoplite())
    x, y, words = MISMATCHES[what]
    for places in (workers[:2], workers[:1]):
        futures = put(c, [x, y], places)
        for call in COMBINING.values():
            with pytest.raises(OperandError, match=words) as caught:
                raise await error_of(await call(futures, client=c))
            assert isinstance(caught.value, ValueError)
            named = [f.key in str(caught.value) for f in futures]
            one = "axis" in str(caught.value) or "cannot reduce" in str(caught.value)
            assert any(named) if one else all(named)
            assert all(f.status == "finished" for f in futures)
    del futures, caught
    await nothing_left(s, workers)


@pytest.mark.parametrize("name", COMBINING)
@hoplite_cluster()
async def test_one_of_many_that_does_not_match(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    odd = np.zeros(7, "c8")
    futures = put(c, [*powers(5), odd, *powers(2)], workers)
    call = functools.partial(COMBINING[name], num_objects=8) if "some" in name else COMBINING[name]
    with pytest.raises(OperandError, match=futures[5].key):
        raise await error_of(await call(futures, client=c))
    assert same(await futures[5], odd)
    del futures
    await nothing_left(s, workers)


class Raising:
    """Also what Hoplite itself takes for a reason to try again."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, a, b):
        raise self.kind("by the operation")


def reshaping(a, b):
    return np.concatenate([a, b])


def retyping(a, b):
    return (a + b).astype("f4")


def spoiling(a, b):
    a += b
    return a


@pytest.mark.parametrize("name", COMBINING)
@hoplite_cluster()
async def test_operations_that_raise(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(4), workers)
    for kind in (ZeroDivisionError, KeyError, OSError, CancelledError):
        with pytest.raises(kind, match="by the operation"):
            raise await error_of(await COMBINING[name](futures, Raising(kind), client=c))
    for kind in (StopIteration, SystemExit, asyncio.CancelledError):
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: by the operation"):
            raise await error_of(await COMBINING[name](futures, Raising(kind), client=c))
    floats = put(c, [np.ones(3000)] * 4, workers)
    with pytest.raises(ValueError, match="bitwise_or cannot reduce the value of dtype float64"):
        raise await error_of(await COMBINING[name](floats, np.bitwise_or, client=c))
    del futures, floats
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_operations_that_change_what_they_get(c, s, *workers):
    """Whole objects are what the operation makes of them, but operands stay as they were."""
    await c.register_plugin(Hoplite())
    values = powers(4)
    futures = put(c, values, workers)
    for call in (hoplite.reduce, hoplite.allreduce):
        joined = await (await call(futures, reshaping, client=c))
        assert sorted(set(joined)) == [1, 2, 4, 8] and len(joined) == 80_000
        narrow = await (await call(futures, retyping, client=c))
        assert same(narrow, np.full(20_000, 15, "f4"))
    for places in (workers, workers[:1]):
        futures = put(c, values, places)
        for op in (spoiling, operator.iadd):
            for call in (hoplite.reduce, hoplite.allreduce):
                got = await (await call(futures, op, client=c))
                assert same(got, np.full(20_000, 15))
                assert all(map(same, await c.gather(futures), values)), "operands are as they were"


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_an_operand_that_raises(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    held = Event("go", client=c)
    futures = [
        *put(c, powers(1), workers),
        c.submit(fail_when, "go", pure=False),
        c.submit(when, "go", 3, pure=False),
    ]
    call = CALLS[name]
    if "some" in name:
        call = functools.partial(call, num_objects=3)
    if name == "reduce-scatter":
        call = functools.partial(call, workers=[w.address for w in workers])
    made = await call(futures, client=c)
    await held.set()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        raise await error_of(made)
    del made, futures
    await nothing_left(s, workers)


def fail_when(name):
    Event(name).wait()
    fail()


@hoplite_cluster()
async def test_an_operand_that_raises_while_there_are_others(c, s, *workers):
    await c.register_plugin(Hoplite())
    for call in (hoplite.reduce, hoplite.allreduce):
        futures = [c.submit(fail_when, "go", pure=False)] + [
            c.submit(when, "later", x, pure=False) for x in powers(2)
        ]
        got = await call(futures, num_objects=2, client=c)
        await Event("go", client=c).set()
        await wait(futures[0])
        await Event("later", client=c).set()
        assert same(await got, sum(powers(2)))
        assert len(await hoplite.contributors(got, client=c)) == 2
        await Event("go", client=c).clear()
        await Event("later", client=c).clear()


@hoplite_cluster()
async def test_operands_that_are_cancelled_while_it_waits(c, s, *workers):
    await c.register_plugin(Hoplite())
    for call in (hoplite.reduce, hoplite.allreduce):
        futures = [c.submit(when, "go", x, pure=False) for x in powers(3)]
        made = await call(futures, client=c)
        some = await call(futures, num_objects=3, client=c)
        two = await call(futures, num_objects=2, client=c)
        await until(lambda made=made, some=some: {made.key, some.key} <= s.tasks.keys())
        await c.cancel(futures[0], force=True)
        with pytest.raises(ReductionError, match=futures[0].key):
            raise await error_of(some)
        with pytest.raises(FutureCancelledError):
            await asyncio.wait_for(made, 10)
        await Event("go", client=c).set()
        assert same(await asyncio.wait_for(two, 10), powers(3)[1] + powers(3)[2])
        await Event("go", client=c).clear()
        del futures, made, some, two
        await nothing_left(s, workers)


# Time


@pytest.mark.parametrize("call", [hoplite.reduce, hoplite.allreduce])
@pytest.mark.parametrize("some", [None, 2])
@hoplite_cluster()
async def test_timeout(c, s, *workers, call, some):
    await c.register_plugin(Hoplite())
    futures = [*put(c, powers(1), workers), c.submit(when, "go", powers(1)[0])]
    await wait(futures[0])
    got = await call(futures, num_objects=some, timeout=0.1, client=c)
    with pytest.raises(TimeoutError, match=rf"{got.key}.*0\.1 s; 1 of 2.*{futures[1].key}"):
        raise await error_of(got)
    assert [f.status for f in futures] == ["finished", "pending"], "they were not touched"
    await Event("go", client=c).set()
    again = await call(futures, num_objects=some, timeout=30, client=c)
    assert same(await again, 2 * powers(1)[0])
    del futures, got, again
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_no_timeout_after_the_result(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(4), workers)
    await wait(futures)
    for call in (hoplite.reduce, hoplite.allreduce):
        got = await call(futures, timeout=3, client=c)
        await got
        assert not any(
            timer.when() for run in plugin(s).reductions.runs.values() for timer in run.timers
        )
        root = next(w for w in workers if got.key in w.data)
        for w in list(s.tasks[got.key].who_has):
            s.remove_replica(s.tasks[got.key], w) if w.address != root.address else None
        assert same(await got, sum(powers(4)))


# Installing and taking away


@each
@hoplite_cluster()
async def test_without_the_plugin(c, s, *workers, name):
    futures = put(c, powers(2), workers)
    with pytest.raises(NotInstalledError, match="register_plugin"):
        await CALLS[name](futures, client=c)
    with pytest.raises(NotInstalledError, match="register_plugin"):
        await hoplite.contributors(futures[0], client=c)
    assert len(s.tasks) <= 2


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_uninstalled_while_it_waits(c, s, *workers, name):
    """Dask does it with what it has, or says that it can not."""
    await c.register_plugin(Hoplite())
    futures = [*put(c, powers(1), workers), c.submit(when, "go", 2 * powers(1)[0])]
    call = CALLS[name]
    if name == "reduce-scatter":
        call = functools.partial(call, workers=[w.address for w in workers])
    made = await call(futures, client=c)
    await until(lambda: len(s.tasks) > 2)
    if "some" in name:
        await until(lambda: any(w.plugins["hoplite"].reducer.results for w in workers))
    await c.unregister_scheduler_plugin("hoplite")
    await Event("go", client=c).set()
    if "some" in name:
        with pytest.raises(NotInstalledError, match="uninstalled"):
            raise await error_of(made)
    else:
        got = await c.gather(made)
        if name == "allgather":
            assert all(map(same, got, [powers(1)[0], 2 * powers(1)[0]]))
        else:
            whole = np.concatenate(got) if name == "reduce-scatter" else got
            assert same(whole, 3 * powers(1)[0])
    del made, futures
    await until(lambda: not s.tasks and not any(w.data for w in workers))
    assert not [client for client in s.clients if client.startswith("hoplite")]


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_uninstalled_in_the_middle(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    handlers = set(s.handlers)
    futures = put(c, powers(8, 1_000_000), workers)
    await wait(futures)
    made = await CALLS[name](futures, client=c)
    await c.unregister_scheduler_plugin("hoplite")
    assert not [h for h in s.handlers if h.startswith("hoplite")]
    assert not [h for w in workers for h in w.handlers if "hoplite" in h]
    await wait(made)
    await c.register_plugin(Hoplite())
    assert set(s.handlers) == handlers
    del made
    got = await hoplite.allreduce(futures, client=c)
    assert same(await got, np.full(1_000_000, 255))


@pytest.mark.parametrize("name", CALLS)
@hoplite_cluster()
async def test_restart(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    futures = [*put(c, powers(3), workers), c.submit(when, "go", powers(1)[0])]
    call = CALLS[name]
    if name == "reduce-scatter":
        call = functools.partial(call, workers=[w.address for w in workers])
    if "some" in name:
        call = functools.partial(call, num_objects=4)
    made = await call(futures, client=c)
    await until(lambda: len(s.tasks) > 4)
    restarting = asyncio.create_task(c.restart(wait_for_workers=False))
    for got in made if isinstance(made, list) else [made]:
        with pytest.raises(FutureCancelledError):
            await asyncio.wait_for(got, 15)
    await Event("go", client=c).set()
    await restarting
    reductions = plugin(s).reductions
    await until(lambda: not (reductions.runs or reductions.users or reductions.groups))
    assert not reductions.gatherings.gatherings and not reductions.contributors
    await until(lambda: not [k for k in s.clients if k.startswith("hoplite-reduction")])


@pytest.mark.parametrize("name", ["reduce", "some", "allreduce", "some to all"])
@hoplite_cluster()
async def test_a_client_that_leaves(c, s, *workers, name):
    await c.register_plugin(Hoplite())
    other = await Client(s.address, asynchronous=True)
    futures = [other.submit(when, "go", x, pure=False) for x in powers(3)]
    made = await CALLS[name](futures, client=other)
    await until(lambda: len(s.tasks) > 3)
    del made, futures
    await other.close()
    await Event("go", client=c).set()
    await nothing_left(s, workers)
