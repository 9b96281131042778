"""A store on a device does what one on the host does, to the bit, and copies no more."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.algorithms.fasgd import FASGD
from aiops.codecs import find as codec
from aiops.errors import BadPush
from aiops.kernels.clipping import Clip
from aiops.kernels.device import Device, DeviceArray
from aiops.model.arena import aligned
from aiops.model.layout import Array, Cover, Layout, dtype_named
from aiops.model.parts import Part
from aiops.model.shared_memory import Memory, Segment, SharedMemory, attached, available
from aiops.store import cuda_backend
from aiops.store.cuda_backend import Buffers, CudaBackend, PageLocked
from aiops.store.evaluation import Evaluation
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store, UpdateJob, UpdateRound
from tests.devices import DEVICES, device_named, machine_with
from tests.emulated import COMPILER, DeviceEvent, EmulatedDevice
from tests.inline import Inline
from tests.rows import each_row
from tests.seeds import by_turns
from tests.store.test_parameters import gradient_of

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile with")
MIXED = ("float64", "float32", "bfloat16", "float16")


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def arrays_of(random: np.random.Generator, *dtypes: str) -> dict[str, Array]:
    shapes = {"a": (7, 9), "b": (), "c": (2100,), "d": (0, 3), "e": (33,)}
    return {
        f"{name}-{dtype}": np.asarray(random.standard_normal(shape)).astype(dtype_named(dtype))
        for dtype in dtypes
        for name, shape in shapes.items()
    }


class Both:
    """The same store twice, on the host and on a device; whatever is done is done to both."""

    def __init__(self, device: Device, policy: str, *dtypes: str, **settings: Any) -> None:
        self.random = np.random.default_rng(5)
        self.arrays = arrays_of(self.random, *dtypes)
        self.rule = find(policy).make(settings).rule()
        layout = Layout.of(self.arrays)
        host = Store(layout, self.rule, backend="numpy")
        there = Store(layout, self.rule, backend="numpy", machine=machine_with(device))
        self.stores = host, there
        for store in self.stores:
            store.set(self.arrays)

    def gradient(self, *names: str) -> dict[str, Array]:
        chosen = names or tuple(self.arrays)
        return {
            name: np.asarray(self.random.standard_normal(self.arrays[name].shape)).astype(
                self.arrays[name].dtype
            )
            for name in chosen
        }

    def do(self, arrays: dict[str, Array] | None, coded: str = "", **facts: Any) -> None:
        """Do one job; ``step`` is in it unless ``weights`` are given alone."""
        sums = []
        scalars = len(self.rule.scalars)
        for store in self.stores:
            gradient = None if arrays is None else gradient_of(store, arrays)
            if gradient is not None and coded:
                gradient = self.coded(store.layout, arrays, gradient.cover, coded)
            job = UpdateJob(
                store,
                store.cost,
                gradient=gradient,
                **{k: v for k, v in facts.items() if k != "take"},
            )
            if facts.get("take", True):
                covered = store.layout.all if gradient is None else gradient.cover.tensors
                job.touched = covered
                job.steps = np.linspace(0.1, 0.2, len(covered))
                job.scalars = np.full((len(covered), scalars), 0.7)
                job.target = store.begin()
            found = job.run()
            sums.append(found.tolist())
            if job.target is not None:
                store.commit(job.target, job.touched, found)
        assert sums[0] == sums[1]

    @staticmethod
    def coded(layout: Layout, arrays: Any, cover: Cover, how: str) -> Gradient:
        """The same gradient, written by these codecs in turn."""
        kinds = how.split("+")
        parts, payloads = [], []
        for place, index in enumerate(cover.tensors.tolist()):
            tensor = layout.tensors[index]
            kind, array = kinds[place % len(kinds)], arrays[tensor.name]
            if kind == "raw" or not tensor.size:
                payload, name = array.tobytes(), "raw"
            else:
                encoder = codec(kind).encoder(tensor.shape, feedback=False)
                payload = bytes(encoder.encode(array.astype(np.float32).reshape(-1)))
                name = kind.partition(":")[0]
            end = tensor.offset + tensor.nbytes
            parts.append(Part(tensor.offset, end, name, len(payload), 0))
            payloads.append(payload)
        data = aligned(sum(map(len, payloads)))
        data[:] = np.frombuffer(b"".join(payloads), np.uint8)
        return Gradient(data, cover, tuple(parts))

    def check(self) -> None:
        host, there = self.stores
        assert there.backend == "cuda"
        assert there.current.arena.data.tobytes() == host.current.arena.data.tobytes()
        assert there.version == host.version
        assert there.vbar() == host.vbar()
        for one, other in zip(host.state, there.state, strict=True):
            assert [array.tobytes() for array in one] == [array.tobytes() for array in other]
        for mine, theirs in zip(host.masters, there.masters, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or mine.tobytes() == theirs.tobytes()


@pytest.fixture(params=[cuda_backend.PORTION, 96], ids=["whole", "in portions"])
def portions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much of a gradient is brought at a time."""
    portion: int = request.param
    monkeypatch.setattr(cuda_backend, "PORTION", portion)
    return portion


@pytest.mark.usefixtures("portions")
class TestBits:
    @pytest.mark.parametrize("policy", ["fasgd", "asgd", "schedule-free"])
    def test_updates_of_all_and_of_some(self, device: Device, policy: str) -> None:
        both = Both(device, policy, *MIXED)
        for names in ((), (), ("c-float32",), ("a-float64", "e-float16", "e-bfloat16"), ()):
            both.do(both.gradient(*names), factor=0.5)
            both.check()

    def test_leases_outlive_updates(self, device: Device) -> None:
        """What a reader holds stays as it was, whether it was looked at before or not."""
        both = Both(device, "fasgd", *MIXED)
        held, wanted = [], []
        for turn in range(4):
            lease = both.stores[1].lease()
            wanted.append(both.stores[0].current.arena.data.tobytes())
            if turn % 2:
                lease.version.arena  # noqa: B018
            held.append(lease)
            both.do(both.gradient() if turn != 2 else both.gradient("c-float32"))
        assert [lease.version.arena.data.tobytes() for lease in held] == wanted
        assert both.stores[1].alive == 5
        both.check()
        for lease in held:
            lease.release()
        assert both.stores[1].alive == 1

    def test_collected_gradients(self, device: Device) -> None:
        both = Both(device, "fasgd", *MIXED)
        for _ in range(2):
            for names in ((), ("c-float32", "e-float16"), ()):
                arrays = both.gradient(*names)
                weights = np.linspace(0.5, 1.5, len(arrays))
                both.do(arrays, weights=weights, take=False)
            both.do(None, factor=1 / 3)
            both.check()

    def test_norms_are_clipped(self, device: Device) -> None:
        both = Both(device, "fasgd", *MIXED)
        both.do(both.gradient(), clip=Clip((0.7,)))
        both.do(both.gradient("c-float32", "a-float64"), clip=Clip((0.7,)))
        both.check()
        arrays = both.gradient()
        both.do(arrays, weights=np.ones(len(arrays)), take=False)
        both.do(None, clip=Clip((0.3,)))
        both.check()

    @pytest.mark.parametrize("policy", ["fasgd", "asgd", "schedule-free"])
    def test_norms_of_groups_are_clipped(self, device: Device, policy: str) -> None:
        both = Both(device, policy, *MIXED)
        groups = np.arange(len(both.arrays)) % 3
        limits = (0.7, 0.0, 0.2)
        both.do(both.gradient(), clip=Clip(limits, groups))
        both.do(both.gradient("c-float32", "a-float64"), clip=Clip(limits, groups[:2]))
        both.check()
        arrays = both.gradient()
        both.do(arrays, weights=np.ones(len(arrays)), take=False)
        both.do(None, factor=0.5, clip=Clip(limits, groups))
        both.do(both.gradient(), scales=np.linspace(0.1, 1, len(arrays)))
        both.check()

    @each_row("measured", ["gradient", "sum"])
    def test_norms_are_measured_for_other_shards(self, device: Device, measured: str) -> None:
        both = Both(device, "fasgd", *MIXED)
        arrays = both.gradient()
        found = []
        for store in both.stores:
            gradient = gradient_of(store, arrays)
            weights = None if measured == "gradient" else np.ones(len(arrays))
            job = UpdateJob(
                store,
                store.cost,
                gradient=gradient,
                weights=weights,
                touched=store.layout.all,
                round=UpdateRound.MEASURE,
                clip=Clip((1.0, 2.0, 0.0), np.arange(len(arrays)) % 3),
            )
            found.append(job.run().view(np.float64).tolist())
        assert found[0] == found[1]
        assert [each > 0 for each in found[0]] == [True, True, False]

    @each_row(("rate", "fits"), [(0.01, True), (1e38, False)])
    def test_a_step_is_rehearsed_for_other_shards(
        self, device: Device, rate: float, fits: bool
    ) -> None:
        both = Both(device, "asgd", *MIXED)
        arrays = both.gradient()
        for store in both.stores:
            before = [array.copy() for array in store.current.arena.sections]
            job = UpdateJob(store, store.cost, gradient=gradient_of(store, arrays))
            job.touched, job.round = store.layout.all, UpdateRound.REHEARSE
            job.steps = np.full(len(arrays), rate)
            [bad] = job.run()
            assert bool(bad == -1) is fits
            for array, was in zip(store.current.arena.sections, before, strict=True):
                np.testing.assert_array_equal(array, was)

    # A rule has an element as the loader of its codec reads it, whichever that is.
    @pytest.mark.parametrize(
        ("how", "policy"),
        by_turns(
            [
                *("int8", "fp16", "bf16", "onebit", "topk:0.05", "topk:fraction=0.5,values=bf16"),
                *("lowrank", "int8+raw+topk:0.1", "raw+fp16", "onebit+int8+bf16+raw"),
            ],
            ["fasgd", "dcasgd", "schedule-free"],
        ),
    )
    def test_coded_gradients(self, device: Device, policy: str, how: str) -> None:
        """Read by kernels as they came, decoded there first, or decoded by the host."""
        for packed in (True, False):
            both = Both(device, policy, "float32")
            for store in both.stores:
                store.read_packed(["int8", "fp16", "bf16", "onebit"] if packed else [])
            more = {"sent": None} if not both.rule.reads else {}
            for names in ((), ("a-float32", "c-float32")):
                if both.rule.reads:
                    self.compared(both, both.gradient(*names), how)
                else:
                    both.do(both.gradient(*names), how, **more)
            arrays = both.gradient()
            both.do(arrays, how, weights=np.ones(len(arrays)), take=False)
            if not both.rule.reads:
                both.do(arrays, how, clip=Clip((0.5,)))
                both.do(arrays, how, scales=np.linspace(0.1, 1, len(arrays)))
            both.check()

    @staticmethod
    def compared(both: Both, arrays: dict[str, Array], how: str = "") -> None:
        """One update of a rule that compares, with a version that was sent."""
        leases = [store.lease() for store in both.stores]
        sums = []
        for store, lease in zip(both.stores, leases, strict=True):
            gradient = gradient_of(store, arrays)
            if how:
                gradient = both.coded(store.layout, arrays, gradient.cover, how)
            touched = gradient.cover.tensors
            job = UpdateJob(
                store,
                store.cost,
                gradient=gradient,
                steps=np.full(len(touched), 0.1),
                touched=touched,
            )
            job.scalars = np.full((len(touched), len(both.rule.scalars)), 0.7)
            job.sent = lease.version
            job.target = store.begin()
            found = job.run()
            sums.append(found.tolist())
            store.commit(job.target, touched, found)
            lease.release()
        assert sums[0] == sums[1]

    @each_row("how", ["int8", "topk:0.1"])
    def test_coded_gradients_of_other_dtypes(self, device: Device, how: str) -> None:
        both = Both(device, "fasgd", *MIXED)
        both.do(both.gradient(), how)
        both.check()

    def test_what_was_sent_is_compared_with(self, device: Device) -> None:
        both = Both(device, "dcasgd", *MIXED)
        leases = [store.lease() for store in both.stores]
        self.compared(both, both.gradient())  # with the current version
        both.check()
        for store, lease in zip(both.stores, leases, strict=True):  # and with an older one
            gradient = gradient_of(store, both.arrays)
            touched = gradient.cover.tensors
            job = UpdateJob(
                store,
                store.cost,
                gradient=gradient,
                steps=np.full(len(touched), 0.1),
                touched=touched,
            )
            job.scalars = np.full((len(touched), len(both.rule.scalars)), 0.7)
            job.sent, job.target = lease.version, store.begin()
            store.commit(job.target, touched, job.run())
            lease.release()
        both.check()

    def test_relaxed_reads_see_every_update(self, device: Device) -> None:
        arrays = {"w": np.zeros(50, np.float32)}
        store = Store(Layout.of(arrays), FASGD().rule(), relaxed=True, machine=machine_with(device))
        store.set(arrays)
        [[payload]] = store.lease().payloads()
        gradient = gradient_of(store, {"w": np.ones(50, np.float32)})
        job = UpdateJob(
            store, store.cost, gradient=gradient, steps=np.ones(1), touched=store.layout.all
        )
        job.target = store.begin()
        store.commit(job.target, job.touched, job.run())
        assert (np.frombuffer(payload, np.float32) < 0).all()


class Counted:
    """Passes on what is asked of a backend, and counts the parameters that were copied back."""

    def __init__(self, store: Store) -> None:
        self.store, self.copies = store, 0
        compute = store.updater.compute
        assert isinstance(compute, CudaBackend)
        copy = compute._downloaded

        def counted(arena: Any) -> None:
            self.copies += 1
            copy(arena)

        compute._downloaded = counted  # type: ignore[method-assign]


@needs_compiler
class TestCopies:
    """A copy on the host is made once per version, and of versions that are read alone."""

    def both(self) -> tuple[Both, Counted]:
        both = Both(EmulatedDevice(), "fasgd", "float32")
        return both, Counted(both.stores[1])

    def test_pushes_that_nobody_reads_copy_nothing(self) -> None:
        both, counted = self.both()
        for _ in range(5):
            both.do(both.gradient())
        assert counted.copies == 0
        both.check()
        both.check()
        assert counted.copies == 1

    def test_a_version_that_is_read_each_time_is_copied_with_the_update(self) -> None:
        both, counted = self.both()
        for turn in range(1, 5):
            both.do(both.gradient())
            assert counted.copies == (turn if turn > 1 else 0)
            lease = both.stores[1].lease()
            lease.borrowed_views()
            lease.release()
            assert counted.copies == turn
        both.do(both.gradient())
        both.do(both.gradient())
        assert counted.copies == 5, "the last but one was copied in vain, and then none"

    def test_what_is_only_held_is_copied_before_it_is_overwritten(self) -> None:
        both, counted = self.both()
        both.do(both.gradient())
        wanted = both.stores[0].current.arena.data.tobytes()
        lease = both.stores[1].lease()
        assert counted.copies == 0
        both.do(both.gradient())
        assert lease.version.arena.data.tobytes() == wanted
        lease.release()


@needs_compiler
class TestOverlap:
    """What is there of a large gradient is updated, and copied back, while the rest comes."""

    def both(self, monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> tuple[Both, list[str]]:
        monkeypatch.setattr(cuda_backend, "PORTION", 1024)
        both, events = Both(EmulatedDevice(), "fasgd", *dtypes), list[str]()
        compute = both.stores[1].updater.compute
        assert isinstance(compute, CudaBackend)
        wait, download = DeviceEvent.wait, compute._down.download

        def waited(mark: DeviceEvent) -> None:
            events.append("arrived")
            wait(mark)

        def downloaded(target: Any, source: Any) -> None:
            events.append("shown")
            download(target, source)

        monkeypatch.setattr(DeviceEvent, "wait", waited)
        monkeypatch.setattr(compute._down, "download", downloaded)
        return both, events

    def read(self, both: Both) -> None:
        lease = both.stores[1].lease()
        lease.borrowed_views()
        lease.release()

    def test_of_a_version_that_is_read_each_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both, events = self.both(monkeypatch, "float32")
        for _ in range(4):
            both.do(both.gradient())
            self.read(both)
        both.check()
        events.clear()
        both.do(both.gradient())
        nbytes = both.stores[1].layout.nbytes
        assert events.count("arrived") == -(-nbytes // 1024)
        assert events.index("shown") == 1
        assert events[-1] == "shown"
        both.check()
        self.read(both)
        counted = Counted(both.stores[1])
        for _ in range(3):
            both.do(both.gradient())
            self.read(both)
        assert counted.copies == 0, "all of it was copied piece by piece"
        both.check()

    def test_of_some_tensors_all_the_rest_is_copied_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both, _events = self.both(monkeypatch, "float32", "bfloat16")
        for names in ((), ("c-float32",), ("c-bfloat16", "e-float32"), ()):
            both.do(both.gradient(*names))
            self.read(both)
            both.check()

    def test_nothing_is_copied_back_that_nobody_reads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both, events = self.both(monkeypatch, "float32")
        both.do(both.gradient())  # for the first of many, magnitudes are read (`FiniteGuard`)
        events.clear()
        for _ in range(3):
            both.do(both.gradient())
        assert set(events) == {"arrived"}
        both.check()


@needs_compiler
class TestMemory:
    def test_a_model_that_does_not_fit(self) -> None:
        """The worker that offers it is told, and a smaller one is taken afterwards."""
        machine = machine_with(EmulatedDevice(capacity=50_000))
        inline = Inline("fasgd", machine=machine)
        with pytest.raises(BadPush, match=r"the model of 40000 bytes, .* do not fit .* no 40000"):
            inline.define({"w": np.zeros(10_000, np.float32)})
        gc.collect()
        inline.define({"w": np.zeros(1000, np.float32)})
        assert inline.params()["w"].size == 1000

    def test_memory_is_given_back(self) -> None:
        device = EmulatedDevice()
        both = Both(device, "fasgd", *MIXED)
        both.do(both.gradient())
        assert device.used > 0
        del both
        gc.collect()
        assert device.used == 0

    def test_it_does_not_grow_with_updates(self) -> None:
        device = EmulatedDevice()
        both = Both(device, "fasgd", "float32")
        used = []
        for _ in range(5):
            both.do(both.gradient(), "int8+raw")
            both.do(both.gradient())
            used.append(device.used)
        assert used[1:] == used[:1] * 4

    def test_gradients_take_turns_in_two_buffers(self) -> None:
        device = EmulatedDevice()
        buffers = Buffers(device, 100)
        used = device.used
        first, second = buffers.take(100), buffers.take(30)
        assert (len(first), len(second), device.used) == (100, 30, used)
        third = buffers.take(10)
        assert device.used > used
        starts = {array.start for array in (first, second, third)}
        assert len(starts) == 3
        start, part = first.start, first[10:20].view(np.uint16)
        del first
        fourth = buffers.take(10)
        assert fourth.start != start, "a part of it is still referred to"
        del part
        fifth = buffers.take(10)
        assert isinstance(fifth, DeviceArray)
        assert fifth.start == start

    @pytest.mark.skipif(not available(), reason="there is no shared memory")
    def test_shared_arenas_are_page_locked_as_long_as_they_live(self) -> None:
        device = EmulatedDevice()
        memory = PageLocked(SharedMemory(), device)
        layout = Layout.of({"w": np.zeros(10_000, np.float32)})
        made = memory.arena(layout)
        assert made.segment is not None
        assert device.pinned == layout.nbytes
        del made
        gc.collect()
        assert device.pinned == 0
        small = PageLocked(Memory(), device).holding(layout, np.ones(layout.nbytes, np.uint8))
        assert device.pinned == 0
        assert (small.data == 1).all()

    @pytest.mark.skipif(not available(), reason="there is no shared memory")
    def test_a_workers_segment_is_page_locked_and_still_the_workers(self) -> None:
        device = EmulatedDevice()
        theirs = Segment(10_000)
        mapped = partial(attached, os.dup(theirs.fd))
        ours = PageLocked(Memory(), device).attached(mapped, 10_000)
        part = ours[:100]
        del ours
        assert device.pinned == 10_000
        theirs.data[:] = 7
        assert (part == 7).all(), "what is written after the pages were locked is seen"
        del part
        gc.collect()
        assert device.pinned == 0


# ---------------------------------------------------------------- where a model is evaluated


@needs_compiler
@each_row("dtypes", [("float32",), ("bfloat16", "float16"), ("float64",)], ids=str)
def test_a_model_is_evaluated_where_it_would_be_on_the_host(
    device: Device, dtypes: tuple[str, ...]
) -> None:
    both = Both(device, "schedule-free", *dtypes)
    for _ in range(3):
        both.do(both.gradient())
    left = np.linspace(0, 1, len(both.arrays))
    found = []
    for store in both.stores:
        evaluation = Evaluation(store)
        at_once = evaluation.now(left)
        job = evaluation.begin(left)
        job.run()
        evaluation.publish(job)
        lease = evaluation.lease()
        np.testing.assert_array_equal(lease.version.arena.data, at_once.data)
        found.append(at_once.data)
        lease.release()
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != both.stores[0].current.arena.data).any()
