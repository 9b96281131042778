"""A live run, recorded, replays to the same bits; damage is said, not guessed over."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.algorithms.asgd import ASGD
from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import replay_all
from aiops.durable.run_record import Replayed, replay
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.engine.statistics import decided
from aiops.errors import BadPush, DamagedState, UsageError
from aiops.model.layout import Array
from aiops.state.directory import journal_name
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import RowKind
from tests.proxy import Proxy
from tests.recording import Recording, replayed, version
from tests.support import ServerThread, server_process

WORKERS = 3
STEPS = 12

START: Mapping[str, Array] = {
    "wide": np.linspace(-1, 1, 96).reshape(8, 12).astype(np.float32),
    "exact": np.linspace(-2, 2, 7),
    "narrow": np.linspace(0, 1, 5).astype(np.float16),
}

RUNS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "asgd": ("asgd", {}),
    "sasgd": ("sasgd", {"modulate": "exponential"}),
    "fasgd": ("fasgd", {"gamma": 0.9}),
    "softsync": ("softsync", {"n": 2}),
    "hardsync-wait": ("hardsync", {"admission": "wait"}),
    "hardsync-reject": ("hardsync", {"admission": "reject"}),
}

BACKENDS = ("numba", "numpy")


@dataclass(frozen=True)
class Ended:
    """What a run came to: the live one, or a replay."""

    version: int
    digest: str
    report: Mapping[str, Any]

    @classmethod
    def of(cls, engine: Any) -> Ended:
        digest = hashlib.sha256(engine.store.current.arena.data.tobytes()).hexdigest()
        return cls(engine.version, digest, decided(engine.report()))


def gradients(params: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """A pull towards zero, and noise: depends on the parameters, as real ones do."""
    return {
        name: (0.1 * array + 0.01 * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in params.items()
    }


def work(url: str, index: int) -> None:
    """Train; the last worker leaves early, and everybody makes a mistake now and then."""
    rng = np.random.default_rng(index)
    with aiops.Worker(url, START, name=f"worker-{index}") as worker:
        for step in range(STEPS if index < WORKERS - 1 else STEPS // 2):
            if step == index + 1:
                bad = gradients(worker.params, rng)
                bad["wide"][index] = np.nan
                with pytest.raises(BadPush):
                    worker.step(lambda _params, bad=bad: bad)
            if step == index + 2:
                worker.step(lambda params: {"exact": gradients(params, rng)["exact"]})
            worker.step(lambda params: gradients(params, rng))


def recorded(path: Path, run: str, **settings: Any) -> Ended:
    """Have real workers train, over real sockets, and return what became of it at the end."""
    policy, chosen = RUNS[run]
    with ServerThread(
        policy=policy, set=chosen, workers=WORKERS, record=path, **settings
    ) as server:
        engine = server.call(lambda running: running.engine)
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda index: work(server.url, index), range(WORKERS)))
    return Ended.of(engine)


class TestLiveRun:
    @pytest.mark.slow
    @pytest.mark.parametrize("run", RUNS)
    def test_replays_to_the_same_bits_with_either_backend(self, run: str, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        live = recorded(path, run)
        assert live.version > 0
        assert live.report["refused"]["bad-push"] == WORKERS
        for backend in BACKENDS:
            again = replayed(path, backend)
            assert again.complete
            assert Ended.of(again.engine) == live
            assert again.engine.store is not None
            assert again.engine.store.backend == backend

    def test_recorded_with_numpy_replays_with_numba(self, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        live = recorded(path, "fasgd", kernels="numpy")
        assert Ended.of(replayed(path, "numba").engine) == live

    def test_with_a_model_from_a_file(self, tmp_path: Path) -> None:
        model, path = tmp_path / "model.safetensors", tmp_path / "run.journal"
        first = recorded(tmp_path / "first.journal", "asgd", save=model)
        live = recorded(path, "asgd", init=model)
        assert live.digest != first.digest
        assert Ended.of(replayed(path).engine) == live

    def test_with_connections_cut_in_mid_push(self, tmp_path: Path) -> None:
        path, rng = tmp_path / "run.journal", np.random.default_rng(0)
        with ServerThread(policy="fasgd", record=path) as server, Proxy(server.url) as proxy:
            with aiops.Worker(proxy.url, START) as worker:
                for cut in (100, 500, 900):
                    fault = proxy.cut("up", cut)
                    worker.step(gradients(worker.params, rng))
                    worker.step(gradients(worker.params, rng))
                    fault.wait()
                assert worker.version == 6
            assert proxy.connections == 4
            engine = server.call(lambda running: running.engine)
        assert Ended.of(replayed(path).engine) == Ended.of(engine)

    @pytest.mark.slow
    def test_a_server_killed_outright_leaves_a_record_up_to_then(self, tmp_path: Path) -> None:
        path, rng = tmp_path / "run.journal", np.random.default_rng(0)
        big = {"w": np.zeros(1 << 16, np.float32)}
        with (
            server_process("--policy", "asgd", "--record", str(path)) as process,
            aiops.Worker(process.url, big) as worker,
        ):
            for _ in range(8):
                worker.step(gradients(worker.params, rng))
            process.signal(signal.SIGKILL)
            process.popen.wait()
        again = replayed(path)
        assert not again.complete
        assert again.engine.store is not None
        assert again.engine.store.version == 8, "all that it had acknowledged"


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Sequence[JournalFrame]:
    """The rows of a short run, of every kind that a record has."""
    path = tmp_path_factory.mktemp("journal") / "run"
    recorded(path, "fasgd", kernels="numpy")
    with StateFolder(path).segment(1) as scan:
        return [replace(frame, payload=memoryview(bytes(frame.payload))) for frame in scan]


def again(frames: Sequence[JournalFrame]) -> Replayed:
    return replay(frames, "numpy")


def with_another_gradient(frames: Sequence[JournalFrame]) -> list[JournalFrame]:
    """Change the last gradient: the exponent of its first number, which is a float64."""
    changed = [*frames]
    at = max(i for i, frame in enumerate(frames) if frame.kind in PUSHES and len(frame.payload))
    payload = bytearray(frames[at].payload)
    payload[7] ^= 0x01
    changed[at] = replace(frames[at], payload=memoryview(payload))
    return changed


PUSHES = (RowKind.RECEIVED, RowKind.STEADY)


class TestCutShort:
    def test_replays_up_to_the_cut(self, frames: Sequence[JournalFrame]) -> None:
        whole = again(frames)
        assert whole.complete
        seen = []
        for end in range(1, len(frames)):
            cut = again(frames[:end])
            assert not cut.complete
            seen.append((cut.rows, version(cut)))
        assert seen == sorted(seen)
        assert seen[0] == (0, 0)
        assert seen[-1] == (whole.rows - 1, version(whole))
        assert {reached for _rows, reached in seen} == set(range(version(whole) + 1))

    def test_a_cut_within_a_row_is_a_cut_before_it(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        recorded(path, "asgd", kernels="numpy")
        segment = path / journal_name(1)
        whole = segment.read_bytes()
        with StateFolder(path).segment(1) as scan:
            ends = [(frame.at, frame.number) for frame in scan]
        for at, number in ends[1::5]:
            segment.write_bytes(whole[: at + 40] + bytes(len(whole) - at - 40))
            cut = replayed(path)
            assert (cut.last, cut.complete) == (number - 1, False)


class TestDamaged:
    def test_without_a_beginning(self, frames: Sequence[JournalFrame]) -> None:
        for rows in ([], frames[1:]):
            with pytest.raises(UsageError, match="its first row is missing"):
                again(rows)

    def test_any_byte_of_a_record_that_has_ended(self, tmp_path: Path) -> None:
        """Its last row says that all before it were on the disk."""
        path = tmp_path / "run"
        recorded(path, "fasgd", kernels="numpy")
        with StateFolder(path).segment(1) as scan:
            *rows, last = [(frame.at, frame.number, frame.end - frame.at) for frame in scan]
        segment, rng = path / journal_name(1), np.random.default_rng(0)
        whole = segment.read_bytes()
        for at, number, _nbytes in [rows[i] for i in rng.integers(1, len(rows), 8)]:
            changed = bytearray(whole)
            changed[at + int(rng.integers(48))] ^= 1 << int(rng.integers(8))
            segment.write_bytes(changed)
            ended, damage = replay_all(StateFolder(path), "numpy")
            assert damage is not None
            assert f"is damaged at row {number:,}" in str(damage)
            assert (ended.last, ended.complete) == (number - 1, False)
        segment.write_bytes(whole[: last[0]] + bytes(len(whole) - last[0]))
        assert not replayed(path).complete

    def test_another_gradient_than_the_recorded_one(self, frames: Sequence[JournalFrame]) -> None:
        with pytest.raises(DamagedState, match="gives other numbers"):
            again(with_another_gradient(frames))

    def test_a_rule_without_a_statistic_is_checked_at_the_end(self) -> None:
        live = Recording("asgd", Engine(ASGD(lr=0.5), Options()))
        live.end(0.0)
        assert live.replay().complete
        _number, *rest = live.frames
        other = replace(rest[-1], row=pack(["00" * 32]))
        with pytest.raises(DamagedState, match="not those that the recorded run ended with"):
            again([live.frames[0], other])


class TestRecording:
    def test_relaxed_reads_are_refused(self) -> None:
        with pytest.raises(UsageError, match="relaxed reads cannot be recorded"):
            Recording("asgd", Engine(ASGD(), Options(relaxed=True)))

    async def test_and_the_server_does_not_start(self, tmp_path: Path) -> None:
        settings = {"record": tmp_path / "run.journal", "consistency": "relaxed", "port": 0}
        with pytest.raises(UsageError, match="relaxed reads cannot be recorded"):
            async with aiops.serve(**settings):
                pytest.fail("it started")

    async def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--record"):
            async with aiops.serve(record=tmp_path / "none" / "run.journal", port=0):
                pytest.fail("it started")

    def test_the_policy_is_found_again_by_the_name_it_was_given(self) -> None:
        live = Recording("aiops.algorithms.asgd:ASGD", Engine(ASGD(lr=0.5), Options()))
        ended = live.replay()
        assert ended.engine.algorithm == ASGD(lr=0.5)
        assert (ended.rows, ended.complete) == (0, False)
