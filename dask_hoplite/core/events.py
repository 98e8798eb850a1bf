"""What the directory is told.

Events are facts, never requests for a particular choice: whoever sends one does not know, and
does not need to know, what will be decided from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Key = Any  #: A Dask key: a str, bytes, int, float, or a tuple of them.


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is there and can both receive and serve."""

    worker: str
    host: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone, with all that it held, received and served."""

    worker: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker needs an object and asks for a source.

    ``received`` bytes of it are there already (from an earlier source); ``expected`` is how many
    workers are believed to want the same object about now; ``ahead``: it does not know yet that it
    will need it, and is told together with the decision.
    """

    key: Key
    receiver: str
    nbytes: int
    received: int = 0
    expected: int = 1
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    """Somebody outside the cluster (a client, the scheduler) starts to push to a worker.

    ``ahead``: the worker does not know yet that it gets it.
    """

    key: Key
    receiver: str
    nbytes: int
    origin: str
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Progressed:
    """A receiver has this many bytes of the object by now, and they come as fast as they should."""

    key: Key
    receiver: str
    epoch: int
    received: int


@dataclass(frozen=True, slots=True)
class Lagging:
    """Bytes come from the source at a ``rate`` (per second) far below that of the link, or none do.

    Until the receiver says otherwise by :class:`Progressed`, or is given another source.
    """

    key: Key
    receiver: str
    epoch: int
    received: int
    rate: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes come at a ``rate`` (per second); the receiver was not told what the link carries."""

    key: Key
    receiver: str
    epoch: int
    received: int
    rate: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has come from the source for one stall interval; the connection still stands."""

    key: Key
    receiver: str
    epoch: int
    received: int


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The source broke the connection, refused, or does not have the object."""

    key: Key
    receiver: str
    epoch: int
    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The receiver has the whole object.

    ``latency`` is the time in seconds to the first byte, ``seconds`` from the first to the last;
    ``path`` says how the bytes went.
    """

    key: Key
    receiver: str
    epoch: int
    latency: float
    seconds: float
    path: str = ""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The receiver no longer wants the object, or cannot make use of what came."""

    key: Key
    receiver: str
    epoch: int
    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class Declined:
    """The receiver has no use for what was decided ahead, unless it has asked by itself since."""

    key: Key
    receiver: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Released:
    """The object has no user left, or all of it is lost: this generation of the key is over."""

    key: Key


# Of reductions. Their key is that of the result.


@dataclass(frozen=True, slots=True)
class Ready:
    """An operand is in memory."""

    key: Key
    operand: Key


@dataclass(frozen=True, slots=True)
class Gone:
    """An operand will never be in memory: its task failed, or it is lost for good."""

    key: Key
    operand: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Rooted:
    """It is known which worker is to have the result; None: no longer."""

    key: Key
    worker: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """The time is over that was given to other operands, to become ready."""

    key: Key


@dataclass(frozen=True, slots=True)
class Look:
    """It is time to see whether those who make the result are alive: nobody else waits for them."""

    key: Key


@dataclass(frozen=True, slots=True)
class Silent:
    """A worker was asked, and has not answered for long."""

    key: Key
    worker: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker that was silent, or could not be reached, has answered."""

    key: Key
    worker: str


@dataclass(frozen=True, slots=True)
class Combining:
    """A node is at work: from each of its sources so many bytes have come, and so many are made."""

    key: Key
    worker: str
    node: int
    received: tuple[int, ...]
    made: int


@dataclass(frozen=True, slots=True)
class Combined:
    """A node is done. ``seconds``: how long its bytes came; ``nbytes``: how many it gives."""

    key: Key
    worker: str
    node: int
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A node cannot get on with a source: it cannot be reached, or (``gone``) has nothing."""

    key: Key
    worker: str
    node: int
    source: int
    reason: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A node's worker does not have an operand, or cannot do its part."""

    key: Key
    worker: str
    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """Operands do not go together, or the operation raises: ``error`` is that, in pickled form."""

    key: Key
    worker: str
    node: int
    reason: str
    error: bytes


@dataclass(frozen=True, slots=True)
class Promoted:
    """Operands are of several item sizes: all are to be combined as ``common``, in pickled form."""

    key: Key
    worker: str
    node: int
    common: bytes


Event = (
    WorkerJoined
    | WorkerLeft
    | Wanted
    | Pushed
    | Progressed
    | Lagging
    | Measured
    | Stalled
    | SourceFailed
    | Finished
    | Abandoned
    | Declined
    | Released
)

ReductionEvent = (
    WorkerLeft
    | Ready
    | Gone
    | Rooted
    | Due
    | Look
    | Silent
    | Returned
    | Combining
    | Combined
    | Broken
    | Missing
    | Unfit
    | Promoted
)
