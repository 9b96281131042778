"""A simulation that is stopped, and goes on elsewhere, comes to the same."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.codecs import Encoder
from aiops.errors import ConflictError, DamagedState, UsageError
from aiops.lab.workloads import PerceptronTask
from aiops.serving.state.snapshot_reader import opened_snapshot
from aiops.sim.turns import checkpoint
from aiops.sim.turns.client_selection import RoundRobin, Softmax
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from aiops.state.blocks import FORMAT
from aiops.state.snapshot_file import SnapshotPlan
from tests.rows import each_row
from tests.sim.turns.cases import FEWER, POLICIES, TASK, of_case, random_pieces, simulation
from tests.sim.turns.lines import ByteLine, in_pieces
from tests.sim.turns.wide_task import WideTask


def longer(case: Simulation, iterations: int) -> Simulation:
    return dataclasses.replace(case, iterations=iterations)


IGNORED = ("ringmaster-2", "bare")
"""Some of its gradients are ignored, and their acknowledgements are longer: they say why."""


@pytest.mark.parametrize("case", dict.fromkeys([*FEWER, IGNORED]), ids="-".join)
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


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("bare", {"line": ByteLine}),
        ("gate", {"jobs": 3}),
        ("relative", {"line": ByteLine}),
        ("codecs", {"line": in_pieces(random_pieces(2))}),
        ("reapply", {"line": ByteLine}),
        *(("both", how) for how in ({"jobs": 3}, {"line": in_pieces(random_pieces(2))})),
    ],
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
            run = Run.load(tmp_path / "run.ckpt", TASK, **how)
        outcome = run.execute()
        run.close()
    assert outcome.digest == expected.digest


FACTORS: Mapping[str, Sequence[Any]] = {
    "gate": (
        "",
        "",
        "bfasgd:c_push=0.05,c_fetch=0.1",
        "bfasgd:c_push=4,c_fetch=2,relative=true,by=tensor,share=0.3,longest=5",
        "constant:p_push=0.5,p_fetch=0.5,by=tensor,stamp=newest",
        "constant:p_push=0.3,p_fetch=0.5,combine=mean,stamp=mean,local=0.05",
        "periodic:k_push=2,k_fetch=2,skipped=reapply",
        "constant:p_push=0.5,p_fetch=0.2,skipped=discard",
    ),
    "push_codec": ((), ("topk:0.1",), ("int8",), ("onebit",), ("bf16",), ("lowrank:rank=2",)),
    "fetch_codec": ((), ("int8",), ("lowrank:rank=2",), ("topk:0.05",)),
    "waits": (True, False),
    "selection": (
        "uniform",
        "round-robin",
        "softmax:add=-1",
        "softmax:times=0.5,start=3",
        "paced:times=3",
    ),
    "order": ("random", "sequential"),
    "clients": (2, 3, 5),
}


def drawn(name: str) -> Simulation:
    """Return a simulation of a policy, of values of the factors that can be together."""
    rng = random.Random(name)
    policy, settings = POLICIES[name]
    texts = tuple(f"{key}={value}" for key, value in settings.items())
    while True:
        values = {factor: rng.choice(choices) for factor, choices in FACTORS.items()}
        case = simulation(policy, set=texts, seed=rng.randrange(99), **values)
        with contextlib.suppress(ConflictError):
            case.engine()
            return case


def kept(run: Run, path: Path) -> bytes:
    """All that is kept of a run, but for the time that it took."""
    run.seconds = 0.0
    run.save(path)
    return path.read_bytes()


@pytest.mark.parametrize("name", POLICIES)
def test_all_that_is_kept_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """An interrupted run has the same state at the end: engine, clients, streams, accounts."""
    task, path, rng = WideTask(), tmp_path / "run.ckpt", random.Random(name)
    case = drawn(name)
    with Run(case, task) as run:
        run.dispatcher.run(28)
        expected = kept(run, path)
    with Run(case, task) as run:
        run.dispatcher.run(rng.randrange(0, 22))
        run.save(path)
    with Run.load(path, task, case) as run:
        run.dispatcher.run(28 - run.iteration)
        assert kept(run, path) == expected, case.key


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

    def rule() -> Softmax:
        return Softmax(4, 1, lambda priority: priority - 0.5)

    for case in (
        simulation("hardsync", waits=False),
        simulation("ssp", set=("s=0",)),
        simulation("hardsync", set=("admission=reject",)),
    ):
        digests = set()
        for stop in (0, 17, 30):
            with Run(case, TASK, rule=rule()) as run:
                run.dispatcher.run(stop)
                run.save(tmp_path / "run.ckpt")
            with Run.load(tmp_path / "run.ckpt", TASK, case, rule=rule()) as run:
                digests.add(run.execute().digest)
        assert len(digests) == 1


def test_memory_is_shared_as_it_was(tmp_path: Path) -> None:
    """At a barrier all clients read one version, and it is the server's."""
    with Run(simulation("hardsync"), TASK) as run:
        run.dispatcher.run(40)
        run.save(tmp_path / "run.ckpt")
    assert (tmp_path / "run.ckpt").stat().st_size < 12 * 610 * 4 + 96_000
    with Run.load(tmp_path / "run.ckpt", task=TASK) as run:
        store = run.dispatcher.store
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
        with Run(simulation("hardsync", push_codec=("int8",), waits=False), TASK) as run:
            run.dispatcher.run(6)
            run.save(tmp_path / "run.ckpt")
        return tmp_path / "run.ckpt"

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"lr": 0.01}, "is of another simulation: its lr is None, not 0.01"),
            ({"seed": 8}, "its seed is 0, not 8"),
            ({"set": ("gamma=0.9",)}, r"its set is \[\], not \['gamma=0.9'\]"),
            ({"policy": "asgd"}, "its policy is hardsync, not asgd"),
        ],
        ids=str,
    )
    def test_another_simulation(self, path: Path, change: dict[str, Any], match: str) -> None:
        same = simulation("hardsync", push_codec=("int8",), waits=False)
        with pytest.raises(UsageError, match=match):
            Run.load(path, TASK, dataclasses.replace(same, **change))

    def test_another_task(self, path: Path) -> None:
        with pytest.raises(UsageError, match="is of another task: its initial is"):
            Run.load(path, task=PerceptronTask("digits", 9))

    def test_another_rule(self, path: Path) -> None:
        with pytest.raises(UsageError, match=r"were selected by .*:Uniform, and .*:RoundRobin"):
            Run.load(path, TASK, rule=RoundRobin(4))

    def test_a_newer_format(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[8] = FORMAT + 1
        end = 16 + int.from_bytes(data[12:16], "little")
        data[end : end + 4] = zlib.crc32(data[:end]).to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(UsageError, match="and this release reads format 1: go on with"):
            Run.load(path, task=TASK)

    def test_another_release_is_told(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        rewrite(path, wrote={"aiops": "0.0.1", "numpy": np.__version__, "python": "2.7"})
        Run.load(path, TASK).close()
        assert "was written with aiops 0.0.1, python 2.7, and this is aiops" in caplog.text
        assert "what follows may differ" in caplog.text

    def test_other_code_of_ones_own_is_told(
        self, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Task(PerceptronTask):
            pass

        task, code = Task("digits", 8), "class Task: pass"
        monkeypatch.setattr(checkpoint.inspect, "getsource", lambda module: code)
        with Run(simulation("asgd"), task) as run:
            run.save(path)
        Run.load(path, task).close()
        assert "was written with" not in caplog.text
        code += "  # another"
        Run.load(path, task).close()
        assert f"was written with the code of {__name__} " in caplog.text

    @each_row(
        "found", [b"", b"hello", b"aiops simulation checkpoint\n{}\n", b"\x80\x05."], ids=repr
    )
    def test_something_else(self, tmp_path: Path, found: bytes) -> None:
        (tmp_path / "x").write_bytes(found)
        with pytest.raises(UsageError, match="x is no checkpoint of a simulation"):
            Run.load(tmp_path / "x", task=TASK)

    def test_the_snapshot_of_a_server(self, path: Path) -> None:
        rewrite(path, kind="server")
        with pytest.raises(UsageError, match="no checkpoint of a simulation, but the state of a"):
            Run.load(path, TASK)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot read the checkpoint .*No such file"):
            Run.load(tmp_path / "none", task=TASK)
        with pytest.raises(UsageError, match=r"cannot read the checkpoint .*Is a directory"):
            Run.load(tmp_path, task=TASK)

    def test_what_was_there_stays_when_it_cannot_be_written(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = path.read_bytes()

        def full(*arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwritev", full)
        with Run(simulation(), TASK) as run, pytest.raises(UsageError, match="No space left"):
            run.save(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "run.ckpt"
    coded = {"push_codec": ("topk:0.2",), "fetch_codec": ("int8",)}
    with Run(simulation("ssp", set=("s=0",), waits=False, **coded), TASK) as run:
        run.dispatcher.run(9)
        while not any(worker.strategy.under_way for worker in run.dispatcher.workers):
            run.dispatcher.turn()
        run.save(path)
    return path.read_bytes()


class TestDamage:
    """Whatever a file holds, it is refused with a sentence, or it is a simulation's."""

    def test_every_part_has_a_checksum(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "run.ckpt"
        places = {*range(8, len(whole), 977), *range(len(whole) - 30, len(whole), 3)}
        for place in sorted(places):
            data = bytearray(whole)
            data[place] ^= 4
            path.write_bytes(data)
            with pytest.raises(UsageError, match=r"is damaged|reads format"):
                Run.load(path, TASK)

    def test_cut(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "run.ckpt"
        for length in (8, 15, 1000, 4096, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(DamagedState):
                Run.load(path, TASK)

    @pytest.mark.parametrize("value", [None, -1, 1 << 70, "x", [], {}, [None], {"a": []}], ids=repr)
    def test_values_that_are_no_simulation_s(
        self, whole: bytes, tmp_path: Path, value: Any
    ) -> None:
        path = tmp_path / "run.ckpt"
        path.write_bytes(whole)
        with opened_snapshot(path) as file:
            owners = dict(file.header.owners)
        for name in owners:
            path.write_bytes(whole)
            rewrite(path, owners={**owners, name: value})
            with contextlib.suppress(UsageError):
                Run.load(path, TASK).close()
        for name in owners["clients"][0]:
            path.write_bytes(whole)
            clients = [{**client, name: value} for client in owners["clients"]]
            rewrite(path, owners={**owners, "clients": clients})
            with contextlib.suppress(UsageError):
                Run.load(path, TASK).close()

    def test_a_model_that_no_memory_holds(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "run.ckpt"
        path.write_bytes(whole)
        with opened_snapshot(path) as file:
            owners = dict(file.header.owners)
        rewrite(path, owners={**owners, "model": [[("w", "float32", (1 << 50,))], ()]})
        with pytest.raises(DamagedState, match="are of no such simulation"):
            Run.load(path, TASK)

    def test_nothing_in_it_is_executed(self) -> None:
        """No module of a checkpoint's way reads what can name a function."""
        for module in ("aiops.sim.turns", "aiops.state", "aiops.engine", "aiops.client"):
            folder = Path(str(importlib.import_module(module).__path__[0]))
            for file in folder.rglob("*.py"):
                assert not {"pickle", "marshal"} & imported_by(file), file


class TestKept:
    def test_a_rule_that_cannot_be(self, tmp_path: Path) -> None:
        with Run(simulation(), TASK, rule=(number for number in range(3))) as run:
            for keep in (run.check_kept, lambda: run.save(tmp_path / "run.ckpt")):
                with pytest.raises(UsageError, match=r"rule builtins:generator cannot be kept in"):
                    keep()
        assert not list(tmp_path.iterdir())

    def test_a_change_that_remembers(self) -> None:
        seen: list[float] = []

        def change(priority: float) -> float:
            seen.append(priority)
            return priority - len(seen)

        with (
            Run(simulation(), TASK, rule=Softmax(4, 0, change)) as run,
            pytest.raises(UsageError, match="give a function of the priority alone"),
        ):
            run.check_kept()

    def test_a_policy_that_cannot_be(self) -> None:
        with Run(simulation(), TASK) as run:
            run.engine.policy.file = open  # type: ignore[attr-defined]
            with pytest.raises(UsageError, match=r"keeps a builtin_function_or_method in \.file"):
                run.check_kept()

    def test_an_encoder_that_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def state(encoder: Encoder) -> dict[str, Any]:
            return {"phases": np.ones(3, np.complex64)}

        with Run(simulation(push_codec=("int8",)), TASK) as run:
            run.check_kept()
            monkeypatch.setattr(Encoder, "state", state)
            with pytest.raises(UsageError, match=r"phases' cannot be written: it is .*complex64"):
                run.check_kept()

    def test_a_recorded_rule_needs_its_file_no_more(self, tmp_path: Path) -> None:
        (tmp_path / "turns").write_text("0 1 2 3 3 2 1 0 " * 10)
        case = simulation(selection=f"recorded:{tmp_path / 'turns'}", iterations=30)
        with Run(case, TASK) as run:
            run.dispatcher.run(11)
            run.save(tmp_path / "run.ckpt")
            expected = run.execute().digest
        (tmp_path / "turns").unlink()
        with Run.load(tmp_path / "run.ckpt", TASK) as run:
            assert run.execute().digest == expected


def rewrite(path: Path, **changes: Any) -> None:
    """Change plain values of a checkpoint, with the right checksums."""
    with opened_snapshot(path) as file:
        header = dataclasses.replace(file.header, **changes)
        plan = SnapshotPlan(header, {name: file.array(name) for name in file.arrays})
    path.write_bytes(b"".join(part for _at, buffers in plan.pieces() for part in buffers))


def imported_by(file: Path) -> set[str]:
    """The modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_facts_tell_tasks_apart() -> None:
    assert checkpoint.facts_of(TASK) == checkpoint.facts_of(PerceptronTask("digits", 8))
    assert checkpoint.facts_of(TASK) != checkpoint.facts_of(PerceptronTask("digits", 9))
