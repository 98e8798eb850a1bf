"""Collectives whose workers leave, freeze or pause in the middle: each operand counts once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from concurrent.futures import CancelledError
from functools import partial

import dask
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, wait
from distributed.core import Status
from distributed.utils_test import gen_test

import dask_hoplite as hoplite
from benchmarks.exactness import Outcome, Plan, Raised, judge
from dask_hoplite import Hoplite, ObjectLostError, ReductionError
from dask_hoplite.core.events import Broken
from dask_hoplite.exceptions import CancelledPullError
from tests import helpers
from tests.helpers import apart, first_blocks, hoplite_cluster, plugin

until = partial(helpers.until, timeout=25)

N = 100_000

#: So much of a sum is passed on before something happens.
HALF = 400_000


def power(index: int, n: int = N) -> np.ndarray:
    return np.full(n, 2**index)


async def power_when(index: int, name: str) -> np.ndarray:
    await Event(name).wait()  # a thread could not be ended
    return power(index)


def raising(index: int) -> np.ndarray:
    raise Raised(index)


def powers(c: Client, workers) -> list:
    """An operand on each worker, which can be computed again elsewhere."""
    return [
        c.submit(power, i, workers=[w.address], allow_other_workers=True, pure=False)
        for i, w in enumerate(workers)
    ]


async def scattered(c: Client, workers) -> list:
    """An operand on each worker, which is lost with it."""
    return [
        await c.scatter(power(i), workers=[w.address], hash=False) for i, w in enumerate(workers)
    ]


class Halt:
    """Lets workers send only the first half of each sum, until they may go on."""

    def __init__(self, *workers, nbytes: int = HALF):
        self.nbytes = nbytes
        self.halted: dict = {}  # keys by worker
        self.on = asyncio.Event()
        for worker in workers:
            worker.handlers["hoplite_pull"] = self.serve_on(worker)

    def serve_on(self, worker):
        extension = worker.plugins["hoplite"]

        async def serve(comm, key, **kwargs):
            if isinstance(key, tuple) and not self.on.is_set():
                await extension.shelf.announced(key, 5)
                async with extension.shelf.reading(key) as buffer:
                    await buffer.beyond(self.nbytes - 1)
                    answer = {"status": "OK", "offset": 0, **buffer.layout.to_message()}
                    await comm.write(answer)
                    await comm.stream.write(first_blocks(buffer, self.nbytes))
                    self.halted[worker] = key
                    await self.on.wait()
                comm.abort()
                return Status.dont_reply
            return await extension.serve(comm, key, **kwargs)

        return serve

    async def one(self, root: str | None = None):
        """A worker that has sent a half. Not the root."""
        await until(lambda: any(worker.address != root for worker in self.halted))
        return next(worker for worker in self.halted if worker.address != root)

    def go_on(self) -> None:
        self.on.set()


def root_of(s, future) -> str:
    """The worker where the task of a collective waits for its result."""
    return s.tasks[future.key].processing_on.address


async def root_found(s, future, workers):
    await until(lambda: future.key in s.tasks and s.tasks[future.key].processing_on)
    return next(w for w in workers if w.address == root_of(s, future))


def holders(s, future) -> set[str]:
    return {ws.address for ws in s.tasks[future.key].who_has or ()}


def total(indices) -> np.ndarray:
    return np.full(N, sum(2**i for i in indices))


async def check(c: Client, result, operands, count: int | None = None) -> list[int]:
    """See that a result is the sum of its contributors, and that these are so many."""
    value = await result
    told = await hoplite.contributors(result, client=c)
    places = {future.key: index for index, future in enumerate(operands)}
    indices = [places[future.key] for future in told]
    assert len(set(indices)) == len(indices) == (len(operands) if count is None else count)
    np.testing.assert_array_equal(value, total(indices))
    return indices


async def failure(awaitable) -> Exception:
    """What something fails with, without the frames that have futures."""
    try:
        await awaitable
    except (Exception, CancelledError) as error:
        return error.with_traceback(None)
    raise AssertionError("it does not fail")


async def nothing_left(s, workers) -> None:
    """Wait until nothing is left of collectives, and of errors that had futures."""
    reductions = plugin(s).reductions
    tables = [reductions.runs, reductions.users, reductions.groups, reductions.contributors]
    tables += [reductions.gatherings.gatherings, s.tasks]
    for w in workers:
        if w.status != Status.closed:
            extension = w.plugins["hoplite"]
            tables += [extension.reducer.sums, extension.reducer.results, w.data, w.state.tasks]
            tables += [extension.puller.incoming]
    await until(lambda: not any(tables) or gc.collect() < 0)
    await until(lambda: not any(t.name == "hoplite-pump" for t in threading.enumerate()))


# Workers that die


@hoplite_cluster()
async def test_killed_before_it_contributes(c, s, a, *workers):
    await c.register_plugin(Hoplite())
    later = c.submit(power_when, 3, "gate", workers=[a.address], allow_other_workers=True)
    operands = [*powers(c, workers), later]
    result = await hoplite.reduce(operands, client=c)
    await until(lambda: a.state.executing_count)
    await a.close()
    await Event("gate", client=c).set()
    await check(c, result, operands)
    del result, operands, later
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_killed_half_streamed(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    halt = Halt(*workers)
    result = await hoplite.reduce(operands, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    halt.go_on()
    await victim.close()
    await check(c, result, operands)
    del result, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_copies_of_what_is_made_anew(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    halt = Halt(*workers)
    addresses = {w.address for w in workers}
    result = await hoplite.allreduce(operands, workers=addresses, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    halt.go_on()
    await victim.close()
    await check(c, result, operands)
    assert holders(s, result) == addresses - {victim.address}
    del result, operands
    await nothing_left(s, workers)


@pytest.mark.parametrize("op", [hoplite.reduce, hoplite.allreduce])
def test_what_is_finished_is_used_after_the_root_was_killed(op):
    @hoplite_cluster()
    async def test(c, s, root, *workers):
        await c.register_plugin(Hoplite())
        for w in workers:
            w.plugins["hoplite"].shelf.grace = 0.0
        later = c.submit(power_when, 3, "gate", workers=[root.address], allow_other_workers=True)
        operands = [*powers(c, workers), later]
        where = {"workers": [w.address for w in workers]} if op is hoplite.allreduce else {}
        result = await op(operands, timeout=60, client=c, **where)
        run = await run_of(s, result)
        await until(lambda: len(run.plan.placed) >= 2)
        made = dict(run.plan.nodes)
        await until(lambda: all(node.done for node in made.values()))
        events = record(s)
        last = await root_found(s, result, (root, *workers))
        kept = {number for number, node in made.items() if node.worker != last.address}
        halt = Halt(root, *workers)
        await Event("gate", client=c).set()
        await until(lambda: any(node.final for node in run.plan.nodes.values()))
        await last.close()
        halt.go_on()
        await check(c, result, operands)
        assert kept & run.plan.nodes.keys()
        assert not [event for event in events if isinstance(event, Broken) and event.gone]
        del result, operands, later
        await nothing_left(s, workers)

    test()


def record(s) -> list:
    """All that workers report from now on."""
    events, tell = [], plugin(s).reductions.tell

    def told(event):
        events.append(event)
        tell(event)

    plugin(s).reductions.tell = told
    return events


async def run_of(s, future):
    await until(lambda: future.key in plugin(s).reductions.runs)
    return plugin(s).reductions.runs[future.key]


@pytest.mark.parametrize("some", [None, 3])
def test_killed_root(some):
    @hoplite_cluster()
    async def test(c, s, *workers):
        await c.register_plugin(Hoplite())
        operands = powers(c, workers)
        await wait(operands)
        halt = Halt(*workers)
        root = workers[2]
        result = await hoplite.reduce(operands, root=root.address, num_objects=some, client=c)
        await halt.one(root.address)
        halt.go_on()
        await root.close()
        await check(c, result, operands, some)
        assert holders(s, result) != {root.address}
        del result, operands
        await nothing_left(s, workers)

    test()


@hoplite_cluster()
async def test_two_at_once(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    halt = Halt(*workers)
    result = await hoplite.allreduce(operands, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    halt.go_on()
    await asyncio.gather(victim.close(), root.close())
    await check(c, result, operands)
    del result, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_a_spare_takes_the_place_of_what_is_lost(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = await scattered(c, workers)
    halt = Halt(*workers)
    result = await hoplite.reduce(operands, num_objects=3, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    halt.go_on()
    await victim.close()
    used = await check(c, result, operands, 3)
    assert workers.index(victim) not in used
    del result, operands
    await nothing_left(s, workers)


LOST = (ObjectLostError, ReductionError, CancelledError)


@pytest.mark.parametrize(
    "op", [hoplite.reduce, hoplite.allreduce, hoplite.reduce_scatter, hoplite.allgather]
)
@pytest.mark.parametrize("where", ["on the way", "before"])
def test_what_is_lost_and_cannot_be_computed(op, where):
    @hoplite_cluster()
    async def test(c, s, *workers):
        await c.register_plugin(Hoplite())
        operands = await scattered(c, workers)
        if where == "before":
            await workers[1].close()
            results = await failure(of_all(c, op(operands, client=c)))
            assert isinstance(results, LOST)
        else:
            halt = Halt(*workers, nbytes=HALF // 4)  # in a ring, there is no more at first
            hinder(workers, "hoplite_gather")
            results = await op(operands, client=c)
            results = results if isinstance(results, list) else [results]
            keys = {future.key for future in results}
            await until(lambda: keys <= s.tasks.keys())
            if op is not hoplite.allgather:
                await halt.one()
            halt.go_on()
            await workers[1].close()
            for result in results:
                assert isinstance(await failure(result), LOST)
            del result
        del results, operands
        await nothing_left(s, workers)

    test()


async def of_all(c: Client, asked):
    return await c.gather(await asked)


def hinder(workers, name: str) -> list:
    """Let workers answer a question never."""
    for w in workers:
        w.handlers[name] = never


def served_after(gate: asyncio.Event, worker):
    extension = worker.plugins["hoplite"]

    async def serve(comm, key, **kwargs):
        await gate.wait()
        return await extension.serve(comm, key, **kwargs)

    return serve


async def never(**kwargs):
    await asyncio.Event().wait()


@hoplite_cluster()
async def test_killed_while_all_is_gathered(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    hinder(workers, "hoplite_gather")
    result = await hoplite.allgather(operands, client=c)
    root = await root_found(s, result, workers)
    for w in workers:
        w.handlers["hoplite_gather"] = w.plugins["hoplite"].gatherer.gather
    await root.close()
    value = await result
    np.testing.assert_array_equal(np.stack(value), np.stack([power(i) for i in range(4)]))
    assert len(holders(s, result)) == 3
    del result, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_copies_of_what_is_gathered_anew(c, s, *workers):
    """Lists that were on their way come to nothing: one of them would be a result at once."""
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    gate = asyncio.Event()
    for w in workers:
        w.handlers["hoplite_pull"] = served_after(gate, w)
    result = await hoplite.allgather(operands, client=c)
    root = await root_found(s, result, workers)
    await until(lambda: all(len(w.plugins["hoplite"].coming) == 1 for w in workers))
    victim = next(w for w in workers if w is not root)
    await victim.close()
    gate.set()
    await wait(result)
    assert len(holders(s, result)) == 3
    del result, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_what_is_recalled(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    [x] = powers(c, [a])
    await wait(x)
    hinder([a], "hoplite_pull")
    extension = b.plugins["hoplite"]
    coming = asyncio.create_task(extension.acquire({x.key: 8 * N}))
    await until(lambda: extension.puller.incoming)
    extension.recall(x.key, 1)
    assert (await coming)["status"] == "partial-fail"
    assert not extension.coming and x.key not in b.data
    await until(lambda: not extension.puller.incoming)


@hoplite_cluster()
async def test_a_pull_after_one_that_was_given_up(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    [x] = powers(c, [a])
    await wait(x)
    puller = b.plugins["hoplite"].puller
    hinder([a], "hoplite_pull")
    first = asyncio.create_task(puller.pull(x.key, 8 * N))
    await until(lambda: x.key in puller.incoming and puller.incoming[x.key].source)
    a.handlers["hoplite_pull"] = a.plugins["hoplite"].serve
    puller.cancel(x.key)
    value, _ = await puller.pull(x.key, 8 * N)
    np.testing.assert_array_equal(value, power(0))
    assert isinstance(await failure(first), CancelledPullError)


# Operands that fail, or do not come


@hoplite_cluster()
async def test_an_operand_that_raises(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    operands = [*powers(c, workers), c.submit(raising, 2, workers=[a.address])]
    assert isinstance(await failure(of_all(c, hoplite.reduce(operands, client=c))), Raised)
    some = await hoplite.reduce(operands, num_objects=2, client=c)
    assert await check(c, some, operands, 2) == [0, 1]
    del some, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_an_operand_that_never_comes(c, s, *workers):
    await c.register_plugin(Hoplite())
    never_there = c.submit(power, 3, workers=["tcp://127.0.0.1:1"])
    operands = [*powers(c, workers[:3]), never_there]
    for op in (hoplite.reduce, hoplite.allreduce):
        result = await op(operands, timeout=0.2, client=c)
        error = await failure(result)
        assert isinstance(error, TimeoutError) and "1 of 4 operands are not ready" in str(error)
        result = await op(operands, num_objects=3, timeout=20, client=c)
        assert await check(c, result, operands, 3) == [0, 1, 2]
    del result, operands, never_there, error
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_operands_that_the_scheduler_has_not_heard_of_yet(c, s, *workers):
    """What was submitted goes another way, and is taken in by and by."""
    await c.register_plugin(Hoplite())
    asked = asyncio.Event()
    hold, update_graph = plugin(s).reductions.hold, s.stream_handlers["update-graph"]

    async def holding(**kwargs):
        answer = await hold(**kwargs)
        asked.set()
        return answer

    async def updating(**kwargs):
        await asked.wait()
        await update_graph(**kwargs)

    s.handlers["hoplite_hold"], s.stream_handlers["update-graph"] = holding, updating
    operands = powers(c, workers)
    result = await hoplite.reduce(operands, num_objects=3, client=c)
    await check(c, result, operands, 3)


# Workers that retire or are paused


@hoplite_cluster()
async def test_a_worker_that_retires(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = await scattered(c, workers)
    halt = Halt(*workers)
    result = await hoplite.allreduce(operands, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    retiring = asyncio.create_task(c.retire_workers([victim.address]))
    await until(lambda: victim.address not in {ws.address for ws in s.running})
    halt.go_on()
    await check(c, result, operands)
    await retiring
    del result, operands
    await nothing_left(s, workers)


# Or they would go on by themselves, seeing that there is memory.
@hoplite_cluster(worker_kwargs={"memory_limit": 0})
async def test_a_worker_that_is_paused(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    halt = Halt(*workers)
    result = await hoplite.reduce(operands, client=c)
    root = await root_found(s, result, workers)
    victim = await halt.one(root.address)
    for paused in (victim, root):
        paused.status = Status.paused
        await until(lambda p=paused: s.workers[p.address].status == Status.paused)
    halt.go_on()
    await check(c, result, operands)
    del result, operands
    await nothing_left(s, workers)


# Workers that do not answer


def freeze(worker):
    """Let a worker answer nobody, and say nothing of reductions, until it is let go again."""
    names = ["echo", "hoplite_pull", "hoplite_acquire", "hoplite_describe", "hoplite_gather"]
    handlers, reducer = {name: worker.handlers[name] for name in names}, None
    reducer = worker.plugins["hoplite"].reducer
    report = reducer.report
    reducer.report = lambda event: None
    for name in names:
        worker.handlers[name] = never

    def let_go():
        worker.handlers.update(handlers)
        reducer.report = report

    return let_go


@pytest.mark.parametrize("named", [True, False])
def test_a_root_that_does_not_answer(named):
    @hoplite_cluster()
    async def test(c, s, *workers):
        await c.register_plugin(Hoplite())
        operands = await scattered(c, workers[:3])
        halt = Halt(*workers)
        where = {"root": workers[3].address} if named else {"num_objects": 2}
        result = await hoplite.reduce(operands, client=c, **where)
        root = await root_found(s, result, workers)
        let_go = freeze(root)
        halt.go_on()
        used = await check(c, result, operands, None if named else 2)
        assert named or workers.index(root) not in used
        assert holders(s, result) <= {w.address for w in workers} - {root.address}
        let_go()
        del result, operands
        await nothing_left(s, workers)

    test()


@hoplite_cluster()
async def test_a_root_that_does_not_answer_has_a_deadline_too(c, s, *workers):
    await c.register_plugin(Hoplite())
    never_there = c.submit(power, 3, workers=["tcp://127.0.0.1:1"])
    operands = [*powers(c, workers[:3]), never_there]
    result = await hoplite.reduce(operands, root=workers[3].address, timeout=0.3, client=c)
    await root_found(s, result, workers)
    freeze(workers[3])
    workers[3].stream_handlers["hoplite-fail"] = lambda **_: None
    with pytest.raises(TimeoutError, match="1 of 4 operands are not ready"):
        await result


@hoplite_cluster(nthreads=[])
async def test_a_deadline_where_there_is_no_worker(c, s):
    await c.register_plugin(Hoplite())
    operands = [c.submit(power, i, pure=False) for i in range(2)]
    for op in (hoplite.reduce, hoplite.allreduce):
        result = await op(operands, timeout=0.1, client=c)
        error = await failure(result)
        assert isinstance(error, TimeoutError) and "2 of 2 operands" in str(error)
    del result, operands, error
    await nothing_left(s, [])


@pytest.mark.parametrize("op", [hoplite.allreduce, hoplite.allgather])
def test_copies_are_not_waited_for_where_nobody_answers(op):
    @hoplite_cluster()
    async def test(c, s, *workers):
        await c.register_plugin(Hoplite())
        operands = powers(c, workers[:3])
        await wait(operands)
        addresses = {w.address for w in workers}
        let_go = freeze(workers[3])
        result = await op(operands, workers=addresses, client=c)
        await wait(result)
        assert holders(s, result) >= addresses - {workers[3].address}
        let_go()
        key = s.tasks[result.key]
        await until(lambda: len(key.who_has) == 4)  # as meant
        del result, operands
        await nothing_left(s, workers)

    test()


@hoplite_cluster()
async def test_a_ring_in_which_one_does_not_answer(c, s, *workers):
    await c.register_plugin(Hoplite())
    apart(s, workers)
    operands = powers(c, workers)
    await wait(operands)
    let_go = freeze(workers[3])
    result = await hoplite.allgather(operands, client=c)
    await root_found(s, result, workers)
    gathering = plugin(s).reductions.gatherings.gatherings[result.key]
    await until(lambda: workers[3].address in gathering.spread.silent)
    let_go()
    np.testing.assert_array_equal(np.stack(await result), [power(i) for i in range(4)])
    del result, operands
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_workers_that_hear_of_a_gathering_after_its_recall(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = powers(c, workers)
    await wait(operands)
    plain, recalled, heard = {}, {}, {}

    def late(worker):
        plain[worker] = worker.handlers["hoplite_gather"]
        heard[worker], recalled[worker] = asyncio.Event(), asyncio.Event()
        recall = worker.stream_handlers["hoplite-recall"]

        async def gather(**how):
            heard[worker].set()
            await recalled[worker].wait()
            return await plain[worker](**how)

        def recalls(**what):
            recall(**what)
            recalled[worker].set()

        worker.handlers["hoplite_gather"] = gather
        worker.stream_handlers["hoplite-recall"] = recalls

    for w in workers:
        late(w)
    result = await hoplite.allgather(operands, client=c)
    root = await root_found(s, result, workers)
    copies = [w for w in workers if w is not root]
    for w in copies:
        await heard[w].wait()
    key = result.key
    del result
    for w in copies:
        await recalled[w].wait()
    recalled[root].set()
    await until(lambda: not plugin(s).tasks)
    assert not [w for w in workers if key in w.data]
    del operands
    await nothing_left(s, workers)


# Processes


@gen_test(timeout=120)
async def test_processes_that_are_stopped_or_killed():
    config = {"hoplite.min-size": 1000, "hoplite.stall-timeout": "500ms"}
    with dask.config.set(config):
        async with (
            LocalCluster(
                n_workers=4,
                threads_per_worker=1,
                processes=True,
                asynchronous=True,
                dashboard_address=None,
            ) as cluster,
            Client(cluster, asynchronous=True) as c,
        ):
            await c.register_plugin(Hoplite())
            s = cluster.scheduler
            pids = await c.run(os.getpid)
            *others, frozen = pids
            gate = Event("gate", client=c)
            operands = [
                c.submit(power, i, workers=[w], allow_other_workers=True, pure=False)
                for i, w in enumerate(others)
            ]
            await wait(operands)
            later = c.submit(power_when, 3, "gate", workers=others[:1])
            operands.append(later)
            result = await hoplite.reduce(operands, root=frozen, timeout=60, client=c)
            await until(lambda: result.key in s.tasks and s.tasks[result.key].processing_on)
            os.kill(pids[frozen], signal.SIGSTOP)
            try:
                await gate.set()
                await check(c, result, operands)
                assert frozen not in holders(s, result)
            finally:
                os.kill(pids[frozen], signal.SIGCONT)
            asked = await c.run(left_on_worker, result.key, workers=[frozen])
            assert asked == {frozen: []}
            await check(c, result, operands)
            [killed] = holders(s, result)
            os.kill(pids[killed], signal.SIGKILL)
            await until(lambda: killed not in s.workers)
            await check(c, result, operands)


async def left_on_worker(key, dask_worker) -> list[str]:
    """What a worker that was stopped still does for a result, a moment later."""
    reducer = dask_worker.plugins["hoplite"].reducer
    await until(lambda: key not in dask_worker.state.tasks and not reducer.sums)
    return [*reducer.results]


# The command


def judged(error=None, *, departed=(), found=None, contributors=range(8), **plan) -> str:
    how = Plan(0, "reduce", None, None, length=10, where=list(range(8)), scattered={0, 1})
    for name, value in plan.items():
        setattr(how, name, value)
    outcome = Outcome(error=error, contributors=list(contributors), departed=set(departed))
    mask = sum(2**i for i in outcome.contributors) if found is None else found
    outcome.found = ("float64", 10, mask)
    return judge(how, outcome)[0]


def test_the_command_sees_what_is_wrong():
    assert judged() == "right"
    assert judged(found=254) == judged(found=256) == judged(found=-1) == "wrong"
    assert judged(contributors=range(7)) == "wrong"
    assert judged(contributors=range(7), count=7) == "right"
    assert judged(fault="raises", odd=3) == "wrong", "it does not exist"
    lost = ReductionError("key", "lost")
    assert judged(lost) == judged(lost, departed=[3]) == "unexplained"
    assert judged(lost, departed=[1]) == "justified"
    assert judged(lost, departed=[1], count=7) == "unexplained", "there was a spare"
    assert judged(KeyError(), departed=[1]) == "unexplained", "this is not for users"
    assert judged(Raised(3), fault="raises", odd=3) == "justified"
    assert judged(TimeoutError(), fault="never comes", odd=3) == "justified"
    assert judged(TimeoutError()) == "unexplained"
