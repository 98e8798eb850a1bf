"""What has happened since Hoplite was installed, in numbers that only grow.

Pure, as the rest of the core. What is rare enough for people to read is told to somebody, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

#: Takes an event: a dict with ``action``.
Tell = Callable[[dict[str, Any]], None]

#: How a source stops to feed a receiver, or a receiver to be one
OUTCOMES = (
    "finished",
    "released",
    "declined",
    "abandoned",
    "begun_anew",
    "asked_again",
    "no_source",
    "receiver_left",
    "source_left",
    "source_failed",
    "source_silent",
    "source_slow",
    "source_busy",
)

#: Those of them after which a receiver asks, or is told, to go on with another source
CAUSES = (*(how for how in OUTCOMES if how.startswith("source_")), "asked_again")

#: How a reduction ends
ENDS = ("finished", "failed", "released")


class Record:
    """Counters, and a word about what is rare.

    Parameters
    ----------
    tell : callable, optional
        Is given each event that people may want to read.
    """

    def __init__(self, tell: Tell = lambda event: None):
        self.tell = tell
        #: Of each source of each receiver, how it ended: as many as there were rows of ``log()``
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        #: Receivers that got another source, by how the former one ended
        self.reparented: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        self.resumed = 0  #: those of them that went on at a byte beyond the first
        self.received = 0  #: bytes that receivers have said to have
        self.decisions = 0
        self.deciding = 0.0  #: seconds
        self.lost = 0  #: objects whose last copy went, and that nothing could bring back
        self.reductions: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.replanned = 0  #: times that a part of a reduction had to be made again

    def decided(self, seconds: float) -> None:
        """An event was handled."""
        self.decisions += 1
        self.deciding += seconds

    def reparent(self, cause: str, resumed_from: int, **event: Any) -> None:
        """A receiver that has so many bytes got another source."""
        self.reparented[cause] += 1
        self.resumed += resumed_from > 0
        self.tell({"action": "reparented", "cause": cause, "resumed_from": resumed_from, **event})

    def fail(self, **event: Any) -> None:
        """Nobody is left who could feed a receiver."""
        self.tell({"action": "transfer-failed", **event})

    def lose(self, **event: Any) -> None:
        """An object is lost for good."""
        self.lost += 1
        self.tell({"action": "object-lost", **event})

    def replan(self, **event: Any) -> None:
        """Sums of a reduction are lost; others take their place."""
        self.replanned += 1
        self.tell({"action": "reduction-replanned", **event})

    def end(self, how: str, **event: Any) -> None:
        """A reduction is over."""
        self.reductions[how] += 1
        if how == "failed":
            self.tell({"action": "reduction-failed", **event})
