"""The checker itself: it accepts what is promised, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.lab.torture.checker import (
    DIGITS,
    CellRange,
    ClientView,
    mean_violations,
    touched_violations,
    uncertain,
    violations,
)
from aiops.lab.torture.plan import exponential, inverse

CELLS = CellRange(1, 3)


def model_of(counts: dict[int, int], cells: CellRange = CELLS) -> np.ndarray:
    """Return a model in which pushes count this many times."""
    model = np.zeros(5)
    for push, count in counts.items():
        cell, amount = cells.place(push)
        model[cell] -= count * amount
    return model


def seen(acks: int, cells: CellRange = CELLS) -> ClientView:
    log = b"".join(b"ack %d %d 0 1\n" % (push, push + 1) for push in range(acks))
    return ClientView.parse("w", cells, log + b"ack 9")  # the last line was not completed


def test_each_acknowledged_push_counts_once_and_the_next_at_most_once() -> None:
    for last in (0, 1):
        counts = {**dict.fromkeys(range(30), 1), 30: last}
        assert violations(model_of(counts), [seen(30)]) == []
        assert uncertain(model_of(counts), seen(30)) == bool(last)


@pytest.mark.parametrize("push", [0, DIGITS - 1, DIGITS, 29])
@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_push_that_is_lost_or_counts_twice_is_told(push: int, count: int) -> None:
    counts = {**dict.fromkeys(range(30), 1), push: count}
    [text] = violations(model_of(counts), [seen(30)])
    assert text == f"w: push {push} was acknowledged and counts {count} times, not 1"


def test_what_was_not_acknowledged_counts_at_most_once() -> None:
    counts = dict.fromkeys(range(10), 1)
    assert "not acknowledged" in violations(model_of({**counts, 10: 2}), [seen(10)])[0]
    assert "never made" in violations(model_of({**counts, 11: 1}), [seen(10)])[0]


def test_a_cell_of_another_or_no_sum_is_told() -> None:
    model = model_of({})
    model[0] = 1
    assert violations(model, [seen(0)]) == ["cells of no client have changed"]
    for value in (1.0, -0.5, -(4.0**26)):
        assert "no sum" in violations(np.array([0, value, 0, 0, 0]), [seen(0)])[0]


def test_a_version_that_goes_back_is_told() -> None:
    view = ClientView.parse("w", CELLS, b"ack 0 7 0 1\nack 1 6 0 1\nend\n")
    assert view.ended
    assert view.told == ["version 7 was followed by 6 (push 1)"]


def test_pushes_that_are_scaled_have_their_own_cells() -> None:
    cells = CellRange(1, 3, digits=1)
    view = ClientView.parse("w", cells, b"ack 0 1 0 1\nack 1 9 4 1\n")
    assert violations(np.array([0, -1, -0.25, -0.2, 0]), [view], scaled=inverse) == []
    for wrong in ([0, -1, -0.5, 0, 0], [0, -1, 0, 0, 0], [0, -1, -0.25, -2, 0]):
        assert violations(np.array(wrong), [view], scaled=inverse)


def test_the_factor_of_a_push_that_an_offered_model_had_was_never_told() -> None:
    """It was applied and not acknowledged, and ignored when it was sent again to a new server."""
    view = ClientView.parse("w", CellRange(0, 3, digits=1), b"ack 0 1 0 1\nack 1 1 0 0\n")
    for amount, fine in ((0, True), (-1 / 3, True), (-2, False)):
        model = np.array([-1, amount, 0])
        assert (not violations(model, [view], scaled=inverse, lossy=True, offered=True)) == fine
    assert violations(np.array([-1, -1 / 3, 0]), [view], scaled=inverse, lossy=True)


def test_what_is_lost_is_what_was_told() -> None:
    counts = {**dict.fromkeys(range(10), 1), 8: 0, 9: 0}
    for told, ended, wrong in ((2, True, 0), (1, True, 1), (3, True, 1), (1, False, 0)):
        view = seen(10)
        view.rolled_back, view.ended = told, ended
        found = violations(model_of(counts), [view], lossy=True)
        assert len(found) == wrong, (told, ended)
    view = seen(10)
    view.rolled_back, view.ended = 3, True
    assert not violations(model_of(counts), [view], lossy=True, offered=True)
    view.ignored = {7}
    assert violations(model_of(counts), [view], lossy=True), "an ignored push counts"
    assert not violations(model_of(counts), [view], lossy=True, offered=True), "in what was offered"
    assert violations(model_of(counts), [seen(10)]), "where none may be lost"
    gone = seen(CELLS.pushes)
    gone.rolled_back, gone.ended = 0, True
    counts = dict.fromkeys(range(CELLS.pushes - 2), 1)
    assert not violations(model_of(counts), [gone], lossy=True), "it had left before the kill"


def test_pushes_whose_factor_falls_exponentially() -> None:
    cells = CellRange(0, 2, digits=1)
    view = ClientView.parse("w", cells, b"ack 0 1 0 1\nack 1 9 10 1\nend\n")
    assert violations(np.array([-1, -np.exp(-1.0)]), [view], scaled=exponential) == []
    assert violations(np.array([-1, -1.0]), [view], scaled=exponential)


ONE = CellRange(0, 4, digits=1)
OTHER = CellRange(4, 4, digits=1)


def rounds() -> list[ClientView]:
    """Two clients; the second was killed after two rounds."""
    first = ClientView.parse("a", ONE, b"ack 0 1 0 1\nack 1 2 0 1\nack 2 3 0 1\nend\n")
    return [first, ClientView.parse("b", OTHER, b"ack 0 1 0 1\nack 1 2 0 1\n")]


def test_rounds_whose_mean_is_added() -> None:
    whole = [-0.5, -0.5, -1, 0, -0.5, -0.5, 0, 0]
    assert mean_violations(np.array(whole), 3, rounds()) == []
    last = [-0.5, -0.5, -0.5, 0, -0.5, -0.5, -0.5, 0]
    assert mean_violations(np.array(last), 3, rounds()) == []
    for at, value in ((0, 0.0), (0, -1.0), (1, -1.0), (3, -1.0), (6, -0.5), (7, -0.5), (2, -2.0)):
        wrong = [*whole]
        wrong[at] = value
        assert mean_violations(np.array(wrong), 3, rounds()), at
    assert mean_violations(np.array(whole), 4, rounds())


def test_an_ignored_push_is_in_no_round() -> None:
    view = ClientView.parse("a", ONE, b"ack 0 1 0 1\nack 1 1 1 0\nend\n")
    assert mean_violations(np.array([-1.0, 0, 0, 0]), 1, [view]) == []
    assert mean_violations(np.array([-1.0, -1, 0, 0]), 2, [view])


def immediate() -> list[ClientView]:
    first = ClientView.parse("a", ONE, b"ack 0 1 0 1\nack 1 3 1 1\nend\n")
    return [first, ClientView.parse("b", OTHER, b"ack 0 2 0 1\n")]


def test_pushes_that_change_their_cells_are_counted_by_versions() -> None:
    whole = [0.1, -0.2, 0, 0, 0.3, 0, 0, 0]
    assert touched_violations(np.array(whole), 3, immediate()) == []
    assert touched_violations(np.array([*whole[:5], 0.1, 0, 0]), 4, immediate()) == []
    assert touched_violations(np.array(whole), 4, immediate()), "a push counts twice"
    assert touched_violations(np.array([*whole[:5], 0.1, 0, 0]), 3, immediate())
    for at, value in ((0, 0.0), (2, 0.1), (6, 0.1)):
        wrong = [*whole]
        wrong[at] = value
        assert touched_violations(np.array(wrong), 3, immediate()), at
    same = ClientView.parse("c", CellRange(8, 1, digits=1), b"ack 0 2 0 1\nend\n")
    found = touched_violations(np.array([*whole, 0.1]), 4, [*immediate(), same])
    assert any("as version 2" in text for text in found)


def test_where_a_codec_changes_other_cells_versions_are_counted() -> None:
    model = np.full(8, 0.1)
    for version, wrong in ((2, True), (3, False), (4, False), (5, True)):
        assert bool(touched_violations(model, version, immediate(), cells=False)) == wrong


def test_what_a_client_was_told_last_is_what_it_lost() -> None:
    log = b"ack 0 1 0 1\nack 1 2 0 1\nlost 1\nack 2 2 0 1\nend\n"
    assert ClientView.parse("w", CELLS, log, lossy=True).rolled_back == 1
    assert ClientView.parse("w", CELLS, log, lossy=True).told == []
