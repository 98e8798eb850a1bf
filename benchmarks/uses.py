"""What collectives are for: asynchronous SGD, reinforcement learning, and serving an ensemble.

The definitions are those of Hoplite's paper (SIGCOMM 2021, sections 5.2 to 5.4): of n hosts one is
the server, the others compute; a step takes the first ``k = (n-1) // 2`` that are ready.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from distributed import Client, Future, as_completed, wait
from distributed.comm import get_address_host

from dask_hoplite.bench.workloads import Workload

#: Steps before the clock starts, and those that are timed.
WARM_UP, STEPS = 4, 12

#: Seconds that a gradient takes.
GRADIENT = 0.02

#: Share of the way to the optimum that all gradients of a step make together.
RATE = 0.15

#: Environments of an actor, and steps of each for a contribution: all hosts share two processors,
#: so that what is computed is kept small.
ACTORS, PLAYED = 4, 8

#: Queries that are under way at a time.
QUERIES = 3

#: Numbers in a prediction.
CLASSES = 1000


class Use(Workload):
    """Base: something that goes on step by step.

    Subclasses define ``steps``, which yields at the end of each.

    Parameters
    ----------
    slow : float
        Seconds that the last worker takes longer than others.
    goodput : float
        Bytes per second of a link.
    spare : int
        So many models' answers are not waited for.
    """

    iterator: Iterator[object]

    def __init__(
        self,
        client: Client,
        nbytes: int,
        hoplite: bool = False,
        slow: float = 0.0,
        goodput: float = 24e6,
        spare: int = 0,
    ):
        super().__init__(client, nbytes, hoplite)
        self.server, *self.others = self.workers
        self.k = max(len(self.others) // 2, 1)
        self.slow = slow
        self.goodput = goodput
        self.spare = spare

    @staticmethod
    def crossings(workers: int, per_host: int) -> float:
        return STEPS

    def prepare(self) -> None:
        self.iterator = self.steps()
        self.advance(WARM_UP)

    def run(self) -> None:
        self.advance(STEPS)

    def advance(self, count: int) -> None:
        """Make some steps."""
        self.seconds: list[float] = []
        before = time.perf_counter()
        for _ in itertools.islice(self.iterator, count):
            now = time.perf_counter()
            self.seconds.append(round(now - before, 4))
            before = now
        assert len(self.seconds) == count, f"it ended after {len(self.seconds)} of {count} steps"

    def figures(self) -> dict[str, object]:
        return {"steps": self.seconds}

    def steps(self) -> Iterator[object]:
        """Make steps without end."""
        raise NotImplementedError

    def lateness(self) -> list[float]:
        """Seconds that each worker takes longer."""
        return [*[0.0] * (len(self.others) - 1), self.slow]


class AsyncSGD(Use):
    """Each step adds up the first k gradients, and gives new parameters to those workers."""

    parameters: Future
    contribution: Callable[..., Any]
    apply: Callable[..., Any]

    def start(self) -> tuple[Any, list[Future]]:
        """The rule of Hoplite, and the data of each worker; sets what plain Dask does instead."""
        from dask_hoplite import sgd

        rate = RATE / self.k
        self.parameters = self.on(self.server, zeros, self.nbytes)
        self.contribution, self.apply = gradient, functools.partial(update, rate)
        pairs = zip(self.others, self.lateness(), strict=True)
        # On its host, rather than its worker: another one may be started there
        return sgd.Sum(rate), [self.on(get_address_host(w), load, late) for w, late in pairs]

    def steps(self) -> Iterator[object]:
        rule, data = self.start()
        wait([self.parameters, *data])
        if self.hoplite:
            return self.by_hoplite(rule, data)
        return self.by_tasks(dict(zip(self.others, data, strict=True)), rule)

    def by_hoplite(self, rule: Any, data: list[Future]) -> Iterator[object]:
        """As a user of Hoplite would write it."""
        from dask_hoplite import sgd

        with sgd.train(
            self.contribution,
            self.parameters,
            data,
            rule,
            self.k,
            server=self.server,
            client=self.client,
        ) as training:
            for step in training:
                self.parameters = step.parameters
                yield step

    def by_tasks(self, data: dict[str, Future], rule: Any) -> Iterator[object]:
        """In plain Dask, one task on the server takes the contributions: no tree is faster."""
        owners: dict[Future, str] = {}
        ready = as_completed()
        memory = self.on(self.server, rule.memory, self.parameters)
        parameters = self.parameters

        def ask(worker: str) -> None:
            future = self.on(worker, self.contribution, parameters, data[worker])
            owners[future] = worker
            ready.add(future)

        for worker in self.others:
            ask(worker)
        while True:
            done = list(itertools.islice(ready, self.k))
            both = self.on(self.server, self.apply, parameters, memory, *done)
            parameters, memory = (self.on(self.server, item, both, index) for index in (0, 1))
            for future in done:
                ask(owners.pop(future))
            del done, future, both
            yield parameters
            self.parameters = parameters

    def correct(self) -> bool:
        lowest, highest = self.on(self.server, extremes, self.parameters).result()
        self.iterator.close()  # type: ignore[attr-defined]
        return lowest == highest and 0.5 < lowest < 1.5

    def figures(self) -> dict[str, object]:
        wait(self.parameters)
        loss = self.on(self.server, loss_of, self.parameters).result()
        return {**super().figures(), "loss": loss}


class A3C(AsyncSGD):
    """The same with actors that play CartPole, and learn from what they see.

    The limit counts, beside the link, what is computed, as long as that takes here: while the
    parameters of one step go out, the gradients of the next one come in, and so two steps take at
    least two transfers, a contribution, and an update.
    """

    #: Transfers in the way of an actor, from when it has contributed until it has again
    transfers = 2

    def start(self) -> tuple[Any, list[Future]]:
        from dask_hoplite import rl

        self.parameters = self.on(self.server, policy, self.nbytes)
        rule = self.timed(rl.a3c_gradient, rl.A3C())
        indices = range(len(self.others))
        pairs = zip(self.others, indices, strict=True)
        return rule, [self.on(worker, rl.Actor, index, ACTORS) for worker, index in pairs]

    def correct(self) -> bool:
        right = self.on(self.server, is_finite, self.parameters).result()
        self.iterator.close()  # type: ignore[attr-defined]
        return right

    def figures(self) -> dict[str, object]:
        found = self.client.run(take_seconds)
        updates = statistics.median(found.pop(self.server))
        played = statistics.median(itertools.chain.from_iterable(found.values()))
        once = self.nbytes / self.goodput
        step = max(once, updates, (self.transfers * once + played + updates) / 2)
        limit = step * len(self.seconds)
        return {**Use.figures(self), "limit": limit, "played": played, "updates": updates}

    def timed(self, contribution: Callable[..., Any], rule: Any) -> Any:
        """Let workers note how long they compute."""
        from dask_hoplite import rl

        options = rl.Options(steps=PLAYED)
        self.contribution = Timed(functools.partial(contribution, options=options))
        rule.apply = Timed(rule.apply)
        self.apply = functools.partial(learn, rule)
        return rule


class Impala(A3C):
    """Actors play with the weights that they were given; the server learns from what they saw."""

    transfers = 1

    def start(self) -> tuple[Any, list[Future]]:
        from dask_hoplite import rl

        _, data = super().start()
        options = rl.Options(steps=PLAYED)
        return self.timed(rl.rollout, rl.Impala(options=options)), data


class Ensemble(Use):
    """Queries go to a model on each worker; what they say is added up."""

    def steps(self) -> Iterator[object]:
        self.base = np.zeros(self.nbytes // 4, "f4")
        self.asked = self.answered = 0
        self.right = True
        self.latencies: list[float] = []  # of queries
        seconds = self.nbytes / self.goodput
        lateness = [0.0, *self.lateness()]
        models = [
            # On its host, rather than its worker: another one may be started there
            self.on(get_address_host(worker), Model, index, seconds + late)
            for index, (worker, late) in enumerate(zip(self.workers, lateness, strict=True))
        ]
        wait(models)
        return self.by_hoplite(models) if self.hoplite else self.by_tasks(models)

    def query(self) -> np.ndarray:
        """One that was not there before."""
        self.asked += 1
        query = self.base.copy()
        query[0] = self.asked
        return query

    def check(self, answer: np.ndarray, models: int) -> None:
        """See whether an answer is to the query whose turn it is."""
        self.answered += 1
        self.right &= bool((answer == models * self.answered).all())

    def by_hoplite(self, models: list[Future]) -> Iterator[object]:
        from dask_hoplite import serving

        first = len(models) - self.spare
        with serving.Ensemble(models, "sum", client=self.client, num_objects=first) as ensemble:
            waiting = deque(ensemble.submit(self.query()) for _ in range(QUERIES))
            while True:
                answer = waiting.popleft().result()
                self.latencies.append(answer.seconds)
                self.check(answer.value, len(answer.models))
                waiting.append(ensemble.submit(self.query()))
                yield answer

    def by_tasks(self, models: list[Future]) -> Iterator[object]:
        """In plain Dask: straight to one worker, from which the others take it."""

        def submit() -> tuple[float, Future]:
            begun = time.perf_counter()
            query = self.client.scatter(
                self.query(), workers=self.workers[:1], direct=True, hash=False
            )
            pairs = zip(self.workers, models, strict=True)
            said = [self.on(worker, predict, model, query) for worker, model in pairs]
            return begun, self.on(self.server, add, *said)

        waiting = deque(submit() for _ in range(QUERIES))
        while True:
            begun, answer = waiting.popleft()
            self.check(answer.result(), len(models))
            self.latencies.append(time.perf_counter() - begun)
            waiting.append(submit())
            yield None

    def figures(self) -> dict[str, object]:
        p50, p99 = np.percentile(self.latencies[WARM_UP:], [50, 99])
        return {**super().figures(), "p50": float(p50), "p99": float(p99)}

    def correct(self) -> bool:
        self.iterator.close()  # type: ignore[attr-defined]
        return self.right


#: These operations by name.
USES: dict[str, type[Workload]] = {
    "async-sgd": AsyncSGD,
    "a3c": A3C,
    "impala": Impala,
    "ensemble": Ensemble,
}


# What runs on workers

#: Seconds that what is computed here has taken.
_seconds: list[float] = []


class Timed:
    """Notes how long a function takes."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*args)
        _seconds.append(time.perf_counter() - start)
        return result


def take_seconds() -> list[float]:
    """How long what was computed here has taken, since this was asked last."""
    taken = list(_seconds)
    _seconds.clear()
    return taken


def zeros(nbytes: int) -> np.ndarray:
    """Parameters."""
    return np.zeros(nbytes // 4, "f4")


def policy(nbytes: int) -> dict:
    """Parameters of a network."""
    from dask_hoplite import rl

    return rl.policy(nbytes=nbytes)


def load(late: float) -> float:
    """A worker's data; it stays there."""
    return late


def gradient(parameters: np.ndarray, late: float) -> np.ndarray:
    """That of (w - 1)² / 2, after a while."""
    time.sleep(GRADIENT + late)
    return parameters - np.float32(1)


def update(
    rate: float, parameters: np.ndarray, memory: None, *gradients: np.ndarray
) -> tuple[np.ndarray, None]:
    """Apply gradients."""
    total = gradients[0].copy()
    for one in gradients[1:]:
        total += one
    return parameters - np.float32(rate) * total, memory


def learn(rule: Any, parameters: Any, memory: Any, *contributions: Any) -> tuple[Any, Any]:
    """Apply what a rule of Hoplite does, without Hoplite."""
    from dask_hoplite.sgd import Update, tree_map

    values: Any = list(contributions)
    if not rule.gathers:
        # Of pairs of a gradient and a loss
        values = tree_map(lambda *arrays: sum(arrays), *(gradient for gradient, _ in values))
    count = len(contributions)
    return rule.apply(parameters, values, memory, Update(0, count, float(count)))


def item(pair: tuple[Any, ...], index: int) -> Any:
    """One of two results."""
    return pair[index]


def extremes(parameters: np.ndarray) -> tuple[float, float]:
    """Look at all of the parameters."""
    return float(parameters.min()), float(parameters.max())


def loss_of(parameters: np.ndarray) -> float:
    """How far they are from the optimum."""
    return float((parameters[0] - 1) ** 2 / 2)


def is_finite(parameters: dict) -> bool:
    """Whether all of the parameters are numbers."""
    return all(
        bool(np.isfinite(array).all()) for layer in parameters.values() for array in layer.values()
    )


class Model:
    """Takes its time, and says what is in a query."""

    def __init__(self, index: int, seconds: float):
        self.index = index
        self.seconds = seconds

    def predict(self, query: np.ndarray) -> np.ndarray:
        """What it thinks of each class."""
        time.sleep(self.seconds)
        return np.full(CLASSES, query[0])


def predict(model: Model, query: np.ndarray) -> np.ndarray:
    """Let a model predict."""
    return model.predict(query)


def add(*predictions: np.ndarray) -> np.ndarray:
    """Add up what models say."""
    return np.sum(predictions, axis=0)
