"""How a training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Client, Future

from dask_hoplite.client import check, extension, or_current
from dask_hoplite.collectives.operands import flatten
from dask_hoplite.sgd import work
from dask_hoplite.sgd.data import parts_of
from dask_hoplite.sgd.loop import Plan, State
from dask_hoplite.sgd.peers import PeerLoop
from dask_hoplite.sgd.rules import PeerRule, Rule
from dask_hoplite.sgd.served import ServedLoop, server_among
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import Checkpoint, TrainingError
from dask_hoplite.sgd.training import Training

#: Seeds for a step: a training that is resumed draws others than before
SEEDS = 1_000_000


def train(
    gradient: Callable[..., Any],
    parameters: Any,
    data: Any,
    rule: Rule,
    num_objects: int | None = None,
    steps: int | None = None,
    *,
    server: str | None = None,
    timeout: float | None = None,
    resume: Checkpoint | None = None,
    seed: int = 0,
    check_gradients: bool = True,
    client: Client | None = None,
) -> Any:
    """Train asynchronously.

    Parameters
    ----------
    gradient : callable
        Called on workers as ``gradient(parameters, data)``, or, if it has such an argument,
        ``gradient(parameters, data, seed=...)`` with another integer each time, to draw samples
        by. Gives the gradient, or the gradient and a loss. Must not change what it is given.
    parameters : nested dicts, lists and tuples of arrays, or Future of those
        To begin with.
    data : Future, list of Future, mapping of str to list of Future, or Dask collection
        Parts of the data. Each worker works on those that it has, in turn. With a mapping from
        addresses or names of workers, these take what it says. A tuple of Dask collections that are
        divided alike gives tuples of blocks.
    rule : Rule
        What contributions are, and what becomes of them, such as :class:`Sum`.
    num_objects : int, optional
        How many contributions make a step: the first that are ready. Default: half of the workers
        that have data; for rules among peers, what the rule says, or all.
    steps : int, optional
        After how many to stop. Default: when it is closed.
    server : str, optional
        Address or name of the worker that has the parameters. If it leaves, it is another one.
        Default: one without data, if there is one. Rules among peers have none.
    timeout : float, optional
        Seconds that a step may take, or that there may be no workers. Default: any number; 30.
    resume : Checkpoint, optional
        Go on from there, in place of from ``parameters``.
    seed : int
        What the seeds that ``gradient`` gets are counted from.
    check_gradients : bool
        Whether gradients are looked at: for their structure and shapes, NaN, and infinity.
    client : Client, optional
        Default: the current client.

    Returns
    -------
    Training
        An iterator of :class:`Step`. With an asynchronous client, an awaitable of it.

    Raises
    ------
    ValueError
        If there is no data, or a worker is named that has none or does not exist; if
        ``num_objects`` is not from 1 to the number of workers that have data.
    TypeError
        If an argument is not what it should be.
    TrainingError
        If there is no worker.
    NotInstalledError
        If the cluster has no Hoplite.
    Exception
        That of the task of a part of the data.

    Notes
    -----
    What goes wrong later is raised by the iterator: :class:`GradientError`, which names the worker,
    its data and the step, if ``gradient`` raises, or returns what does not go with the parameters
    or is not finite; :class:`TrainingError` if there is no worker any more, or the parameters are
    lost with the server. After each, ``training.checkpoint()`` gives what was reached.

    A worker that leaves is left out; data that Dask can compute again is worked on by others. A
    worker that joins gets the newest parameters, and takes over half of the parts of the one that
    has the most. Of the versions of the parameters, only those are kept that are in use.
    """
    client = or_current(client)
    if not callable(gradient):
        raise TypeError(f"a gradient is computed by a function, not by {gradient!r}")
    if not isinstance(rule, Rule):
        raise TypeError(f"a rule is an object such as Sum(rate=0.1), not {rule!r}")
    for name, number in (("num_objects", num_objects), ("steps", steps)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is a number from 1, not {number!r}")
    if resume is not None and not isinstance(resume, Checkpoint):
        raise TypeError(f"resume is a Checkpoint, not {resume!r}")
    if resume is None:
        begin = parameters, None, 0
    else:
        begin = resume.parameters, resume.memory, resume.step
    plan = Plan(
        work.Job(rule, gradient, check_gradients),
        num_objects or 0,
        steps,
        timeout,
        seed + begin[2] * SEEDS,
        begin[2],
    )
    return client.sync(_train, client, plan, begin[0], begin[1], data, server)


async def _train(
    client: Client, plan: Plan, parameters: Any, memory: Any, data: Any, server: str | None
) -> Training:
    await extension(client)
    rule = plan.job.rule
    _, present = await client.scheduler.hoplite_workers(seen=-1)
    if not present:
        raise TrainingError(plan.first, "there is no worker")
    futures, placed = await parts_of(client, data)
    plan.parts = {future.key: future for future in futures}
    located = await client.scheduler.hoplite_locate(keys=list(plan.parts))
    named = list(dict.fromkeys(placed.values()))
    addresses = await _addresses(client, named)
    holders = {
        key: [addresses[placed[key]]] if key in placed else located[key][1]
        for key in plan.parts
        if key in located or key in placed
    }
    shares = Shares(holders)
    if server is not None:
        server = (await _addresses(client, [server]))[server]
    if placed:
        plan.aside = [worker for worker in present if worker not in shares.workers]
    else:
        shares.follow(present, [] if server is None else [server])
    workers = len(shares.workers)
    if not workers:
        raise ValueError("there is no data to work on: it is lost")
    if plan.num_objects > workers:
        raise ValueError(
            f"num_objects is {plan.num_objects}, but only {workers} of {len(present)} workers have "
            f"data: {shares.workers}"
        )
    plan.num_objects = plan.num_objects or min(rule.num_objects(workers), workers)
    reserved = server is not None and server not in shares.workers
    server = server or server_among(present, shares.workers)
    parameters = await _placed(client, parameters, server)
    assert parameters._state is not None
    await parameters._state.wait()
    if parameters.status == "error":
        await parameters  # raises
    if memory is not None:
        memory = await _placed(client, memory, server)
    [(nbytes, _)] = (await client.scheduler.hoplite_locate(keys=[parameters.key])).values()
    kind = PeerLoop if isinstance(rule, PeerRule) else ServedLoop
    state = State(plan.first, parameters, memory)
    loop = kind(client, plan, shares, state, nbytes)
    if isinstance(loop, ServedLoop):
        loop.server, loop.reserved = server, reserved
        if memory is None and type(rule).memory is not Rule.memory:
            state.memory = loop.submit(work.begin, rule, parameters, worker=server)
        await client.scheduler.hoplite_keep(key=parameters.key, worker=server)
    loop.begin(present)
    return Training(loop)


async def _addresses(client: Client, named: list[str]) -> dict[str, str]:
    """Addresses of workers, by what the user calls them."""
    answer = await client.scheduler.hoplite_hold(key="", operands=[], workers=named)
    return dict(zip(named, answer["addresses"], strict=True))


async def _placed(client: Client, value: Any, server: str) -> Future:
    """A value on the server, or wherever it is already."""
    if isinstance(value, Future):
        check(client, [value])
        return value
    flatten(value)  # raises if these are no parameters
    [future] = await client._scatter([value], workers=[server], hash=False)
    return future
