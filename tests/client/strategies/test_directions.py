"""What workers push in the place of a matrix's gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.client.strategies import directions_for
from aiops.client.strategies.directions import Directions
from aiops.errors import UsageError
from aiops.kernels.orthogonalise import orthogonalised
from aiops.model.layout import Layout, dtype_named
from aiops.model.matrices import as_matrix
from tests.client.test_dlpack import CPU, Tensor
from tests.rows import each_row
from tests.support import PATIENCE

SHAPES: dict[str, tuple[int, ...]] = {
    "square": (8, 8),
    "bias": (8,),
    "long": (64, 4),  # 16 times as long as wide
    "longer": (65, 4),
    "row": (1, 8),
    "scalar": (),
    "empty": (0, 4),
    "torch": (6, 4, 3, 3),
    "flax": (3, 3, 4, 6),
}


def directions(dtype: str = "float32", memory: float = 0.5) -> Directions:
    layout = Layout([(name, dtype, shape) for name, shape in SHAPES.items()])
    return Directions({"orthogonal": memory}, layout)


def step(made: Directions, gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the directions of a step that is taken."""
    found = made.of(gradients)
    made.took()
    return found


def drawn(name: str, seed: int = 0, dtype: str = "float32") -> Any:
    values = np.random.default_rng(seed).normal(size=SHAPES[name])
    return values.astype(dtype_named(dtype))


def size(array: Any) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.square(array, dtype=np.float64).mean()))


@each_row(
    ("name", "made"),
    [
        *(("square", True), ("bias", False), ("long", True), ("longer", False), ("row", False)),
        *(("scalar", False), ("empty", False), ("torch", True), ("flax", True)),
    ],
)
def test_matrices_alone_get_directions(name: str, made: bool) -> None:
    gradient = drawn(name)
    found = directions().of({name: gradient})[name]
    assert (found is not gradient) == made
    assert found.shape == gradient.shape
    if made:
        assert 0.8 < size(found) / size(gradient) < 1.2


@each_row("length", [1e-6, 0.5, 1e6])
def test_a_direction_is_as_long_as_its_gradient(length: float) -> None:
    """Not as its momentum: a mini-batch of which all is learnt moves little."""
    made = directions(memory=0.9)
    step(made, {"square": drawn("square", 1)})
    found = step(made, {"square": np.float32(length) * drawn("square", 2)})["square"]
    assert 0.8 < size(found) / (length * size(drawn("square", 2))) < 1.2


def test_a_convolution_is_the_same_matrix_in_either_order() -> None:
    gradient = drawn("torch")
    torch = directions().of({"torch": gradient})["torch"]
    flax = directions().of({"flax": gradient.transpose(2, 3, 1, 0).copy()})["flax"]
    rows = torch.reshape(6, -1)
    np.testing.assert_allclose(rows @ rows.T, 36 * size(gradient) ** 2 * np.eye(6), atol=6)
    columns = flax.reshape(-1, 6)
    np.testing.assert_allclose(columns.T @ columns, rows @ rows.T, atol=0.01)


def test_momentum_is_a_mean_of_the_gradients_so_far() -> None:
    made, first, second = directions(memory=0.75), drawn("square", 1), drawn("square", 2)
    step(made, {"square": first})
    found = step(made, {"square": second})["square"]
    wanted = orthogonalised(np.float32(0.1875) * first + np.float32(0.25) * second)
    np.testing.assert_allclose(found, wanted * np.sqrt(8) * size(second), rtol=1e-4, atol=1e-5)


@each_row("dtype", ["float64", "float16", "bfloat16"])
def test_a_direction_has_the_dtype_of_its_gradient(dtype: str) -> None:
    found = directions(dtype).of({"square": drawn("square", dtype=dtype)})["square"]
    assert found.dtype == dtype_named(dtype)


@each_row("dtype", ["float32", "float64", "bfloat16"])
@each_row("value", [np.nan, np.inf, -np.inf, 1e38, -2e18, 1e60])
def test_what_servers_refuse_is_passed_on_and_forgotten(value: float, dtype: str) -> None:
    made, broken = directions(dtype), drawn("square", dtype=dtype)
    with np.errstate(over="ignore"):
        broken[2, 3] = value
    assert step(made, {"square": broken})["square"] is broken
    wanted = directions(dtype).of({"square": drawn("square", dtype=dtype)})["square"]
    found = step(made, {"square": drawn("square", dtype=dtype)})["square"]
    np.testing.assert_array_equal(found, wanted)
    assert np.isfinite(found.astype(np.float32)).all()


def test_another_shape_dtype_or_name_is_passed_on() -> None:
    strange, unknown = np.ones((4, 16), np.float32), np.ones((8, 8), np.float32)
    wider, whole = np.ones((64, 4)), np.ones((6, 4, 3, 3), np.int64)
    given = {"square": strange, "what": unknown, "long": wider, "torch": whole}
    made = directions()
    found = step(made, given)
    assert all(found[name] is value for name, value in given.items())
    assert not any(momentum.any() for momentum in made.arrays().values())


def numpys(array: Any) -> Any:
    return array


def torchs(array: Any) -> Any:
    pytest.importorskip("torch")
    from aiops.client.torch_arrays import to_tensor

    return to_tensor(array.copy())


def cudas(array: Any) -> Any:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torchs(array).cuda()


Lift = Callable[[Any], Any]


def several_steps(lift: Lift, agree: Callable[[Any, Any], None]) -> Directions:
    """Compare some steps with NumPy's, not all with all matrices, and not all taken."""
    layout = Layout([(name, "float32", (24, 16)) for name in "abcde"])
    here, there = (Directions({"orthogonal": 0.5}, layout) for _ in range(2))
    rng = np.random.default_rng(0)
    for number in range(12):
        names = ("abcde", "abcde", "abd", "abcde", "cde", "ab")[number % 6]
        gradients = {name: rng.normal(size=(24, 16)).astype("f4") for name in names}
        lifted = {name: lift(array) for name, array in gradients.items()}
        wanted, found = here.of(gradients), there.of(lifted)
        for name in names:
            agree(found[name], wanted[name])
        if number % 3:  # others are not taken
            here.took()
            there.took()
    return there


LIFTS = [numpys, torchs, cudas]
"""What makes an array a gradient of NumPy, of PyTorch on the host, and of PyTorch on a GPU."""


@pytest.mark.parametrize("lift", LIFTS)
class TestContract:
    """Directions are the same wherever they are made."""

    @each_row("dtype", ["float32", "float64", "float16", "bfloat16"])
    def test_several_steps(self, lift: Lift, dtype: str) -> None:
        here, there = directions(dtype, 0.75), directions(dtype, 0.75)
        for seed in range(4):
            gradients = {name: drawn(name, seed, dtype) for name in SHAPES}
            wanted = step(here, gradients)
            found = step(there, {name: lift(array) for name, array in gradients.items()})
            for name in here.names:
                assert type(found[name]) is np.ndarray
                assert found[name].flags.c_contiguous
                assert found[name].dtype == dtype_named(dtype)
                self.agree(found[name], wanted[name])
        assert here.names == there.names == {"square", "long", "torch", "flax"}

    def test_matrices_of_one_shape(self, lift: Lift) -> None:
        """A device makes their directions together; not every step has all of them."""
        several_steps(lift, self.agree)

    @staticmethod
    def agree(found: Any, wanted: Any) -> None:
        """Check that two directions, or dicts of such, differ by rounding alone."""
        if isinstance(wanted, Mapping):
            for name in wanted:
                TestContract.agree(found[name], wanted[name])
            return
        close = {"float16": 4e-3, "bfloat16": 3e-2}.get(wanted.dtype.name, 2e-4)
        values = found.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_allclose(*values, atol=close * math.sqrt(max(wanted.shape)))

    def test_a_gradient_of_nearly_low_rank(self, lift: Lift) -> None:
        """In 16 bits half of such directions would be noise."""
        random = np.random.default_rng(0)
        low = random.normal(size=(64, 4)) @ random.normal(size=(4, 96))
        gradient = (low + 1e-3 * random.normal(size=(64, 96))).astype(np.float32)
        plan, layout = {"orthogonal": 0.5}, Layout([("w", "float32", (64, 96))])
        wanted = Directions(plan, layout).of({"w": gradient})["w"]
        found = Directions(plan, layout).of({"w": lift(gradient)})["w"]
        assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)

    def test_a_step_that_is_not_taken_does_not_count(self, lift: Lift) -> None:
        made, gradients = directions(), [{"square": lift(drawn("square", n))} for n in range(3)]
        step(made, gradients[0])
        before = {name: array.copy() for name, array in made.arrays().items()}
        wanted = made.of(gradients[1])
        made.of(gradients[2])
        for name, array in made.arrays().items():
            np.testing.assert_array_equal(array, before[name])
        found = step(made, gradients[1])
        np.testing.assert_array_equal(found["square"], wanted["square"])

    def test_under_autocast(self, lift: Lift) -> None:
        """The program's products are then made in 16 bits, and these are not."""
        random, torch = np.random.default_rng(0), pytest.importorskip("torch")
        gradient = random.normal(size=(64, 8)) @ random.normal(size=(8, 96))
        gradient = gradient.astype(np.float32)
        plan, layout = {"orthogonal": 0.5}, Layout([("w", "float32", (64, 96))])
        wanted, given = Directions(plan, layout).of({"w": gradient})["w"], lift(gradient)
        kind = "cpu" if lift is numpys else given.device.type
        with torch.autocast(kind, torch.bfloat16):
            found = Directions(plan, layout).of({"w": given})["w"]
        assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)

    def test_a_transposed_gradient(self, lift: Lift) -> None:
        gradient = drawn("square")
        found = directions().of({"square": lift(gradient.T.copy()).T})["square"]
        assert found.flags.c_contiguous
        self.agree(found, directions().of({"square": gradient})["square"])

    @each_row("scale", [1e-29, 1e17])
    def test_tiny_and_huge_gradients(self, lift: Lift, scale: float) -> None:
        gradient = (drawn("square") * scale).astype(np.float32)
        found = directions().of({"square": lift(gradient)})["square"]
        wanted = directions().of({"square": drawn("square")})["square"]
        self.agree(found / np.float32(scale), wanted)

    @each_row("value", [5e-324, 1e-60, 1e-46, 1e-44])
    def test_a_gradient_below_the_least_float32(self, lift: Lift, value: float) -> None:
        found = directions("float64").of({"square": lift(np.full((8, 8), value))})["square"]
        assert not found.any()

    def test_zeros(self, lift: Lift) -> None:
        found = directions().of({"square": lift(np.zeros((8, 8), np.float32))})
        assert not found["square"].any()

    @each_row("dtype", ["float32", "float64", "bfloat16"])
    def test_a_matrix_without_a_gradient_stays(self, lift: Lift, dtype: str) -> None:
        """Its momentum decays all the same, to nothing."""
        made, zeros = directions(dtype), np.zeros((8, 8), dtype_named(dtype))
        step(made, {"square": lift(drawn("square", 1, dtype))})
        for _ in range(3):
            found = step(made, {"square": lift(zeros)})["square"]
            assert found.shape == (8, 8)
            assert found.dtype == zeros.dtype
            assert not found.any()
        decayed = drawn("square", 1, dtype).astype(np.float32) * np.float32(0.03125)
        wanted = orthogonalised(decayed + np.float32(0.5) * drawn("square", 2, dtype).astype("f4"))
        found = step(made, {"square": lift(drawn("square", 2, dtype))})["square"]
        self.agree(found, (wanted * np.sqrt(8) * size(drawn("square", 2))).astype(found.dtype))

    def test_what_is_left_of_a_momentum_counts_as_none(self, lift: Lift) -> None:
        made, one = directions(), np.zeros((8, 8), np.float32)
        step(made, {"square": lift(drawn("square"))})
        for _ in range(200):
            step(made, {"square": lift(one)})
        one[2, 3] = 1e-38
        assert not step(made, {"square": lift(one)})["square"].any()
        one[2, 3] = 1
        found = step(made, {"square": lift(one)})["square"]
        self.agree(found, directions().of({"square": one})["square"])

    @each_row("dtype", ["float32", "float64", "bfloat16"])
    @each_row("value", [np.nan, np.inf, 1e38, -2e18, 1e60])
    def test_what_servers_refuse(self, lift: Lift, value: float, dtype: str) -> None:
        """It is passed on, beside directions of the rest, and forgotten."""
        made, broken = directions(dtype), drawn("square", dtype=dtype)
        with np.errstate(over="ignore"):
            broken[2, 3] = value
        gradients = {"square": broken, "long": drawn("long", dtype=dtype)}
        found = step(made, {name: lift(array) for name, array in gradients.items()})
        for values in (found["square"], broken):
            assert values.dtype == dtype_named(dtype)
        wide = found["square"].astype(np.float64), broken.astype(np.float64)  # for NaN in bfloat16
        np.testing.assert_array_equal(*wide)
        self.agree(found["long"], directions(dtype).of(gradients)["long"])
        found = step(made, {"square": lift(drawn("square", dtype=dtype))})
        self.agree(found, directions(dtype).of({"square": drawn("square", dtype=dtype)}))

    def test_what_does_not_fit(self, lift: Lift) -> None:
        wider, long = lift(np.ones((8, 8))), lift(np.ones((4, 64), np.float32))
        made = directions()
        found = step(made, {"square": wider, "long": long})
        assert found["square"] is wider
        assert found["long"] is long
        assert not any(momentum.any() for momentum in made.arrays().values())

    def test_gradients_stay_as_they_are(self, lift: Lift) -> None:
        gradient = lift(drawn("square"))
        directions().of({"square": gradient})
        assert (gradient == lift(drawn("square"))).all()


def test_arrays_and_tensors_of_the_host_have_one_momentum() -> None:
    one, other = directions(memory=0.75), directions(memory=0.75)
    for seed, lift in enumerate([numpys, torchs, numpys]):
        wanted = step(one, {"square": drawn("square", seed)})
        found = step(other, {"square": lift(drawn("square", seed))})
        np.testing.assert_allclose(found["square"], wanted["square"], rtol=1e-3, atol=1e-4)


def test_a_momentum_comes_from_the_device_of_its_gradient() -> None:
    one, other = directions(memory=0.75), directions(memory=0.75)
    for seed, lift in enumerate([numpys, cudas, numpys, torchs, cudas]):
        wanted = step(one, {"square": drawn("square", seed)})
        found = step(other, {"square": lift(drawn("square", seed))})
        np.testing.assert_allclose(found["square"], wanted["square"], rtol=1e-3, atol=1e-4)
        assert ("square" in other.arrays()) == (lift is not cudas)


def test_arrays_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is an error
    assert directions().of({"square": drawn("square")})["square"].shape == (8, 8)


@pytest.mark.parametrize("name", ["square", "long", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_values_on_a_device_are_not_looked_at(name: str, dtype: str) -> None:
    """The host does not wait for them: those of the device ``meta`` it could not see."""
    torch = pytest.importorskip("torch")
    from aiops.client.strategies.torch_directions import _Stack

    matrix = as_matrix(SHAPES[name])
    assert matrix is not None
    gradients = [torch.empty(SHAPES[name], dtype=getattr(torch, dtype), device="meta")] * 3
    momenta = torch.empty((3, *matrix), device="meta")
    stack = _Stack(0.5, None)
    for _step in range(2):
        found, rows = stack.directions(gradients, list(momenta))
        momenta = torch.stack(list(rows))
        assert found.shape == momenta.shape == (3, *matrix)
        assert (found.dtype, momenta.dtype) == (gradients[0].dtype, torch.float32)
        assert found.device == momenta.device == gradients[0].device
    with pytest.raises(RuntimeError):  # what a look would be
        bool(found.max() < 1)


def test_a_stack_makes_what_each_alone_would() -> None:
    torch = pytest.importorskip("torch")
    from aiops.client.strategies.torch_directions import _Stack

    gradients, momenta = torch.randn(2, 3, 150, 200).unbind()
    together, alone = _Stack(0.5, None), _Stack(0.5, None)
    found = together.directions(list(gradients), list(momenta))
    for number in range(3):
        wanted = alone.directions([gradients[number]], [momenta[number]])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[number], other[0], rtol=1e-4, atol=1e-4)


class Recorded:
    """Stands for a device's graphs: does the work again, into the tensors of its results."""

    def __init__(self) -> None:
        self.captured_so_far = self.replayed = 0

    def captured(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = work()
        self.captured_so_far += 1

        def replay() -> None:
            self.replayed += 1
            for kept, new in zip(results, work(), strict=True):
                kept.copy_(new)

        return replay, results


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("most", [2, 5])
def test_stacks_are_as_matrices_alone(
    monkeypatch: pytest.MonkeyPatch, most: int, graphs: bool
) -> None:
    """As on a GPU: matrices of one shape together, and the work on them captured."""
    torch = pytest.importorskip("torch")
    from aiops.client.strategies import torch_directions
    from aiops.client.strategies.torch_directions import TorchDirections, _Stack

    made: list[int] = []
    old, recorded = TorchDirections._stack, Recorded()

    def stacked(self: TorchDirections, kind: Any, count: int) -> _Stack:
        found = old(self, kind, count)
        found._graphs = recorded if graphs else None  # type: ignore[assignment]
        made.append(count)
        assert len(self._stacks[kind]) <= 2
        return found

    monkeypatch.setattr(torch_directions, "MOST_ON_HOST", most)
    monkeypatch.setattr(TorchDirections, "_stack", stacked)
    # Directions in the memory of a graph are those of the next stack, too: a device copies them.
    monkeypatch.setattr(torch_directions, "host_copy", lambda tensor, into: tensor.clone())
    several_steps(lambda array: torch.from_numpy(array.copy()), TestContract.agree)
    assert set(made) == ({1, 2} if most == 2 else {2, 3, 5})
    assert (recorded.captured_so_far > 0) == graphs
    assert (recorded.replayed > 2) == graphs


def test_captures_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers of matrices change for good, to capture would take longer than it saves."""
    torch = pytest.importorskip("torch")
    from aiops.client.strategies import torch_directions

    recorded = Recorded()
    monkeypatch.setattr(torch_directions, "MOST_ON_HOST", 9)
    monkeypatch.setattr(torch_directions, "host_copy", lambda tensor, into: tensor.clone())
    made = Directions({"orthogonal": 0.5}, Layout([(name, "float32", (8, 8)) for name in "abcd"]))
    step(made, {"a": torch.ones(8, 8)})
    of_tensors = made._of_tensors.__self__  # type: ignore[union-attr]
    of_tensors._graphs[torch.device("cpu")] = recorded
    for number in range(120):
        names = "abcd"[: 2 + number // 3 % 3]
        step(made, {name: torch.ones(8, 8) for name in names})
    assert 3 <= recorded.captured_so_far <= 6


def test_a_momentum_keeps_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from aiops.client.strategies import torch_directions

    monkeypatch.setattr(torch_directions, "MOST_ON_HOST", 9)
    made = Directions({"orthogonal": 0.5}, Layout([(name, "float32", (8, 8)) for name in "abc"]))
    step(made, {name: torch.ones(8, 8) for name in "abc"})
    momenta = made.arrays()
    assert not any(np.shares_memory(momenta["a"], momenta[other]) for other in "bc")
    assert all(momentum.base.nbytes == momentum.nbytes for momentum in momenta.values())


def test_a_tensor_that_cannot_be_had_is_named() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(8, 8, device="meta"), torch.zeros(8, 8).to_sparse()):
        with pytest.raises(UsageError, match=r"'square'.* cannot be read"):
            directions().of({"square": tensor})


@pytest.mark.parametrize(("side", "takes_long"), [(64, False), (512, True)])
def test_large_matrices_take_long(side: int, takes_long: bool) -> None:
    """On any device, and beside a small one on another: the host waits for all of them."""
    torch = pytest.importorskip("torch")
    layout = Layout([("w", "float32", (side, side)), ("small", "float32", (2, 2))])
    array, small = np.zeros((side, side), np.float32), torch.zeros(2, 2)
    for gradient in (array, torch.from_numpy(array), torch.from_numpy(array).to("meta")):
        for other in (small, small.to("meta")):
            made = Directions({"orthogonal": 0.5}, layout)
            elsewhere = made.elsewhere({"w": gradient, "small": other})
            assert (elsewhere is not None) == takes_long


@each_row("lift", LIFTS)
def test_another_thread_waits_for_the_gradient(lift: Lift) -> None:
    """A device may still compute it, on the stream of the thread that asks for directions."""
    gradient, torch = np.ones((512, 512), np.float32), pytest.importorskip("torch")
    plan, layout = {"orthogonal": 0.5}, Layout([("w", "float32", (512, 512))])
    wanted = Directions(plan, layout).of({"w": gradient})["w"]
    given = lift(np.zeros_like(gradient))
    stream = torch.cuda.Stream() if lift is cudas else None
    with torch.cuda.stream(stream):
        if stream is not None:
            torch.cuda.synchronize()
            torch.cuda._sleep(1 << 28)  # a tenth of a second
        given += 1
        elsewhere = Directions(plan, layout).elsewhere({"w": given})
    assert elsewhere is not None
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(elsewhere).result(PATIENCE)["w"]
    TestContract.agree(found, wanted)


def test_tensors_of_other_frameworks() -> None:
    wanted = directions().of({"square": drawn("square")})["square"]
    found = directions().of({"square": Tensor(drawn("square"), CPU)})["square"]
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(UsageError, match=r"'square'.*a CUDA device"):
        directions().of({"square": Tensor(drawn("square"), copies=False)})  # type: ignore[dict-item]


def test_the_order_of_bytes_makes_no_difference() -> None:
    wanted = directions().of({"square": drawn("square")})["square"]
    found = directions().of({"square": drawn("square").astype(">f4")})["square"]
    np.testing.assert_array_equal(found, wanted)


@each_row("value", [-0.1, 1.0, "0.5", None, float("nan")])
def test_a_plan_that_is_none(value: Any) -> None:
    params = Params(Layout([("w", "float32", (2, 2))]))
    with pytest.raises(UsageError, match="orthogonal"):
        directions_for({"orthogonal": value}, params)


def test_without_a_word_in_the_plan_there_are_none() -> None:
    assert directions_for({}, Params(Layout([("w", "float32", (2, 2))]))) is None


def test_without_a_matrix_there_are_none() -> None:
    params = Params(Layout([("b", "float32", (2,)), ("longer", "float32", (65, 4))]))
    assert directions_for({"orthogonal": 0.5}, params) is None
