"""The times at which snapshots are taken."""

from __future__ import annotations

from aiops.durable.snapshot_rule import SnapshotRule, Unsaved

SOME, MUCH = Unsaved(3, 1000, 1000), Unsaved(3, 900 << 20, 1 << 30)


def test_by_the_clock_if_anything_has_happened() -> None:
    rule = SnapshotRule(30.0, 100.0)
    assert not rule.due(129.9, SOME)
    assert rule.due(130.0, SOME)
    assert not rule.due(130.0, Unsaved(0, 0, 0))
    rule.written(131.0, 0.01, 1.0)  # it began at 130
    assert not rule.due(159.9, SOME)
    assert rule.due(160.0, SOME)


def test_sooner_when_a_replay_would_take_long() -> None:
    rule = SnapshotRule(30.0, 0.0)
    assert MUCH.seconds > 1
    assert not rule.due(1.9, MUCH), "the first answers come first"
    assert rule.due(2.0, MUCH)
    assert rule.due(2.0, Unsaved(20_000, 0, 0))
    assert rule.due(2.0, Unsaved(300, 300 << 20, 0)), "its journal would leave the system's cache"
    assert not rule.due(2.0, SOME)


def test_pauses_and_writing_have_a_bounded_part_of_the_time() -> None:
    rule = SnapshotRule(30.0, 0.0)
    rule.written(10.1, pause=0.2, writing=0.1)
    assert not rule.due(11.9, MUCH)
    assert rule.due(12.1, MUCH)
    rule.written(21.5, pause=0.2, writing=1.5)
    assert not rule.due(24.4, MUCH)
    assert rule.due(24.6, MUCH)
    assert SnapshotRule(1.0, 0.0).due(1.0, SOME)  # those by the clock are not put off


def test_one_that_failed_is_tried_again_in_ten_seconds() -> None:
    rule = SnapshotRule(300.0, 0.0)
    rule.failed(50.0)
    assert not rule.due(59.9, MUCH)
    assert rule.due(60.0, SOME)
    rule = SnapshotRule(0.5, 0.0)
    rule.failed(50.0)
    assert rule.due(50.5, SOME)


def test_at_once_when_many_starts_have_left_their_segments() -> None:
    """Also in the first two seconds, in which such a server may end again; but after a failure."""
    many = Unsaved(9, 1000, 1000, files=9 * (16 << 20))
    rule = SnapshotRule(300.0, 100.0)
    assert rule.due(100.0, many)
    assert not rule.due(100.0, Unsaved(9, 1000, 1000, files=8 * (16 << 20)))
    rule.failed(100.5)
    assert not rule.due(110.4, many)
    assert rule.due(110.5, many)
