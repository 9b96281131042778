"""The journal: a live run, recorded, replays to the same bits; damage is said, not guessed over."""

from __future__ import annotations

import hashlib
import io
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import aiops
from aiops.algorithms.asgd import ASGD
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.engine.journal import Journal, Replayed, replay
from aiops.engine.statistics import decided
from aiops.errors import BadPush, UsageError
from aiops.model.layout import Array
from tests.proxy import Proxy
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


def replayed(path: Path, backend: str = "auto") -> Replayed:
    with path.open("rb") as file:
        return replay(file, backend)


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
def journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The record of a short run, with everything in it that a record can hold."""
    path = tmp_path_factory.mktemp("journal") / "run.journal"
    recorded(path, "fasgd", kernels="numpy")
    return path.read_bytes()


def again(data: bytes) -> Replayed:
    return replay(io.BytesIO(data), "numpy")


def boundaries(data: bytes) -> Iterator[int]:
    """Yield where each object of the stream ends."""
    unpacker = msgpack.Unpacker(io.BytesIO(data), use_list=False)
    for _ in unpacker:
        yield unpacker.tell()


def with_another_gradient(data: bytes) -> bytes:
    """Change the last gradient: the exponent of its first number, which is a float64."""
    unpacker = msgpack.Unpacker(io.BytesIO(data), use_list=False)
    start = end = 0
    for item in unpacker:
        if isinstance(item, bytes):
            start = end + 5
        end = unpacker.tell()
    changed = bytearray(data)
    changed[start + 7] ^= 0x01
    return bytes(changed)


def version(ended: Replayed) -> int:
    return ended.engine.store.version if ended.engine.store else 0


class TestCutShort:
    def test_replays_up_to_the_cut(self, journal: bytes) -> None:
        whole = again(journal)
        assert whole.complete
        ends = list(boundaries(journal))
        seen = []
        for end in ends[:-1]:
            cut = again(journal[:end])
            assert not cut.complete
            seen.append((cut.events, version(cut)))
        assert seen == sorted(seen)
        assert seen[0] == (0, 0)
        assert seen[-1] == (whole.events, version(whole))
        assert {reached for _events, reached in seen} == set(range(version(whole) + 1))

    def test_a_cut_within_an_object_is_a_cut_before_it(self, journal: bytes) -> None:
        ends = list(boundaries(journal))
        for before, after in zip(ends[:-1:7], ends[1::7], strict=False):
            reference = again(journal[:before])
            for end in {before + 1, (before + after) // 2, after - 1}:
                cut = again(journal[:end])
                assert (cut.events, version(cut)) == (reference.events, version(reference))
                assert not cut.complete


class TestDamaged:
    @pytest.mark.parametrize(
        "data",
        [b"", b"\x00", b"no journal\n", msgpack.packb({"aiops-journal": 99}), msgpack.packb([1])],
        ids=["empty", "a number", "text", "another version", "a list"],
    )
    def test_what_is_no_journal_is_refused(self, data: bytes) -> None:
        with pytest.raises(UsageError, match="not a journal"):
            again(data)

    def test_bytes_that_are_no_messagepack(self, journal: bytes) -> None:
        end = list(boundaries(journal))[9]
        with pytest.raises(UsageError, match="damaged"):
            again(journal[:end] + b"\xc1" + journal[end + 1 :])

    def test_a_hole(self, journal: bytes) -> None:
        ends = list(boundaries(journal))
        for first in range(2, len(ends) - 3, 5):
            try:
                ended = again(journal[: ends[first]] + journal[ends[first + 2] + 3 :])
            except UsageError:
                continue
            assert not ended.complete  # what follows the hole looked like one long object, cut

    def test_another_gradient_than_the_recorded_one(self, journal: bytes) -> None:
        with pytest.raises(UsageError, match="gives other numbers"):
            again(with_another_gradient(journal))

    def test_a_rule_without_a_statistic_is_checked_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        recorded(path, "asgd", kernels="numpy")
        with pytest.raises(UsageError, match="not those that the recorded run ended with"):
            again(with_another_gradient(path.read_bytes()))

    def test_whatever_bytes_change_the_answer_is_an_error_of_ours(self, journal: bytes) -> None:
        rng = np.random.default_rng(0)
        refused = 0
        for place in rng.integers(0, len(journal), 300):
            changed = bytearray(journal)
            changed[place] ^= 1 << int(rng.integers(8))
            try:
                again(bytes(changed))
            except aiops.errors.AiopsError:
                refused += 1
        assert refused > 100


class TestRecording:
    def test_relaxed_reads_are_refused(self, tmp_path: Path) -> None:
        options = Options(relaxed=True)
        with pytest.raises(UsageError, match="relaxed reads cannot be recorded"):
            Journal(io.BytesIO(), "asgd", Engine(ASGD(), options))

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
        file = io.BytesIO()
        Journal(file, "aiops.algorithms.asgd:ASGD", Engine(ASGD(lr=0.5)))
        ended = again(file.getvalue())
        assert ended.engine.algorithm == ASGD(lr=0.5)
        assert (ended.events, ended.complete) == (0, False)
