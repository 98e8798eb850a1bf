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


# Of reductions. Their key is that of the result.


@dataclass(frozen=True, slots=True)
class Combine:
    """Let ``worker`` combine operands that it holds with what comes from other nodes.

    Parameters
    ----------
    node : int
        Names this sum. It never changes: a plan that changes has other nodes.
    operands : tuple of Key
        In this order, behind the sources.
    sources : tuple of (str, int)
        Workers and nodes.
    count : int
        How many operands are in the result, if this node makes it, or 0.
    hops : int
        How many nodes there may be in a row.
    ring : int
        The number of workers in a ring of which this is one, or 0.
    index : int
        Its place there.
    common : bytes
        What all operands are to be combined as, if they are not of one kind.
    """

    key: Key
    worker: str
    node: int
    operands: tuple[Key, ...]
    sources: tuple[tuple[str, int], ...]
    reason: str
    count: int = 0
    hops: int = 1
    ring: int = 0
    index: int = 0
    common: bytes = b""


@dataclass(frozen=True, slots=True)
class Forget:
    """Let ``worker`` stop to make and to serve a node."""

    key: Key
    worker: str
    node: int


@dataclass(frozen=True, slots=True)
class Later:
    """Tell the reduction that it is :class:`~dask_hoplite.core.events.Due` after some seconds."""

    key: Key
    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out whether ``worker`` answers; it is to be told as ``Returned`` as soon as it does."""

    key: Key
    worker: str


@dataclass(frozen=True, slots=True)
class Done:
    """The result is made, of these operands, on its root, and in case of a ring on all of it."""

    key: Key
    contributors: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """There can be no result; ``operands`` are in the way, if it is these.

    ``error``: what a worker has raised, in pickled form, if it has.
    """

    key: Key
    reason: str
    operands: tuple[Key, ...] = ()
    error: bytes = b""


Instruction = Pull | Wait | NoSource | Cancel
ReductionInstruction = Combine | Forget | Later | Ask | Done | Fail
