"""The order of turns, and what clients compute ahead of theirs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import PerceptronTask
from aiops.sim.turns.client_selection import RecordedSelection
from aiops.sim.turns.run import Run
from aiops.sim.turns.task import ORDERS, Batches
from tests.rows import each_row
from tests.sim.turns.cases import TASK, simulation


class TestTurns:
    def test_are_those_of_the_rule(self) -> None:
        with Run(simulation("asgd", clients=3), TASK) as run:
            run.dispatcher.selection = RecordedSelection(3, [2, 0, 0, 1, 2])
            assert [run.dispatcher.turn() for _ in range(5)] == [2, 0, 0, 1, 2]
            assert [worker.steps for worker in run.dispatcher.workers] == [2, 1, 2]

    def test_who_waits_is_passed_over(self) -> None:
        with Run(simulation("hardsync", clients=3), TASK) as run:
            run.dispatcher.selection = RecordedSelection(3, [2, 2, 0, 2, 0, 1, 1])
            assert [run.dispatcher.turn() for _ in range(4)] == [2, 0, 1, 1]

    @pytest.mark.parametrize("jobs", [1, 3])
    def test_a_record_that_ends_says_so(self, jobs: int) -> None:
        with Run(simulation("asgd", clients=3), TASK, jobs=jobs) as run:
            run.dispatcher.selection = RecordedSelection(3, [2, 0, 0, 1, 2])
            run.dispatcher.run(5)
            with pytest.raises(UsageError, match="the record ends after 5 turns"):
                run.dispatcher.turn()


class Heads(PerceptronTask):
    """Writes one of its tensors in each mini-batch, and sums into it; ``clean``: sets all to 0."""

    def __init__(self, *, clean: bool) -> None:
        super().__init__("digits", 8)
        self._clean = clean

    def gradient(self, params: Any, rows: Any, out: Any) -> None:
        whole = out.like()
        super().gradient(params, rows, whole)
        names = [*out]
        for name in names if self._clean else ():
            out[name][...] = 0
        name = names[int(rows[0]) % len(names)]
        out[name][...] += whole[name]


class TestGradients:
    def test_what_is_not_written_is_nothing(self) -> None:
        """Nor is it what another client's mini-batch left there, on however many threads."""
        digests = set()
        for clean in (True, False):
            for jobs in (1, 2, 3):
                with Run(simulation("asgd", clients=6), Heads(clean=clean), jobs=jobs) as run:
                    digests.add(run.execute().digest)
        assert len(digests) == 1

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_what_is_returned_is_refused(self, jobs: int) -> None:
        class Returned(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> Any:
                return {name: array * 0 for name, array in params.items()}

        with (
            Run(simulation("asgd"), Returned("digits", 8), jobs=jobs) as run,
            pytest.raises(UsageError, match=r"Returned.gradient returned dict, .* `out`"),
        ):
            run.execute()

    def test_where_it_was_written_may_be_returned(self) -> None:
        class Returned(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> Any:
                super().gradient(params, rows, out)
                return out

        digests = set()
        for task in (PerceptronTask, Returned):
            with Run(simulation("asgd"), task("digits", 8)) as run:
                digests.add(run.execute().digest)
        assert len(digests) == 1


class TestAhead:
    """With several jobs gradients are computed before their turn, and are the same gradients."""

    def test_gradients_are_computed_on_other_threads_and_no_more_often(self) -> None:
        threads: list[int] = []

        class Noted(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> None:
                threads.append(threading.get_ident())
                super().gradient(params, rows, out)

        with Run(simulation(clients=12), Noted("digits", 8), jobs=3) as run:
            run.execute()
        ahead = sum(thread != threading.get_ident() for thread in threads)
        assert ahead > 30
        assert 60 <= len(threads) <= 60 + 9, "but for those of turns that did not come any more"

    def test_what_was_computed_for_another_turn_is_computed_again(self) -> None:
        """Behind a barrier who comes when is known only when it comes to it."""
        computed: list[bytes] = []

        class Noted(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> None:
                computed.append(rows.tobytes())
                super().gradient(params, rows, out)

        digests = set()
        for jobs in (1, 4):
            with Run(simulation("ssp", set=("s=1",), clients=6), Noted("digits", 8), jobs) as run:
                digests.add(run.execute().digest)
        assert len(digests) == 1
        assert len(computed) > 120

    def test_buffers_are_used_again(self) -> None:
        with Run(simulation(clients=12, iterations=200), TASK, jobs=3) as run:
            run.execute()
            assert len(run.dispatcher._rooms) + len(run.dispatcher._ahead) <= 3 * 3 + 2


class TestBatches:
    def test_random_ones_depend_on_the_seed_and_the_iteration_alone(self) -> None:
        there = Batches(1000, 8, seed=1)
        rows = [there.rows(i) for i in range(3000)]
        back = Batches(1000, 8, seed=1)
        for i in (2999, 0, 1500, 7):
            np.testing.assert_array_equal(back.rows(i), rows[i])
        assert not np.array_equal(Batches(1000, 8, seed=2).rows(0), rows[0])
        assert len({row.tobytes() for row in rows}) == 3000

    def test_sequential_ones_are_fred_s(self) -> None:
        batches = Batches(10, 3, seed=1, order="sequential")
        assert [batches.rows(i).tolist() for i in range(4)] == [
            [0, 1, 2],
            [3, 4, 5],
            [6, 7, 8],
            [0, 1, 2],
        ]

    @pytest.mark.parametrize("order", ORDERS)
    def test_all_examples_at_a_time(self, order: str) -> None:
        assert len(Batches(10, 10, 0, order).rows(3)) == 10

    @each_row("size", [0, 11, -1])
    def test_more_than_there_are(self, size: int) -> None:
        with pytest.raises(UsageError, match=f"mini-batches of {size}: the data has 10 examples"):
            Batches(10, size, 0)
