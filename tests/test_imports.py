"""The deciding core imports nothing that does input or output, nor anything of Dask."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import dask_hoplite

PACKAGE = pathlib.Path(dask_hoplite.__file__).parent
CORE = sorted(path.stem for path in (PACKAGE / "core").glob("*.py") if path.stem != "__init__")
FORBIDDEN = {"asyncio", "dask", "distributed", "numpy", "random", "socket", "time", "tornado"}

#: All that the core may import itself. Each of these is free of input and output.
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "typing",
}

#: Imports modules of the package without its __init__, which imports Dask.
LOAD = """
import importlib, sys, types
package = types.ModuleType("dask_hoplite")
package.__path__ = [sys.argv[1]]
sys.modules["dask_hoplite"] = package
before = set(sys.modules)
for name in sys.argv[2:]:
    importlib.import_module(f"dask_hoplite.{name}")
print(*sorted(set(sys.modules) - before))
"""


def loaded_with(*names):
    """The modules that a fresh interpreter has loaded after importing some of the package's."""
    command = [sys.executable, "-c", LOAD, str(PACKAGE), *names]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return set(run.stdout.split())


def imported_by(path):
    """Names of the modules that a source file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            found.add(node.module)
    return found


def test_core_loads_nothing_that_is_forbidden():
    loaded = loaded_with(*(f"core.{name}" for name in CORE))
    assert {f"dask_hoplite.core.{name}" for name in CORE} <= loaded
    assert not {name.partition(".")[0] for name in loaded} & FORBIDDEN
    assert {name for name in loaded if name.startswith("dask_hoplite")} == {
        "dask_hoplite.core",
        *(f"dask_hoplite.core.{name}" for name in CORE),
    }


def test_that_would_show():
    assert loaded_with("config") & FORBIDDEN
    assert loaded_with("transfer.channel") >= {"asyncio", "distributed", "tornado"}


@pytest.mark.parametrize("name", ["__init__", *CORE])
def test_core_imports_only_what_is_allowed(name):
    imported = imported_by(PACKAGE / "core" / f"{name}.py")
    outside = {module for module in imported if not module.startswith("dask_hoplite.core")}
    assert {module.partition(".")[0] for module in outside} <= ALLOWED


def test_core_is_all_there():
    assert {"cost", "directory", "events", "instructions", "tree"} <= set(CORE)
    assert "dask_hoplite.core.tree" in imported_by(PACKAGE / "core" / "directory.py")


def test_simulation_needs_no_dask():
    loaded = loaded_with("simulate")
    assert "dask_hoplite.core.directory" in loaded
    assert not {name.partition(".")[0] for name in loaded} & (FORBIDDEN - {"random", "time"})
