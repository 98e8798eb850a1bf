"""What the directory decides. Each instruction says why."""

from __future__ import annotations

from dataclasses import dataclass

from dask_hoplite.core.events import Key


@dataclass(frozen=True, slots=True)
class Pull:
    """Let ``receiver`` take the object from ``source``; all reports about it carry ``epoch``.

    ``shares_host``: whether there are other workers on the receiver's host; ``hops``: how many
    receivers there may be in a row; ``early``: whether the source may not know yet that it will
    have the object; ``rate``: bytes per second that the link should carry, 0 if nobody knows, None
    if it does not matter.
    """

    key: Key
    receiver: str
    source: str
    epoch: int
    reason: str
    shares_host: bool = False
    hops: int = 1
    early: bool = False
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Let ``receiver`` stay with the source that it has.

    ``again``: seconds after which it is to say once more what it has just said, if not 0; ``rate``:
    bytes per second that the link should carry, if the receiver did not know.
    """

    key: Key
    receiver: str
    epoch: int
    reason: str
    again: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class NoSource:
    """Nobody can give ``receiver`` the object; ``tried`` are the sources that failed, and why."""

    key: Key
    receiver: str
    tried: dict[str, str]
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Let ``receiver`` drop what it has of the object."""

    key: Key
    receiver: str
    epoch: int
    reason: str


Instruction = Pull | Wait | NoSource | Cancel
