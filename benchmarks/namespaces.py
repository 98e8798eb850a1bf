"""Network namespaces and shaped devices, by the commands `ip` and `tc`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator

# Linux builds packets of up to 64 KiB and leaves it to the last device to cut them. A token bucket
# has to cut those larger than itself in software; a smaller largest packet keeps the buckets small
# (so the rate also holds over a millisecond) and the processors free.
LARGEST_PACKET = 16 * 1024
QUEUE = 256 * 1024  # bytes that wait at a shaper, as in a shallow switch, before one is dropped


class LaboratoryError(RuntimeError):
    """The laboratory could not be made or changed."""


def sh(*command: str) -> str:
    """Run a command and return what it printed; if it fails, say which one and why."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LaboratoryError(f"`{shlex.join(command)}` failed: {said}")
    return done.stdout


def present(prefix: str) -> list[str]:
    """Names of the namespaces that exist and start so."""
    lines = sh("ip", "netns", "list").splitlines()
    return [name for name, *_ in map(str.split, lines) if name.startswith(prefix)]


def remove(names: Iterable[str]) -> None:
    """Remove namespaces, after killing every process in them.

    Several processes may remove the same ones at the same time.
    """
    names = list(names)
    deadline = time.monotonic() + 10
    while pids := [pid for name in names for pid in _of_present(name, "pids").split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LaboratoryError(f"processes of a laboratory do not end: {' '.join(pids)}")
    for name in names:
        _of_present(name, "del")


def _of_present(name: str, verb: str) -> str:
    """What `ip netns` says of a namespace; nothing if somebody has removed it meanwhile."""
    try:
        return sh("ip", "netns", verb, name)
    except LaboratoryError:
        if name in present(name):
            raise
        return ""


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Move this thread, and no other one, to a namespace and back."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{name}") as there:
        _setns(there.fileno())
        try:
            yield
        finally:
            _setns(before.fileno())


def _setns(namespace: int) -> None:
    clone_newnet = 0x40000000  # `os.setns` and `os.CLONE_NEWNET` are there from Python 3.12 on
    if ctypes.CDLL(None, use_errno=True).setns(namespace, clone_newnet):
        raise LaboratoryError(f"setns failed: {os.strerror(ctypes.get_errno())}")


def bytes_per_second(rate: str) -> float:
    """What a rate in tc's notation means, e.g. ``"200mbit"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if not match:
        raise ValueError(f"a rate looks like 500kbit, 200mbit or 1gbit, not {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def milliseconds(delay: str) -> float:
    """What a delay in tc's notation means, e.g. ``"5ms"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", delay)
    if not match:
        raise ValueError(f"a delay looks like 0ms or 2.5ms, not {delay!r}")
    return float(match[1])


def limit_packets(namespace: str, device: str) -> None:
    """Limit the size of the packets that a device is given to cut, or has put together."""
    size = str(LARGEST_PACKET)
    sh("ip", "-n", namespace, "link", "set", device, "gso_max_size", size, "gro_max_size", size)


def shape(verb: str, namespace: str, device: str, rate: str) -> None:
    """Limit what leaves through a device (verb "add"), or change that limit ("change")."""
    # A bucket must hold what accrues while the kernel is busy elsewhere, or the rate is missed.
    burst = max(2 * LARGEST_PACKET, int(bytes_per_second(rate) * 0.001))
    bucket = ["rate", rate, "burst", str(burst), "limit", str(QUEUE)]
    root = ["dev", device, "root", "handle", "1:"]
    sh("tc", "-n", namespace, "qdisc", verb, *root, "tbf", *bucket)


def add_delay(namespace: str, device: str, delay: str) -> None:
    """Delay what leaves through a shaped device."""
    below = ["dev", device, "parent", "1:1"]
    try:
        sh("tc", "-n", namespace, "qdisc", "add", *below, "netem", "delay", delay)
    except LaboratoryError as error:
        if "kind is unknown" not in str(error):
            raise
        message = "This kernel has no netem, so packets cannot be delayed: use a delay of 0ms."
        raise LaboratoryError(message) from None
