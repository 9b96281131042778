"""How much processor time processes have used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.processor_time import ProcessorMeter, ProcessorTime, processor_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")


def work(seconds: float) -> None:
    """Use so much of a processor, in this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def call(seconds: float) -> None:
    """Use so much of a processor in calls of the system, nearly all of it."""
    page = bytearray(1 << 20)
    end = time.thread_time() + seconds
    with open("/dev/zero", "rb", buffering=0) as zeros:
        while time.thread_time() < end:
            zeros.readinto(page)


def used() -> ProcessorTime:
    found = processor_time(os.getpid())
    assert found is not None
    return found


def test_it_is_that_of_all_threads() -> None:
    before, begun = used(), time.process_time()
    thread = threading.Thread(target=work, args=(0.05,))
    thread.start()
    thread.join()
    work(0.05)
    spent, counted = used().total - before.total, time.process_time() - begun
    assert counted >= 0.1
    assert spent == pytest.approx(counted, abs=0.005)


def test_the_kernels_part_is_told_apart() -> None:
    before = used()
    work(0.2)
    between = used()
    call(0.2)
    after = used()
    assert between.user - before.user > 0.1 > between.kernel - before.kernel
    assert after.kernel - between.kernel > 0.1 > after.user - between.user


def test_of_a_process_that_has_ended_it_is_not_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert processor_time(child.pid) is None
    assert ProcessorMeter().read([child.pid]) is None


def test_a_meter_tells_what_was_used_since_it_was_read() -> None:
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(), input()"
    with subprocess.Popen(
        [sys.executable, "-uc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        meter, mine = ProcessorMeter(), [os.getpid()]
        meter.read(mine)
        work(0.1)
        first = meter.read(mine)
        child.stdout.readline()
        second = meter.read([*mine, child.pid])
        third = meter.read([*mine, child.pid])
        child.communicate(b"\n")
        work(0.1)
        last = meter.read([*mine, child.pid])  # of which one has ended
    assert first is not None
    assert second is not None
    assert third is not None
    assert last is not None
    assert 0.1 <= first.total < 0.2
    assert 0.3 <= second.total < 0.5  # all that a process has used that was not there before
    assert third.total < 0.1
    assert 0.1 <= last.total < 0.3


def test_steps_of_the_kernels_part_never_make_more_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told in steps of 10 ms, which may be longer than what was used."""
    told = iter([ProcessorTime(0.008, 0.02), ProcessorTime(0.003, 0.03)])
    monkeypatch.setattr("benchmarks.processor_time.processor_time", lambda pid: next(told))
    meter = ProcessorMeter()
    meter.read([1])
    spent = meter.read([1])
    assert spent == (0.0, pytest.approx(0.005))
