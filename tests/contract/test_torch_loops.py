"""A loop in PyTorch finds in a RemoteOptimizer what it finds in an optimizer of its own.

Each loop is run with both, under each policy. The one of its own takes no steps: it puts the
parameters there that the server's had after the same step. So the gradients, learning rates, losses
and buffers of both are the same to the last bit, if the loop sees no difference. Where
there is a GPU the loops run there, too.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import ServerThread

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler  # noqa: E402

from aiops.client.torch import RemoteOptimizer  # noqa: E402
from aiops.client.torch_arrays import to_array  # noqa: E402

STEPS = 4
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
POLICIES: dict[str, dict[str, Any]] = {
    "schedule-free": {},
    "asgd": {"optimizer": "adamw", "lr": 0.01},
    "fasgd": {},
    "hardsync": {"lr": 0.05},
    "diloco": {"local_steps": 3, "inner_lr": 0.01},
    "downpour": {"n_push": 2, "n_fetch": 3, "lr": 0.05},
}
Step = tuple[dict[str, Any], list[float], dict[str, Any]]
"""Gradients by name, the groups' learning rates, and the parameters after the step."""


class Net(torch.nn.Module):  # type: ignore[misc]
    """Tied weights, a norm with buffers, and matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.mix = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, seen: Any) -> Any:
        """Return scores, float32[batch, 7], of int64[batch]."""
        return self.head(torch.tanh(self.mix(self.norm(self.embed(seen)))))


class Noted(RemoteOptimizer):
    """A RemoteOptimizer that notes what its worker is given."""

    def begin(self, steps: list[Step]) -> None:
        """Note the steps there."""
        inner = self.worker.step

        def step(gradients: Any, factors: Any) -> Any:
            if callable(gradients):
                found: dict[str, Any] = {}

                def compute(params: Any) -> Any:
                    found.update(gradients(params))
                    return found

                receipt, pushed = inner(compute, factors), found
            else:
                pushed = {name: _array(each).copy() for name, each in gradients.items()}
                receipt = inner(gradients, factors)
            each = factors if isinstance(factors, dict) else dict.fromkeys(self.worker.params, 1.0)
            rates = [each[group["param_names"][0]] * self.server_lr for group in self.param_groups]
            gradient = {name: _array(value).copy() for name, value in pushed.items()}
            params = {name: value.copy() for name, value in self.worker.params.items()}
            steps.append((gradient, rates, params))
            return receipt

        self.worker.step = step  # type: ignore[method-assign]


class Given(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose parameters after each step are given."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, given: list[Step]) -> None:
        super().__init__(groups, {"lr": lr})
        self.given, self.steps, self.at = given, list[Step](), 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Note the gradients and the rates; take the parameters that are given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self.given[self.at][2]
        gradients: dict[str, Any] = {}
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                gradients[name] = p.grad.cpu().numpy().copy()
                with torch.no_grad():
                    p.copy_(torch.from_numpy(params[name]))
        self.steps.append((gradients, [group["lr"] for group in self.param_groups], params))
        self.at += 1
        return loss


def _array(gradient: Any) -> Any:
    return to_array(gradient.cpu()) if isinstance(gradient, torch.Tensor) else np.asarray(gradient)


def batch(number: int) -> tuple[Any, Any]:
    """Return a mini-batch: a number, and the next one."""
    drawn = torch.Generator().manual_seed(number)
    seen = torch.randint(7, (8,), generator=drawn)
    return seen, (seen + 1) % 7


def device_of(net: Any) -> Any:
    return next(net.parameters()).device


def cost(net: Any, number: int) -> Any:
    seen, following = (numbers.to(device_of(net)) for numbers in batch(number))
    return torch.nn.functional.cross_entropy(net(seen), following)


def plain(net: Any, opt: Any, scheduler: Any = None, clip: float | None = None) -> list[float]:
    """The usual loop; return its losses."""
    losses = []
    for number in range(STEPS):
        opt.zero_grad()
        loss = cost(net, number)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def clipped(net: Any, opt: Any) -> list[float]:
    return plain(net, opt, clip=0.1)


def step_lr(net: Any, opt: Any) -> list[float]:
    return plain(net, opt, lr_scheduler.StepLR(opt, 2, gamma=0.5))


def warm_up(net: Any, opt: Any) -> list[float]:
    return plain(net, opt, lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / 2)))


def one_cycle(net: Any, opt: Any) -> list[float]:
    most = [3 * group["lr"] for group in opt.param_groups]
    scheduler = lr_scheduler.OneCycleLR(opt, most, total_steps=STEPS + 1, cycle_momentum=False)
    return plain(net, opt, scheduler)


def one_after_the_other(net: Any, opt: Any) -> list[float]:
    parts = [lr_scheduler.LinearLR(opt, 0.5, 1, 2), lr_scheduler.CosineAnnealingLR(opt, 3)]
    return plain(net, opt, lr_scheduler.SequentialLR(opt, parts, [2]))


def plateau(net: Any, opt: Any) -> list[float]:
    return plain(net, opt, lr_scheduler.ReduceLROnPlateau(opt, patience=0))


def accumulated(net: Any, opt: Any) -> list[float]:
    """Each step with the gradients of three mini-batches."""
    losses = []
    for step in range(STEPS):
        for part in range(3):
            loss = cost(net, 3 * step + part) / 3
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses


def with_a_closure(net: Any, opt: Any) -> list[float]:
    def closure() -> Any:
        opt.zero_grad()
        loss = cost(net, 0)
        loss.backward()
        return loss

    return [opt.step(closure).item() for _ in range(STEPS)]


def bfloat16(net: Any, opt: Any) -> list[float]:
    losses = []
    for number in range(STEPS):
        opt.zero_grad()
        with torch.autocast(device_of(net).type, torch.bfloat16):
            loss = cost(net, number)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def scaled(net: Any, opt: Any) -> list[float]:
    """A scaler that unscales, clips, and leaves out the step that overflows; float16 on a GPU."""
    device = device_of(net).type
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    losses = []
    for number in range(STEPS + 1):
        opt.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = cost(net, number)
        scaler.scale(loss * (torch.inf if number == 1 else 1)).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 128.0
    return losses


def compiled(net: Any, opt: Any) -> list[float]:
    return plain(torch.compile(net, backend="eager"), opt)


def resumed(net: Any, opt: Any) -> list[float]:
    """The states of optimizer and scheduler go through a file in the middle."""

    def schedule() -> Any:
        return lr_scheduler.ExponentialLR(opt, 0.5)

    scheduler = schedule()
    losses = plain(net, opt, scheduler)
    rates, file = [group["lr"] for group in opt.param_groups], io.BytesIO()
    torch.save({"optimizer": opt.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"]
    scheduler, state = schedule(), torch.load(file)
    opt.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert rates == [group["lr"] for group in opt.param_groups]
    return losses + plain(net, opt, scheduler)


LOOPS = (
    *(plain, clipped, step_lr, warm_up, one_cycle, one_after_the_other, plateau, accumulated),
    *(with_a_closure, bfloat16, scaled, compiled, resumed),
)


def groups_of(net: Any, lr: float) -> list[dict[str, Any]]:
    """Two groups, of which the second has a rate of its own."""
    pairs = list(net.named_parameters())
    return [
        {"params": [pair for pair in pairs if "norm" not in pair[0]], "lr": lr},
        {"params": [pair for pair in pairs if "norm" in pair[0]], "lr": lr / 4},
    ]


@pytest.fixture(autouse=True)
def _sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow  # the first compilation loads the compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_sees_no_difference(policy: str, device: str) -> None:
    for loop in LOOPS:
        torch.manual_seed(0)
        remote = Net().to(device)
        steps: list[Step] = []
        settings = POLICIES[policy]
        with ServerThread(policy=policy, set=settings, workers=1, kernels="numpy") as server:
            with RemoteOptimizer(copy.deepcopy(remote), server.url) as probe:
                lr = probe.server_lr
            local = copy.deepcopy(remote)
            with Noted(groups_of(remote, lr), server.url) as opt:
                opt.begin(steps)
                losses = loop(remote, opt)
                trained = copy.deepcopy(remote).cpu().state_dict()  # before `close` pushes the rest
        given = Given(groups_of(local, lr), lr, steps)
        assert losses == loop(local, given), loop.__name__
        assert len(steps) == len(given.steps) >= STEPS, loop.__name__
        for (gradients, rates, _), (wanted, schedule, _) in zip(steps, given.steps, strict=True):
            assert rates == pytest.approx(schedule, rel=1e-12), loop.__name__
            assert gradients.keys() == wanted.keys()
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(gradient, wanted[name], f"{loop.__name__}: {name}")
        for name, value in local.state_dict().items():  # parameters and buffers
            assert torch.equal(value.cpu(), trained[name]), f"{loop.__name__}: {name}"
        assert remote.head.weight is remote.embed.weight
        assert not np.array_equal(steps[0][2]["mix.weight"], steps[-1][2]["mix.weight"])
