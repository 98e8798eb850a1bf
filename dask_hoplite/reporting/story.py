"""How one object spread, told from the rows of its transfers. Pure: no clock, no cluster.

What bounded the time is said of the receiver that was the last to have the object. The time from
when anybody asked until then is divided, without a rest, by this rule:

- **late**: from the first request of anybody until it asked itself.
- **first byte**: from when it asked a source until the first byte came from there. What a source
  waits for itself is a part of it, so it grows with the depth of the pipeline.
- **given up**: pauses between its sources, and the time with sources that were given up, as far as
  it is more than their bytes take at the median rate.
- **moving**: its bytes at the median rate of all links, or at its own if that is higher.
- **slow**: the rest. It is laid to the first link, on the way from a whole copy to this receiver,
  that carried about as little as the slowest one there: what is behind cannot be faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

#: After these, a receiver is not given another source: what follows is another transfer.
ENDS = frozenset(
    {"finished", "receiver left", "released", "begun anew", "declined", "did not begin"}
)

#: Seconds between the end of a transfer and the start of the next one that goes on with it.
AT_ONCE = 1e-3

#: Links are about as slow as the slowest if they carry at most so many times as much.
ALIKE = 1.1


@dataclass
class Piece:
    """What came from one source, from byte ``first`` up to byte ``end``.

    ``moved``: bytes that came. It is more than these if the receiver had to start again.
    """

    source: str
    first: int
    end: int
    moved: int
    start: float
    stop: float
    latency: float | None
    status: str
    reason: str
    path: str

    @property
    def seconds(self) -> float:
        return max(self.stop - self.start, 0.0)

    @property
    def waited(self) -> float:
        """Seconds to the first byte, as far as it is known."""
        return min(max(self.latency or 0.0, 0.0), self.seconds)

    @property
    def rate(self) -> float:
        """Bytes per second since the first byte, or 0."""
        moving = self.seconds - self.waited
        return self.moved / moving if moving > 0 else 0.0


@dataclass
class Arrival:
    """How an object came to a receiver: one piece after the other."""

    receiver: str
    pieces: list[Piece] = field(default_factory=list)
    status: str = "running"

    @property
    def start(self) -> float:
        return self.pieces[0].start

    @property
    def stop(self) -> float:
        return self.pieces[-1].stop

    @property
    def received(self) -> int:
        return self.pieces[-1].end

    @property
    def told(self) -> list[Piece]:
        """Those of which it is known exactly what they brought: not the last one of a receiver
        that left, or is still at it."""
        return self.pieces if self.status == "finished" else self.pieces[:-1]


@dataclass
class Takeover:
    """A receiver went on with another source, at ``byte``."""

    receiver: str
    old: str
    new: str
    byte: int
    at: float
    why: str
    reason: str


@dataclass
class Share:
    """A part of the time."""

    name: str
    seconds: float
    text: str


@dataclass
class Story:
    """How an object spread.

    Attributes
    ----------
    arrivals : list of Arrival
        In the order in which they began. A worker that got it twice is there twice.
    takeovers : list of Takeover
        In order of time.
    begin, end : float
        Of all of it.
    rate : float
        Bytes per second: the median of all links, or 0.
    last : Arrival or None
        The last one that has finished.
    shares : list of Share
        What the time until then consists of.
    bottleneck : tuple of Arrival and Piece, or None
        The link that is said to have bounded the rate at which the last one got its bytes.
    """

    nbytes: int
    arrivals: list[Arrival]
    takeovers: list[Takeover]
    begin: float
    end: float
    rate: float = 0.0
    last: Arrival | None = None
    shares: list[Share] = field(default_factory=list)
    bottleneck: tuple[Arrival, Piece] | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def finished(self) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if arrival.status == "finished"]

    def depth(self) -> int:
        """How many links there are in a row, at the most."""
        source = {arrival.receiver: arrival.pieces[-1].source for arrival in self.arrivals}
        deepest = 0
        for receiver in source:
            seen: set[str] = set()
            while receiver in source and receiver not in seen:
                seen.add(receiver)
                receiver = source[receiver]
            deepest = max(deepest, len(seen))
        return deepest


def tell(rows: Iterable[Mapping[str, Any]], now: float) -> Story:
    """The story of one object.

    Parameters
    ----------
    rows : iterable of mapping
        Those of :func:`dask_hoplite.transfers` that are about one key, in their order.
    now : float
        The time, by the clock of these rows, up to which those are drawn that still run.

    Returns
    -------
    Story

    Raises
    ------
    ValueError
        If no row says that anything came from anybody.
    """
    rows = sorted(rows, key=lambda row: row["start"])
    arrivals = _arrivals(rows, now)
    if not arrivals:
        raise ValueError("nothing has moved")
    story = Story(
        max(row["nbytes"] for row in rows),
        arrivals,
        sorted(_takeovers(arrivals), key=lambda takeover: takeover.at),
        min(arrival.start for arrival in arrivals),
        max(arrival.stop for arrival in arrivals),
    )
    rates = [piece.rate for arrival in arrivals for piece in arrival.told if piece.rate > 0]
    story.rate = median(rates) if rates else 0.0
    if story.finished:
        story.last = max(story.finished, key=lambda arrival: arrival.stop)
        story.bottleneck = _bottleneck(story, story.last)
        story.shares = _shares(story, story.last)
    return story


def _arrivals(rows: Iterable[Mapping[str, Any]], now: float) -> list[Arrival]:
    by_receiver: defaultdict[str, list[Arrival]] = defaultdict(list)
    for row in rows:
        known = by_receiver[row["receiver"]]
        previous = known[-1] if known else None
        goes_on = (
            previous is not None
            and previous.status not in ENDS
            and row["start"] - previous.stop <= AT_ONCE
        )
        if row["source"] is None:  # nobody had it to give
            if previous is not None and goes_on:
                previous.status = row["status"]
            continue
        piece = Piece(
            row["source"],
            row["resumed_from"],
            row["received"],
            max(row["received"] - row["resumed_from"], 0),
            row["start"],
            max(now, row["start"]) if row["stop"] is None else row["stop"],
            row.get("latency"),
            row["status"],
            row["reason"],
            row["path"],
        )
        if previous is None or not goes_on:
            previous = Arrival(row["receiver"])
            known.append(previous)
        else:
            previous.pieces[-1].end = piece.first  # less, if it had to start again
        previous.pieces.append(piece)
        previous.status = row["status"]
    found = [arrival for arrivals in by_receiver.values() for arrival in arrivals]
    return sorted(found, key=lambda arrival: arrival.start)


def _takeovers(arrivals: Iterable[Arrival]) -> Iterable[Takeover]:
    for arrival in arrivals:
        for old, new in pairwise(arrival.pieces):
            yield Takeover(
                arrival.receiver,
                old.source,
                new.source,
                new.first,
                new.start,
                old.status,
                new.reason,
            )


def _bottleneck(story: Story, last: Arrival) -> tuple[Arrival, Piece] | None:
    """The first link on the way to a receiver that carried about as little as the slowest."""
    way: list[tuple[Arrival, Piece]] = []
    arrival: Arrival | None = last
    while arrival is not None and all(arrival is not seen for seen, _ in way):
        piece = arrival.pieces[-1]
        way.append((arrival, piece))
        # A source that was still receiving itself; one that was not, had all of it.
        arrival = next(
            (
                other
                for other in reversed(story.arrivals)
                if other.receiver == piece.source
                and other.status == "finished"
                and other.start <= piece.stop
                and other.stop > piece.start
            ),
            None,
        )
    slowest = min((piece.rate for _, piece in way if piece.rate > 0), default=0.0)
    return next(
        (link for link in reversed(way) if 0 < link[1].rate <= ALIKE * slowest),
        None,
    )


def _shares(story: Story, last: Arrival) -> list[Share]:
    """What the time of a receiver consists of: these add up to all of it."""
    late = last.start - story.begin
    waited = given_up = moving = slow = 0.0
    stopped = last.start
    for piece in last.pieces:
        given_up += max(piece.start - stopped, 0.0)
        stopped = piece.stop
        usual = piece.moved / story.rate if story.rate else 0.0
        waited += piece.waited
        rest = piece.seconds - piece.waited
        moving += min(rest, usual)
        if piece is last.pieces[-1]:
            slow += max(rest - usual, 0.0)
        else:
            given_up += max(rest - usual, 0.0)
    return [
        Share("late", late, "before it asked"),
        Share("first byte", waited, "until the first byte came"),
        Share("given up", given_up, "lost with sources that were given up"),
        Share("moving", moving, "its bytes at the median rate of all links"),
        Share("slow", slow, "its bytes, beyond that: links below the median rate"),
    ]
