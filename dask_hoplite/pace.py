"""For how long a client's messages to the scheduler gather, before they leave together."""

from __future__ import annotations

from distributed.batched import BatchedSend

#: Seconds after the first batch. Dask's own 10 ms are a quarter of the time that 1 MiB takes at
#: 200 Mbit/s, and so much later than the first of several tasks did the others begin.
FIRST = 0.001

#: Batches of a row, each of which gathers for twice as long as the one before, until it is for as
#: long as Dask has it: in a long row, many small batches cost more than they gain.
STEPS = 4


class Pace:
    """Lets the first batches after a silence gather for shorter than those of a long row."""

    def __init__(self) -> None:
        self.stream: BatchedSend | None = None
        self.longest = 0.0
        self.start = 0

    def follow(self, stream: BatchedSend) -> None:
        """A message is about to be given to a stream.

        A client that has lost its scheduler, and found it again, has another one.
        """
        if stream is not self.stream:
            self.stop()
            self.stream, self.longest = stream, stream.interval
            self.start = stream.batch_count - STEPS
        if stream.next_deadline is None:  # nothing has left for as long as messages gather
            self.start = stream.batch_count
        step = stream.batch_count - self.start
        stream.interval = min(FIRST * 2**step, self.longest) if step < STEPS else self.longest

    def stop(self) -> None:
        """Let messages gather for as long as Dask has it."""
        if self.stream is not None:
            self.stream.interval = self.longest
            self.stream = None
