"""The store: a reader sees exactly one version, whatever happens meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from aiops import kernels
from aiops.algorithms.base import sgd
from aiops.algorithms.fasgd import FASGD
from aiops.codecs.half import BF16
from aiops.errors import UsageError
from aiops.kernels.rule import Rule
from aiops.model.arena import aligned
from aiops.model.layout import Array, Cover, Layout, dtype_named
from aiops.model.parts import Part
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store, UpdateJob
from tests.rows import each_row


def store_of(arrays: dict[str, Array], rule: Rule | None = None, **options: object) -> Store:
    store = Store(Layout.of(arrays), rule or Rule(sgd), **options)  # type: ignore[arg-type]
    store.set(arrays)
    return store


def gradient_of(store: Store, arrays: dict[str, Array], base: int = 0) -> Gradient:
    layout = store.layout
    indices = sorted(layout.index[name] for name in arrays)
    starts, data = [], b""
    for index in indices:
        starts.append(len(data))
        data += arrays[layout.tensors[index].name].tobytes()
    buffer = aligned(len(data))
    buffer[:] = np.frombuffer(data, np.uint8)
    whole = len(indices) == len(layout.tensors)
    tensors = layout.all if whole else np.array(indices, np.int64)
    bases = np.full(len(indices), base, np.int64)
    return Gradient(buffer, Cover(tensors, np.array(starts, np.int64), whole, None, bases))


def update(store: Store, arrays: dict[str, Array], lr: float = 1.0) -> None:
    gradient = gradient_of(store, arrays)
    touched = gradient.cover.tensors
    job = UpdateJob(
        store, store.cost, gradient=gradient, steps=np.full(len(touched), lr), touched=touched
    )
    job.target = store.begin()
    sums = job.run()
    store.commit(job.target, touched, sums)


def ones(store: Store) -> dict[str, Array]:
    return {t.name: np.ones(t.shape, t.dtype) for t in store.layout.tensors}


class Reader:
    """A client that reads the current version at a pace, in KiB/s, until it is cut off."""

    def __init__(self, store: Store, pace: float, *, stuck: bool = False) -> None:
        self._pace, self._stuck, self.why = pace, stuck, ""
        lease = store.lease()
        [[self._view]] = lease.payloads()
        lease.release()
        lease.sender = self

    def pace(self) -> float:
        return 1024 * self._pace

    def dismiss(self, why: str) -> None:
        self.why = why
        if not self._stuck:
            self._view = memoryview(b"")

    def value(self) -> float:
        return float(np.frombuffer(self._view, np.float32)[0])


class TestVersions:
    def test_update_is_in_place_when_nobody_reads(self) -> None:
        store = store_of({"w": np.zeros(10, np.float32)})
        arena = store.current.arena
        update(store, ones(store))
        assert store.version == 1
        assert store.current.arena is arena
        np.testing.assert_array_equal(store.current.arena.views["w"], -1)

    def test_update_is_out_of_place_while_somebody_reads(self) -> None:
        store = store_of({"w": np.zeros(10, np.float32)})
        lease = store.lease()
        [[payload]] = lease.payloads()
        lease.release()
        for _ in range(5):
            update(store, ones(store))
        assert store.version == 5
        np.testing.assert_array_equal(np.frombuffer(payload, np.float32), 0)
        assert store.alive == 2
        del payload
        assert store.alive == 1

    def test_arenas_are_used_again(self) -> None:
        store = store_of({"w": np.zeros(10, np.float32)})
        seen = set()
        for _ in range(20):
            lease = store.lease()
            update(store, ones(store))
            lease.release()
            seen.add(id(store.current.arena))
        assert len(seen) <= 3
        np.testing.assert_array_equal(store.current.arena.views["w"], -20)

    def test_a_partial_update_keeps_the_rest_out_of_place_too(self) -> None:
        arrays = {"a": np.arange(3, dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
        store = store_of(arrays)
        lease = store.lease()
        update(store, {"b": np.ones(4, np.float32)})
        views = store.current.arena.views
        np.testing.assert_array_equal(views["a"], [0, 1, 2])
        np.testing.assert_array_equal(views["b"], [-1, 0, 1, 2])
        assert store.current.tensor_versions.tolist() == [0, 1]
        assert [(p.start, p.stop, p.version) for p in store.current.parts] == [
            (0, 12, 0),
            (12, 28, 1),
        ]
        lease.release()

    def test_beyond_the_bound_the_slowest_readers_are_cut_off(self) -> None:
        """A version is as slow as the fastest of its readers."""
        store = store_of({"w": np.zeros(4, np.float32)}, live=4)
        readers = {pace: Reader(store, pace) for pace in (5.0, 1.0)}  # of version 0
        for pace in (3.0, 6.0, 9.0):
            update(store, ones(store))
            readers[pace] = Reader(store, pace)
        assert not any(reader.why for reader in readers.values())
        update(store, ones(store))
        assert "it read slowest (3 KiB/s) of the clients that hold 4 v" in readers[3.0].why
        readers[8.0] = Reader(store, 8.0)
        update(store, ones(store))
        assert [pace for pace, reader in readers.items() if reader.why] == [5.0, 1.0, 3.0]
        assert (store.cut, store.alive, store.spare) == (3, 4, 0)
        assert [readers[pace].value() for pace in (6.0, 9.0, 8.0)] == [-2, -3, -4]

    def test_what_was_cut_off_is_not_cut_off_again(self) -> None:
        """The event loop may hold its last bytes for a while: other readers pay nothing for it."""
        store = store_of({"w": np.zeros(4, np.float32)}, live=3)
        stuck = Reader(store, 0.0, stuck=True)
        others = []
        for _ in range(2):
            update(store, ones(store))
            others.append(Reader(store, 1.0))
        update(store, ones(store))
        assert stuck.why
        assert (store.cut, store.alive) == (1, 4)
        assert [reader.why for reader in others] == ["", ""]

    def test_versions_that_are_not_being_sent_are_nobodys_fault(self) -> None:
        """Such as those for rules that read them, or of answers that wait for the journal."""
        store = store_of({"w": np.zeros(4, np.float32)}, live=3)
        kept = []
        reader = Reader(store, 0.0)
        for _ in range(5):
            update(store, ones(store))
            kept.append(store.lease())
        assert not reader.why
        assert store.alive == 6

    def test_relaxed_reads_share_the_live_arena(self) -> None:
        store = store_of({"w": np.zeros(4, np.float32)}, relaxed=True)
        lease = store.lease()
        [[payload]] = lease.payloads()
        update(store, ones(store))
        np.testing.assert_array_equal(np.frombuffer(payload, np.float32), -1)
        assert store.alive == 1

    def test_relaxed_reads_are_possible_during_an_update(self) -> None:
        store = store_of({"w": np.zeros(4, np.float32)}, relaxed=True)
        target = store.begin()
        assert store.readable
        assert target is store.current

    def test_leases_end_on_whatever_thread_they_are_dropped(self) -> None:
        store = store_of({"w": np.zeros(4, np.float32)})
        payloads = []
        for _ in range(200):
            lease = store.lease()
            payloads.append(lease.payloads())
            lease.release()
        del lease

        def drop(chunk: list[list[list[memoryview]]]) -> None:
            chunk.clear()
            gc.collect()

        chunks = [payloads[i::4] for i in range(4)]
        payloads.clear()
        threads = [threading.Thread(target=drop, args=(chunk,)) for chunk in chunks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.alive == 1
        assert store.current.readers == set()


class Halfway:
    """A kernel that stops in the middle, so that a test can look at what a reader sees there."""

    backend = "numpy"

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look

    def __call__(
        self,
        spans: kernels.Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
    ) -> Array:
        half = len(base) // 2
        target[:half] = base[:half] - grad[:half]
        self.look()
        target[half:] = base[half:] - grad[half:]
        return np.zeros(1, np.int64)

    def warm(self) -> kernels.Kernel:
        return self


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_reader_sees_one_whole_version_in_the_middle_of_an_update(relaxed: bool) -> None:
    """Relaxed reads do mix versions here, so this test can tell a torn read when there is one."""
    store = store_of({"w": np.zeros(64, np.float32)}, relaxed=relaxed)
    seen: list[set[float]] = []
    early = store.lease()
    [[payload]] = early.payloads()

    def look() -> None:
        seen.append(set(np.frombuffer(payload, np.float32).tolist()))
        if store.readable:
            lease = store.lease()
            [[late]] = lease.payloads()
            seen.append(set(np.frombuffer(late, np.float32).tolist()))
            lease.release()

    store.updater.kernels = [Halfway(look)]
    update(store, ones(store))
    assert len(seen) == 2
    assert all((len(values) > 1) is relaxed for values in seen)
    early.release()


def test_an_update_in_place_cannot_be_read_midway() -> None:
    store = store_of({"w": np.zeros(64, np.float32)})
    readable: list[bool] = []
    store.updater.kernels = [Halfway(lambda: readable.append(store.readable))]
    update(store, ones(store))
    assert readable == [False]
    assert store.readable


def test_no_torn_read_while_another_thread_updates() -> None:
    """Every version holds one value everywhere, so a torn read would show as two values."""
    size = 1 << 18
    store = store_of({"w": np.zeros(size, np.float32)})
    gradient = gradient_of(store, {"w": np.ones(size, np.float32)})
    for version in range(40):
        lease = store.lease()
        [[payload]] = lease.payloads()
        values = np.frombuffer(payload, np.float32)
        job = UpdateJob(
            store, store.cost, gradient=gradient, steps=np.ones(1), touched=store.layout.all
        )
        job.target = store.begin()
        thread = threading.Thread(target=job.run)
        thread.start()
        assert values.min() == values.max() == -version
        thread.join()
        assert values.min() == values.max() == -version
        store.commit(job.target, store.layout.all, np.zeros(1, np.int64))
        del values, payload
        lease.release()
    np.testing.assert_array_equal(store.current.arena.views["w"], -40)


class TestDtypes:
    @each_row("name", ["float64", "bfloat16", "float16"])
    def test_coded_gradients_of_other_dtypes_are_rounded_from_float32(self, name: str) -> None:
        """docs/codecs.md: a value that float16 cannot hold becomes its largest."""
        layout, codec = Layout([("w", name, (8,))]), BF16()
        values = np.array([1, -2, 3.14159, 1e-3, 65_000, 70_000, -1e6, 0], np.float32)
        payload = np.frombuffer(codec.encoder((8,), feedback=False).encode(values), np.uint8)
        tensor = layout.tensors[0]
        part = Part(0, tensor.nbytes, "bf16", len(payload), 0)
        gradient = Gradient(payload, layout.covered((part,)), (part,))
        found = gradient.dense(layout, lambda: aligned(layout.nbytes), "numpy")
        decoded = np.empty(8, np.float32)
        codec.decode(payload, (8,), decoded, backend="numpy")
        if name == "float16":
            decoded = np.clip(decoded, -65_504, 65_504)
        expected = decoded.astype(dtype_named(name))
        assert found.data.tobytes() == expected.tobytes()
        assert not found.parts

    @pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
    def test_sixteen_bits_are_trained_with_float32_masters(self, name: str) -> None:
        """1,000 steps of 1e-4 from 1: too small for 16 bits to see one by one."""
        dtype = dtype_named(name)
        store = store_of({"w": np.ones(5, dtype)})
        for _ in range(1000):
            update(store, {"w": np.ones(5, dtype)}, lr=1e-4)
        assert float(store.current.arena.views["w"][0]) == pytest.approx(0.9, rel=1e-2)
        assert store.current.arena.views["w"].dtype == dtype

    def test_mixed_dtypes_in_one_arena(self) -> None:
        names = ["bfloat16", "float64", "float16", "float32"]
        arrays = {name: np.full((3, 2), 2, dtype_named(name)) for name in names}
        store = store_of(arrays, FASGD().rule())
        update(store, ones(store))
        for name in names:
            view = store.current.arena.views[name]
            assert view.dtype == dtype_named(name)
            assert float(view[0, 0]) < 2
        assert len(store.layout.sections) == 4

    @pytest.mark.parametrize("name", ["float32", "bfloat16"])
    def test_collected_gradients_equal_their_weighted_mean(self, name: str) -> None:
        dtype = dtype_named(name)
        store = store_of({"a": np.zeros(4, dtype), "b": np.zeros(4, dtype)})
        for value, weight in ((1.0, 1.0), (2.0, 0.5), (4.0, 0.25)):
            arrays = {"a": np.full(4, value, dtype), "b": np.full(4, value, dtype)}
            UpdateJob(
                store, store.cost, gradient=gradient_of(store, arrays), weights=np.full(2, weight)
            ).run()
        job = UpdateJob(store, store.cost, factor=1 / 3, steps=np.ones(2), touched=store.layout.all)
        job.target = store.begin()
        store.commit(job.target, job.touched, job.run())
        np.testing.assert_array_equal(store.current.arena.views["a"].astype(np.float32), -1)

    def test_a_sum_over_different_tensors_starts_each_of_them_afresh(self) -> None:
        store = store_of({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
        two = np.full(2, 2, np.float32)
        for names in (["a"], ["a", "b"]):
            gradient = gradient_of(store, dict.fromkeys(names, two))
            UpdateJob(store, store.cost, gradient=gradient, weights=np.ones(len(names))).run()
        job = UpdateJob(store, store.cost, factor=0.5, steps=np.ones(2), touched=store.layout.all)
        job.target = store.begin()
        store.commit(job.target, job.touched, job.run())
        views = store.current.arena.views
        assert (views["a"][0], views["b"][0]) == (-2, -1)


class TestStatistic:
    def test_it_starts_at_its_initial_value(self) -> None:
        store = store_of({"w": np.zeros(7, np.float32)}, FASGD().rule())
        assert store.vbar() == 1.0
        assert np.frombuffer(store.vbars(), "<f4").tolist() == [1.0]

    def test_it_is_the_mean_of_the_state_array(self) -> None:
        arrays = {"a": np.zeros(300, np.float32), "b": np.zeros((5, 7), np.float32)}
        store = store_of(arrays, FASGD().rule())
        rng = np.random.default_rng(0)
        for names in (["a", "b"], ["b"], ["a"]):
            update(store, {n: rng.normal(size=arrays[n].shape).astype(np.float32) for n in names})
        v = store.state[0][2]
        assert store.vbar() == pytest.approx(float(v.mean()), rel=1e-6)
        means = np.frombuffer(store.vbars(), "<f4")
        assert means == pytest.approx([v[:300].mean(), v[300:].mean()], rel=1e-6)

    def test_rules_without_one_report_none(self) -> None:
        store = store_of({"w": np.zeros(7, np.float32)})
        assert store.vbar() is None
        assert store.vbars() == b""


def test_parameters_of_another_model_are_refused() -> None:
    store = store_of({"w": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match=r"its 'w' has shape \(3,\), not \(4,\)"):
        store.set({"w": np.zeros(4, np.float32)})


def test_warm_compiles_and_changes_nothing() -> None:
    store = store_of({"w": np.ones(3, np.float32)}, FASGD().rule())
    store.warm()
    np.testing.assert_array_equal(store.current.arena.views["w"], 1)
    assert store.backend in ("numba", "numpy")
    assert kernels.STATISTIC_SCALE == 2**24
