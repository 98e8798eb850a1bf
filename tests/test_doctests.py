"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_hoplite

FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples():
    """All docstrings with examples."""
    for info in pkgutil.walk_packages(dask_hoplite.__path__, "dask_hoplite."):
        for test in FINDER.find(import_module(info.name)):
            if not all(doctest.SKIP in example.options for example in test.examples):
                yield pytest.param(test, id=test.name)


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=""
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(dask_hoplite.Hoplite())
        yield client


@pytest.mark.parametrize("test", list(examples()))
def test_examples(test, client):
    test.globs |= {"client": client, "hoplite": dask_hoplite, "np": np}
    with client.as_current():
        result = doctest.DocTestRunner().run(test)
    assert not result.failed
    assert result.attempted


def test_functions_have_examples():
    """Each public function shows how it is called."""
    for name in dask_hoplite.__all__:
        thing = getattr(dask_hoplite, name)
        if not (isinstance(thing, type) and issubclass(thing, Exception)):
            assert ">>> " in thing.__doc__, name
