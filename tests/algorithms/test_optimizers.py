"""Server-side optimisers are torch's, step by step, and say truly what may be done with them."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiops.algorithms import optimizers
from aiops.algorithms.optimizers import OPTIMIZERS, Optimizer, make
from aiops.errors import UsageError
from aiops.kernels import Spans, build
from tests.rows import each_row

SIZE = 50
RATE = 1 / 128
"""With decays that are powers of two, so that float32 holds the 1 − α·δ of torch's AdamW exactly.

Elsewhere its rounding, the same in every step, is the largest error of all: over 200 steps with
α = 0.01 and δ = 0.03 torch drifts 2.5e-6 from its own float64 results, and ours 1.1e-6.
"""
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
BACKENDS = ("numba", "numpy")


@dataclass(frozen=True)
class Given:
    optimizer: str = "sgd"
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    alpha: float = 0.99
    eps: float = 0.0
    weight_decay: float = 0.0
    per_tensor: str = ""


VARIANTS = {
    "defaults": Given(),
    "decay": Given(weight_decay=1 / 32),
    "eps": Given(eps=1e-3),
    "memory": Given(momentum=0.5, beta1=0.7, beta2=0.9, alpha=0.8, eps=1e-6, weight_decay=0.5),
    "no memory": Given(momentum=0.0, beta1=0.0, beta2=0.0, alpha=0.0, eps=1e-2),
}


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


class Run:
    """An optimiser at work on one tensor."""

    def __init__(self, given: Given, dtype: Any, backend: str) -> None:
        self.optimizer: Optimizer = make(given)
        rule, compute = self.optimizer.rule, np.dtype(dtype)
        if compute.itemsize == 2:
            compute = np.dtype(np.float32)
        self.kernel = build(rule, dtype, backend)
        self.base = np.linspace(-1.0, 1.0, SIZE).astype(compute)
        self.target = self.base if compute == np.dtype(dtype) else self.base.astype(dtype)
        self.state = [np.full(SIZE, start, compute) for start in rule.state.values()]
        self.t = 0

    def step(self, g: np.ndarray, step: float) -> None:
        self.t += 1
        spans = Spans.whole(SIZE, step, self.optimizer.scalars(self.t))
        self.kernel(spans, 1.0, self.base, g, self.target, self.state)

    def warmed(self) -> Run:
        """Take some steps, so that every state has a memory."""
        random = np.random.default_rng(3)
        for _ in range(5):
            self.step(random.standard_normal(SIZE).astype(self.target.dtype), 0.01)
        return self


def peer(torch: ModuleType, given: Given, w: np.ndarray, lr: float) -> tuple[Any, Any]:
    """Return torch's parameter and its optimiser of that name."""
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optim, decay = torch.optim, {"lr": lr, "weight_decay": given.weight_decay}
    betas = {"betas": (given.beta1, given.beta2)}
    eps = {"eps": given.eps} if given.eps else {}  # else torch's own default
    made = {
        "sgd": lambda: optim.SGD([parameter], **decay),
        "momentum": lambda: optim.SGD([parameter], momentum=given.momentum, **decay),
        "nesterov": lambda: optim.SGD(
            [parameter], momentum=given.momentum, nesterov=given.momentum > 0, **decay
        ),
        "adagrad": lambda: optim.Adagrad([parameter], **eps, **decay),
        "rmsprop": lambda: optim.RMSprop([parameter], alpha=given.alpha, **eps, **decay),
        "adam": lambda: optim.Adam([parameter], **betas, **eps, **decay),
        "adamw": lambda: optim.AdamW([parameter], **betas, **eps, **decay),
    }
    return parameter, made[given.optimizer]()


@pytest.mark.parametrize(
    ("variant", "dtype"),  # the mathematics in float64, and in float32 how errors add up
    [*((name, "float64") for name in VARIANTS), ("defaults", "float32"), ("decay", "float32")],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_torchs_over_200_steps(
    torch: ModuleType, name: str, variant: str, dtype: str
) -> None:
    """Noisy least squares, each side following its own gradient; compared after every step."""
    given = replace(VARIANTS[variant], optimizer=name)
    ours = Run(given, dtype, "numpy")  # whose bits Numba has in its own tests
    parameter, theirs = peer(torch, given, ours.base, RATE)
    random = np.random.default_rng(11)
    curvature = random.uniform(0.1, 2.0, SIZE).astype(dtype)
    for _ in range(200):
        wanted = random.standard_normal(SIZE).astype(dtype)
        ours.step(curvature * (ours.base - wanted), RATE)
        parameter.grad = torch.from_numpy(curvature * (parameter.detach().numpy() - wanted))
        theirs.step()
        expected = parameter.detach().numpy()
        assert np.linalg.norm(ours.base - expected) <= TOLERANCE[dtype] * np.linalg.norm(expected)


@each_row("name", OPTIMIZERS)
def test_without_a_learning_rate_only_the_memory_moves(torch: ModuleType, name: str) -> None:
    given = Given(name, weight_decay=0.1)
    ours = Run(given, np.float64, "numpy")
    parameter, theirs = peer(torch, given, ours.base, 0.0)
    before, g = ours.base.copy(), np.linspace(-2.0, 3.0, SIZE)
    for _ in range(3):
        ours.step(g, 0.0)
        parameter.grad = torch.from_numpy(g)
        theirs.step()
    np.testing.assert_array_equal(ours.base, before)
    np.testing.assert_array_equal(parameter.detach().numpy(), before)
    theirs_state = [v.numpy() for v in theirs.state[parameter].values() if getattr(v, "ndim", 0)]
    for one, two in zip(ours.state, theirs_state, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


@each_row("decay", [0.0, 0.25])
@each_row("name", OPTIMIZERS)
def test_the_whole_step_scales_with_the_step(name: str, decay: float) -> None:
    moves = []
    for step in (0.25, 0.5):
        run = Run(Given(name, weight_decay=decay), np.float64, "numpy").warmed()
        before = run.base.copy()
        run.step(np.cos(np.arange(SIZE)), step)
        moves.append(run.base - before)
        assert np.abs(moves[-1]).max() > 0
    np.testing.assert_allclose(moves[1], 2 * moves[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_16_bit_parameters_have_a_master_of_the_same_bits_on_both_backends(
    name: str, dtype: Any
) -> None:
    fused, plain = (
        Run(Given(name, weight_decay=0.01), dtype, backend).warmed() for backend in BACKENDS
    )
    assert np.isfinite(fused.base).all()
    assert not np.array_equal(fused.base, np.linspace(-1.0, 1.0, SIZE).astype(np.float32))
    assert fused.target.tobytes() == fused.base.astype(dtype).tobytes()
    for one, two in zip((fused.base, *fused.state), (plain.base, *plain.state), strict=True):
        assert one.tobytes() == two.tobytes()


def test_sgd_without_decay_is_the_plain_rule() -> None:
    assert make(Given("sgd")).rule.function is optimizers.sgd
    assert make(Given("sgd", weight_decay=0.1)).rule.function is not optimizers.sgd


@each_row("name", OPTIMIZERS)
def test_each_knows_its_name_and_its_scalars(name: str) -> None:
    optimizer = make(Given(name))
    assert optimizer.name == name
    assert len(optimizer.scalars(1)) == len(optimizer.rule.scalars)
    assert optimizer.tensor_scalars("w") == ()
    assert all(np.isfinite(optimizer.scalars(t)).all() for t in (1, 2, 1000, 10**9))


@each_row(("name", "eps"), [("adagrad", 1e-10), ("rmsprop", 1e-8), ("adam", 1e-8), ("adamw", 1e-8)])
def test_an_eps_of_zero_is_the_optimisers_own(name: str, eps: float) -> None:
    assert make(Given(name)).rule.constants["eps"] == eps
    assert make(Given(name, eps=0.5)).rule.constants["eps"] == 0.5


def test_the_corrections_of_adam_are_those_of_the_paper() -> None:
    unbias, root = make(Given("adam", beta1=0.5, beta2=0.75)).scalars(2)
    assert unbias == 1 / (1 - 0.25)
    assert root == pytest.approx((1 - 0.5625) ** -0.5, rel=1e-15)


def test_an_unknown_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no optimizer is called 'adamm'; did you mean 'adam"):
        make(Given("adamm"))


@each_row(
    ("wrong", "message"),
    [
        ({"momentum": 1.0}, r"optimizer sgd: momentum must be in \[0, 1\), not 1.0"),
        ({"beta1": -0.1}, r"beta1 must be in \[0, 1\), not -0.1"),
        ({"beta2": 1.5}, r"beta2 must be in \[0, 1\), not 1.5"),
        ({"alpha": float("nan")}, r"alpha must be in \[0, 1\), not nan"),
        ({"eps": -1e-8}, "eps must be 0 or more, not -1e-08"),
        ({"weight_decay": float("inf")}, "weight_decay must be 0 or more, not inf"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(Given(**wrong))


def test_the_example_in_the_docstring_runs() -> None:
    failed, run = doctest.testmod(optimizers)
    assert run
    assert not failed
