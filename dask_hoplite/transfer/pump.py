"""A thread that moves bytes between sockets and buffers.

An event loop that moved them itself would leave the link idle whenever it does something else, and
in a chain of relays all such times add up. Here, one thread takes what has arrived and, in the same
breath, gives it to those who follow. It knows sockets and buffers, and nothing of Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic

from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.wire import Wire

#: The most that is read or written at once, in bytes: so long do the others wait, and whoever wants
#: to stop a move (a copy of 4 MiB takes about 1 ms). Far more than a socket holds.
PIECE = 4 * 2**20

#: Each wake-up has its price, whatever it brings, and so it pays to let bytes gather. All hops
#: together may be late by this share of the whole transfer; one by so many seconds.
GATHER_SHARE, GATHER_MOST = 1 / 100, 0.002

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Move(ABC):
    """Bytes on their way from a socket to a buffer, or the other way.

    Parameters
    ----------
    connection : socket.socket
        Non-blocking. The move has a duplicate of its own.
    buffer : Buffer
        Where bytes go, or come from.
    """

    def __init__(self, connection: socket.socket, buffer: Buffer):
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.socket = connection.dup()
        self.buffer = buffer
        self.wire = Wire(buffer)
        # What is tried at once, about twice what went the last time: it takes time to say where all
        # of it is.
        self.stride = 2 * self.wire.unit
        self.interest = 0  # what the pump waits for; only its thread touches this
        self.over = False
        self._lock = threading.Lock()  # held while bytes move

    @abstractmethod
    def advance(self, events: int) -> int:
        """Move what can be moved now; return what to wait for next (0: all is done)."""

    def step(self, events: int) -> int:
        """Go on, in the pump's thread, after ``events``."""
        with self._lock:
            if self.over:
                return 0
            try:
                interest = self.advance(events)
            except BaseException as error:
                self._end(error)
                return 0
            if not interest:
                self._end(None)
            return interest

    def _passed(self, count: int) -> None:
        self.stride = min(2 * max(count, self.wire.unit), PIECE)

    def stop(self) -> bool:
        """Touch neither socket nor buffer from now on; return whether that would have been done."""
        with self._lock:
            was_over, self.over = self.over, True
        return not was_over

    def _end(self, error: BaseException | None) -> None:
        self.over = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.finish, error)

    def finish(self, error: BaseException | None) -> None:
        """Tell whoever waits for the end. Only in the event loop's thread."""
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


class Receive(Move):
    """Fills a buffer with what comes, and lets bytes gather while that delays nobody noticeably.

    Parameters
    ----------
    connection, buffer
        As for :class:`Move`.
    hops : int
        How many receivers there may be in a row, of which this is one.
    position : int, optional
        Up to where on the wire all has come, if that is not only whole blocks.

    Notes
    -----
    The kernel wakes us only when so many bytes are there as come, at the present rate, in a small
    part of the time that the whole object takes (``SO_RCVLOWAT``).
    """

    def __init__(
        self, connection: socket.socket, buffer: Buffer, hops: int, position: int | None = None
    ):
        super().__init__(connection, buffer)
        self.share = GATHER_SHARE / hops
        self.start = monotonic()
        self.position = self.wire.position(buffer.received) if position is None else position
        self.first = self.position
        self.mark = 1

    def advance(self, events: int) -> int:
        wire = self.wire
        if self.position < wire.nbytes:
            room = wire.pieces(self.position, min(self.position + self.stride, wire.nbytes))
            try:
                count, *_ = self.socket.recvmsg_into(room)
            except BlockingIOError:
                return READ
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            self.position += count
            self._passed(count)
            wire.check(self.position)
        self._gather()
        return 0 if self.position == wire.nbytes else READ

    def _gather(self) -> None:
        missing = self.wire.nbytes - self.position
        elapsed = monotonic() - self.start
        rate = (self.position - self.first) / max(elapsed, 1e-6)
        delay = min(self.wire.nbytes / max(rate, 1) * self.share, GATHER_MOST)
        # Whole blocks, as nobody sees a part of one; at least what is missing of the next.
        unit = self.wire.unit
        blocks = (self.position % unit + min(int(rate * delay), PIECE)) // unit
        mark = max(min(max(blocks, 1) * unit - self.position % unit, missing), 1)
        if mark != self.mark and (self.mark > missing or not self.mark / 2 < mark < self.mark * 2):
            self.mark = mark
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)


class Send(Move):
    """Sends a buffer from some offset on, as it fills."""

    def __init__(self, connection: socket.socket, buffer: Buffer, offset: int):
        super().__init__(connection, buffer)
        self.position = self.wire.position(offset)

    def advance(self, events: int) -> int:
        if events & READ:  # nothing is to come but the end
            said = self.socket.recv(1, socket.MSG_PEEK)
            raise ConnectionResetError(
                "the other end spoke out of turn" if said else "the other end closed the connection"
            )
        wire, buffer = self.wire, self.buffer
        have = wire.position(buffer.received)
        if self.position < have:
            pieces = wire.sealed(self.position, min(self.position + self.stride, have))
            with contextlib.suppress(BlockingIOError):
                count = self.socket.sendmsg(pieces)
                self.position += count
                self._passed(count)
        if self.position == wire.nbytes:
            return 0
        if self.position == have and buffer.error is not None:
            raise buffer.error
        return READ | WRITE if self.position < have else READ


class Pump:
    """Makes moves, in one thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked: deque[Move] = deque()

    async def make(self, move: Move) -> None:
        """Make a move to its end.

        Raises
        ------
        OSError
            If the connection breaks.
        Exception
            What the buffer that is sent failed with.
        """

        def follow() -> None:
            if threading.current_thread() is self._thread:
                self._step(move, 0)
            else:
                self._ask(move)

        try:
            if isinstance(move, Send):
                move.buffer.follow(follow)
            self._ask(move)
            await move.done
        finally:
            move.buffer.unfollow(follow)
            if move.stop():
                self._ask(move)  # to let go of its socket

    def _ask(self, move: Move) -> None:
        with self._lock:
            self._asked.append(move)
            if self._thread is None or not self._thread.is_alive():  # it is not, after a fork
                self._selector = selectors.DefaultSelector()
                self._alarm, alarmed = socket.socketpair()
                alarmed.setblocking(False)
                self._alarm.setblocking(False)
                self._selector.register(alarmed, READ)
                self._thread = threading.Thread(
                    target=self._work, args=(alarmed,), name="hoplite-pump", daemon=True
                )
                self._thread.start()
            else:
                with contextlib.suppress(BlockingIOError):  # it is full of alarms
                    self._alarm.send(b"!")

    def _work(self, alarmed: socket.socket) -> None:
        while True:
            while self._asked:
                self._step(self._asked.popleft(), 0)
            with self._lock:
                if len(self._selector.get_map()) == 1 and not self._asked:
                    self._selector.close()
                    self._alarm.close()
                    alarmed.close()
                    self._thread = None
                    return
            for key, events in self._selector.select():
                if key.data is None:
                    alarmed.recv(4096)
                else:
                    self._step(key.data, events)

    def _step(self, move: Move, events: int) -> None:
        interest, before = move.step(events), move.interest
        move.interest = interest
        if not interest:
            if before:
                self._selector.unregister(move.socket)
            move.socket.close()
        elif not before:
            self._selector.register(move.socket, interest, move)
        elif interest != before:
            self._selector.modify(move.socket, interest, move)


PUMP = Pump()
