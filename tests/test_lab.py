"""The laboratory does what it says: rates hold, cables can be pulled, nothing stays behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import namespaces
from benchmarks.laboratory import Laboratory, LaboratoryError, remove_leftovers, why_not
from benchmarks.namespaces import bytes_per_second

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

MIB = 2**20


@pytest.fixture(scope="module")
def lab():
    with Laboratory(hosts=2, rate="100mbit") as lab:
        yield lab


def test_goodput_is_that_of_the_rate(lab):
    assert 0.85 <= lab.goodput(0, 1) / bytes_per_second("100mbit") <= 1


def test_counters_count(lab):
    before = {host: lab.counters(host) for host in lab.hosts}
    lab.goodput(0, 1, nbytes=MIB)
    after = {host: lab.counters(host) for host in lab.hosts}

    entered = {host: after[host][0] - before[host][0] for host in lab.hosts}
    left = {host: after[host][1] - before[host][1] for host in lab.hosts}
    assert MIB <= left[0] <= 1.1 * MIB
    assert MIB <= entered[1] <= 1.1 * MIB
    assert entered["client"] + left["client"] < 0.01 * MIB


def test_set_rate_takes_effect(lab):
    lab.set_rate(1, "20mbit")
    try:
        received = lab.goodput(0, 1, nbytes=MIB)
        sent = lab.goodput(1, 0, nbytes=MIB)
    finally:
        lab.set_rate(1, "100mbit")
    assert 0.85 <= received / bytes_per_second("20mbit") <= 1
    assert 0.85 <= sent / bytes_per_second("20mbit") <= 1
    assert 0.85 <= lab.goodput(0, 1) / bytes_per_second("100mbit") <= 1


def test_link_down_stops_a_stream_and_link_up_resumes_it(lab):
    source, sink = lab.connect(0, 1)

    def send_until_closed():
        with contextlib.suppress(OSError):
            while True:
                source.sendall(bytes(64 * 1024))

    sender = threading.Thread(target=send_until_closed)
    with source, sink:
        sender.start()
        assert sink.recv(1)
        lab.link_down(1)
        sink.settimeout(0.5)
        with pytest.raises(TimeoutError):  # once the socket's own buffer is empty
            while sink.recv(MIB):
                pass
        entered, _ = lab.counters(1)
        with pytest.raises(TimeoutError):
            sink.recv(1)
        assert lab.counters(1)[0] == entered
        lab.link_up(1)
        sink.settimeout(10)
        assert sink.recv(1)
    sender.join(10)
    assert not sender.is_alive()


def test_commands_run_on_their_host(lab):
    assert lab.run(1, ["hostname"]) == "host1\n"
    assert lab.address("client") in lab.run("client", ["ip", "-4", "addr"])


def test_errors_name_what_is_wrong(lab):
    with pytest.raises(LaboratoryError, match=r"`cat nowhere` failed on host 0: .*No such file"):
        lab.run(0, ["cat", "nowhere"])
    with pytest.raises(LaboratoryError, match=r"`tc -n .* dev eth9 .*` failed: .*eth9"):
        namespaces.shape("change", f"{lab.name}-0", "eth9", "1mbit")
    with pytest.raises(ValueError, match="no host 2"):
        lab.popen(2, ["true"])
    with pytest.raises(ValueError, match="200mbit"):
        Laboratory(rate="200")
    with pytest.raises(ValueError, match=r"2\.5ms"):
        Laboratory(delay="5s")


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_gone_afterwards(error):
    with contextlib.suppress(error or ()), Laboratory(hosts=2) as lab:
        assert len(namespaces.present(lab.name)) == 5
        child = lab.popen(0, ["sleep", "1000"])
        # A daemon: it has left its parent and its session.
        script = ["sh", "-c", "echo ready; exec sleep 1000"]
        daemon = lab.popen(1, ["setsid", "--fork", *script], stdout=subprocess.PIPE)
        assert daemon.stdout.readline() == b"ready\n"
        if error:
            raise error
    assert not namespaces.present(lab.name)
    assert child.returncode == -9
    assert daemon.communicate(timeout=5) == (b"", None)  # nobody holds the pipe any more


def test_leftovers_of_a_killed_process_are_removed():
    script = (
        "import os; from benchmarks.laboratory import Laboratory\n"
        "lab = Laboratory(hosts=4).__enter__()\n"
        "print(lab.name, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert namespaces.present(killed.stdout.strip())
    # As the processes of a test run do, or two benchmarks that are started together
    with ThreadPoolExecutor(4) as pool:
        for removed in [pool.submit(remove_leftovers) for _ in range(4)]:
            removed.result()
    assert not namespaces.present(killed.stdout.strip())


def test_two_laboratories_side_by_side(lab):
    with Laboratory(hosts=1, rate="50mbit") as other:
        assert other.address(0) == lab.address(0)
        assert other.goodput() <= bytes_per_second("50mbit")
    assert len(namespaces.present(lab.name)) == 5


def test_delay_works_or_says_why_not():
    try:
        with Laboratory(hosts=2, delay="20ms") as lab:
            output = lab.run(0, ["ping", "-c", "1", lab.address(1)])
    except LaboratoryError as error:
        assert "no netem" in str(error)
    else:
        assert float(output.split("time=")[1].split()[0]) >= 40
