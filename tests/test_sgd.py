"""Asynchronous training: exact values, data, bad input, what is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import weakref
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, get_worker, worker_client

from dask_hoplite import Hoplite, NotInstalledError, sgd
from tests import helpers
from tests.helpers import hoplite_cluster
from tests.test_collectives import nothing_left, put, same

until = partial(helpers.until, timeout=25)

#: Whether gradients that wait may be computed: of this process, as all workers are
GO = threading.Event()


@pytest.fixture(autouse=True)
def gate():
    """Gradients wait until the test lets them go on, or is over."""
    GO.clear()
    yield
    GO.set()


def start():
    return {"w": np.linspace(1.0, 2.0, 2000), "b": [np.array([0.5])]}


def gradient(parameters, target):
    """That of a parabola around a number."""
    diff = sgd.tree_map(lambda w: w - target, parameters)
    return diff, float(np.mean(diff["w"] ** 2))


def flat(parameters, target):
    return parameters - target, float(target)


def waiting(parameters, target):
    if target < 0:
        assert GO.wait(25)
    return parameters - abs(target), 0.0


def targets(c, workers, count=None):
    """A number on each worker, and, by address, which: if there is one for each."""
    values = [float(i + 1) for i in range(count or len(workers))]
    return put(c, values, workers), dict(zip([w.address for w in workers], values, strict=False))


class Momentum(sgd.Rule):
    """As in the documentation."""

    def __init__(self, rate, decay=0.9):
        self.rate, self.decay = rate, decay

    def memory(self, parameters):
        return sgd.tree_map(np.zeros_like, parameters)

    def apply(self, parameters, total, memory, update):
        memory = sgd.tree_map(lambda v, g: self.decay * v + g, memory, total)
        return sgd.tree_map(lambda w, v: w - self.rate * v, parameters, memory), memory


class Mean(sgd.Rule):
    """Takes all contributions."""

    gathers = True

    def apply(self, parameters, total, memory, update):
        assert len(total) == update.count == update.weight
        mean = sgd.tree_map(lambda *g: sum(g) / len(g), *total)
        return sgd.tree_map(lambda w, g: w - 0.1 * g, parameters, mean), memory


def replay(rule, parameters, steps, target, k):
    """What the parameters are after each step, made one after the other in this process."""
    versions, memory, pending = [parameters], rule.memory(parameters), []
    for step in steps:
        assert len(step.contributors) == len(set(step.contributors)) == k
        now = len(versions) - 1
        values = []
        for worker, staleness in zip(step.contributors, step.staleness, strict=True):
            value, _ = rule.work(gradient, versions[now - staleness], target[worker])
            weight = rule.weight(staleness)
            values.append(sgd.tree_map(lambda g, w=weight: g * w, value))
        pending += values
        if rule.gathers or rule.applies(step.number):
            total = pending
            if not rule.gathers:
                total = sgd.tree_map(lambda *g: sum(g), *pending)
            update = sgd.Update(step.number, len(pending), float(len(pending)))
            new, memory = rule.apply(versions[-1], total, memory, update)
            versions.append(new)
            pending = []
        yield versions[-1]


RULES = [
    sgd.Sum(0.05),
    sgd.Hybrid(0.02, 2),
    sgd.Hybrid(0.02, 1, grows=3),
    sgd.StalenessAdaptive(0.05, 0.5),
    sgd.DelayCompensated(0.05, 0.3),
    Momentum(0.02),
    Mean(),
]


@hoplite_cluster()
async def test_values(c, s, *workers):
    await c.register_plugin(Hoplite())
    for rule in RULES:
        data, target = targets(c, workers[1:])
        training = await sgd.train(gradient, start(), data, rule, 2, 8, client=c)
        steps = [step async for step in training]
        assert [step.number for step in steps] == list(range(8))
        for step, want in zip(steps, replay(rule, start(), steps, target, 2), strict=True):
            got = await step.parameters
            np.testing.assert_allclose(got["w"], want["w"], rtol=1e-12, err_msg=repr(rule))
            np.testing.assert_allclose(got["b"][0], want["b"][0], rtol=1e-12)
        assert same(await training.parameters, got)
        assert all(np.isfinite(step.loss) and step.nbytes > 16_000 for step in steps)
        assert any(any(step.staleness) for step in steps)
        with pytest.raises(StopAsyncIteration):
            await anext(training)
        del training, steps, step, data
        await nothing_left(s, workers)


def test_delay_compensation():
    rule = sgd.DelayCompensated(0.1, 0.5)
    old, new = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    g = old - 4
    value, loss = rule.work(flat, old, 4.0)
    got, _ = rule.apply(new, value, None, sgd.Update(0, 1, 1.0))
    np.testing.assert_allclose(got, new - 0.1 * (g + 0.5 * g * g * (new - old)))
    assert loss == 4.0


@pytest.mark.parametrize("bad", [{"updates": 0}, {"grows": 0}])
def test_rules_refuse(bad):
    with pytest.raises(ValueError, match="at least 1"):
        sgd.Hybrid(0.1, **bad)
    with pytest.raises(ValueError, match="at least one local step"):
        sgd.LocalSteps(0.1, 0)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_local_steps(c, s, *workers):
    await c.register_plugin(Hoplite())
    data, target = targets(c, workers)
    training = await sgd.train(gradient, start(), data, sgd.LocalSteps(0.1, 3), steps=3, client=c)
    want = start()
    async for step in training:
        assert set(step.contributors) == set(target) and step.staleness == (0, 0, 0)
        rule = sgd.LocalSteps(0.1, 3)
        each = [rule.work(gradient, want, t)[0] for t in target.values()]
        want = sgd.tree_map(lambda *w: sum(w) / 3, *each)
        np.testing.assert_allclose((await training.parameters)["w"], want["w"])
        np.testing.assert_allclose((await step.parameters)["w"], want["w"])
    del training, step, data
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_gossip(c, s, *workers):
    """All learn from each other, whoever is ready with whom."""
    await c.register_plugin(Hoplite())
    data, _ = targets(c, workers)
    training = await sgd.train(flat, np.zeros(2000), data, sgd.Gossip(0.1), steps=60, client=c)
    groups = [frozenset(step.contributors) async for step in training]
    assert {len(group) for group in groups} == {2} and len(set(groups)) > 2
    value = await training.parameters
    assert value.shape == (2000,) and abs(value[0] - 2.5) < 0.7
    del training, data
    await nothing_left(s, workers)


# What may be given


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_parameters(c, s, *workers):
    await c.register_plugin(Hoplite())
    ones = np.ones(500, "f4")
    for parameters in (
        ones,
        (ones, ones * 2),
        ({"a": ones}, [ones]),
        [ones, (ones, {"b": ones})],
        (ones, np.float32(2)),
    ):
        for loss in (False, True):

            def grad(parameters, data, loss=loss):
                value = sgd.tree_map(np.ones_like, parameters)
                return (value, 3.0) if loss else value

            for given in (parameters, put(c, [parameters])[0]):
                training = await sgd.train(
                    grad, given, put(c, [0], workers), sgd.Sum(0.5), steps=2, client=c
                )
                steps = [step async for step in training]
                assert all(s.loss == 3.0 if loss else np.isnan(s.loss) for s in steps)
                got = await training.parameters
                want = sgd.tree_map(lambda w: w - 1, parameters)
                for ours, theirs in zip(flatten(got), flatten(want), strict=True):
                    assert same(ours, theirs)


def flatten(tree):
    leaves = []
    sgd.tree_map(lambda leaf: leaves.append(leaf) or leaf, tree)
    return leaves


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_torch(c, s, *workers):
    torch = pytest.importorskip("torch")
    await c.register_plugin(Hoplite())
    data = put(c, [1.0, 2.0], workers)
    training = await sgd.train(flat, torch.ones(500), data, sgd.Sum(0.1), 2, 2, client=c)
    assert len([step async for step in training]) == 2
    assert (await training.parameters).dtype == torch.float32


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_data(c, s, a, b):
    """Blocks of all kinds are worked on in turn."""
    await c.register_plugin(Hoplite())
    x = np.arange(12.0)
    bag = pytest.importorskip("dask.bag").from_sequence(list(x), npartitions=4)
    kinds = [
        put(c, np.split(x, 4), [a, b]),
        {a.address: put(c, np.split(x, 4), [a])},
        {a.name: put(c, [x], [b])[0]},
        da.from_array(x, chunks=3),
        (da.from_array(x, chunks=3), da.from_array(-x, chunks=3)),
        bag,
        dask.delayed(lambda: x)(),
    ]
    with contextlib.suppress(ImportError):
        import dask.dataframe as dd
        import pandas as pd

        kinds.append(dd.from_pandas(pd.DataFrame({"x": x}), npartitions=4))

    def grad(parameters, data):
        if isinstance(data, tuple):
            assert (data[0] == -data[1]).all()
            data = data[0]
        value = np.zeros(12)
        value[np.asarray(data, int).ravel()] = 1
        return value

    for data in kinds:
        training = await sgd.train(grad, np.zeros(12), data, sgd.Sum(1), 1, client=c)
        seen = np.zeros(12)
        used = set()
        async for step in training:
            used.update(step.contributors)
            seen = await step.parameters
            if (seen < 0).all() or step.number > 100:
                break
        assert (seen < 0).all(), data
        if isinstance(data, dict):
            assert used == {a.address}, "others were given no data"
        await training.close()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_seeds(c, s, *workers):
    """Each is another one, also after a pause; the same from the same seed."""
    await c.register_plugin(Hoplite())

    def draw(parameters, data, seed):
        return np.array([float(seed)])

    async def seeds(seed, resume=None):
        training = await sgd.train(
            draw,
            np.zeros(1),
            put(c, [0], workers),
            sgd.Sum(1),
            steps=3,
            seed=seed,
            resume=resume,
            client=c,
        )
        found = [0.0 if resume is None else resume.parameters[0]]
        async for step in training:
            found.append((await step.parameters)[0])
        return list(np.diff(found)), await training.checkpoint()

    first, there = await seeds(0)
    assert (await seeds(0))[0] == first and (await seeds(7))[0] != first
    assert len({*first, *(await seeds(0, there))[0]}) == 6


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_arguments(c, s, a, b):
    data = put(c, [1.0, 2.0], [a, b])
    train = partial(sgd.train, flat, np.zeros(10), client=c)
    with pytest.raises(NotInstalledError):
        await train(data, sgd.Sum(0.1))
    await c.register_plugin(Hoplite())
    for bad, kind, match in (
        ({"rule": 3}, TypeError, "a rule is"),
        ({"steps": 0}, ValueError, "steps"),
        ({"num_objects": 0}, ValueError, "num_objects"),
        ({"num_objects": 3}, ValueError, "num_objects is 3, but only 2 of 2 workers"),
        ({"data": []}, ValueError, "no data"),
        ({"data": {a.address: []}}, ValueError, f"no data for {a.address}"),
        ({"data": {"nobody": data}}, ValueError, "nobody"),
        ({"data": [1, 2]}, TypeError, "not a int"),
        ({"data": 5}, TypeError, "not a int"),
        ({"data": (da.ones(4, chunks=2), da.ones(4, chunks=1))}, ValueError, "different numbers"),
        ({"server": "nobody"}, ValueError, "nobody"),
        ({"resume": {}}, TypeError, "Checkpoint"),
    ):
        with pytest.raises(kind, match=match):
            await train(**{"data": data, "rule": sgd.Sum(0.1), **bad})
    failed = c.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await train([failed], sgd.Sum(0.1))
    failed.release()
    with pytest.raises(TypeError, match="function"):
        sgd.train(3, np.zeros(10), data, sgd.Sum(0.1), client=c)
    with pytest.raises(ValueError):
        await sgd.train(flat, object(), data, sgd.Sum(0.1), client=c)
    del data, bad
    await nothing_left(s, [a, b])


@hoplite_cluster(nthreads=[])
async def test_no_worker(c, s):
    await c.register_plugin(Hoplite())
    with pytest.raises(sgd.TrainingError, match="no worker"):
        await sgd.train(flat, np.zeros(10), [c.submit(int)], sgd.Sum(0.1), client=c)


# What goes wrong later


class Unloadable:
    """A function that no worker can have."""

    def __call__(self, parameters, data):
        return parameters

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ImportError("it is only here")


def bad_gradient(kind, worker, parameters, target):
    if get_worker().address != worker or parameters[0] > -0.3:
        return np.ones_like(parameters)
    if kind == "raises":
        raise RuntimeError("it has no idea")
    return {
        "nan": parameters * np.nan,
        "shape": parameters[:3],
        "structure": [parameters],
        "text": "text",
    }[kind]


@pytest.mark.parametrize("kind", ["raises", "nan", "shape", "structure", "text"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_bad_gradients(c, s, a, b, kind):
    await c.register_plugin(Hoplite())
    data = put(c, [0, 0], [a, b])
    grad = partial(bad_gradient, kind, b.address)
    training = await sgd.train(grad, np.zeros(1000), data, sgd.Sum(0.1), 2, client=c)
    with pytest.raises(sgd.GradientError) as caught:
        async for step in training:
            last = step.number
    error = caught.value
    assert (error.worker, error.step, error.part) == (b.address, 2, data[1].key)
    assert b.address in str(error) and str(pickle.loads(pickle.dumps(error))) == str(error)
    assert last == 1
    checkpoint = pickle.loads(pickle.dumps(await training.checkpoint()))
    assert checkpoint.step == 2
    np.testing.assert_allclose(checkpoint.parameters, -0.4)
    training = await sgd.train(
        lambda w, t: np.ones_like(w), None, data, sgd.Sum(0.1), 2, 1, resume=checkpoint, client=c
    )
    assert [step.number async for step in training] == [2]
    np.testing.assert_allclose(await training.parameters, -0.6)
    del training, caught, error, data, step
    await nothing_left(s, [a, b])


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_function_that_workers_cannot_load(c, s, *workers):
    await c.register_plugin(Hoplite())
    data = put(c, [0, 0], workers)
    training = await sgd.train(Unloadable(), np.zeros(1000), data, sgd.Sum(0.1), client=c)
    with pytest.raises(sgd.GradientError, match="deserialization"):
        await anext(training)


class Failing(Momentum):
    def apply(self, parameters, total, memory, update):
        if update.step == 3:
            raise RuntimeError("out of rules")
        return super().apply(parameters, total, memory, update)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_rule_that_raises(c, s, *workers):
    await c.register_plugin(Hoplite())
    data = put(c, [1.0, 1.0], workers)
    training = await sgd.train(flat, np.zeros(1000), data, Failing(0.1), client=c)
    steps = []
    with pytest.raises(sgd.TrainingError, match="out of rules") as caught:
        async for step in training:
            steps.append(step.number)
    assert steps == [0, 1, 2] and caught.value.step == 3
    assert (await training.checkpoint()).step == 3
    del training, caught, data, step
    await nothing_left(s, workers)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_resumed_with_memory(c, s, *workers):
    """In two pieces it is the same."""
    await c.register_plugin(Hoplite())
    data, _ = targets(c, workers)
    train = partial(sgd.train, gradient, start(), data, Momentum(0.1), 2, client=c)
    whole = await train(6)
    assert len([step async for step in whole]) == 6
    half = await train(3)
    assert len([step async for step in half]) == 3
    rest = await train(3, resume=await half.checkpoint())
    assert [step.number async for step in rest] == [3, 4, 5]
    assert same((await whole.parameters)["w"], (await rest.parameters)["w"])


# What is left, and what grows


@hoplite_cluster()
async def test_nothing_grows(c, s, *workers):
    await c.register_plugin(Hoplite())
    data, _ = targets(c, workers)
    training = await sgd.train(flat, np.zeros(500), data, sgd.Sum(0.01), 2, 150, client=c)
    counts = []
    async for _step in training:
        counts.append((len(s.tasks), len(c.futures), len(training._loop.tasks)))
    del _step
    assert np.max(counts[10:], axis=0).tolist() <= [60, 40, 30], np.max(counts[10:], axis=0)
    assert len(s.task_groups) < 100
    del training, data
    await nothing_left(s, workers)


@pytest.mark.parametrize("how", ["close", "with", "del", "end"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_nothing_left(c, s, *workers, how):
    await c.register_plugin(Hoplite())
    before = asyncio.all_tasks()
    data, _ = targets(c, workers)
    rules = sgd.Sum(0.1), Momentum(0.1), sgd.Gossip(0.1)
    for rule in rules:
        steps = 3 if how == "end" else None
        training = await sgd.train(flat, np.zeros(2000), data, rule, steps=steps, client=c)
        if how == "with":
            async with training:
                await anext(training)
        else:
            assert (await anext(training)).number == 0
        if how == "close":
            await training.close()
            with pytest.raises(StopAsyncIteration):
                await anext(training)
            assert (await training.parameters).shape == (2000,)
        elif how == "end":
            assert len([step async for step in training]) == 2
        gone = weakref.ref(training)
        del training
        assert gone() is None
        await until(lambda: set(c.futures) == {future.key for future in data} or gc.collect() < 0)
    data.clear()
    await nothing_left(s, workers)
    await until(lambda: not [t for t in asyncio.all_tasks() - before if "sgd" in repr(t)])


@hoplite_cluster()
async def test_a_slow_user(c, s, *workers):
    await c.register_plugin(Hoplite())
    data, _ = targets(c, workers)
    training = await sgd.train(flat, np.zeros(2000), data, sgd.Sum(0.1), client=c)
    await anext(training)
    loop = training._loop
    await until(lambda: loop.number > 3 and len(loop.finished) == 4)
    assert loop.number == 4
    await training.close()


@hoplite_cluster()
async def test_many_at_once(c, s, *workers):
    await c.register_plugin(Hoplite())
    data, _ = targets(c, workers)

    async def one(rule):
        training = await sgd.train(gradient, start(), data, rule, steps=6, client=c)
        assert len([step async for step in training]) == 6

    await asyncio.gather(*map(one, [*RULES[:4], sgd.Gossip(0.1)]))
    data.clear()
    await nothing_left(s, workers)


def test_synchronous_client_and_inside_a_task():
    def inside(address):
        with worker_client() as client:
            data = client.scatter([1.0, 2.0], hash=False)
            with sgd.train(flat, np.zeros(2000), data, sgd.Sum(0.1), steps=3) as training:
                return len(list(training)), training.parameters.shape

    with Client(
        n_workers=2, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=None
    ) as c:
        c.register_plugin(Hoplite())
        data = c.map(float, range(4), pure=False)
        training = sgd.train(flat, np.zeros(2000), data, sgd.Sum(0.1), steps=4)
        assert [step.number for step in training] == [0, 1, 2, 3]
        assert training.parameters.shape == (2000,)
        assert training.checkpoint().step == 4
        training = sgd.train(flat, np.zeros(2000), data, sgd.Sum(0.1))
        for step in training:
            if step.number == 3:
                break
        del training, step
        assert c.submit(inside, "").result(timeout=20) == (3, (2000,))
