"""Events and instructions of the core as parts of Dask messages."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from dask_hoplite.core.events import Event, ReductionEvent
from dask_hoplite.core.instructions import Instruction, ReductionInstruction

_KINDS = (Event, ReductionEvent, Instruction, ReductionInstruction)
_TYPES = {cls.__name__: cls for kind in _KINDS for cls in get_args(kind)}


def encode(item: Event | ReductionEvent | Instruction | ReductionInstruction) -> dict[str, Any]:
    """An event or instruction as a dict of what msgpack can carry."""
    fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {"type": type(item).__name__, **fields}


def decode(message: dict[str, Any]) -> Any:
    """The inverse of :func:`encode`.

    Raises
    ------
    KeyError
        If this version does not know the type.
    """
    message = dict(message)
    return _TYPES[message.pop("type")](**message)
