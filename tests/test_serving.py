"""Ensembles: values, what becomes of models that are lost, late or wrong, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
from functools import partial

import numpy as np
import pytest
from distributed import Client, Future, Nanny, Worker, wait

import dask_hoplite as hoplite
from dask_hoplite import EnsembleError, Hoplite, OperandError, serving
from tests import helpers
from tests.helpers import hoplite_cluster, plugin
from tests.test_collectives import nothing_left, put, same

until = partial(helpers.until, timeout=25)

#: Whether models that wait may predict: of this process, as all workers are
GO = threading.Event()

QUERY = np.arange(20_000.0).reshape(1000, 20)  # a large object


def may_go():
    return GO.wait(25)


class Linear:
    """A model of which it is easily said what it predicts."""

    def __init__(self, factor, offset=0.0):
        self.factor = factor
        self.offset = offset

    def predict(self, query):
        return query * self.factor + self.offset


class Waiting(Linear):
    """One that predicts when it may."""

    def predict(self, query):
        assert may_go()
        return super().predict(query)


class Wrong(Linear):
    def predict(self, query):
        raise RuntimeError("it has no idea")


def models_on(c, workers, kinds=(Linear,) * 4):
    """A model of each kind, which can be made again elsewhere."""
    return [
        c.submit(kind, 10.0**i, workers=[w.address], allow_other_workers=True, pure=False)
        for i, (kind, w) in enumerate(zip(kinds, workers, strict=False))
    ]


@pytest.fixture(autouse=True)
def gate():
    """Models wait until the test lets them go on, or is over."""
    GO.clear()
    yield
    GO.set()


def total(*names):
    return QUERY * sum(10.0**i for i in names)


# Values


@hoplite_cluster()
async def test_values(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers)
    for query in (QUERY, QUERY[:2], await c.scatter(QUERY), c.submit(np.array, QUERY)):
        asked = QUERY if isinstance(query, Future) else query
        for combine, want in (
            ("sum", asked * 1111),
            ("mean", asked * 1111 / 4),
            ("max", asked * 1000),
            ("argmax", np.full(len(asked), 19)),
        ):
            async with serving.Ensemble(models, combine, client=c) as ensemble:
                answer = await ensemble.predict(query)
                np.testing.assert_allclose(answer.value, want)
                assert answer.models == (0, 1, 2, 3) and answer.failed == {}
                assert answer.seconds == ensemble.latencies()["p50"]
    del models, query, answer, ensemble
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_vote(c, s, *workers):
    await c.register_plugin(Hoplite())
    scores = [[[9, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 1, 0]], [[0, 2, 1], [0, 0, 5]]]
    for combine, want in (("vote", [1, 1]), ("argmax", [0, 2])):
        async with serving.Ensemble(
            dict(zip("abc", scores, strict=True)),
            combine,
            client=c,
            predict=lambda model, query: np.array(model) + query,
        ) as ensemble:
            answer = await ensemble.predict(0)
            assert same(answer.value, np.array(want)) and answer.models == ("a", "b", "c")
    del ensemble
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_models_that_are_values_or_are_called(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = {"new": Linear(1.0), "old": put(c, [Linear(10.0)])[0], 3: abs}
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        answer = await ensemble.predict(-QUERY)
        np.testing.assert_array_equal(answer.value, -QUERY * 10)
        assert answer.models == ("new", "old", 3)
    del models, ensemble
    await nothing_left(s, workers)


def test_synchronous_client_and_inside_a_task():
    def inside():
        with serving.Ensemble([Linear(3.0)], "sum") as ensemble:
            return ensemble.predict(QUERY).value

    with Client(
        n_workers=2, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=None
    ) as c:
        c.register_plugin(Hoplite())
        models = c.map(Linear, [1.0, 2.0])
        with serving.Ensemble(models, "sum") as ensemble:
            answers = [ensemble.submit(QUERY + i) for i in range(5)]
            for i, answer in enumerate(answers):
                assert same(answer.result(timeout=20).value, (QUERY + i) * 3)
            assert ensemble.latencies()["count"] == 5
        with pytest.raises(RuntimeError, match="closed"):
            ensemble.predict(QUERY)
        assert same(c.submit(inside).result(timeout=20), QUERY * 3)


# Many queries


@hoplite_cluster()
async def test_queries_overlap(c, s, *workers):
    """None waits for another one's answer."""
    await c.register_plugin(Hoplite())
    models = models_on(c, workers, [Linear, Waiting, Linear, Linear])
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        answers = [ensemble.submit(QUERY + i) for i in range(5)]
        await until(lambda: len([k for k in s.tasks if str(k).startswith("reduce")]) == 5)
        await until(
            lambda: len([t for t in s.tasks.values() if t.prefix.name == "prediction"]) == 20
        )
        await until(lambda: len([t for t in s.tasks.values() if t.state == "processing"]) >= 5)
        assert not any(answer.done() for answer in answers)
        GO.set()
        for i, answer in enumerate(await asyncio.gather(*answers)):
            np.testing.assert_allclose(answer.value, (QUERY + i) * 1111)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_nothing_grows(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers)
    query = QUERY[:100]
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        for _ in range(10):
            await asyncio.gather(*(ensemble.submit(query) for _ in range(10)))
        await until(lambda: len(s.tasks) == 2)
        assert set(c.futures) == {model.key for model in models}
        assert not plugin(s).puts.pending and not plugin(s).directory.trees
    del models, ensemble
    await nothing_left(s, workers)


# Workers that leave


@hoplite_cluster()
async def test_a_model_is_lost_and_is_back(c, s, *workers):
    await c.register_plugin(Hoplite())
    _, b, *others = workers
    models = models_on(c, others)
    models.append(c.submit(Linear, 100.0, workers=[b.address]))  # nowhere else
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        assert (await ensemble.predict(QUERY)).models == (0, 1, 2)
        await b.close()
        answer = await ensemble.predict(QUERY)
        np.testing.assert_array_equal(answer.value, total(0, 1))
        assert answer.models == (0, 1) and "not in memory" in answer.failed[2]
        async with serving_worker(s, b) as again:
            await wait(models)
            answer = await ensemble.predict(QUERY)
            np.testing.assert_array_equal(answer.value, total(0, 1, 2))
            assert answer.models == (0, 1, 2) and not answer.failed
            del models[:], ensemble
            await again.close()


def serving_worker(s, former):
    """A worker in the place of a former one."""
    return Worker(s.address, nthreads=1, host="127.0.0.1", port=int(former.address.split(":")[-1]))


@hoplite_cluster()
async def test_a_worker_leaves_while_it_predicts(c, s, *workers):
    """Those that are left answer; a model that is made again meanwhile, is one of them."""
    await c.register_plugin(Hoplite())
    a, b, *others = workers
    models = models_on(c, (a, *others), [Linear] * 3)
    models.append(c.submit(Waiting, 1e3, workers=[b.address]))
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        await wait(models)
        answer = ensemble.submit(QUERY)
        await until(lambda: b.state.executing_count)
        await b.close(executor_wait=False)
        answer = await answer
        np.testing.assert_array_equal(answer.value, total(0, 1, 2))
        assert answer.models == (0, 1, 2) and list(answer.failed) == [3]
        assert b.address in answer.failed[3]
    GO.set()


@hoplite_cluster()
async def test_a_scattered_model_is_lost(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = {w.name: Linear(10.0**w.name) for w in workers}
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        names = (await ensemble.predict(QUERY)).models
        assert names == (0, 1, 2, 3)
        [place] = [p for n, p in ensemble.members.places.items() if n == 2]
        [victim] = [w for w in workers if w.address == place]
        await victim.close()
        for _ in range(2):
            answer = await ensemble.predict(QUERY)
            assert 2 not in answer.models
            np.testing.assert_array_equal(answer.value, total(*answer.models))


@hoplite_cluster()
async def test_a_worker_retires(c, s, *workers):
    """The model is somewhere else now; nobody tells the client."""
    await c.register_plugin(Hoplite())
    models = models_on(c, workers)
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        await ensemble.predict(QUERY)
        for w, query in zip(workers[:2], (QUERY, QUERY[:1]), strict=True):
            await c.retire_workers([w.address])
            answer = await ensemble.predict(query)
            np.testing.assert_array_equal(answer.value, query * 1111)
            assert answer.models == (0, 1, 2, 3), answer.failed
            np.testing.assert_array_equal(answer.value, query * 1111)


@hoplite_cluster(Worker=Nanny, nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_killed_process(c, s, *nannies):
    await c.register_plugin(Hoplite())
    models = [
        c.submit(Linear, 10.0**i, workers=[n.worker_address], allow_other_workers=True)
        for i, n in enumerate(nannies)
    ]
    async with serving.Ensemble(models, "sum", client=c) as ensemble:
        await ensemble.predict(QUERY)
        under_way = [ensemble.submit(QUERY) for _ in range(5)]
        await nannies[1].kill()
        for answer in await asyncio.gather(*under_way):
            np.testing.assert_array_equal(answer.value, total(*answer.models))
            assert {0, 2} <= set(answer.models)
        await wait(models)
        assert (await ensemble.predict(QUERY)).models == (0, 1, 2)


@hoplite_cluster(Worker=Nanny, nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_frozen_process(c, s, *nannies):
    """It costs one query its time; it is asked again when it answers."""
    await c.register_plugin(Hoplite())
    models = [c.submit(Linear, 10.0**i, workers=[n.worker_address]) for i, n in enumerate(nannies)]
    await wait(models)
    async with serving.Ensemble(models, "sum", client=c, timeout=2) as ensemble:
        assert (await ensemble.predict(QUERY)).models == (0, 1, 2)
        os.kill(nannies[1].pid, signal.SIGSTOP)
        try:
            with contextlib.suppress(EnsembleError):  # if it was to pass the query on
                assert 1 not in (await ensemble.predict(QUERY)).models
            await until(lambda: all(e.done() for p, e in late(ensemble, but=nannies[1])))
            answer = await ensemble.predict(QUERY)
            np.testing.assert_array_equal(answer.value, total(0, 2))
            assert answer.models == (0, 2) and "too late before" in answer.failed[1]
            assert answer.seconds < 2
        finally:
            os.kill(nannies[1].pid, signal.SIGCONT)
        await until(lambda: all(echo.done() for _, echo in ensemble.members.late.values()))
        assert (await ensemble.predict(QUERY)).models == (0, 1, 2)


def late(ensemble, but):
    return [(p, e) for p, e in ensemble.members.late.values() if p != but.worker_address]


# Models that are slow


@hoplite_cluster()
async def test_the_first_so_many(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers, [Linear, Waiting, Linear, Waiting])
    async with serving.Ensemble(models, "mean", client=c, num_objects=2) as ensemble:
        answer = await ensemble.predict(QUERY)
        np.testing.assert_array_equal(answer.value, total(0, 2) / 2)
        assert answer.models == (0, 2)
        await until(lambda: len(s.tasks) == 4)  # the others are given up
    GO.set()


@hoplite_cluster()
async def test_time_is_up(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers, [Linear, Linear, Waiting, Linear])
    await wait(models)
    async with serving.Ensemble(models, "sum", client=c, timeout=1, quorum=2) as ensemble:
        answer = await ensemble.predict(QUERY)
        np.testing.assert_array_equal(answer.value, total(0, 1, 3))
        assert answer.models == (0, 1, 3) and "within 1 s" in answer.failed[2]
        answer = await ensemble.predict(QUERY)
        assert answer.models == (0, 1, 3) and "too late before" in answer.failed[2]
        assert answer.seconds < 1
        GO.set()
        await until(lambda: all(echo.done() for _, echo in ensemble.members.late.values()))
        assert (await ensemble.predict(QUERY)).models == (0, 1, 2, 3)


@hoplite_cluster()
async def test_time_is_up_for_too_many(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers, [Linear, Waiting, Waiting, Waiting])
    await wait(models)
    async with serving.Ensemble(models, "sum", client=c, timeout=1, quorum=2) as ensemble:
        with pytest.raises(EnsembleError, match="1 models are left, and an answer takes 2"):
            await ensemble.predict(QUERY)
    GO.set()
    del models, ensemble
    await nothing_left(s, workers)


# Errors


@hoplite_cluster()
async def test_models_that_raise(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = models_on(c, workers, [Wrong, Linear, Linear, Wrong])
    for some in (None, 3):
        async with serving.Ensemble(models, "sum", client=c, num_objects=some) as ensemble:
            answer = await ensemble.predict(QUERY)
            assert answer.models == (1, 2)
            np.testing.assert_array_equal(answer.value, total(1, 2))
            assert list(answer.failed) == [0, 3]
            assert "RuntimeError: it has no idea" in answer.failed[0]
            assert workers[0].address in answer.failed[0]
    async with serving.Ensemble(models, "sum", client=c, num_objects=2) as ensemble:
        answer = await ensemble.predict(QUERY)
        assert answer.models == (1, 2) and answer.failed.keys() <= {0, 3}
    async with serving.Ensemble(models, "sum", client=c, quorum=3) as ensemble:
        with pytest.raises(EnsembleError) as caught:
            await ensemble.predict(QUERY)
        assert caught.value.failed.keys() == {0, 3}
        assert workers[3].address in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
    del models, ensemble, caught
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_predictions_that_do_not_match(c, s, *workers):
    await c.register_plugin(Hoplite())
    async with serving.Ensemble(
        [1, 2, 3], client=c, predict=lambda model, query: query[:model]
    ) as ensemble:
        with pytest.raises(OperandError, match="shape"):
            await ensemble.predict(QUERY)


@hoplite_cluster()
async def test_a_query_that_has_failed(c, s, *workers):
    await c.register_plugin(Hoplite())
    async with serving.Ensemble(models_on(c, workers), client=c) as ensemble:
        with pytest.raises(ZeroDivisionError):
            await ensemble.predict(c.submit(lambda: 1 / 0))


@hoplite_cluster()
async def test_models_that_were_never_there(c, s, *workers):
    await c.register_plugin(Hoplite())
    models = {"bad": c.submit(lambda: 1 / 0), "good": c.submit(Linear, 1.0)}
    async with serving.Ensemble(models, client=c) as ensemble:
        answer = await ensemble.predict(QUERY)
        assert answer.models == ("good",) and "ZeroDivisionError" in answer.failed["bad"]


@hoplite_cluster()
async def test_arguments(c, s, *workers):
    for models in ([], {}):
        with pytest.raises(ValueError, match="no models"):
            serving.Ensemble(models, client=c)
    for bad in ({"quorum": 3}, {"quorum": 0}, {"num_objects": 3}, {"timeout": 0}):
        with pytest.raises(ValueError):
            serving.Ensemble([1, 2], client=c, **bad)
    with pytest.raises(ValueError, match="operation"):
        serving.Ensemble([1, 2], "median", client=c)
    with pytest.raises(hoplite.NotInstalledError):
        await serving.Ensemble([1, 2], client=c).predict(QUERY)


@hoplite_cluster()
async def test_closed_while_it_answers(c, s, *workers):
    await c.register_plugin(Hoplite())
    ensemble = serving.Ensemble(models_on(c, workers, [Waiting] * 4), client=c)
    answers = [ensemble.submit(QUERY + i) for i in range(3)]
    await until(lambda: all(w.state.executing_count for w in workers))
    mine = c.submit(may_go)
    getting = asyncio.ensure_future(c._gather(mine))
    answers[0].cancel()
    await ensemble.close()
    for answer in answers:
        with pytest.raises(asyncio.CancelledError):
            await answer
    GO.set()
    assert await getting, "others get what they ask for"
    del ensemble, answers, answer, mine, getting
    await nothing_left(s, workers)
