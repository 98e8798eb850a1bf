"""Wrong settings are found at once, and named."""

from __future__ import annotations

import logging

import dask
import pytest
from distributed import Scheduler
from distributed.utils_test import gen_test

import dask_hoplite as hoplite
from dask_hoplite import Hoplite
from tests.helpers import array, hoplite_cluster


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stall_timeout", "x"),
        ("stall_timeout", [1]),
        ("stall_timeout", "nan"),
        ("stall_timeout", float("inf")),
        ("push_timeout", "soon"),
        ("min_size", "many"),
        ("min_size", [1]),
        ("history", "x"),
    ],
)
def test_what_is_no_number_is_named(setting, value):
    name = "hoplite." + setting.replace("_", "-")
    with pytest.raises(ValueError) as raised:
        Hoplite(**{setting: value})
    assert name in str(raised.value) and repr(value) in str(raised.value)
    with dask.config.set({name: value}), pytest.raises(ValueError, match=name):
        Hoplite()


@pytest.mark.parametrize("setting", ["stall_timeout", "push_timeout", "min_size", "history"])
def test_negative(setting):
    with pytest.raises(ValueError, match="hoplite"):
        Hoplite(**{setting: -1})


def test_settings_that_there_are_none_of_are_told(caplog):
    with dask.config.set({"hoplite.min-sise": "1MiB", "hoplite.shared_memory": True}):
        Hoplite()
    [said] = [record.message for record in caplog.records]
    assert said == "There is no setting hoplite.min-sise; is min-size meant?"


def test_not_a_mapping(caplog):
    with dask.config.set({"hoplite": "x"}):
        Hoplite()
    assert "not a mapping" in caplog.text


@hoplite_cluster()
async def test_wrong_setting_of_the_client(c, s, *workers):
    with (
        dask.config.set({"hoplite.connect-timeout": "perhaps"}),
        pytest.raises(ValueError, match=r"hoplite.connect-timeout: 'perhaps' is not a time"),
    ):
        await c.register_plugin(Hoplite())


@gen_test()
async def test_preload_with_a_wrong_setting(caplog):
    caplog.set_level(logging.ERROR, "dask_hoplite")
    with dask.config.set({"hoplite.stall-timeout": "x"}):
        async with Scheduler(dashboard_address=":0", preload=["dask_hoplite"]) as s:
            assert "hoplite" not in s.plugins
    [said] = [r.message for r in caplog.records if r.name.startswith("dask_hoplite")]
    assert "not installed" in said and "hoplite.stall-timeout: 'x'" in said


@hoplite_cluster()
async def test_a_second_one_by_another_name_does_nothing(c, s, *workers, caplog):
    await c.register_plugin(Hoplite())
    await c.register_plugin(Hoplite(), name="other")
    x = await hoplite.broadcast(array(), client=c)
    await s.remove_worker(workers[-1].address, stimulus_id="test")
    await c.unregister_scheduler_plugin("hoplite")
    with pytest.raises(hoplite.NotInstalledError):
        await hoplite.status(client=c)
    await c.unregister_scheduler_plugin("other")
    assert "AttributeError" not in caplog.text
    del x


@hoplite_cluster()
async def test_any_name_will_do(c, s, *workers):
    await c.register_plugin(Hoplite(), name="mine")
    await c.register_plugin(Hoplite())
    assert await hoplite.status(client=c)
    await c.unregister_scheduler_plugin("hoplite")
    assert await hoplite.status(client=c), "it is still there"
    await c.unregister_scheduler_plugin("mine")
    assert "hoplite" not in s.extensions
    with pytest.raises(hoplite.NotInstalledError):
        await hoplite.status(client=c)


@hoplite_cluster()
async def test_no_workers_are_named(c, s, *workers):
    await c.register_plugin(Hoplite())
    with pytest.raises(ValueError, match="No workers are named"):
        await hoplite.broadcast(array(), workers=[], client=c)
