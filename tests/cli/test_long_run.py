"""What commands that take long have in common."""

from __future__ import annotations

import signal

import pytest

from aiops.cli.long_run import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_the_second_is_as_before(number: signal.Signals) -> None:
    stopped, before, later = [], signal.getsignal(number), []
    signal.signal(number, lambda *_: later.append(number))
    try:
        with interrupts(lambda: stopped.append(number)):
            signal.raise_signal(number)
            assert (stopped, later) == ([number], [])
            signal.raise_signal(number)
            assert (stopped, later) == ([number], [number])
        signal.raise_signal(number)
        assert (stopped, later) == ([number], [number] * 2)
    finally:
        signal.signal(number, before)
