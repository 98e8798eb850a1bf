"""What there is to see at a moment: who takes which object from whom, and how far each is.

No Bokeh, no Dask, no clock: an :class:`Observer` is given the plugin and the time. It runs only
while somebody looks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask_hoplite.core.directory import Directory
from dask_hoplite.core.events import Key
from dask_hoplite.core.reduction import Node, Reduction
from dask_hoplite.core.tree import Transfer

if TYPE_CHECKING:
    from dask_hoplite.collectives.reductions import Run
    from dask_hoplite.scheduler import Hoplite

#: Seconds for which what has ended is still shown
LINGER = 10.0

#: Seconds for which a picture is good for all who look: less than between two looks of one of them,
#: which may come late, and the next one then sooner
FRESH = 0.7

#: Changes of source that are listed, and objects
CHANGES, OBJECTS = 50, 100


@dataclass(slots=True)
class Cell:
    """One worker's part in what becomes of an object: a copy, or a sum on the way to a result."""

    name: Hashable  #: the worker's address, or the number of the sum
    worker: str
    sources: tuple[Hashable, ...]  #: names of those that it takes from
    received: int
    nbytes: int
    state: str  #: "whole", "receiving", "slow", "silent" or "done"
    rate: float | None = None  #: bytes per second
    moved: bool = False  #: whether it has been given another source
    note: str = ""
    operands: tuple[Key, ...] = ()  #: what it adds itself

    @property
    def share(self) -> float:
        """How much of it is there, from 0 to 1."""
        return min(self.received / self.nbytes, 1.0) if self.nbytes else 1.0

    @property
    def busy(self) -> bool:
        """Whether bytes are still to come."""
        return self.state not in ("whole", "done")


@dataclass(slots=True)
class Sketch:
    """An object that moves, or that is the result of a reduction, and all who take part."""

    key: Key
    kind: str  #: "transfer", "reduction" or "ring"
    nbytes: int
    cells: dict[Hashable, Cell]
    copies: int = 0  #: workers that hold it as a whole
    changes: int = 0  #: how often a receiver was given another source
    wanted: int = 0  #: how many operands are to go into it
    ready: int = 0
    contributors: tuple[Key, ...] = ()  #: those that are in a sum by now

    @property
    def takers(self) -> list[Cell]:
        """All but those that had it from the start."""
        return [cell for cell in self.cells.values() if cell.state != "whole"]

    @property
    def share(self) -> float:
        """How much is done, from 0 to 1."""
        takers = self.takers
        return sum(cell.share for cell in takers) / len(takers) if takers else 1.0

    @property
    def rate(self) -> float:
        """Bytes per second that all receive together at the moment."""
        return sum(cell.rate or 0.0 for cell in self.cells.values() if cell.busy)

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return not any(cell.busy for cell in self.cells.values())


@dataclass(slots=True)
class Traffic:
    """What a worker has received and sent by Hoplite: bytes so far, and per second of late."""

    worker: str
    received: int
    sent: int
    receiving: float = 0.0
    sending: float = 0.0


@dataclass(slots=True)
class Change:
    """A receiver was given another source."""

    time: float  #: on the directory's clock
    key: Key
    receiver: str
    left: str
    source: str
    at: int  #: the byte at which the new one goes on
    reason: str


@dataclass(slots=True)
class Picture:
    """All of it."""

    time: float
    sketches: list[Sketch] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  #: the latest first
    kept: list[tuple[Key, int]] = field(default_factory=list)  #: at rest, and on how many workers

    @property
    def rate(self) -> float:
        """Bytes per second that all receive together at the moment."""
        return sum(sketch.rate for sketch in self.sketches)


class History:
    """What has ended lately, read from the directory's log as far as that is new."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None  # row that was read
        self.finished: defaultdict[Key, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.changed: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        self.touched: dict[Key, float] = {}  # when something of it ended
        self.changes: deque[Change] = deque(maxlen=CHANGES)

    def read(self, directory: Directory, now: float) -> None:
        """Take in what is new, and drop what is old."""
        left: dict[tuple[Key, str], dict[str, Any]] = {}
        for row in self._news(directory):
            key, receiver = row["key"], row["receiver"]
            self._follow(left.pop((key, receiver), None), row)
            if row["status"] == "finished":
                self.finished[key][receiver] = row
            else:
                left[key, receiver] = row
            self.touched[key] = row["stop"]
        for (key, receiver), row in left.items():
            tree = directory.trees.get(key)
            if tree is not None and (transfer := tree.transfers.get(receiver)) is not None:
                after = {
                    "source": transfer.source,
                    "start": transfer.start,
                    "resumed_from": transfer.resumed_from,
                }
                self._follow(row, after)
        for key, time in list(self.touched.items()):
            tree = directory.trees.get(key)
            if (tree is None or not tree.transfers) and now - time > LINGER:
                for of_key in (self.touched, self.finished, self.changed):
                    of_key.pop(key, None)

    def _news(self, directory: Directory) -> list[dict[str, Any]]:
        news = []
        for row in reversed(directory.ended):
            if row is self.last:
                break
            news.append(row)
        self.last = news[0] if news else self.last
        return news[::-1]

    def _follow(self, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> None:
        """Note a change of source, if a receiver went on with another one in the same moment."""
        if (
            before is None
            or after["source"] is None
            or before["stop"] != after["start"]
            or before["source"] == after["source"]
        ):
            return
        key, receiver = before["key"], before["receiver"]
        self.changed[key][receiver] += 1
        change = Change(
            before["stop"],
            key,
            receiver,
            before["source"],
            after["source"],
            after["resumed_from"],
            before["status"],
        )
        self.changes.append(change)


class Observer:
    """Looks at a plugin, once a second at the most for all who want a picture."""

    def __init__(self) -> None:
        self.directory: Directory | None = None
        self.picture = Picture(-math.inf)

    def look(self, hoplite: Hoplite, now: float) -> Picture:
        """A picture of what is going on.

        Parameters
        ----------
        hoplite : Hoplite
            The scheduler's plugin.
        now : float
            Seconds on the clock of its directory.

        Returns
        -------
        Picture
            The same one as before, if that is fresh enough.
        """
        directory = hoplite.directory
        if directory is not self.directory:
            self._begin(directory)
        if now - self.picture.time >= FRESH:
            self.history.read(directory, now)
            sketches = [*self._reductions(hoplite, now), *self._transfers(hoplite)]
            moving = {sketch.key for sketch in sketches}
            self.picture = Picture(
                now,
                sorted(sketches, key=lambda sketch: sketch.over)[:OBJECTS],
                self._traffic(directory, now),
                list(self.history.changes)[::-1],
                self._kept(hoplite, moving)[: max(OBJECTS - len(sketches), 0)],
            )
        return self.picture

    def _begin(self, directory: Directory) -> None:
        self.directory = directory
        self.history = History()
        self.picture = Picture(-math.inf)
        self.sums: dict[tuple[Key, int], tuple[float, int, float | None]] = {}
        self.reductions: dict[Key, tuple[float, Sketch]] = {}  # and when each was seen last

    # Transfers

    def _transfers(self, hoplite: Hoplite) -> list[Sketch]:
        history, trees = self.history, hoplite.directory.trees
        found = []
        for key in dict.fromkeys([*trees, *history.finished]):
            holders = set(hoplite.holders(key))
            live: Mapping[str, Transfer] = {}
            finished = history.finished.get(key, {})
            if (tree := trees.get(key)) is not None:
                live = tree.transfers
                # An earlier generation of it says nothing of this one.
                there = holders | tree.landed.keys()
                finished = {worker: row for worker, row in finished.items() if worker in there}
            if live or finished:
                changed = history.changed.get(key, Counter())
                found.append(of_transfers(key, live.values(), finished, changed, len(holders)))
        return found

    # Reductions

    def _reductions(self, hoplite: Hoplite, now: float) -> list[Sketch]:
        for key, run in hoplite.reductions.runs.items():
            if run.plan.nodes:
                nbytes = hoplite.reductions.size(run)
                sketch = of_reduction(run.plan, nbytes, self._rates(run))
                self.reductions[key] = now, sketch
        for key, (time, sketch) in list(self.reductions.items()):
            if key in hoplite.reductions.runs:
                continue
            if now - time > LINGER:
                del self.reductions[key]
            elif (known := hoplite.reductions.contributors.get(key)) is not None:
                finish(sketch, known)
            else:
                del self.reductions[key]  # it has failed, or is not wanted any more
        self.sums = {name: seen for name, seen in self.sums.items() if name[0] in self.reductions}
        return [sketch for _, sketch in self.reductions.values()]

    def _rates(self, run: Run) -> dict[int, float | None]:
        """Bytes per second that each sum grew by between its last two reports."""
        rates = {}
        for number, node in run.plan.nodes.items():
            heard, made, rate = self.sums.get((run.key, number), (node.heard, node.made, None))
            if node.heard > heard:
                rate = max(node.made - made, 0) / (node.heard - heard)
            self.sums[run.key, number] = node.heard, node.made, rate
            rates[number] = rate
        return rates

    # Workers, and objects at rest

    def _traffic(self, directory: Directory, now: float) -> list[Traffic]:
        before = {traffic.worker: traffic for traffic in self.picture.traffic}
        seconds = now - self.picture.time
        traffic = []
        for worker in directory.hosts:
            new = Traffic(worker, directory.bytes_in[worker], directory.bytes_out[worker])
            if (old := before.get(worker)) is not None:
                new.receiving = max(new.received - old.received, 0) / seconds
                new.sending = max(new.sent - old.sent, 0) / seconds
            traffic.append(new)
        return traffic

    def _kept(self, hoplite: Hoplite, moving: Collection[Key]) -> list[tuple[Key, int]]:
        """Objects of which copies are meant to stay, and that do not move."""
        kept = []
        for key in hoplite.wishes:
            if key not in moving and (holders := hoplite.holders(key)):
                kept.append((key, len(holders)))
            if len(kept) == OBJECTS:
                break
        return kept


def of_transfers(
    key: Key,
    live: Iterable[Transfer],
    finished: Mapping[str, Mapping[str, Any]],
    changed: Mapping[str, int],
    copies: int = 0,
) -> Sketch:
    """An object on its way.

    Parameters
    ----------
    key : Key
        The object.
    live : iterable of Transfer
        Those who receive it.
    finished : mapping of str to mapping
        Rows of the directory's log, of those who have it by now.
    changed : mapping of str to int
        How often a receiver was given another source.
    copies : int
        How many workers hold all of it.

    Returns
    -------
    Sketch
        With a cell for each of these, and for the others that they take from.
    """
    cells: dict[Hashable, Cell] = {
        receiver: _copy(row, "done", rate_of(row, row["nbytes"], row["stop"]), changed)
        for receiver, row in finished.items()
    }
    for transfer in live:
        row = {name: getattr(transfer, name) for name in ("receiver", "source", "nbytes", "reason")}
        row["received"] = transfer.received
        row["start"], row["resumed_from"] = transfer.start, transfer.resumed_from
        rate = transfer.rate
        if rate is None:
            rate = rate_of(row, transfer.received, transfer.moved)
        state = "silent" if transfer.silent else "slow" if transfer.slow else "receiving"
        cells[transfer.receiver] = _copy(row, state, rate, changed)
    nbytes = max((cell.nbytes for cell in cells.values()), default=0)
    for cell in list(cells.values()):
        for source in cell.sources:
            if source not in cells:
                cells[source] = Cell(source, str(source), (), nbytes, nbytes, "whole")
    return Sketch(key, "transfer", nbytes, cells, copies, sum(changed.values()))


def _copy(
    row: Mapping[str, Any], state: str, rate: float | None, changed: Mapping[str, int]
) -> Cell:
    receiver, source, nbytes = row["receiver"], row["source"], row["nbytes"]
    note = row["reason"]
    if row["resumed_from"]:
        note = f"{note}; from byte {row['resumed_from']:,} on"
    received = nbytes if state == "done" else row["received"]
    return Cell(
        receiver,
        receiver,
        (source,) if source is not None else (),
        received,
        nbytes,
        state,
        rate,
        moved=bool(changed.get(receiver)),
        note=note,
    )


def rate_of(row: Mapping[str, Any], received: int, time: float) -> float | None:
    """Bytes per second that came from the present source until some time, if there is a mean."""
    gained, seconds = received - row["resumed_from"], time - row["start"]
    return gained / seconds if gained > 0 and seconds > 0 else None


def of_reduction(plan: Reduction, nbytes: int, rates: Mapping[int, float | None]) -> Sketch:
    """A reduction on its way.

    Parameters
    ----------
    plan : Reduction
        The core's.
    nbytes : int
        Bytes that its result will have.
    rates : mapping of int to float
        Bytes per second by which sums grow.

    Returns
    -------
    Sketch
        With a cell for each sum.
    """
    nodes = [node for node in plan.nodes.values() if not node.lost]
    ring = len(nodes) > 1 and all(node.final for node in nodes)
    return Sketch(
        plan.key,
        "ring" if ring else "reduction",
        nbytes,
        {node.number: _sum(node, nbytes, rates.get(node.number), plan) for node in nodes},
        wanted=plan.count,
        ready=len(plan.ready),
        contributors=tuple(key for key in plan.operands if key in plan.placed),
    )


def _sum(node: Node, nbytes: int, rate: float | None, plan: Reduction) -> Cell:
    state = "silent" if node.worker in plan.suspects else "receiving"
    if node.done:
        state, nbytes = "done", int(node.length) if math.isfinite(node.length) else nbytes
    what = "the result" if node.final else "a partial sum"
    note = f"{what}: {len(node.operands)} operands of its own, {len(node.sources)} sums of others"
    return Cell(
        node.number,
        node.worker,
        tuple(node.sources),
        nbytes if node.done else node.made,
        nbytes,
        state,
        rate,
        note=note,
        operands=node.operands,
    )


def finish(sketch: Sketch, contributors: tuple[Key, ...]) -> None:
    """The result of a reduction is there."""
    sketch.contributors = contributors
    for cell in sketch.cells.values():
        cell.received, cell.state = cell.nbytes, "done"
