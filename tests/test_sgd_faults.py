"""Training whose workers come, leave, or are slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from distributed import Nanny, Worker, get_worker, wait
from distributed.utils_test import captured_logger

from dask_hoplite import Hoplite, sgd
from tests.helpers import hoplite_cluster
from tests.test_collectives import nothing_left, put
from tests.test_sgd import GO, gate, until  # noqa: F401  (gate: a fixture)


def flat(parameters, target):
    return parameters - target, 0.0


def waiting_on(worker, parameters, target):
    """One worker computes when it may."""
    if get_worker().address == worker:
        assert GO.wait(25)
    return parameters - target, 0.0


def anywhere(c, workers):
    """Data of each worker that can be computed again elsewhere."""
    return [
        c.submit(float, i + 1, workers=[w.address], allow_other_workers=True, pure=False)
        for i, w in enumerate(workers)
    ]


def zeros():
    return np.zeros(2000)


async def until_from(training, worker, limit=200):
    """Take steps until a worker has contributed."""
    async for step in training:
        if worker in step.contributors:
            return step
        assert step.number < limit
    raise AssertionError("it is over")


@pytest.mark.parametrize("rule", [sgd.Sum(0.1), sgd.Gossip(0.1)], ids=["sum", "gossip"])
@hoplite_cluster()
async def test_a_contributor_leaves_and_one_joins(c, s, *workers, rule):
    await c.register_plugin(Hoplite())
    victim = workers[3]
    data = anywhere(c, workers[1:] * 3)
    training = await sgd.train(flat, zeros(), data, rule, 2, client=c, timeout=20)
    await until_from(training, victim.address)
    await victim.close()
    for _ in range(8):
        step = await anext(training)
    assert victim.address not in step.contributors
    async with Worker(s.address, nthreads=1) as new:
        await until_from(training, new.address)
        await training.close()
        await new.close()


@hoplite_cluster()
async def test_data_that_may_come_back(c, s, *workers):
    """Whoever is to work on it works on other data meanwhile."""
    await c.register_plugin(Hoplite())
    victim, *others = workers
    data = put(c, [1.0, 2.0, 3.0, 4.0], workers)  # each on its worker, and nowhere else
    training = await sgd.train(flat, zeros(), data, sgd.Sum(0.1), 2, client=c, timeout=20)
    await anext(training)
    await victim.close()
    missing = {w.address for w in others}
    await until(lambda: set(training._loop.shares.workers) == missing)
    for _ in range(4):
        await anext(training)  # what was made before
    for _ in range(10):
        missing -= set((await anext(training)).contributors)
    assert not missing
    await training.close()


@hoplite_cluster(Worker=Nanny, nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_killed_process(c, s, *nannies):
    """No step fails, and the one that comes in its place takes part."""
    await c.register_plugin(Hoplite())
    former = nannies[2].worker_address
    server = nannies[0].worker_address
    data = [
        c.submit(float, i, workers=[n.worker_address], allow_other_workers=True, pure=False)
        for i, n in enumerate(nannies[1:])
    ]
    training = await sgd.train(
        flat, zeros(), data, sgd.Sum(0.1), 1, server=server, client=c, timeout=20
    )
    steps = []
    async for step in training:
        steps.append(step)
        if step.number == 20:
            os.kill(nannies[2].pid, signal.SIGKILL)
            await until(lambda: former not in s.workers)
            await until(lambda: len(s.workers) == 3)
        if step.number > 20 and set(step.contributors) - {former, nannies[1].worker_address}:
            break
        assert step.number < 500
    assert [step.number for step in steps] == list(range(len(steps)))
    await training.close()


@pytest.mark.parametrize("rule", [sgd.Sum(0.1), sgd.Hybrid(0.1, 3)], ids=["sum", "hybrid"])
@hoplite_cluster()
async def test_the_server_leaves(c, s, *workers, rule):
    await c.register_plugin(Hoplite())
    server = workers[0]
    data = anywhere(c, workers[1:])
    training = await sgd.train(
        flat, zeros(), data, rule, 2, server=server.address, client=c, timeout=20
    )
    for _ in range(5):
        await anext(training)
    await server.close()
    for number in range(5, 15):
        assert (await anext(training)).number == number
    value = await training.parameters
    assert training._loop.server != server.address and np.isfinite(value).all()
    await training.close()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_all_leave(c, s, *workers):
    await c.register_plugin(Hoplite())
    data = [c.submit(float, i, pure=False) for i in range(2)]
    training = await sgd.train(flat, zeros(), data, sgd.Sum(0.1), 2, client=c, timeout=0.5)
    await anext(training)
    checkpoint = await training.checkpoint()
    for w in workers:
        await w.close()
    with pytest.raises(sgd.TrainingError):
        [step async for step in training]
    async with Worker(s.address, nthreads=1) as new:
        training = await sgd.train(
            flat, None, data, sgd.Sum(0.1), steps=2, resume=checkpoint, client=c
        )
        assert [step.number async for step in training] == [1, 2]
        del training, data
        await new.close()


@pytest.mark.parametrize("rule", [sgd.Sum(0.1), sgd.Gossip(0.1)], ids=["sum", "gossip"])
@hoplite_cluster()
async def test_one_that_is_slow(c, s, *workers, rule):
    """Nobody waits for it."""
    await c.register_plugin(Hoplite())
    slow = workers[3].address
    data = anywhere(c, workers[1:])
    grad = partial(waiting_on, slow)
    training = await sgd.train(grad, zeros(), data, rule, 2, client=c, timeout=20)
    for _ in range(20):
        assert slow not in (await anext(training)).contributors
    GO.set()
    step = await until_from(training, slow)
    assert max(step.staleness) > 15
    await training.close()


@hoplite_cluster()
async def test_data_that_are_lost(c, s, *workers):
    """The others go on; with none, it is over."""
    await c.register_plugin(Hoplite())
    data = [
        await c.scatter(float(i), workers=[w.address], hash=False) for i, w in enumerate(workers)
    ]
    training = await sgd.train(
        flat,
        zeros(),
        data[1:],
        sgd.Sum(0.1),
        1,
        server=workers[0].address,
        client=c,
        timeout=20,
    )
    await until_from(training, workers[3].address)
    await workers[3].close()
    await until(lambda: data[3].status != "finished")
    for _ in range(10):
        assert workers[3].address not in (await anext(training)).contributors
    assert set(training._loop.plan.parts) == {data[1].key, data[2].key}
    for w in workers[1:3]:
        await w.close()
    with pytest.raises(sgd.TrainingError):
        async for _ in training:
            pass
    assert np.isfinite(await training.parameters).all()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_step_takes_too_long(c, s, *workers):
    await c.register_plugin(Hoplite())
    slow = workers[2].address
    training = await sgd.train(
        partial(waiting_on, slow),
        zeros(),
        anywhere(c, workers[1:]),
        sgd.Sum(0.1),
        2,
        client=c,
        timeout=0.5,
    )
    with pytest.raises(sgd.TrainingError, match=rf"0\.5 s; still busy: \['{slow}'\]"):
        await anext(training)
    assert (await training.checkpoint()).step == 0
    GO.set()
    del training
    await nothing_left(s, workers)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_the_client_closes(c, s, *workers):
    """Quietly."""
    await c.register_plugin(Hoplite())
    training = await sgd.train(flat, zeros(), anywhere(c, workers), sgd.Sum(0.1), client=c)
    await anext(training)
    loop = training._loop
    with captured_logger("dask_hoplite", level=logging.WARNING) as log:
        await c.close()
        await asyncio.wait({loop.running}, timeout=5)
    assert not log.getvalue()
    await training.close()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_the_end_of_a_training_spares_what_others_gather(c, s, *workers):
    """Dask gets at once what several ask for, and those who ask for the loss are stopped."""
    await c.register_plugin(Hoplite())
    training = await sgd.train(flat, zeros(), anywhere(c, workers), sgd.Sum(0.1), client=c)
    await anext(training)
    loop = training._loop
    await training.close()
    number, wanted = c.submit(float, 1), c.submit(float, 2)
    await wait([number, wanted])
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(c._gather_semaphore._value):  # all who gather now do it together
            await stack.enter_async_context(c._gather_semaphore)
        losing = asyncio.create_task(loop.loss_of(number, workers[0].address))
        await until(lambda: c._gather_future is not None)
        gathering = asyncio.create_task(c._gather(wanted))
        await until(lambda: wanted.key in c._gather_keys)
        losing.cancel()
        await asyncio.wait({losing})
    assert losing.cancelled()
    assert await gathering == 2.0


SCRIPT = """
import numpy as np
from distributed import Client
from dask_hoplite import Hoplite, sgd

if __name__ == "__main__":
    c = Client(n_workers=2, processes=False, protocol="tcp", dashboard_address=None)
    c.register_plugin(Hoplite())
    data = c.scatter([1.0, 2.0])
    for step in sgd.train(lambda w, t: w - t, np.zeros(100_000), data, sgd.Sum(0.1)):
        if step.number == 5:
            break
"""


def test_a_script_that_breaks_off_ends_quietly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "is lost" not in done.stderr and "never retrieved" not in done.stderr
    assert "was destroyed" not in done.stderr, done.stderr
