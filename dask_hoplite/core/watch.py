"""The receiver's part of the protocol: when it tells the directory how its bytes come."""

from __future__ import annotations

from typing import Literal

#: A receiver looks so often in a stall timeout how fast bytes come. It complains if that is less
#: than this share of what the link should carry: half, as when a source feeds one more, or less.
WINDOWS, FAIR = 5, 0.6

Finding = Literal["progressed", "lagging", "measured", "stalled"]


class Watch:
    """Looks at one source, as long as bytes come from it or should.

    A change for the worse, or for the better, is told at once. That it goes on is told again: slow
    bytes ever more rarely, down to once in a stall timeout, like everything else.

    Parameters
    ----------
    timeout : float
        The stall timeout, in seconds.
    rate : float or None
        Bytes per second that the link should carry; 0 if nobody knows; None if only nothing is too
        little.
    received : int
        Bytes that are there at the start.
    now : float
        Seconds on any clock that does not run backwards.
    """

    def __init__(self, timeout: float, rate: float | None, received: float, now: float):
        self.timeout = timeout
        self.fair = FAIR * rate if rate is not None else -1.0
        self.interval = self.pause = timeout / WINDOWS  #: seconds after which to look again
        self.rate = 0.0  #: bytes per second, lately
        self.received = received
        self.looked = self.moved = self.said = now
        self.wrong: Literal["dry", "slow", "unknown"] | None = None

    def look(self, received: float, now: float, begun: float = 0.0) -> Finding | None:
        """What is to be told, if anything, when so many bytes are there, the first since ``begun``.

        At the end of a long chain that is later than when they were asked for.
        """
        if received > self.received and now - begun < self.interval / 2:
            self.moved = now
            return None  # it is too early to say how fast they come
        # Fewer than before: it had to start again, with other bytes.
        seconds = now - max(self.looked, begun)
        self.rate = max(received - self.received, 0) / max(seconds, 1e-9)
        self.received, self.looked = received, now
        if self.rate:
            self.moved = now
        was_wrong = self.wrong
        self.wrong = self._judge()
        now += self.interval / 2  # what will be due before the next look is due
        stalled = now - self.moved >= self.timeout
        pause = self.pause if self.wrong in ("slow", "unknown") else self.timeout
        if self.wrong != was_wrong:
            self.pause = self.interval
        elif not stalled and now - self.said < pause:
            return None
        self.said, self.pause = self.looked, min(2 * self.pause, self.timeout)
        if self.wrong is None:
            return "progressed"
        if not stalled:
            return "measured" if self.wrong == "unknown" else "lagging"
        self.moved = self.looked  # it is told again after as long
        return "stalled"

    def expect(self, rate: float) -> bool:
        """Learn what the link should carry; return whether it carried too little lately."""
        self.fair = FAIR * rate
        self.wrong = self._judge()
        return self.wrong == "slow"

    def _judge(self) -> Literal["dry", "slow", "unknown"] | None:
        if not self.rate:
            return "dry"
        if not self.fair:
            return "unknown"
        return "slow" if self.rate < self.fair else None
