"""Selection rules: streams of clients that depend on their seed alone."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.sim.turns.client_selection import (
    RecordedSelection,
    RecordingSelection,
    Selection,
    Softmax,
    restore_rule,
    rule_state,
    selection,
)
from tests.rows import each_row


def drawn(rule: Selection, turns: int) -> list[int]:
    """Return the clients of the next turns."""
    return list(islice(iter(rule.__next__, None), turns))


def spread(rule: Selection, clients: int, turns: int = 4000) -> float:
    """Return how unevenly turns are spread: their standard deviation over the clients."""
    counts = Counter(drawn(rule, turns))
    return float(np.std([counts[client] for client in range(clients)]))


@pytest.mark.parametrize(
    "text",
    ["uniform", "round-robin", "softmax:add=-1", "softmax:times=0.5", "paced:times=3"],
)
class TestEveryRule:
    def test_depends_on_its_seed_alone(self, text: str) -> None:
        first, again = (drawn(selection(text, 7, seed=3), 5000) for _ in range(2))
        assert first == again

    def test_selects_all_clients_and_nobody_else(self, text: str) -> None:
        assert set(drawn(selection(text, 7, seed=3), 5000)) == set(range(7))

    def test_one_client_is_always_next(self, text: str) -> None:
        assert drawn(selection(text, 1, seed=3), 20) == [0] * 20

    def test_needs_a_client(self, text: str) -> None:
        with pytest.raises(UsageError, match="0 clients: a simulation needs at least one"):
            selection(text, 0, seed=3)


class TestUniform:
    def test_another_seed_is_another_stream(self) -> None:
        streams = {tuple(drawn(selection("uniform", 9, seed), 40)) for seed in range(20)}
        assert len(streams) == 20

    def test_is_uniform(self) -> None:
        counts = Counter(drawn(selection("uniform", 10, seed=1), 50_000))
        assert min(counts.values()) > 4700
        assert max(counts.values()) < 5300

    def test_who_was_before_does_not_matter(self) -> None:
        stream = drawn(selection("uniform", 10, seed=2), 50_000)
        again = sum(a == b for a, b in pairwise(stream))
        assert again / len(stream) == pytest.approx(0.1, rel=0.1)


def test_round_robin() -> None:
    assert drawn(selection("round-robin", 3, seed=9), 7) == [0, 1, 2, 0, 1, 2, 0]


class TestSoftmax:
    def test_priorities_that_fall_make_turns_more_even(self) -> None:
        uniform = spread(selection("uniform", 20, seed=4), 20)
        assert spread(selection("softmax:add=-0.2", 20, seed=4), 20) < uniform / 3

    def test_priorities_that_rise_favour_a_few(self) -> None:
        uniform = spread(selection("uniform", 20, seed=4), 20)
        assert spread(selection("softmax:add=0.05", 20, seed=4), 20) > 5 * uniform

    def test_priorities_that_stay_are_uniform(self) -> None:
        counts = Counter(drawn(selection("softmax:add=0", 10, seed=4), 20_000))
        assert max(counts.values()) < 2200

    def test_change_is_any_function(self) -> None:
        rule = Softmax(3, 0, lambda priority: priority - 50)
        stream = drawn(rule, 300)
        for start in range(0, 300, 3):  # all three, in some order, then again
            assert sorted(stream[start : start + 3]) == [0, 1, 2]

    def test_probabilities_are_the_softmax(self) -> None:
        rule = Softmax(2, 0, lambda priority: priority)
        rule.priorities[1] = np.log(3)
        assert Counter(drawn(rule, 8000))[1] / 8000 == pytest.approx(0.75, abs=0.02)

    def test_far_apart_they_do_not_overflow(self) -> None:
        rule = Softmax(3, 0, lambda priority: priority)
        rule.priorities[:] = 5e4, -5e4, 0
        assert set(drawn(rule, 50)) == {0}

    def test_start(self) -> None:
        rule = selection("softmax:times=0.5,start=8", 2, seed=0)
        assert isinstance(rule, Softmax)
        next(rule)
        assert sorted(rule.priorities) == [4.0, 8.0]

    def test_without_end(self) -> None:
        rule = Softmax(2, 0, lambda priority: priority * 1e200 + 1e200)
        with pytest.raises(UsageError, match=r"priority has become inf: keep it finite"):
            drawn(rule, 10)

    def test_the_change_may_be_any_function(self) -> None:
        named = selection("softmax:change=math:tanh,start=3", 5, seed=2)
        made = Softmax(5, 2, math.tanh, start=3.0)
        assert drawn(named, 500) == drawn(made, 500)


class TestPaced:
    def test_a_slow_client_has_as_many_fewer_turns(self) -> None:
        counts = Counter(drawn(selection("paced:times=3", 4, seed=5), 10_000))
        assert counts[0] == pytest.approx(1000, rel=0.02)
        assert [counts[n] for n in (1, 2, 3)] == pytest.approx([3000] * 3, rel=0.02)

    def test_without_spread_the_order_repeats(self) -> None:
        stream = drawn(selection("paced:times=2,slow=2,sigma=0", 4, seed=6), 600)
        # In the time of a slow client's mini-batch the others make two.
        assert {tuple(stream[n : n + 6]) for n in range(0, 600, 6)} == {tuple(stream[:6])}
        assert Counter(stream[:6]) == {0: 1, 1: 1, 2: 2, 3: 2}

    def test_clients_begin_apart_in_an_order_of_the_seed(self) -> None:
        first = {tuple(drawn(selection("paced", 5, seed), 5)) for seed in range(20)}
        assert len(first) > 15

    def test_kept_and_restored_it_goes_on(self) -> None:
        rule, again = (selection("paced:times=3", 6, seed=7) for _ in range(2))
        drawn(rule, 500)
        restore_rule(again, rule_state(rule))
        assert drawn(again, 500) == drawn(rule, 500)


class TestRecorded:
    def test_a_note_of_a_rule_repeats_it(self, tmp_path: Path) -> None:
        rule = RecordingSelection(selection("uniform", 5, seed=1))
        expected = drawn(rule, 100)
        rule.write(tmp_path / "turns.txt")
        assert drawn(selection(f"recorded:{tmp_path / 'turns.txt'}", 5, seed=9), 100) == expected
        with pytest.raises(UsageError, match=r"cannot write the record to .*none"):
            rule.write(tmp_path / "none" / "turns.txt")

    def test_is_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "turns.txt"
        path.write_text("0 2\n1 1\t0\n")
        rule = selection(f"recorded:{path}", 3, seed=5)
        assert drawn(rule, 5) == [0, 2, 1, 1, 0]
        with pytest.raises(UsageError, match=r"turns.txt ends after 5 turns: record more"):
            next(rule)

    def test_a_client_that_there_is_not(self) -> None:
        with pytest.raises(UsageError, match="the record selects client 3, but there are 3"):
            RecordedSelection(3, [0, 1, 3])
        with pytest.raises(UsageError, match="numbers go from 0 to 2"):
            RecordedSelection(3, [-1])

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"none\.txt: No such file"):
            selection(f"recorded:{tmp_path / 'none.txt'}", 3, seed=0)
        (tmp_path / "words.txt").write_text("0 one 2")
        with pytest.raises(UsageError, match=r"'one': clients' numbers belong there"):
            selection(f"recorded:{tmp_path / 'words.txt'}", 3, seed=0)


@each_row(
    ("text", "match"),
    [
        ("uniformly", "no selection rule is called 'uniformly'.*uniform"),
        ("", "no selection rule is called ''"),
        ("uniform:2", "has no settings, and was given '2'"),
        ("round-robin:x", "has no settings"),
        ("paced:time=3", "paced has no setting 'time'.*times"),
        ("paced:times=0", "times is above 0"),
        ("paced:slow=5", "slow one of 0 to 4, the number of clients"),
        ("paced:slow=1.5", "slow one of 0 to 4"),
        ("paced:sigma=2", "sigma from 0 to 1"),
        ("softmax", "give the change of a selected client's priority"),
        ("softmax:add=-1,times=2", "give the change"),
        ("softmax:ad=-1", "softmax has no setting 'ad'.*add"),
        ("softmax:add", "'add' in a selection rule: write key=number"),
        ("softmax:add=much", "write key=number"),
        ("softmax:change=tanh", "softmax:change=tanh: write package.module:name"),
        ("softmax:change=nowhere.at_all:f", "there is no module 'nowhere.at_all'"),
        ("softmax:change=math:pie", "math has no 'pie'"),
        ("softmax:change=math:pi", "that is not a function"),
        ("softmax:add=nan", "write key=number"),
    ],
)
def test_refused(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        selection(text, 4, seed=0)
