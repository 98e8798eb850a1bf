"""Reductions whose operands have weights: as if each had been multiplied before."""

from __future__ import annotations

import math
import operator
from collections import namedtuple
from fractions import Fraction

import numpy as np
import pytest
from distributed import Event, wait

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, OperandError
from dask_hoplite.collectives.operands import weigh
from tests.helpers import hoplite_cluster, until
from tests.test_collectives import apart, nothing_left, powers, put, rings, same, when

Point = namedtuple("Point", "x y")

WEIGHTS = [0.5, -2.0, 0.0, 1.0, 3.25, 1e-3, 7.0]


def weighed(values, weights=WEIGHTS):
    """What NumPy makes of them."""
    with np.errstate(all="ignore"):
        return [weight * value for weight, value in zip(weights, values, strict=False)]


# A value


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", ">i4", ">f4"]
)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0, 3), ()])
def test_dtype_is_that_of_a_product_with_a_float(dtype, shape):
    value = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    before = value.copy()
    got = weigh(value, 0.75)
    assert same(got, (0.75 * np.atleast_1d(value)).reshape(shape))
    assert same(value, before) and not np.shares_memory(got, value)


def test_values_that_are_no_arrays():
    assert same(weigh(3, 0.5), np.float64(1.5))
    assert same(weigh(np.float32(3), 0.1), np.float32(0.1) * np.float32(3))
    assert same(weigh(True, 2.0), np.float64(2))
    got = weigh({"w": [np.ones(3, "f4"), None], "p": Point(np.arange(2), 1j)}, 2.0)
    want = {"w": [np.full(3, 2, "f4"), None], "p": Point(np.array([0.0, 2.0]), np.complex128(2j))}
    assert same(got, want) and type(got["p"]) is Point
    assert same(weigh(np.arange(12).reshape(3, 4).T[::-2], 2.0).sum(), np.float64(72))


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.array([None]),
        10**30,
        Fraction(1, 2),
        "text",
        np.zeros(2, "i4,f4"),
        object(),
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
)
def test_values_that_cannot_be_weighed(value):
    with pytest.raises(OperandError, match=r"\['a'\]"):
        weigh({"a": value}, 1.0)


def test_tensors():
    torch = pytest.importorskip("torch")
    value = {"w": torch.ones((2, 3), dtype=torch.float32), "n": torch.arange(3)}
    got = weigh(value, 0.5)
    assert got["w"].dtype == torch.float32 and got["w"].tolist() == [[0.5] * 3] * 2
    assert got["n"].dtype == torch.float64 and got["n"].tolist() == [0, 0.5, 1]
    assert value["w"].sum() == 6


# On a cluster


@hoplite_cluster()
async def test_operations_and_dtypes(c, s, *workers):
    """Several operands on each worker, as if NumPy had done it all."""
    await c.register_plugin(Hoplite())
    ufuncs = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    for dtype in ("f8", "f4", "i2", "u8", "c8"):
        values = [np.random.default_rng(i).integers(1, 50, 5000).astype(dtype) for i in range(7)]
        futures = put(c, values, workers)
        for op in (*ufuncs, np.add, "mean"):
            stack = np.stack(weighed(values))
            want = np.mean(stack, axis=0) if op == "mean" else ufuncs.get(op, op).reduce(stack)
            for call in (hoplite.reduce, hoplite.allreduce):
                got = await (await call(futures, op, weights=WEIGHTS, client=c))
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
            got = await hoplite.reduce(futures, op, weights=WEIGHTS, ordered=True, client=c)
            assert same(await got, want)
    del futures, got
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_mixed_item_sizes(c, s, *workers):
    """Weights come first, and then what is common to all."""
    await c.register_plugin(Hoplite())
    dtypes = ["f4", "i1", "f8", "i8", "f4", "?", "u2"]
    values = [np.arange(3000).astype(dtype) for dtype in dtypes]
    got = await hoplite.reduce(put(c, values, workers), weights=WEIGHTS, ordered=True, client=c)
    want = np.add.reduce([value.astype("f8") for value in weighed(values)])
    assert same(await got, want), "integers with weights are floats, and go together with them"


@hoplite_cluster()
async def test_in_a_ring_operands_stay_as_they_are(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(8, 200_000), workers)
    await wait(futures)
    sent = apart(s, workers)
    weights = [2.0**-i for i in range(8)]
    got = await hoplite.allreduce(futures, weights=weights, client=c)
    assert same(await got, np.full(200_000, 8.0))
    assert rings(sent) == [4] * 4
    assert len(s.tasks[got.key].who_has) == 4
    assert all(map(same, await c.gather(futures), powers(8, 200_000)))


@hoplite_cluster()
async def test_structures(c, s, *workers):
    await c.register_plugin(Hoplite())
    values = [{"w": [np.full(4000, i, "f4"), (i, None)], "p": Point(i, 1j * i)} for i in range(4)]
    weights = np.array([1, 10, 100, 1000])
    for call in (hoplite.reduce, hoplite.allreduce):
        got = await (await call(put(c, values, workers), weights=weights, client=c))
        assert same(got["w"], [np.full(4000, 3210, "f4"), (np.float64(3210), None)])
        assert same(got["p"].x, np.float64(3210)) and same(got["p"].y, np.complex128(3210j))


@hoplite_cluster()
async def test_the_first_that_are_ready(c, s, *workers):
    """Each has its own weight, whichever they are, and "mean" divides by their number."""
    await c.register_plugin(Hoplite())
    late = c.submit(when, "late", np.ones(20_000), workers=[workers[0].address])
    others = put(c, powers(5), workers[1:])
    weights = [1000.0, *(10.0**-i for i in range(5))]
    for op, divisor in (("sum", 1), ("mean", 3)):
        got = await hoplite.reduce(
            [late, *others], op, num_objects=3, weights=weights, timeout="60 s", client=c
        )
        value = await got
        used = {future.key for future in await hoplite.contributors(got, client=c)}
        want = sum(0.2**i for i, future in enumerate(others) if future.key in used) / divisor
        assert len(used) == 3 and late.key not in used
        np.testing.assert_allclose(value, np.full(20_000, want))
    await Event("late", client=c).set()
    del late, others, got
    await nothing_left(s, workers)


@pytest.mark.parametrize("some", [None, 3])
@hoplite_cluster()
async def test_what_is_lost_has_the_same_weight_again(c, s, *workers, some):
    await c.register_plugin(Hoplite())
    futures = [
        c.submit(np.full, 20_000, 2.0**i, workers=[w.address], allow_other_workers=True)
        for i, w in enumerate(workers)
    ]
    weights = [3.0, 5.0, 7.0, 11.0]
    got = await hoplite.reduce(futures, num_objects=some, weights=weights, client=c)
    first = await got
    [holder] = [w for w in workers if w.address in {ws.address for ws in s.tasks[got.key].who_has}]
    await holder.close()
    await until(lambda: s.tasks[got.key].who_has)
    assert same(await got, first)
    used = {future.key for future in await hoplite.contributors(got, client=c)}
    places = [i for i, future in enumerate(futures) if future.key in used]
    assert len(places) == (some or 4)
    assert same(first, np.full(20_000, sum(2.0**i * weights[i] for i in places)))


@hoplite_cluster()
async def test_keys_that_are_tuples(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = [
        c.submit(np.full, 3000, 2.0**i, key=("x", i), workers=[w.address])
        for i, w in enumerate(workers)
    ]
    got = await hoplite.reduce(iter(futures), weights=iter([1, 2, 3, 4]), client=c)
    assert same(await got, np.full(3000, 1.0 + 4 + 12 + 32))


@hoplite_cluster()
async def test_uninstalled_before_it_ran(c, s, *workers):
    await c.register_plugin(Hoplite())
    late = c.submit(when, "late", np.ones(3000, "f4"))
    futures = [*put(c, [np.ones(3000, "f4")], workers), late]
    got = await hoplite.reduce(futures, weights=[0.5, 4], client=c)
    await until(lambda: got.key in s.tasks)
    await c.unregister_scheduler_plugin("hoplite")
    await Event("late", client=c).set()
    assert same(await got, np.full(3000, 4.5, "f4"))


# Errors


@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_weights_that_are_refused_at_once(c, s, *workers):
    await c.register_plugin(Hoplite())
    futures = put(c, powers(3))
    for call in (hoplite.reduce, hoplite.allreduce):
        for weights in ([1, 2], [1, 2, 3, 4], []):
            with pytest.raises(ValueError, match=f"{len(weights)} weights for 3 operands"):
                await call(futures, weights=weights, client=c)
        for bad in (math.nan, math.inf, -math.inf, 10**400, np.float32("nan")):
            with pytest.raises(ValueError, match="finite number"):
                call(futures, weights=[1, bad, 2], client=c)
        for bad in (1j, "1", None, [1]):
            with pytest.raises(TypeError, match="real number"):
                call(futures, weights=[1, bad, 2], client=c)
        with pytest.raises(TypeError, match="weights are for numbers, and add"):
            call(futures, operator.add, weights=[1, 2, 3], client=c)
    assert len(s.tasks) <= 3


@hoplite_cluster()
async def test_operands_that_are_refused(c, s, *workers):
    await c.register_plugin(Hoplite())
    bad = [np.zeros(3000, "M8[s]"), np.array([None] * 3000), {"x": "text"}, {1, 2}]
    for value in bad:
        futures = put(c, [value] * 4, workers)
        for call in (hoplite.reduce, hoplite.allreduce):
            got = await call(futures, "max", weights=[1] * 4, client=c)
            with pytest.raises(OperandError) as caught:
                await got
            assert any(repr(future.key) in str(caught.value) for future in futures)
    futures = put(c, powers(4), workers)
    got = await hoplite.reduce(futures, np.bitwise_or, weights=[1] * 4, client=c)
    with pytest.raises(OperandError, match="bitwise_or cannot reduce the value of dtype float64"):
        await got
