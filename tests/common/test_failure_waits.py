"""All waits follow from one setting."""

from __future__ import annotations

from aiops.common.failure_waits import DEFAULT, FailureWaits
from tests.rows import each_row


@each_row("timeout", [4.0, DEFAULT, 7.5, 30.0, 600.0])
def test_a_dead_network_is_noticed_in_time(timeout: float) -> None:
    """What was heard last came before the cut, and a look comes every half second at the latest."""
    waits = FailureWaits(timeout)
    assert waits.unheard + 0.5 <= timeout
    assert waits.unheard >= 3 * waits.probe, "a lost probe or two is no partition"


@each_row("timeout", [0.01, 1.0, DEFAULT, 600.0])
def test_a_healed_network_is_used_within_two_seconds(timeout: float) -> None:
    """The kernel asks again after 1 s; then comes the pause, then the next attempt."""
    waits = FailureWaits(timeout)
    assert 0 < waits.first_pause <= waits.longest_pause
    assert waits.attempt >= 1.0
    assert (waits.attempt - 1.0) + waits.longest_pause < 2


@each_row("timeout", [0.01, 1.0, DEFAULT, 600.0])
def test_a_busy_process_is_not_taken_for_a_dead_machine(timeout: float) -> None:
    waits = FailureWaits(timeout)
    assert waits.unanswered == 12 * waits.heartbeat
    assert waits.probe >= 1, "whole seconds, for the kernel"


def test_all_are_printed() -> None:
    text = str(FailureWaits())
    assert text.startswith("machine unheard 4 s, probe 1 s, ping 5 s, process silent 60 s,")
    waits, printed = FailureWaits(), FailureWaits().table()
    assert all(name in text for name in printed)
    made = [name for name, each in vars(FailureWaits).items() if isinstance(each, property)]
    left_out = [name for name in made if getattr(waits, name) not in printed.values()]
    assert left_out == ["first_pause"], "it doubles up to one that is printed"
