from __future__ import annotations

import copy
import gc
import importlib
import io
import logging
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.errors import BadPush, UsageError
from tests.support import PATIENCE, ServerThread

torch = pytest.importorskip("torch")

from aiops.client import torch as module_under_test  # noqa: E402
from aiops.client.torch import RemoteOptimizer, fetch_into, standalone  # noqa: E402
from aiops.client.torch_arrays import to_array  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """The first optimizer of a process makes torch load its compiler: that is no test's time."""
    torch.optim.SGD([weight(1.0)]).zero_grad()


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def asgd() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", lr=0.5, kernels="numpy") as server:
        yield server


def regression() -> tuple[Any, Any, Any]:
    """A small model and data for it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    x = torch.randn(16, 4)
    return model, x, x.sum(dim=1, keepdim=True)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y)


def weight(*values: complex, **options: Any) -> Any:
    """A parameter of these values."""
    return torch.nn.Parameter(torch.tensor(values, **options))


def pushed(opt: RemoteOptimizer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which every push of gradients is added."""
    seen: list[dict[str, Any]] = []
    step = opt.worker.step

    def spy(gradients: Any, lr_factor: Any) -> Any:
        seen.append(gradients)
        return step(gradients, lr_factor)

    monkeypatch.setattr(opt.worker, "step", spy)
    return seen


def fetched(server: ServerThread) -> dict[str, Any]:
    """Return the server's parameters."""
    with aiops.Client(server.url) as client:
        return client.fetch().numpy()


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


# ---------------------------------------------------------------- training


def test_a_lone_worker_trains_as_torch_sgd_does(asgd: ServerThread) -> None:
    model, x, y = regression()
    local = copy.deepcopy(model)
    sgd = torch.optim.SGD(local.parameters(), lr=0.5)
    with RemoteOptimizer(model, asgd.url) as opt:
        for _ in range(10):
            for net, optimizer in ((model, opt), (local, sgd)):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()
        assert opt.version == 10
    for mine, theirs in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_are_overwritten_in_place(asgd: ServerThread) -> None:
    model, x, y = regression()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    with RemoteOptimizer(model, asgd.url) as opt:
        loss_of(model, x, y).backward()
        opt.step()
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_the_receipt_says_what_became_of_the_push(asgd: ServerThread) -> None:
    p = weight(1.0)
    with RemoteOptimizer([p], asgd.url) as opt:
        assert opt.last is None
        p.grad = torch.ones(1)
        assert opt.step() is None
        receipt: Any = opt.last
        assert (receipt.version, receipt.staleness) == (1, 0)
        assert "1 parameters" in repr(opt)
        assert "asgd, version 1" in repr(opt)
        opt.worker._client._session.restarts.rolled_back = 3
        assert opt.rolled_back == 3


def test_two_workers_at_a_barrier_equal_one_with_both_mini_batches() -> None:
    model, x, y = regression()
    local, other = copy.deepcopy(model), copy.deepcopy(model)
    sgd = torch.optim.SGD(local.parameters(), lr=0.1)
    steps = 3
    for _ in range(steps):
        sgd.zero_grad()
        loss_of(local, x, y).backward()
        sgd.step()

    def work(net: Any, part: slice) -> None:
        with RemoteOptimizer(net, server.url) as opt:
            ready.wait(PATIENCE)
            for _ in range(steps):
                opt.zero_grad()
                loss_of(net, x[part], y[part]).backward()
                opt.step()

    ready = threading.Barrier(2)
    with ServerThread(policy="hardsync", lr=0.1, workers=2, kernels="numpy") as server:
        thread = threading.Thread(target=work, args=(other, slice(8, 16)))
        thread.start()
        work(model, slice(0, 8))
        thread.join(PATIENCE)
    for net in (model, other):
        for mine, theirs in zip(net.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(asgd: ServerThread, dtype: Any) -> None:
    p = weight(1.0, -2.0, dtype=dtype)
    with RemoteOptimizer([("w", p)], asgd.url) as opt:
        p.grad = torch.tensor([0.5, 1.0], dtype=dtype)
        opt.step()
    assert p.dtype == dtype
    assert p.tolist() == [0.75, -2.5]
    assert fetched(asgd)["w"].dtype.name == str(dtype).removeprefix("torch.")


def test_a_scalar_and_an_empty_parameter(asgd: ServerThread) -> None:
    scale, nothing = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.zeros(0, 3))
    with RemoteOptimizer([("scale", scale), ("nothing", nothing)], asgd.url) as opt:
        (3 * scale + nothing.sum()).backward()
        opt.step()
    assert scale.item() == 0.5
    assert fetched(asgd)["scale"].shape == ()


# ---------------------------------------------------------------- what is pushed


def test_contiguous_gradients_are_pushed_from_their_own_memory(
    asgd: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = regression()
    model.to(torch.bfloat16)
    with RemoteOptimizer(model, asgd.url) as opt:
        seen = pushed(opt, monkeypatch)
        loss_of(model, x.bfloat16(), y.bfloat16()).backward()
        opt.step()
        for name, p in model.named_parameters():
            assert seen[0][name].ctypes.data == p.grad.data_ptr(), name


@pytest.mark.parametrize(
    "gradient",
    [
        torch.arange(6.0).reshape(3, 2).t(),
        torch.tensor(1.0).expand(2, 3),
        torch.arange(6.0).reshape(2, 3).requires_grad_() * 2,
    ],
    ids=["transposed", "expanded", "differentiable"],
)
def test_gradients_of_any_strides(asgd: ServerThread, gradient: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(2, 3))
    with RemoteOptimizer([p], asgd.url) as opt:
        p.grad = gradient
        opt.step()
    torch.testing.assert_close(p.detach(), -0.5 * gradient.detach())


def test_channels_last_parameters_keep_their_strides(asgd: ServerThread) -> None:
    net = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    before, strides = net.weight.detach().clone(), net.weight.stride()
    with RemoteOptimizer(net, asgd.url) as opt:
        net(torch.randn(1, 3, 5, 5)).sum().backward()
        opt.step()
    assert net.weight.stride() == strides
    torch.testing.assert_close(net.weight.detach(), before - 0.5 * net.weight.grad)


def test_parameters_without_a_gradient_take_no_part(asgd: ServerThread) -> None:
    a, b = weight(1.0), weight(1.0)
    with RemoteOptimizer([("a", a), ("b", b)], asgd.url) as opt:
        a.grad = torch.ones(1)
        opt.step()
        assert (a.item(), b.item()) == (0.5, 1.0)
        opt.zero_grad()
        with pytest.raises(UsageError, match=r"no parameter has a gradient: call loss.backward"):
            opt.step()
        assert opt.version == 1


def test_zero_grad(asgd: ServerThread) -> None:
    p = weight(1.0)
    with RemoteOptimizer([p], asgd.url) as opt:
        p.grad = torch.ones(1)
        opt.zero_grad(set_to_none=False)
        assert p.grad.item() == 0
        opt.step()  # a gradient of zeros is a gradient
        assert (p.item(), opt.version) == (1.0, 1)
        opt.zero_grad()
        assert p.grad is None


def test_sparse_gradients_are_refused(asgd: ServerThread) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    with RemoteOptimizer(table, asgd.url) as opt:
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match=r"'weight' has a sparse gradient.*sparse=False"):
            opt.step()
        assert opt.version == 0


def test_a_gradient_that_is_not_finite_is_refused_by_name(asgd: ServerThread) -> None:
    a, b = weight(1.0), weight(2.0, 3.0)
    with RemoteOptimizer([("a", a), ("b", b)], asgd.url) as opt:
        a.grad, b.grad = torch.ones(1), torch.tensor([1.0, float("inf")])
        with pytest.raises(BadPush, match=r"'b' holds inf at \[1\]"):
            opt.step()
        assert (a.item(), b.tolist(), opt.version) == (1.0, [2.0, 3.0], 0)
        b.grad = torch.ones(2)
        opt.step()  # the connection and the optimizer live on
        assert (a.item(), b.tolist()) == (0.5, [1.5, 2.5])


def test_grad_scaler_unscales_steps_and_skips(asgd: ServerThread) -> None:
    p = weight(1.0)
    with RemoteOptimizer([p], asgd.url) as opt:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(p.sum()).backward()
        assert p.grad.item() == 1024.0
        scaler.step(opt)
        scaler.update()
        assert p.item() == 0.5
        opt.zero_grad()
        scaler.scale(p.sum() * torch.inf).backward()
        scaler.step(opt)
        scaler.update()
        assert (p.item(), opt.version, scaler.get_scale()) == (0.5, 1, 512.0)
        opt.zero_grad()
        scaler.scale(3 * p.sum()).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        scaler.step(opt)
        assert p.item() == pytest.approx(0.0, abs=1e-5)


def test_a_module_converted_after_construction_trains_on(asgd: ServerThread) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with RemoteOptimizer(model, asgd.url) as opt:
        model.double()
        model.weight.grad = torch.ones(1, 2, dtype=torch.float64)
        opt.step()
    server = fetched(asgd)["weight"]
    assert server.dtype == np.float32
    assert model.weight.dtype == torch.float64
    np.testing.assert_array_equal(model.weight.detach().numpy(), server.astype(np.float64))


# ---------------------------------------------------------------- closures


def test_a_closure_computes_the_gradients_and_its_loss_is_returned(asgd: ServerThread) -> None:
    p = weight(3.0)
    with RemoteOptimizer([p], asgd.url) as opt, torch.no_grad():

        def closure() -> Any:
            opt.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        loss = opt.step(closure)
        assert (loss.item(), p.item()) == (9.0, 0.0)
        assert not torch.is_grad_enabled()


@pytest.fixture
def rejecting() -> Iterator[ServerThread]:
    settings = {"lr": 0.5, "admission": "reject"}
    with ServerThread(policy="hardsync", set=settings, workers=1, kernels="numpy") as server:
        yield server


def test_a_policy_that_recomputes_needs_a_closure(rejecting: ServerThread) -> None:
    p = weight(3.0)
    with RemoteOptimizer([p], rejecting.url) as opt:
        p.grad = torch.ones(1)
        with pytest.raises(UsageError, match=r"hardsync may ask .* pass step\(closure\) a closure"):
            opt.step()
        assert (p.item(), opt.version) == (3.0, 0)


def test_a_refused_gradient_is_recomputed_on_the_newer_parameters(rejecting: ServerThread) -> None:
    mine, other = weight(4.0), weight(4.0)
    seen: list[float] = []

    def closure(p: Any, opt: RemoteOptimizer) -> Any:
        opt.zero_grad()
        loss = (p * p).sum() / 2
        loss.backward()
        seen.append(p.item())
        return loss

    with RemoteOptimizer([mine], rejecting.url) as a, RemoteOptimizer([other], rejecting.url) as b:
        b.step(lambda: closure(other, b))
        assert (other.item(), mine.item()) == (2.0, 4.0)
        loss = a.step(lambda: closure(mine, a))
        assert seen == [4.0, 4.0, 2.0]
        assert (loss.item(), mine.item()) == (2.0, 1.0)
        assert (a.worker.recomputed, a.version) == (1, 2)


# ---------------------------------------------------------------- learning rates


def test_a_group_s_lr_starts_as_the_server_s_and_may_be_another(asgd: ServerThread) -> None:
    a, b = weight(1.0), weight(1.0)
    groups = [{"params": [a]}, {"params": b, "lr": 0.125, "name": "slow"}]
    with RemoteOptimizer(groups, asgd.url) as opt:
        assert opt.server_lr == 0.5
        assert [group["lr"] for group in opt.param_groups] == [0.5, 0.125]
        assert opt.param_groups[1]["name"] == "slow"
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        opt.step()
        assert (a.item(), b.item(), b.grad.item()) == (0.5, 0.875, 1.0)
    assert sorted(fetched(asgd)) == ["group0.param0", "group1.param0"]


@pytest.mark.parametrize("policy", ["asgd", "sasgd", "softsync", "hardsync"])
def test_schedulers_change_the_step(policy: str) -> None:
    p = weight(4.0)
    with (
        ServerThread(policy=policy, lr=0.5, workers=1, kernels="numpy") as server,
        RemoteOptimizer([p], server.url) as opt,
    ):
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: [1.0, 0.5, 0.0][epoch])
        trace: list[float] = []
        for _ in range(3):
            p.grad = torch.ones(1)
            opt.step()
            if len(trace) < 2:
                scheduler.step()
            trace.append(p.item())
        assert trace == [3.5, 3.25, 3.25]


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_an_lr_that_is_none_is_refused(asgd: ServerThread, lr: float) -> None:
    p = weight(1.0)
    with RemoteOptimizer([p], asgd.url) as opt:
        opt.param_groups[0]["lr"] = lr
        p.grad = torch.ones(1)
        with pytest.raises(UsageError, match="group 0: lr must be 0 or more and finite"):
            opt.step()
        assert opt.version == 0


def test_the_rate_of_local_steps_has_another_name_on_the_server() -> None:
    """The server's ``lr`` is the outer one, and a group's is the inner one: AdamW's first steps."""
    moved = []
    for rate in (0.002, 0.0005):
        p = weight(1.0)
        with (
            ServerThread(
                policy="diloco", workers=1, set={"inner_lr": 0.002}, kernels="numpy"
            ) as server,
            RemoteOptimizer([p], server.url) as opt,
        ):
            assert opt.server_lr == 0.002
            opt.param_groups[0]["lr"] = rate
            p.grad = torch.ones(1)
            opt.step()
            assert not opt.last.pushed
            moved.append(1 - p.item())
    assert moved[0] == pytest.approx(4 * moved[1], rel=1e-3)
    assert moved[1] == pytest.approx(0.0005, rel=0.02)


TRAINED = [
    ("schedule-free", {}),
    ("schedule-free", {"orthogonal": False, "collect": 2}),
    ("fasgd", {}),
    ("asgd", {"optimizer": "adamw", "clip": 1.0}),
    ("dcasgd", {}),
    ("downpour", {"n_push": 2, "n_fetch": 2}),
]


@pytest.mark.parametrize(("policy", "settings"), TRAINED)
def test_a_scheduler_is_a_schedule_under_every_policy(
    policy: str, settings: dict[str, Any]
) -> None:
    """To the bit that of the server: a group's rate is what its steps are taken with."""
    found = []
    for own in (True, False):
        schedule = "constant" if own else "linear:8"
        chosen = {**settings, "lr": 0.25, "schedule": schedule}
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 3)
        with (
            ServerThread(policy=policy, set=chosen, kernels="numpy") as server,
            RemoteOptimizer(net, server.url) as opt,
        ):
            scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 8)
            for _ in range(6):
                opt.zero_grad()
                (net(torch.ones(2, 4)) ** 2).mean().backward()
                opt.step()
                if own:
                    scheduler.step()
            found.append(net.weight.detach().clone())
    if "n_push" in settings or "collect" in settings:  # of several gradients, the last one's
        assert torch.allclose(*found, atol=0.2)
        assert not torch.equal(found[0], torch.nn.Linear(4, 3).weight)
    else:
        assert torch.equal(*found)


def test_groups_may_have_schedules_of_their_own() -> None:
    """And a rate of 0 leaves a tensor where it is, while the others move."""
    a, b = weight(1.0), weight(1.0)
    with (
        ServerThread(policy="fasgd", lr=0.01, kernels="numpy") as server,
        RemoteOptimizer([{"params": [a]}, {"params": [b], "lr": 0.03}], server.url) as opt,
    ):
        assert [group["lr"] for group in opt.param_groups] == [0.01, 0.03]
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        opt.step()
        assert 1 - b.item() == pytest.approx(3 * (1 - a.item()), rel=1e-4)
        before = a.item(), b.item()
        opt.param_groups[0]["lr"] = 0.0
        opt.step()
        assert a.item() == before[0]
        assert b.item() < before[1]


def test_a_rate_of_0_on_the_server_is_no_rate_to_multiply() -> None:
    p = weight(1.0)
    with ServerThread(policy="asgd", set={"per_tensor": "lr=0@*"}, kernels="numpy") as server:
        with pytest.raises(UsageError, match=r"the server has 0 .*--set lr=...@PATTERN") as kept:
            RemoteOptimizer([{"params": [p], "lr": 0.03}], server.url)
        assert kept.traceback  # which refers to the optimizer: it is closed nevertheless
        with aiops.Client(server.url) as client:
            there = [member["role"] for member in client.stats()["workers"] if member["present"]]
            assert there == ["observer"]


def test_adding_a_group_is_refused(asgd: ServerThread) -> None:
    with RemoteOptimizer([weight(1.0)], asgd.url) as opt:
        with pytest.raises(UsageError, match="the model was defined on the server"):
            opt.add_param_group({"params": [weight(2.0)]})
        assert len(opt.param_groups) == 1


# ---------------------------------------------------------------- state


def test_state_goes_through_a_file_and_leaves_the_server_alone(
    asgd: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    p = weight(1.0)
    file = io.BytesIO()
    with RemoteOptimizer([("w", p)], asgd.url) as opt:
        torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)
        opt.param_groups[0]["lr"] = 0.25
        torch.save(opt.state_dict(), file)
        assert opt.state_dict()["aiops"] == {"policy": "asgd", "server_lr": 0.5, "version": 0}
        p.grad = torch.ones(1)
        opt.step()
    file.seek(0)
    again = weight(9.0)
    with RemoteOptimizer([("w", again)], asgd.url) as opt, caplog.at_level(logging.INFO):
        opt.load_state_dict(torch.load(file))
        assert (opt.param_groups[0]["lr"], opt.param_groups[0]["initial_lr"]) == (0.25, 0.5)
        assert said(caplog, "stay those of version 1") == 1
        assert (again.item(), opt.version, fetched(asgd)["w"].item()) == (0.75, 1, 0.75)
        again.grad = torch.ones(1)
        opt.step()
        assert again.item() == 0.5


def test_a_state_that_is_ahead_of_the_model_is_warned_of(
    asgd: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint at a server that begins anew: its parameters would be lost in silence."""
    net = torch.nn.Linear(2, 1)
    with RemoteOptimizer(net, asgd.url) as opt:
        state, checkpoint = opt.state_dict(), copy.deepcopy(net.state_dict())
        state["aiops"]["version"] = 7
        opt.load_state_dict(state)  # the module here is the model: it was the checkpoint's
        assert said(caplog, "of version 7") == 0
        net.load_state_dict(checkpoint)
        opt.load_state_dict(state)  # too late
        assert said(caplog, "of version 7, and the model of") == 1
        with RemoteOptimizer(torch.nn.Linear(2, 1), asgd.url) as another:
            another.load_state_dict(state)
    assert said(caplog, "load it into the module before the optimizer is made") == 2


def test_the_state_of_others_is_refused(asgd: ServerThread) -> None:
    p = weight(1.0)
    adam = torch.optim.Adam([p])
    with RemoteOptimizer([("w", p)], asgd.url) as opt:
        with pytest.raises(UsageError, match="the state of another optimizer"):
            opt.load_state_dict(adam.state_dict())
        state = opt.state_dict()
        state["param_groups"][0]["param_names"] = ["v"]
        with pytest.raises(UsageError, match=r"\(0, 'v'\).*\(0, 'w'\)"):
            opt.load_state_dict(state)
        state["param_groups"][0]["param_names"] = []
        with pytest.raises(UsageError, match=r"it has nothing.*\(0, 'w'\)"):
            opt.load_state_dict(state)


def test_it_cannot_be_pickled_or_copied(asgd: ServerThread) -> None:
    with RemoteOptimizer([weight(1.0)], asgd.url) as opt:
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(UsageError, match="make one in each process"):
                duplicate(opt)


# ---------------------------------------------------------------- which parameters


def test_names(asgd: ServerThread) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    groups = [
        {"params": [(f"first.{name}", p) for name, p in first.named_parameters()]},
        {"params": second.parameters()},
    ]
    with RemoteOptimizer(groups, asgd.url):
        pass
    names = {"first.weight", "first.bias", "group1.param0", "group1.param1"}
    assert set(fetched(asgd)) == names


def test_a_compiled_module_has_the_names_of_the_plain_one(asgd: ServerThread) -> None:
    pairs = [("0._orig_mod.weight", weight(1.0)), ("_orig_mod.1.weight", weight(1.0))]
    with RemoteOptimizer(pairs, asgd.url):
        assert list(fetched(asgd)) == ["0.weight", "1.weight"]


def test_tied_weights_are_one_parameter(asgd: ServerThread) -> None:
    net = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)}
    )
    net["head"].weight = net["embed"].weight
    before = net["embed"].weight.detach().clone()
    with RemoteOptimizer(net, asgd.url) as opt:
        assert list(fetched(asgd)) == ["embed.weight"]
        net["head"](net["embed"](torch.tensor([1]))).sum().backward()
        opt.step()
        assert net["head"].weight is net["embed"].weight
        torch.testing.assert_close(
            net["head"].weight.detach(), before - 0.5 * net["head"].weight.grad
        )
        with pytest.raises(UsageError, match=r"'head.weight' is the same tensor as 'embed.weight'"):
            RemoteOptimizer(net.named_parameters(remove_duplicate=False), asgd.url)


def test_frozen_parameters_stay_local(asgd: ServerThread) -> None:
    model, x, y = regression()
    model[0].requires_grad_(False)
    model[0].weight.data.fill_(0.25)
    with RemoteOptimizer(model, asgd.url) as opt:
        assert list(fetched(asgd)) == ["2.weight", "2.bias"]
        loss_of(model, x, y).backward()
        opt.step()
        assert bool((model[0].weight == 0.25).all())
        model[0].requires_grad_(True)
        loss_of(model, x, y).backward()
        with pytest.raises(UsageError, match=r"'0.weight' was frozen when this optimizer was made"):
            opt.step()
        assert opt.version == 1


def test_a_parameter_frozen_later_is_not_trained(asgd: ServerThread) -> None:
    model, x, y = regression()
    with RemoteOptimizer(model, asgd.url) as opt:
        model[0].requires_grad_(False)
        before = copy.deepcopy(model)
        loss_of(model, x, y).backward()
        opt.step()
        assert torch.equal(model[0].weight, before[0].weight)
        assert not torch.equal(model[2].weight, before[2].weight)


shared = weight(1.0)
refused = {
    "nothing": ([], "nothing to train"),
    "all frozen": (torch.nn.Linear(1, 1).requires_grad_(False), "no parameter has requires_grad"),
    "no parameters": (torch.nn.ReLU(), "nothing to train"),
    "a tensor": (weight(1.0), "not one tensor"),
    "not a tensor": ([np.ones(3)], "'group0.param0' is a ndarray, not a tensor"),
    "a set": ([{"params": {weight(1.0)}}], "whose order is random"),
    "not a group": ([{"params": [weight(1.0)]}, [weight(1.0)]], "group 1 is not a dict"),
    "no params": ([{"lr": 0.1}], "group 0 is not a dict with 'params'"),
    "an option": ([{"params": [weight(1.0)], "momentum": 0.9}], "sets 'momentum'.*server's"),
    "twice": ([{"params": [shared]}, {"params": [shared]}], "is the same tensor as"),
    "one name": ([("w", weight(1.0)), ("w", weight(1.0))], "two parameters are called 'w'"),
    "complex": ([("w", weight(1j))], "'w' is torch.complex64, .*; float64, float32"),
    "lazy": (torch.nn.LazyLinear(2), "'weight' has no shape yet: run the lazy module once"),
    "meta": (torch.nn.Linear(1, 1, device="meta"), "'weight' is sparse or has no memory"),
    "sparse": (
        [torch.eye(2).to_sparse().requires_grad_()],
        "'group0.param0' is sparse or has no memory",
    ),
    "no leaf": ([weight(1.0) * 2], "was computed from other tensors"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("which", refused)
def test_what_cannot_be_trained_is_refused_before_anything_is_sent(which: str) -> None:
    params, text = refused[which]
    with pytest.raises(UsageError, match=text):
        RemoteOptimizer(params, "aiops://127.0.0.1:1")


def test_another_model_than_the_server_s_is_refused(asgd: ServerThread) -> None:
    with (
        RemoteOptimizer(torch.nn.Linear(2, 2), asgd.url),
        pytest.raises(BadPush, match=r"'weight' has shape \(2, 2\), not \(2, 3\)"),
    ):
        RemoteOptimizer(torch.nn.Linear(3, 2), asgd.url)


# ---------------------------------------------------------------- the server's parameters


def test_a_later_worker_gets_the_server_s_parameters(
    asgd: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiops.client")
    a, b = weight(1.0), weight(7.0)
    with RemoteOptimizer([a], asgd.url) as first:
        assert said(caplog, "overwritten") == 0
        a.grad = torch.ones(1)
        first.step()
        with RemoteOptimizer([b], asgd.url) as second:
            assert (b.item(), second.version) == (0.5, 1)
            assert said(caplog, "1 of 1 parameters here were overwritten by version 1") == 1
            a.grad = torch.ones(1)
            first.step()
            assert b.item() == 0.5
            assert (second.refresh(), b.item()) == (2, 0.0)


def test_changing_parameters_by_hand_is_warned_of_once(
    asgd: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, y = regression()
    with RemoteOptimizer(model, asgd.url) as opt:
        loss_of(model, x, y).backward()
        opt.step()
        assert said(caplog, "were changed here") == 0
        for _ in range(2):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            opt.step()
        assert said(caplog, "'0.weight' and 3 other parameters were changed here") == 1


def test_fetch_into_a_module_elsewhere(asgd: ServerThread) -> None:
    model, x, y = regression()
    elsewhere = copy.deepcopy(model).requires_grad_(False)
    with RemoteOptimizer(model, asgd.url) as opt:
        loss_of(model, x, y).backward()
        opt.step()
        assert fetch_into(elsewhere, asgd.url) == 1
    assert torch.equal(elsewhere(x), model(x))
    for other, text in (
        (model[0], r"'0.weight' of .* is no parameter here"),
        (torch.nn.Sequential(torch.nn.Linear(1, 3)), r"'0.weight' has shape \(3, 4\)"),
    ):
        with pytest.raises(UsageError, match=text):
            fetch_into(other, asgd.url)


def test_batch_norm_s_buffers_stay_with_each_worker() -> None:
    def make() -> Any:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    x = torch.randn(32, 4)
    y = x.sum(dim=1, keepdim=True)
    nets = [make(), make()]
    with (
        ServerThread(policy="asgd", lr=0.05, kernels="numpy") as server,
        RemoteOptimizer(nets[0], server.url) as first,
        RemoteOptimizer(nets[1], server.url) as second,
    ):
        assert sorted(fetched(server)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        before = loss_of(nets[0], x, y).item()
        for step in range(20):
            net, opt = (nets[0], first) if step % 2 else (nets[1], second)
            opt.zero_grad()
            loss_of(net, x + step % 2, y).backward()
            opt.step()
        first.refresh()
        second.refresh()
        assert loss_of(nets[0], x, y).item() < before / 2
        judge = make()  # as documented: the newest parameters, and statistics that belong to them
        fetch_into(judge, server.url)
    assert torch.equal(nets[0][1].weight, nets[1][1].weight)
    assert not torch.equal(nets[0][0].running_mean, nets[1][0].running_mean)
    torch.optim.swa_utils.update_bn([x], judge)
    judge.eval()
    assert loss_of(judge, x, y).item() < before / 2
    torch.testing.assert_close(judge[0].running_mean, x.mean(dim=0))


@pytest.mark.parametrize("begun", [False, True])
def test_standalone_leaves_a_worker_one_gpu(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    before = dict(os.environ)
    try:
        os.environ.update(job)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        assert standalone() == (1, 2)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == (None if begun else "1")
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_process_group_is_warned_of(
    asgd: ServerThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for members, warned in ((1, 0), (3, 1)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda n=members: n)
        RemoteOptimizer([weight(1.0)], asgd.url).close()
        assert said(caplog, "joins this process and 2 others") == warned


# ---------------------------------------------------------------- the end


def test_closing(asgd: ServerThread) -> None:
    p = weight(1.0)
    with RemoteOptimizer([p], asgd.url) as opt:
        p.grad = torch.ones(1)
    opt.close()
    with pytest.raises(UsageError, match="closed"):
        opt.step()


LOCAL: dict[str, dict[str, Any]] = {
    "diloco": {"set": {"inner_lr": 0.02, "local_steps": 2}},
    "downpour": {"set": {"lr": 0.1, "n_push": 2, "n_fetch": 2}},
    "asgd": {"gate": "periodic:k_push=2,k_fetch=2"},
}


@pytest.mark.parametrize("policy", LOCAL)
def test_closing_pushes_the_last_steps_and_takes_over_the_model(policy: str) -> None:
    with ServerThread(policy=policy, workers=1, kernels="numpy", **LOCAL[policy]) as server:
        p, chosen = weight(1.0), weight(1.0)
        opt = RemoteOptimizer([("p", p), ("chosen", chosen)], server.url)
        for _ in range(3):
            p.grad, chosen.grad = torch.ones(1), torch.ones(1)
            opt.step()
        assert opt.worker.unpushed == 1
        with torch.no_grad():
            chosen.fill_(7.0)  # as a framework does that goes back to the best weights at the end
        opt.close()
        with aiops.Client(server.url) as client:
            theirs = client.fetch()
        assert theirs.version == 2
        assert p.item() == theirs["p"][0] < 1
        assert chosen.item() == 7


SCHEDULE_FREE: dict[str, Any] = {
    "policy": "schedule-free",
    "set": {"schedule": "constant"},
    "kernels": "numpy",
}


def test_after_closing_the_model_is_where_it_is_evaluated() -> None:
    with ServerThread(**SCHEDULE_FREE) as server, aiops.Client(server.url) as client:
        p, chosen = weight(1.0), weight(1.0)
        opt = RemoteOptimizer([("p", p), ("chosen", chosen)], server.url)
        for _ in range(5):
            p.grad, chosen.grad = torch.ones(1), torch.ones(1)
            opt.step()
        with torch.no_grad():
            chosen.fill_(7.0)
        trained = client.fetch()["p"][0]
        assert p.item() == trained
        opt.close()
        assert p.item() == client.fetch(evaluation=True)["p"][0] != trained
        assert chosen.item() == 7


def test_a_model_that_cannot_be_fetched_at_the_end_stays_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ServerThread(**SCHEDULE_FREE) as server:
        p = weight(1.0)
        opt = RemoteOptimizer([p], server.url, timeout=0.1)
        p.grad = torch.ones(1)
        opt.step()
        trained = p.item()
    opt.close()
    assert p.item() == trained != 1
    assert said(caplog, "is evaluated could not be fetched") == 1


@pytest.mark.parametrize("policy", [*LOCAL, "fasgd"])
def test_steps_that_are_lost_without_a_close_are_warned_of(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = LOCAL.get(policy, {})
    with ServerThread(policy=policy, workers=1, kernels="numpy", **options) as server:
        for closed in (True, False):
            p = weight(1.0)
            opt = RemoteOptimizer([p], server.url)
            for _ in range(3):
                p.grad = torch.ones(1)
                opt.step()
            if closed:
                opt.close()
            del opt
            gc.collect()
            lost = 0 if closed or policy == "fasgd" else 1
            assert said(caplog, "has not pushed its last 1 steps") == lost


def test_an_optimizer_nobody_refers_to_says_goodbye(asgd: ServerThread) -> None:
    opt = RemoteOptimizer([weight(1.0)], asgd.url)
    torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)
    worker = opt.worker
    del opt
    gc.collect()
    with pytest.raises(UsageError, match="closed"):
        worker.step({"group0.param0": np.ones(1, np.float32)})


def test_without_torch_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "aiops.client.torch")
    monkeypatch.setattr(aiops.client, "torch", module_under_test)  # and put it back afterwards
    with pytest.raises(ImportError, match=re.escape("pip install 'aiops-ps[torch]'")):
        importlib.import_module("aiops.client.torch")


# ---------------------------------------------------------------- accelerators


def copied(gradient: Any) -> Any:
    """Return a copy of what was pushed, as an array."""
    if isinstance(gradient, torch.Tensor):
        gradient = to_array(gradient.cpu())
    return gradient.copy()


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_are_made_where_gradients_are(
    device: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that comes of them is that of a worker with arrays."""
    model, x, y = regression()
    model, x, y = (each.to(device=device, dtype=dtype) for each in (model, x, y))
    gradients: list[dict[str, Any]] = []
    with ServerThread(policy="schedule-free", lr=0.1, kernels="numpy") as server:
        with RemoteOptimizer(model, server.url) as opt:
            start, seen = opt.worker.params.copy(), pushed(opt, monkeypatch)
            for _ in range(5):
                opt.zero_grad()
                loss_of(model, x, y).backward()
                opt.step()
                kinds = {name: type(gradient) for name, gradient in seen[-1].items()}
                assert kinds.pop("0.weight") is torch.Tensor
                assert set(kinds.values()) == {np.ndarray}
                assert seen[-1]["0.weight"].device.type == device
                gradients.append({name: copied(each) for name, each in seen[-1].items()})
        wanted = fetched(server)
    with ServerThread(policy="schedule-free", lr=0.1, kernels="numpy") as server:
        with aiops.Worker(server.url, start) as worker:
            for each in gradients:
                worker.step(each)
        found = fetched(server)
    for name, array in wanted.items():
        close = 1e-5 if dtype == torch.float32 else 1e-2
        np.testing.assert_allclose(found[name].astype(float), array.astype(float), atol=close)


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(asgd: ServerThread, dtype: Any) -> None:
    p = weight(1.0, -2.0, dtype=dtype, device="cuda")
    with RemoteOptimizer([("w", p)], asgd.url) as opt:
        for _ in range(2):
            opt.zero_grad()
            (p * torch.tensor([0.5, 1.0], dtype=dtype, device="cuda")).sum().backward()
            opt.step()
    assert p.is_cuda
    assert p.tolist() == [0.5, -3.0]


# ---------------------------------------------------------------- the example


@pytest.mark.slow
def test_the_example_learns_at_a_given_server(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import pytorch_loop

    with ServerThread() as server:
        assert pytorch_loop.main([server.url]) == 0
        with aiops.Client(server.url) as client:
            assert client.fetch().version == pytorch_loop.STEPS
    found = re.search(r"test accuracy: ([\d.]+)%", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 85


@pytest.mark.slow
def test_the_example_starts_a_server_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import pytorch_loop

    monkeypatch.delenv("AIOPS_URL", raising=False)
    monkeypatch.setattr(pytorch_loop, "STEPS", 5)
    assert pytorch_loop.main([]) == 0
    assert "test accuracy: " in capsys.readouterr().out


class TestLocalSteps:
    """Policies with local steps: the loop stays the same."""

    def test_downpour_steps_here_and_there(self) -> None:
        settings = {"lr": 0.5, "n_push": 2, "n_fetch": 2}
        with ServerThread(policy="downpour", set=settings) as server:
            model = torch.nn.Linear(2, 1, bias=False)
            with RemoteOptimizer(model, server.url) as opt:
                start = model.weight.detach().clone()
                assert opt.server_lr == 0.5
                for step in range(1, 4):
                    opt.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    opt.step()
                    assert opt.last is not None
                    assert opt.last.pushed == (step == 2)
                    torch.testing.assert_close(model.weight.detach(), start - 0.5 * step)
            end = server.call(lambda s: s.engine.store.current.arena.views["weight"].copy())
            torch.testing.assert_close(
                torch.from_numpy(end), start - 1.5
            )  # closing pushed the rest

    def test_an_error_in_the_loop_pushes_nothing_more(self) -> None:
        with ServerThread(policy="downpour", set={"n_push": 5, "n_fetch": 5}) as server:
            model = torch.nn.Linear(2, 1)

            def fail() -> None:
                with RemoteOptimizer(model, server.url) as opt:
                    model(torch.ones(1, 2)).sum().backward()
                    opt.step()
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                fail()
            assert server.call(lambda s: s.engine.report()["version"]) == 0
