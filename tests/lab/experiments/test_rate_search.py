"""The search for learning rates: the candidates and the rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.rate_search import RateSearch, ladder, search_rates
from aiops.lab.experiments.runs import Runs
from tests.lab.experiments.small_experiment import TINY, result

PANELS = ["few", "many"]
RATES = ladder(0.1, 10, 1, 1)
ERRORS = {  # few workers like a large rate, many a small one
    ("few", 0.01): (0.5, 0.4),
    ("few", 0.1): (0.2, 0.1),
    ("few", 1.0): (0.1, 0.05),
    ("many", 0.01): (0.15, 0.02),
    ("many", 0.1): (0.1, 0.2),
    ("many", 1.0): (0.9, 0.9),
}


def make(panel: str, rate: float, share: float) -> PlannedRun:
    iterations = round(1000 * share)
    work = replace(TINY, lr=rate, clients=1 + PANELS.index(panel), iterations=iterations)
    return PlannedRun(panel, f"{rate}", 1000, work, role="pool")


def run(cases: list[PlannedRun], runs: Runs, diverged: tuple[str, float] | None = None) -> None:
    for case in cases:
        place = case.panel, case.simulation.lr
        assert place[1] is not None
        error = ERRORS[place[0], place[1]][case.simulation.iterations == 1000]
        runs.add(case.key, result(error, diverged="nan" if place == diverged else None))


def test_a_ladder_has_its_middle() -> None:
    assert RATES == (0.01, 0.1, 1.0)
    assert 0.005 in ladder(0.005, 2**0.5, 9, 6)
    assert len(ladder(0.005, 2**0.5, 9, 6)) == 16


def test_all_are_tried_shortly_and_the_best_in_full() -> None:
    pool, runs = RateSearch((("sgd", RATES),), share=0.1, finalists=2), Runs()
    cases, choice = search_rates(pool, "sgd", PANELS, make, runs)
    assert choice is None
    assert len(cases) == 6
    assert {case.simulation.iterations for case in cases} == {100}
    run(cases, runs)
    more, choice = search_rates(pool, "sgd", PANELS, make, runs)
    assert choice is None
    finals = {(case.panel, case.curve) for case in more[6:]}
    # 0.1 and 0.01 are the best over both panels; 1.0 is among the best for few only
    assert finals == {
        ("few", "1.0"),
        ("few", "0.1"),
        ("few", "0.01"),
        ("many", "0.1"),
        ("many", "0.01"),
    }
    run(more, runs)
    _all, choice = search_rates(pool, "sgd", PANELS, make, runs)
    assert choice is not None
    assert choice.once == 0.1
    assert choice.panels == {"few": 1.0, "many": 0.01}
    assert choice.spread == pytest.approx(100)


def test_without_finals_the_first_round_decides() -> None:
    pool, runs = RateSearch((("sgd", RATES),), share=0.1, finalists=0), Runs()
    run(search_rates(pool, "sgd", PANELS, make, runs)[0], runs)
    cases, choice = search_rates(pool, "sgd", PANELS, make, runs)
    assert len(cases) == 6
    assert choice is not None
    assert (choice.once, choice.panels) == (0.1, {"few": 1.0, "many": 0.1})


def test_what_diverges_anywhere_is_not_chosen_for_all() -> None:
    pool, runs = RateSearch((("sgd", RATES),), share=0.1, finalists=0), Runs()
    run(search_rates(pool, "sgd", PANELS, make, runs)[0], runs, diverged=("many", 0.1))
    choice = search_rates(pool, "sgd", PANELS, make, runs)[1]
    assert choice is not None
    assert (choice.once, choice.panels) == (0.01, {"few": 1.0, "many": 0.01})


def test_a_candidate_that_failed_does_not_hold_up_the_choice() -> None:
    pool, runs = RateSearch((("sgd", RATES),), share=0.1, finalists=0), Runs()
    cases, _choice = search_rates(pool, "sgd", PANELS, make, runs)
    run(cases[1:], runs)
    runs.failed[cases[0].key] = "its process ended"
    assert search_rates(pool, "sgd", PANELS, make, runs)[1] is not None
