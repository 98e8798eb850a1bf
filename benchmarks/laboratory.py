"""Emulated hosts on one machine, each with a network link of its own.

Loopback hides what a network does to a collective: it has no bandwidth to share. Here each host is
a Linux network namespace whose only way out is a virtual cable to a switch (a bridge in one more
namespace). Both ends of the cable are shaped, so a host sends and receives at the given rate,
whatever the number of its peers and connections.

The hosts share the machine's processors, files and ``/dev/shm``; abstract Unix sockets, ports and
the loopback interface are each host's own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import namespaces
from benchmarks.namespaces import LaboratoryError, bytes_per_second, sh

__all__ = ["Host", "Laboratory", "LaboratoryError", "remove_leftovers", "why_not"]

Host = int | str

PREFIX = "hoplite-lab"
SUBNET = "10.101.0"
EXTRA_HOSTS = {"scheduler": 251, "client": 252}
MAX_HOSTS = 250

#: What a process frees stays with it (glibc), as memory stays with a host. A machine that is itself
#: virtual gives what is free back to the one below it, and a page that was away takes five times as
#: long to touch: all hosts share two processors for that, and links stand idle meanwhile.
MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}

_serial = itertools.count()


class Laboratory:
    """Hosts ``0 .. n-1``, ``"scheduler"`` and ``"client"``, joined by a switch.

    Use it as a context manager: the hosts exist, and their processes live, inside the block.
    Several laboratories can exist at the same time, in one process or in many.

    Parameters
    ----------
    hosts : int
        Number of hosts, besides those of the scheduler and the client.
    rate : str
        What each host can send, and also what it can receive, e.g. ``"200mbit"``.
    delay : str
        Added to each packet as it leaves its host, e.g. ``"5ms"``. Needs the kernel's netem.

    Examples
    --------
    >>> with Laboratory(hosts=2, rate="100mbit") as lab:
    ...     print(lab.run(0, ["ping", "-c", "1", lab.address(1)]))
    """

    def __init__(self, hosts: int = 8, rate: str = "200mbit", delay: str = "0ms"):
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be 1 to {MAX_HOSTS}, not {hosts}")
        # Complain about these here rather than half way through the making.
        bytes_per_second(rate)
        namespaces.milliseconds(delay)
        self.n = hosts
        self.rate = rate
        self.delay = delay
        self.hosts: list[Host] = [*range(hosts), *EXTRA_HOSTS]
        self.name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self._switch = f"{self.name}-switch"
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Laboratory:
        remove_leftovers()
        try:
            sh("ip", "netns", "add", self._switch)
            sh("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            sh("ip", "-n", self._switch, "link", "set", "switch", "up")
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process of every host and remove the hosts. Twice is a no-op."""
        for process in self._processes:  # some may not have reached their host yet
            process.kill()
        namespaces.remove(namespaces.present(f"{self.name}-"))
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def address(self, host: Host) -> str:
        """The IPv4 address of a host."""
        if host not in self.hosts:
            raise ValueError(f"no host {host!r} in a laboratory of {self.n}")
        return f"{SUBNET}.{EXTRA_HOSTS[host] if isinstance(host, str) else host + 1}"

    def popen(self, host: Host, argv: list[str], **kwargs) -> subprocess.Popen:
        """Start a command on a host, with a hostname of its own (``host0``, ``scheduler``, ...).

        Takes what `subprocess.Popen` takes. The process id is the command's own, so that it can be
        stopped, frozen or looked at. It is killed at the end of the laboratory.
        """
        hostname = f"host{host}" if isinstance(host, int) else host
        script = 'echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
        named = ["unshare", "--uts", "sh", "-c", script, "sh", hostname]
        there = ["ip", "netns", "exec", self._namespace(host)]
        # A session of its own, since Ctrl-C is for the laboratory, which ends the command in turn.
        kwargs.setdefault("start_new_session", True)
        kwargs["env"] = MEMORY | dict(kwargs.get("env") or os.environ)
        process = subprocess.Popen([*there, *named, *argv], **kwargs)
        self._processes.append(process)
        return process

    def run(self, host: Host, argv: list[str], timeout: float = 60) -> str:
        """Run a command on a host to its end and return what it printed."""
        process = self.popen(
            host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise LaboratoryError(f"`{shlex.join(argv)}` failed on host {host}: {output.strip()}")
        return output

    def inside(self, host: Host) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread opens within the block belong to the host.

        A socket stays in the network in which it was opened, so the block can be left at once.
        """
        return namespaces.entered(self._namespace(host))

    def connect(self, sender: Host, receiver: Host) -> tuple[socket.socket, socket.socket]:
        """A TCP connection from a host to another one, both ends held by this process."""
        with self.inside(receiver):
            server = socket.create_server((self.address(receiver), 0))
        with server, self.inside(sender):
            near = socket.create_connection(server.getsockname(), timeout=30)
            far, _ = server.accept()
        far.settimeout(30)
        return near, far

    def goodput(
        self, sender: Host = "client", receiver: Host = 0, nbytes: int | None = None
    ) -> float:
        """Payload bytes per second of a TCP stream between idle hosts: a link at its best.

        Parameters
        ----------
        sender, receiver : int or str
            The two hosts.
        nbytes : int, optional
            Length of the stream; half a second's worth by default.
        """
        if nbytes is None:
            nbytes = int(bytes_per_second(self.rate) / 2)
        source, sink = self.connect(sender, receiver)
        buffer = bytearray(256 * 1024)
        with source, sink, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(source.sendall, bytes(nbytes))
            # The clock starts behind the first bytes: connecting is not the link's rate.
            first = received = sink.recv_into(buffer)
            start = time.perf_counter()
            while received < nbytes:
                received += sink.recv_into(buffer)
            seconds = time.perf_counter() - start
            sent.result()
        return (nbytes - first) / seconds

    def counters(self, host: Host) -> tuple[int, int]:
        """Bytes that have entered and left a host through its cable, headers included."""
        with self.inside(host):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        fields = next(line for line in lines if line.lstrip().startswith("eth0:")).split()
        return int(fields[1]), int(fields[9])

    def set_rate(self, host: Host, rate: str) -> None:
        """Change what a host can send, and receive, from now on."""
        for namespace, device in self._ends(host):
            namespaces.shape("change", namespace, device, rate)

    def tenth(self) -> str:
        """A tenth of the rate of the hosts."""
        return f"{namespaces.bytes_per_second(self.rate) * 8 / 1e4:.0f}kbit"

    def link_down(self, host: Host) -> None:
        """Pull a host's cable out of the switch: packets vanish, and nobody is told."""
        self._set_port(host, "down")

    def link_up(self, host: Host) -> None:
        """Put a host's cable back."""
        self._set_port(host, "up")

    def _set_port(self, host: Host, state: str) -> None:
        _, (switch, port) = self._ends(host)
        sh("ip", "-n", switch, "link", "set", port, state)

    def _namespace(self, host: Host) -> str:
        self.address(host)  # complains about a host that is not there
        return f"{self.name}-{host}"

    def _ends(self, host: Host) -> list[tuple[str, str]]:
        """The two ends of a host's cable, each as namespace and device."""
        return [(self._namespace(host), "eth0"), (self._switch, f"port{host}")]

    def _add(self, host: Host) -> None:
        (own, eth0), (switch, port) = self._ends(host)
        sh("ip", "netns", "add", own)
        ip = functools.partial(sh, "ip", "-n", own)
        ip("link", "add", eth0, "type", "veth", "peer", "name", port, "netns", switch)
        for namespace, device in self._ends(host):
            namespaces.limit_packets(namespace, device)
            namespaces.shape("add", namespace, device, self.rate)
        if namespaces.milliseconds(self.delay):
            namespaces.add_delay(own, eth0, self.delay)
        sh("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        ip("addr", "add", f"{self.address(host)}/24", "dev", eth0, "noprefixroute")
        ip("link", "set", "lo", "up")
        ip("link", "set", eth0, "up")
        # bbr shares a crowded link badly. Chosen on the route, since a namespace's own default can
        # only be an algorithm that the machine's administrator has allowed to everybody.
        ip("route", "add", f"{SUBNET}.0/24", "dev", eth0, "congctl", "cubic")


@functools.cache
def why_not() -> str | None:
    """What keeps this machine from emulating hosts, in one sentence; None if it can."""
    if sys.platform != "linux":
        return f"Emulated hosts need Linux network namespaces, and this is {sys.platform}."
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command) is None:
            return f"Emulated hosts need the command `{command}` (iproute2, util-linux)."
    if os.geteuid():
        return "Emulated hosts need root, to make network namespaces."
    try:
        with Laboratory(hosts=1):
            return None
    except (LaboratoryError, OSError) as error:
        return f"Emulated hosts cannot be made here: {error}."


def remove_leftovers() -> None:
    """Remove the hosts of laboratories whose process was killed before it could do so."""

    def is_left_over(name: str) -> bool:
        pid = re.match(rf"{PREFIX}-(\d+)-", name)
        return pid is not None and not Path("/proc", pid[1]).exists()

    namespaces.remove(filter(is_left_over, namespaces.present(PREFIX)))
