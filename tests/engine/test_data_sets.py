"""Data sets in an engine: tasks, covers, workers that die, waiting, snapshots, and any order."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aiops.engine.capture import capture
from aiops.engine.data_set import Pieces, add, length, remove
from aiops.engine.data_sets import GRACE, HOLD, MOST_COVERS, MOST_HELD, MOST_SETS
from aiops.engine.engine import Engine
from aiops.engine.events import Options, Resumed, Stopping
from aiops.engine.restore import restore
from aiops.model.parts import Part
from aiops.state.plain import pack, unpack
from aiops.wire.data_messages import CoverPush, GivenTask, TakeTask
from aiops.wire.messages import Ack, Error, Leave, Push, Stats
from tests.inline import Inline
from tests.rows import each_row

MODEL = {"w": np.zeros(2, np.float32)}
BAD = np.full(2, np.nan, np.float32).tobytes()
GOOD = np.ones(2, np.float32).tobytes()


class World:
    """An engine with a model, and what its workers ask of its data set."""

    def __init__(self, policy: str = "asgd", examples: int = 20, **options: Any) -> None:
        self.inline = Inline(policy, backend="numpy", **options)
        self.inline.define(MODEL)
        self.examples, self.ids = examples, 0

    def join(self, *peers: int) -> None:
        for peer in peers:
            self.inline.join(peer)

    def take(self, peer: int, size: int = 5, epochs: int = 1, **changes: Any) -> Any:
        """Ask for a task; the answer, or None while the request waits."""
        self.ids += 1
        fields: dict[str, Any] = {
            "name": "d",
            "examples": self.examples,
            "block": 1,
            "seed": 0,
            "epoch": 0,
            "epochs": epochs,
            "size": size,
            "wait": False,
            "holder": "",
            "keeps": (),
            "seen": (),
            **changes,
        }
        return self.inline.receive(peer, TakeTask(self.ids, **fields))

    def cover(self, peer: int, seq: int, *ranges: tuple[int, int, int]) -> None:
        self.inline.receive(peer, CoverPush(0, seq, ranges))

    def push(self, peer: int, seq: int, data: bytes = GOOD) -> Any:
        part = Part(0, 8, "raw", 8, 0)
        return self.inline.receive(peer, Push(1000 + seq, seq, False, -1, (part,)), data)

    def step(self, peer: int, seq: int, *ranges: tuple[int, int, int]) -> bool:
        """Push what is covered; return whether it was used."""
        self.cover(peer, seq, *ranges)
        answer = self.push(peer, seq)
        assert isinstance(answer, Ack)
        return answer.used

    def last(self, peer: int) -> Any:
        return self.inline.said[peer][-1]

    @property
    def row(self) -> dict[str, Any]:
        [row] = self.inline.engine.report()["data_sets"]
        return dict(row)


class TestPieces:
    def test_any_ranges_come_and_go(self) -> None:
        rng = random.Random(3)
        there, pieces = [False] * 40, Pieces()
        for _ in range(2000):
            start = rng.randrange(40)
            stop = rng.randrange(start + 1, 41)
            if not any(there[start:stop]):
                add(pieces, start, stop)
                there[start:stop] = [True] * (stop - start)
            else:
                assert remove(pieces, start, stop) == all(there[start:stop])
                if all(there[start:stop]):
                    there[start:stop] = [False] * (stop - start)
            assert length(pieces) == sum(there)
            assert all(a[1] < b[0] for a, b in pairwise(pieces))


class TestTasks:
    def test_an_epoch_is_handed_out_once_and_is_over_when_all_is_seen(self) -> None:
        world = World()
        world.join(1)
        given = [world.take(1, 8, keeps=(1, 2, 3)) for _ in range(3)]
        assert [(t.task, t.epoch, t.start, t.stop) for t in given] == [
            *((1, 0, 0, 8), (2, 0, 8, 16), (3, 0, 16, 20))
        ]
        assert world.take(1, keeps=(1, 2, 3)) == GivenTask(4, 0, 0, 0, 0, False)
        for seq, task in enumerate(given, 1):
            assert world.step(1, seq, (task.task, task.start, task.stop))
        assert world.take(1) == GivenTask(5, 0, 1, 0, 0, True)
        assert (world.row["tasks_done"], world.row["epoch"]) == (3, 1)

    def test_a_task_is_covered_batch_by_batch(self) -> None:
        world = World()
        world.join(1)
        world.take(1, 20)
        assert world.step(1, 1, (1, 0, 4))
        assert world.step(1, 2, (1, 4, 8))
        row = world.row
        assert (row["seen"], row["examples_under_way"], row["examples_to_do"]) == (8, 12, 0)

    def test_examples_count_only_when_the_push_is_answered(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        world.cover(1, 1, (1, 0, 5))
        assert (world.row["seen"], world.row["examples_under_way"]) == (0, 5)
        world.push(1, 1)
        assert (world.row["seen"], world.row["examples_under_way"]) == (5, 0)

    def test_two_epochs_are_open_at_most(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        assert world.take(1, epochs=9).epoch == 0
        assert world.take(2, epochs=9).epoch == 1
        assert world.take(2, epochs=9, keeps=(2,)).task == 0
        world.step(1, 1, (1, 0, 5))
        assert world.take(2, epochs=9, keeps=(2,)).epoch == 2

    def test_a_data_set_may_begin_at_a_later_epoch(self) -> None:
        world = World()
        world.join(1)
        assert world.take(1, epochs=4, epoch=3).epoch == 3

    def test_the_rest_of_a_task_that_is_not_kept_is_handed_out_again(self) -> None:
        world = World()
        world.join(1, 2)
        world.take(1)
        world.step(1, 1, (1, 0, 2))
        world.take(1, 0)
        again = world.take(2)
        assert (again.start, again.stop) == (2, 5)
        assert world.row["returned"] == 3

    def test_a_request_that_is_repeated_returns_the_task_whose_answer_was_lost(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        again = world.take(1)
        assert (again.task, again.start) == (2, 0)

    def test_a_client_reads_for_the_worker_that_pushes(self) -> None:
        world = World()
        world.join(1)
        world.inline.join(2, "observer")
        task = world.take(2, holder="client-1")
        world.inline.leave(2)
        assert world.step(1, 1, (task.task, 0, 5))


class TestPushes:
    def test_what_is_ignored_returns_to_the_task(self) -> None:
        world = World("rennala")
        world.join(1)
        world.take(1, keeps=(1,))
        world.step(1, 1, (1, 0, 1))
        seen = world.row["seen"]
        stale = Push(50, 2, False, -1, (Part(0, 8, "raw", 8, 0),))
        while True:  # until the batch is full, and gradients of the old version are stale
            world.cover(1, stale.seq, (1, seen, seen + 1))
            answer = world.inline.receive(1, stale, GOOD)
            assert isinstance(answer, Ack)
            if not answer.used:
                break
            seen += 1
            stale = Push(50, stale.seq + 1, False, -1, stale.parts)
        assert world.row["seen"] == seen
        assert world.row["seen"] + world.row["examples_under_way"] == 5

    def test_what_is_refused_may_be_covered_again(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        world.cover(1, 1, (1, 0, 5))
        assert isinstance(world.push(1, 1, BAD), Error)
        assert world.row["seen"] == 0
        assert world.step(1, 2, (1, 0, 5))
        assert world.row["seen"] == 5

    @each_row(
        "ranges",
        [((9, 0, 5),), ((1, 0, 6),), ((1, 0, 2), (1, 1, 5)), ((1, 0, 5), (2, 5, 10)), ((1, 7, 9),)],
    )
    def test_a_push_of_examples_that_are_not_its_own_is_not_used(self, ranges: Any) -> None:
        world = World()
        world.join(1, 2)
        world.take(1)
        world.take(2)
        before = world.inline.version
        assert not world.step(1, 1, *ranges)
        assert (world.inline.version, world.row["seen"]) == (before, 0)
        assert world.step(1, 2, (1, 0, 5))

    def test_a_repeated_push_counts_once(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        world.cover(1, 1, (1, 0, 5))
        world.push(1, 1)
        world.inline.leave(1)
        world.inline.join(1, epoch=2)
        assert world.step(1, 1, (1, 0, 5))
        assert (world.row["seen"], world.inline.version) == (5, 1)

    def test_a_push_that_never_comes_gives_its_examples_back(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        world.cover(1, 1, (1, 0, 5))
        assert world.step(1, 2)
        assert world.row["seen"] == 0
        assert world.step(1, 3, (1, 0, 5))

    def test_a_cover_that_comes_again_with_other_examples_replaces_the_first(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        world.cover(1, 1, (1, 0, 2))
        world.cover(1, 1, (1, 0, 5))
        world.push(1, 1)
        assert world.row["seen"] == 5

    def test_examples_that_count_without_a_push(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        assert world.take(1, 0, seen=((1, 0, 5), (1, 0, 5), (7, 0, 1))).task == 0
        assert world.row["seen"] == 5

    def test_steady_exchanges_go_on_between_pushes_that_are_covered(self) -> None:
        world = World()
        world.join(1)
        world.take(1)
        assert world.step(1, 1, (1, 0, 5))
        assert isinstance(world.push(1, 2), Ack)

    def test_too_many_covers(self) -> None:
        world = World()
        world.join(1)
        for seq in range(1, MOST_COVERS + 2):
            world.cover(1, seq)
        assert world.inline.dropped == [1]


class TestWorkersThatGo:
    def test_leaving_returns_the_tasks_at_once(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        assert world.take(2, wait=True) is None
        world.inline.receive(1, Leave(9))
        assert world.last(2).stop == 5

    def test_a_worker_without_a_connection_has_time_to_come_back(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        world.inline.leave(1)
        assert world.take(2, wait=True) is None
        world.inline.wait(GRACE / 2)
        world.inline.join(1, epoch=2)
        world.inline.wait(HOLD - GRACE / 2)
        assert world.last(2) == GivenTask(2, 0, 0, 0, 0, False)
        assert world.step(1, 1, (1, 0, 5))

    def test_after_that_its_push_is_not_used(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        world.cover(1, 1, (1, 0, 3))
        world.inline.leave(1)
        assert world.take(2, wait=True) is None
        world.inline.wait(GRACE)
        task = world.last(2)
        assert (task.start, task.stop) == (0, 5)
        world.inline.join(1, epoch=2)
        assert not world.step(1, 1, (1, 0, 3))
        assert world.last(1).why == "its examples count with a push of another worker"
        assert world.step(2, 1, (task.task, 0, 5))

    def test_a_push_that_is_queued_when_its_worker_dies_counts(self) -> None:
        world = World(examples=5)
        world.inline.hold = True
        world.join(1, 2)
        world.take(1)
        world.cover(1, 1, (1, 0, 3))
        world.push(1, 1)
        world.inline.receive(1, Leave(9))
        task = world.take(2)
        assert (task.start, task.stop) == (3, 5)
        world.inline.run_kernel()
        assert world.row["seen"] == 3

    def test_a_worker_that_is_late(self) -> None:
        world = World(examples=5, worker_deadline=100.0)
        world.join(1, 2)
        world.take(1)
        world.inline.wait(60)
        world.step(1, 1, (1, 0, 1))
        world.inline.wait(60)
        assert world.take(2).task == 0
        world.inline.wait(40)
        assert (world.take(2).start, world.step(1, 2, (1, 1, 2))) == (1, False)

    def test_waiting_ends_when_all_is_seen(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        assert world.take(2, wait=True) is None
        world.step(1, 1, (1, 0, 5))
        assert world.last(2).over

    def test_waiting_ends_after_a_while(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        assert world.take(2, wait=True) is None
        world.inline.wait(HOLD)
        assert world.last(2).task == 0
        assert not world.last(2).over

    def test_a_barrier_does_not_wait_for_a_worker_that_waits(self) -> None:
        world = World("hardsync", examples=10, workers=2)
        world.join(1, 2)
        world.take(1, 10)
        assert world.take(2, wait=True) is None
        world.cover(1, 1, (1, 0, 10))
        assert isinstance(world.push(1, 1), Ack)
        assert world.last(2).over

    def test_a_server_that_is_started_again_waits_for_its_workers(self) -> None:
        world = World(examples=5)
        world.join(1, 2)
        world.take(1)
        world.take(2, wait=True)
        world.inline.post(Stopping(world.inline.now, kept=True))
        world.inline.post(Resumed(world.inline.now, 2))
        world.inline.join(1, epoch=2)
        assert world.step(1, 1, (1, 0, 5))
        world.inline.join(2, epoch=2)
        assert world.take(2).over


class TestRefusals:
    @each_row(
        ("changes", "words"),
        [
            ({"examples": 21}, "has examples=20, and this worker says examples=21"),
            ({"block": 2}, "block=1"),
            ({"seed": 2}, "seed=0"),
            ({"name": ""}, "1 to 256 characters"),
            ({"name": "x" * 257}, "1 to 256 characters"),
            ({"holder": "strange"}, "must be a client of this server"),
        ],
    )
    def test_requests_that_do_not_fit(self, changes: dict[str, Any], words: str) -> None:
        world = World()
        world.join(1)
        world.take(1)
        refused = world.take(1, **changes)
        assert isinstance(refused, Error)
        assert words in refused.text

    def test_an_observer_has_no_task(self) -> None:
        world = World()
        world.inline.join(1, "observer")
        assert "observer" in world.take(1).text

    def test_before_there_is_a_model(self) -> None:
        world = World()
        world.inline = Inline("asgd", backend="numpy")
        world.join(1)
        assert world.take(1).code == "not-ready"
        world.cover(1, 1, (1, 0, 1))

    def test_bounds(self) -> None:
        world = World(examples=300)
        world.join(1)
        keeps = tuple(range(1, MOST_HELD + 1))
        answers = [world.take(1, 1, keeps=keeps) for _ in range(MOST_HELD + 1)]
        assert isinstance(answers[-1], Error)
        assert world.row["examples_to_do"] == 300 - MOST_HELD
        for number in range(1, MOST_SETS):
            assert isinstance(world.take(1, 0, name=f"d{number}"), GivenTask)
        assert "64 data sets" in world.take(1, 0, name="another").text


class _Trial:
    """Random workers over random events; the model of what must come of them is a list of sets."""

    EXAMPLES, EPOCHS = 60, 3

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World("asgd", self.EXAMPLES)
        self.used: dict[int, list[int]] = {epoch: [] for epoch in range(self.EPOCHS)}
        self.tasks: dict[int, list[GivenTask]] = {}
        self.at: dict[int, dict[int, int]] = {}
        self.seqs: dict[int, int] = {}
        self.peers = 0
        self.over = False

    def run(self) -> None:
        for act in range(5_000):
            if self.over:
                break
            self.act()
            if act % 100 == 50:
                self.again()
        assert self.over, "it came to an end"
        for epoch in range(self.EPOCHS):
            assert sorted(self.used[epoch]) == list(range(self.EXAMPLES))

    def act(self) -> None:
        rng, world = self.rng, self.world
        if len(self.tasks) < 3:
            self.peers += 1
            world.join(self.peers)
            self.tasks[self.peers], self.at[self.peers] = [], {}
            self.seqs[self.peers] = 0
        peer = rng.choice(list(self.tasks))
        draw = rng.random()
        if draw < 0.05:
            world.inline.leave(peer)
            del self.tasks[peer]
        elif draw < 0.08:
            world.inline.receive(peer, Leave(1))
            del self.tasks[peer]
        elif draw < 0.1:
            world.inline.wait(rng.choice([1.0, GRACE, 300.0]))
        elif self.tasks[peer] and draw < 0.8:
            self.step(peer)
        else:
            keeps = tuple(task.task for task in self.tasks[peer] if rng.random() < 0.9)
            self.tasks[peer] = [task for task in self.tasks[peer] if task.task in keeps]
            answer = world.take(peer, rng.randrange(1, 20), self.EPOCHS, keeps=keeps)
            self.over = answer.over
            if answer.task:
                self.tasks[peer].append(answer)
                self.at[peer][answer.task] = answer.start

    def step(self, peer: int) -> None:
        """Push a part of a task, well or badly; it counts if it is used."""
        rng, task = self.rng, self.rng.choice(self.tasks[peer])
        start = self.at[peer][task.task]
        stop = min(task.stop, start + rng.randrange(1, 6))
        self.seqs[peer] += rng.choice([1, 1, 1, 2])
        seq = self.seqs[peer]
        self.world.cover(peer, seq, (task.task, start, stop))
        if rng.random() < 0.05:
            return  # the push never comes
        answer = self.world.push(peer, seq, BAD if rng.random() < 0.1 else GOOD)
        if isinstance(answer, Ack) and answer.used:
            self.used[task.epoch] += range(start, stop)
            self.at[peer][task.task] = stop
        if self.at[peer][task.task] == task.stop:
            self.tasks[peer].remove(task)

    def again(self) -> None:
        """Go on with an engine that was restored from a capture of this one."""
        inline = self.world.inline
        found = capture(inline.engine)
        found.copy()
        state = unpack(pack(found.owners), "owners")
        fresh = Engine(inline.engine.algorithm, Options(backend="numpy"))
        kept = type("Kept", (), {"settings": found.settings, "owners": state})()
        restore(fresh, kept, found.array)
        found.release()
        assert fresh.report()["data_sets"] == inline.engine.report()["data_sets"]
        inline.engine = fresh


@pytest.mark.parametrize("seed", range(8))
def test_each_example_is_used_once_an_epoch_whatever_happens(seed: int) -> None:
    _Trial(seed).run()


def test_the_report_of_a_server_without_data_sets() -> None:
    world = World()
    world.join(1)
    world.inline.receive(1, Stats(1))
    assert not world.last(1).report["data_sets"]
