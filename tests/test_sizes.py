"""Objects of classes of which Dask knows nothing go by Hoplite, too, if they are large."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
from dask._task_spec import Task
from dask.sizeof import sizeof
from distributed import get_client

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, sizes
from tests.helpers import hoplite_cluster

LARGE = 2 * sizes.SMALL


class Model:
    """What users write."""

    def __init__(self, n: int = LARGE):
        self.weights = np.zeros(n, "u1")


class Slotted:
    """One to which there are no weak references."""

    __slots__ = ("weights",)

    def __init__(self):
        self.weights = np.zeros(LARGE, "u1")


class Stubborn:
    """One that cannot be pickled, for a reason of its own."""

    def __getstate__(self):
        raise RuntimeError("no")


class User:
    """Somebody who uses the sizes."""


def nobody():
    """Let nobody use the sizes: clients of other tests may, until they are collected."""
    for other in list(sizes._users):
        sizes._leave(other)


@pytest.fixture
def user():
    nobody()
    user = User()
    sizes.install(user)
    yield user
    sizes.uninstall(user)


def test_large_objects_are_measured(user):
    assert LARGE < sizeof(Model()) < LARGE + 1000
    assert LARGE < sizeof(Slotted()) < LARGE + 1000


def test_no_more_is_pickled_than_it_takes(user):
    model = Model()
    model.weights = [bytes(sizes.ENOUGH // 4) for _ in range(100)]
    assert sizes.ENOUGH < sizeof(model) < 2 * sizes.ENOUGH
    model = Model(20 * sizes.ENOUGH)
    assert sizeof(model) > 20 * sizes.ENOUGH, "arrays are not copied"


def test_what_is_small_or_known_is_as_dask_has_it(user):
    values = [Model(100), Stubborn(), threading.Lock(), None, 3, len, Model, Model(1).__init__]
    values += [np.zeros(LARGE), "x" * LARGE, [b"x" * LARGE]]
    measured = [sizeof(value) for value in values]
    sizes.uninstall(user)
    assert measured == [sizeof(value) for value in values]


def test_it_lasts_as_long_as_somebody_uses_it(user):
    other, model = User(), Model()
    sizes.install(other)
    sizes.uninstall(user)
    assert sizeof(model) > LARGE
    sizes.uninstall(other)
    assert sizeof(model) < 1000
    sizes.install(user)
    assert sizeof(model) > LARGE, "what was looked up in between is looked up again"


def test_classes_of_a_main_module_that_is_elsewhere(user):
    """As those of a notebook are on workers."""
    model = type("Cell", (Model,), {"__module__": "nowhere"})()
    model.function = lambda: 0
    model.module = np
    assert LARGE < sizeof(model) < LARGE + 1000


def test_scalars_and_dasks_own_objects_are_not_pickled(user, monkeypatch):
    monkeypatch.setattr(sizes, "_pickled", lambda value: pytest.fail("that takes time"))
    assert sizeof(np.float64(1)) < 100
    assert sizeof(Task("key", len, [list(range(1000))])) < 100_000


def test_who_is_collected_uses_it_no_longer(user):
    other = User()
    sizes.install(other)
    sizes.uninstall(user)
    del other
    gc.collect()
    assert sizeof(Model()) < 1000


def test_what_others_have_registered_stays(user):
    def other(value):
        return 42

    sizeof.register(object, other)
    try:
        sizes.uninstall(user)
        sizes.install(user)
        assert sizeof.dispatch(object) is other
    finally:
        sizeof.register(object, sizes._plain)


def test_it_may_come_and_go_while_others_measure(user):
    errors, over = [], threading.Event()

    def measure():
        while not over.is_set():
            try:
                for value in (Model(1), 1.5, None, len):
                    sizeof(value)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=measure) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(1000):
            sizes.uninstall(user)
            sizes.install(user)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not errors


def test_an_object_is_not_measured_again_and_again(user, monkeypatch):
    model = Model()
    size = sizeof(model)
    arrived = Model()
    sizes.note(arrived, 12 * LARGE)
    monkeypatch.setattr(sizes, "_pickled", lambda value: pytest.fail("it is known"))
    assert sizeof(model) == size
    assert sizeof(arrived) == 12 * LARGE


def test_nothing_is_kept_of_objects_that_are_gone(user):
    gc.collect()
    before = len(sizes._known)
    models = [Model(), Model()]
    assert all(sizeof(model) > LARGE for model in models)
    assert len(sizes._known) == before + 2
    del models
    gc.collect()
    assert len(sizes._known) <= before


def use(model: Model) -> int:
    return len(model.weights)


@hoplite_cluster(config={"hoplite.min-size": 100_000})
async def test_models_go_by_hoplite(c, s, *workers):
    nobody()
    await c.register_plugin(Hoplite())
    made = c.submit(Model, workers=[workers[0].address])
    scattered = await c.scatter(Model())
    for model in (made, scattered):
        used = [c.submit(use, model, workers=[w.address], pure=False) for w in workers]
        assert await c.gather(used) == [LARGE] * 4
        assert s.tasks[model.key].nbytes > LARGE
        moved = [row for row in await hoplite.transfers(client=c) if row["key"] == model.key]
        receivers = {row["receiver"] for row in moved if row["status"] == "finished"}
        assert len(receivers) >= 3
    await c.unregister_scheduler_plugin("hoplite")
    assert sizeof(Model()) < 1000


def with_a_client() -> bool:
    return get_client() is not None and sizeof(Model()) > LARGE


@hoplite_cluster()
async def test_nothing_is_left_by_the_client_that_tasks_use(c, s, *workers):
    nobody()
    await s.register_scheduler_plugin(Hoplite(), idempotent=True)
    assert await c.submit(with_a_client)
    await s.unregister_scheduler_plugin("hoplite")
    assert sizeof(Model()) < 1000


@hoplite_cluster(config={"hoplite.min-size": 100_000})
async def test_what_cannot_be_pickled_stays_where_it_is(c, s, *workers):
    await c.register_plugin(Hoplite())
    stubborn = c.submit(Stubborn, workers=[workers[0].address])
    assert await c.submit(isinstance, stubborn, object, workers=[workers[0].address])
