"""The cost model: how wide a distribution tree should be, from measured latency and bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Fewer bytes say nothing of a link: they may have waited in a socket, all together.
ENOUGH = 2**20


@dataclass
class CostModel:
    """Estimates of one hop, and the tree that is fastest under them.

    Parameters
    ----------
    latency : float
        Seconds from asking a source that has the data to the first byte, and from a byte's arrival
        to its being sent on.
    bandwidth : float
        Bytes per second of one host's link.
    weight : float
        Share of a new sample in the running mean of the bandwidth.
    link : float
        Bytes per second that a link has been seen to carry lately, or 0.
    guess : float
        The same, from what is still under way: the most that any receiver got.

    Notes
    -----
    Pipelined distribution of ``S`` bytes to ``n`` receivers costs about ``S/B + n·L`` in a chain,
    and ``d·S/B + L·log_d(n)`` in a tree whose nodes feed ``d`` children at a time, since these
    share the node's link (Hoplite, SIGCOMM 2021, section 4; the LogP family of models before it).
    """

    latency: float = 0.002
    bandwidth: float = 1e8
    weight: float = 0.1
    link: float = 0.0
    guess: float = 0.0

    def learn(self, *, latency: float, nbytes: int, seconds: float) -> None:
        """Take one finished hop into the estimates.

        Transfers that took less than ten latencies say more about latency than about bandwidth, and
        are not used for the latter.
        """
        sample = max(latency, 1e-6)
        # What else keeps the two ends busy only ever adds to it: the low samples say what a hop
        # costs, the high ones how much there is to do.
        weight = min(4 * self.weight, 1) if sample < self.latency else self.weight / 4
        self.latency += weight * (sample - self.latency)
        rate = nbytes / max(seconds, 1e-9)
        if seconds > 10 * self.latency:
            self.bandwidth += self.weight * (rate - self.bandwidth)
        if nbytes >= ENOUGH and seconds > 0.01:
            # Whatever disturbs a transfer makes it slower; nothing makes it faster than the link.
            self.link = max(rate, self.link + self.weight * (rate - self.link))

    @property
    def expected(self) -> float:
        """Bytes per second that a link should carry, or 0 if nobody knows."""
        return self.link or self.guess

    def seconds(self, nbytes: int, receivers: int, fan_out: int) -> float:
        """Estimated time until the last of ``receivers`` has all ``nbytes``."""
        once = nbytes / self.bandwidth
        if fan_out == 1:
            return once + receivers * self.latency
        # d + d² + ... + d^depth receivers find a place
        depth = math.ceil(math.log(receivers * (fan_out - 1) / fan_out + 1, fan_out) - 1e-9)
        return min(fan_out, receivers) * once + depth * self.latency

    def rings(self, nbytes: int, members: int) -> bool:
        """Whether all get a sum sooner by a ring than by a tree to one of them, and one back.

        A ring of ``n`` moves ``2·(n-1)/n`` of the bytes over each link (R. Rabenseifner 2004;
        P. Patarasuk and X. Yuan 2009), in a row of as many hops each way.
        """
        once = 2 * (members - 1) / members * nbytes / self.bandwidth
        ring = once + 2 * (members - 1) * self.latency
        width = self.fan_out(nbytes, members - 1)
        return ring < 2 * self.seconds(nbytes, members - 1, width)

    def fan_out(self, nbytes: int, receivers: int) -> int:
        """The number of receivers that a host should feed at a time."""
        best = 1
        width = 2
        while width < 2 * receivers:
            if self.seconds(nbytes, receivers, width) < self.seconds(nbytes, receivers, best):
                best = width
            width *= 2
        return min(best, max(receivers, 1))
