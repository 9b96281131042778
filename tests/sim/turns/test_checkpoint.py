"""A simulation that is stopped, and goes on elsewhere, comes to the same."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import PerceptronTask
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.sim.turns import checkpoint, graph_pickle
from aiops.sim.turns.client_selection import Softmax
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from tests.sim.turns.cases import CASES, TASK, of_case, random_pieces, simulation
from tests.sim.turns.lines import ByteLine, in_pieces


def longer(case: Simulation, iterations: int) -> Simulation:
    return dataclasses.replace(case, iterations=iterations)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_goes_on_to_the_same_result(case: tuple[str, str], tmp_path: Path) -> None:
    whole = of_case(*case, iterations=46)
    with Run(whole, TASK) as run:
        expected = run.execute()
    with Run(longer(whole, 23), TASK, jobs=2) as run:
        run.execute()
        run.save(tmp_path / "run.ckpt")
    with Run.load(tmp_path / "run.ckpt", TASK, whole) as run:
        assert run.iteration == 23
        again = run.execute()
    assert again.digest == expected.digest
    assert again.staleness == expected.staleness
    assert [s for s in again.curve if s.iteration != 12] == expected.curve


@pytest.mark.parametrize("way", ["bare", "gate", "codecs", "both", "reapply"])
@pytest.mark.parametrize(
    "how", [{"jobs": 3}, {"line": ByteLine}, {"line": in_pieces(random_pieces(2))}]
)
def test_however_messages_move(way: str, how: dict[str, Any], tmp_path: Path) -> None:
    case = of_case("fasgd", way)
    with Run(case, TASK) as run:
        expected = run.execute()
    with Run(case, TASK, **how) as run:
        for iterations in (1, 7, 40):  # three times: what was read is written again
            run.dispatcher.run(iterations - run.iteration)
            run.save(tmp_path / "run.ckpt")
            run.close()
            run = Run.load(tmp_path / "run.ckpt", task=TASK, jobs=how.get("jobs", 1))
        outcome = run.execute()
        run.close()
    assert outcome.digest == expected.digest


def test_in_another_process(tmp_path: Path) -> None:
    chosen = [("fasgd", "both"), ("hardsync", "bare"), ("diloco-streaming", "codecs")]
    expected = []
    for number, case in enumerate(chosen):
        with Run(of_case(*case), TASK) as run:
            run.dispatcher.run(20)
            run.save(tmp_path / f"{number}.ckpt")
            expected.append(run.execute().digest)
    found = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, *(str(tmp_path / f"{n}.ckpt") for n in range(3))],
        env={**os.environ, "PYTHONHASHSEED": "99", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.split() == expected


_ELSEWHERE = """
import sys
from pathlib import Path
from aiops.sim.turns.run import Run
from tests.sim.turns.cases import TASK
for path in sys.argv[1:]:
    with Run.load(Path(path), TASK) as run:
        print(run.execute().digest)
"""


def test_who_holds_back_and_who_waits_go_on_too(tmp_path: Path) -> None:
    """Answers that are held, gradients that are ahead, and a rule with any function."""
    for case in (
        simulation("hardsync", waits=False),
        simulation("ssp", set=("s=0",)),
        simulation("hardsync", set=("admission=reject",)),
    ):
        digests = set()
        for stop in (0, 17, 30):
            with Run(case, TASK) as run:
                run.dispatcher.selection = Softmax(4, 1, lambda priority: priority - 0.5)
                run.dispatcher.run(stop)
                run.save(tmp_path / "run.ckpt")
            with Run.load(tmp_path / "run.ckpt", TASK, case) as run:
                digests.add(run.execute().digest)
        assert len(digests) == 1


def test_memory_is_shared_as_it_was(tmp_path: Path) -> None:
    """At a barrier all clients read one version, and it is the server's."""
    with Run(simulation("hardsync"), TASK) as run:
        run.dispatcher.run(40)
        run.save(tmp_path / "run.ckpt")
    assert (tmp_path / "run.ckpt").stat().st_size < 12 * 610 * 4 + 96_000
    with Run.load(tmp_path / "run.ckpt", task=TASK) as run:
        store = run.engine.store
        assert store is not None
        assert store.alive == 1
        assert {id(worker.params.arena) for worker in run.dispatcher.workers} == {
            id(store.current.arena)
        }
        assert store.layout.all is run.dispatcher.workers[0].params.arena.layout.all
        run.dispatcher.run(4)
        assert store.alive == 1
        assert store.current.arena.data.ctypes.data % 64 == 0


class TestStop:
    def test_takes_effect_between_turns(self) -> None:
        with Run(simulation(iterations=5000), TASK) as run:
            turn, taken = run.dispatcher.turn, []

            def stop_at_ten() -> int:
                taken.append(turn())
                if len(taken) == 10:
                    run.stop()
                return taken[-1]

            run.dispatcher.turn = stop_at_ten  # type: ignore[method-assign]
            outcome = run.execute()
            assert outcome.curve[-1].iteration == 10
            assert not outcome.complete
            assert [sample.iteration for sample in run.curve] == [0]

    def test_a_run_that_was_stopped_has_the_curve_of_one_that_was_not(self, tmp_path: Path) -> None:
        with Run(simulation(samples=6), TASK) as run:
            expected = run.execute()
        with Run(simulation(samples=6), TASK) as run:
            run.dispatcher.turn = _then(run.dispatcher.turn, run.stop)  # type: ignore[method-assign]
            run.execute()
            del run.dispatcher.turn
            run.save(tmp_path / "run.ckpt")
        with Run.load(tmp_path / "run.ckpt", task=TASK) as run:
            assert run.iteration == 1
            outcome = run.execute()
        assert outcome.curve == expected.curve
        assert outcome.digest == expected.digest


def _then(first: Callable[[], int], second: Callable[[], None]) -> Callable[[], int]:
    def both() -> int:
        found = first()
        second()
        return found

    return both


class TestRefused:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        with Run(simulation(), TASK) as run:
            run.dispatcher.run(5)
            run.save(tmp_path / "run.ckpt")
        return tmp_path / "run.ckpt"

    def header(self, path: Path, **changes: Any) -> None:
        """Change what a file says of itself."""
        magic, header, rest = path.read_bytes().split(b"\n", 2)
        changed = json.dumps({**json.loads(header), **changes}).encode()
        path.write_bytes(b"\n".join((magic, changed, rest)))

    @pytest.fixture(autouse=True)
    def _nothing_is_unpickled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*arguments: Any) -> None:
            raise AssertionError("it was unpickled")

        monkeypatch.setattr(graph_pickle, "read", never)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"lr": 0.01}, "is of another simulation: its lr is None, not 0.01"),
            ({"seed": 8}, "its seed is 0, not 8"),
            ({"set": ("gamma=0.9",)}, r"its set is \[\], not \['gamma=0.9'\]"),
            ({"policy": "asgd"}, "its policy is fasgd, not asgd"),
        ],
        ids=str,
    )
    def test_another_simulation(self, path: Path, change: dict[str, Any], match: str) -> None:
        with pytest.raises(UsageError, match=match):
            Run.load(path, TASK, dataclasses.replace(simulation(), **change))

    def test_another_task(self, path: Path) -> None:
        with pytest.raises(UsageError, match="is of another task: its initial is"):
            Run.load(path, task=PerceptronTask("digits", 9))

    def test_another_release(self, path: Path) -> None:
        self.header(path, aiops="0.0.1")
        with pytest.raises(UsageError, match=r"was written elsewhere: its aiops is 0.0.1, not"):
            Run.load(path, task=TASK)
        self.header(path, format=7)
        with pytest.raises(UsageError, match="has format 7, and this release reads 1"):
            Run.load(path, task=TASK)

    def test_cut(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UsageError, match="is not as long as its header states"):
            Run.load(path, task=TASK)

    @pytest.mark.parametrize(
        "found", [b"", b"hello", b"aiops simulation checkpoint\n{}\n", b"\x80\x05."], ids=repr
    )
    def test_something_else(self, tmp_path: Path, found: bytes) -> None:
        (tmp_path / "x").write_bytes(found)
        with pytest.raises(UsageError, match=r"is no checkpoint|is damaged"):
            Run.load(tmp_path / "x", task=TASK)

    def test_nonsense_in_its_header(self, path: Path) -> None:
        self.header(path, simulation={"policy": "fasgd", "colour": "red"})
        with pytest.raises(UsageError, match="does not describe a simulation: check batch_size"):
            Run.load(path, task=TASK)
        self.header(path, graph="long")
        with pytest.raises(UsageError, match="is damaged: its header lacks lengths"):
            Run.load(path, task=TASK)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot read the checkpoint .*No such file"):
            Run.load(tmp_path / "none", task=TASK)

    def test_what_cannot_be_kept(self, tmp_path: Path) -> None:
        with Run(simulation(), TASK) as run:
            run.dispatcher.selection = (number for number in range(3))
            with pytest.raises(UsageError, match=r"cannot be kept in a file: .*generator"):
                run.save(tmp_path / "run.ckpt")
        assert not list(tmp_path.iterdir())

    def test_what_was_there_stays_when_it_cannot_be_written(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = path.read_bytes()

        def full(array: Any) -> memoryview:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(graph_pickle, "contents", full)
        with Run(simulation(), TASK) as run, pytest.raises(UsageError, match="No space left"):
            run.save(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]


def kept(root: Any) -> Any:
    """Write a graph, and read it."""
    pickled, arrays = graph_pickle.write(root, {"me": TASK})
    data = b"".join(bytes(graph_pickle.contents(array)) for array in arrays)
    return graph_pickle.read(pickled, BytesIO(data), {"me": TASK})


class TestGraph:
    def test_views_show_what_they_showed(self) -> None:
        arena = Arena(Layout([("w", "float32", (3, 5)), ("h", "float16", (7,))]))
        arena.data[:] = np.arange(arena.layout.nbytes)
        again, view, turned = kept((arena, arena.views["w"][1], arena.views["w"].T))
        assert again.data.tobytes() == arena.data.tobytes()
        again.data[:] = 0
        assert not view.any()
        assert turned.shape == (5, 3)
        again.views["w"][2, 1] = 4
        assert turned[1, 2] == 4
        assert again.data.ctypes.data % 64 == arena.data.ctypes.data % 64

    def test_read_only_stays_so(self) -> None:
        arena = Arena(Layout([("w", "float32", (3, 5))]))
        shown = kept(arena.shown["w"])
        with pytest.raises(ValueError, match="read-only"):
            shown[...] = 1

    @pytest.mark.parametrize(
        "array",
        [
            np.empty((0, 4)),
            np.array(3.5),
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.arange(10)[::-2],
            np.frombuffer(b"four" * 3, "<i4"),
            np.array([True, False]),
        ],
        ids=lambda array: f"{array.dtype}{array.shape}",
    )
    def test_arrays_of_every_kind(self, array: Any) -> None:
        again = kept(array)
        np.testing.assert_array_equal(again, array)
        assert again.dtype == array.dtype
        assert again.strides == array.strides or not array.size

    def test_views_of_bytes(self) -> None:
        buffer = bytearray(range(20))
        whole, part, nothing = kept((buffer, memoryview(buffer)[5:9], memoryview(b"")))
        whole[6] = 99
        assert bytes(part) == bytes([5, 99, 7, 8])
        assert len(nothing) == 0
        data = np.arange(8, dtype=np.uint8)
        again, shown = kept((data, data.data[2:4]))
        again[3] = 0
        assert bytes(shown) == b"\x02\x00"

    def test_closures_hold_what_they_held(self) -> None:
        state = [1]
        holder: dict[str, Any] = {}

        def add(number: int, *, times: int = 2) -> int:
            state[0] += number * times
            return len(holder)

        holder["add"] = add  # it holds itself
        again, numbers = kept((add, state))
        assert again(5) == 1
        assert numbers == [11]
        assert state == [1]

    def test_references(self) -> None:
        class Thing:
            pass

        layout = Layout([("w", "float32", (3,))])
        arena = Arena(layout)
        again, reference, gone = kept((arena, weakref.ref(arena), weakref.ref(Thing())))
        assert reference() is again
        assert gone() is None

    def test_named_things_are_the_reader_s(self) -> None:
        assert kept({"task": TASK, "bound": TASK.validate})["task"] is TASK


def test_facts_tell_tasks_apart() -> None:
    assert checkpoint.facts_of(TASK) == checkpoint.facts_of(PerceptronTask("digits", 8))
    assert checkpoint.facts_of(TASK) != checkpoint.facts_of(PerceptronTask("digits", 9))
