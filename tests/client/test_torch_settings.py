"""A server that is told what `server_settings` returns trains as the local optimizer does."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aiops import Client  # noqa: E402
from aiops.client import torch_settings  # noqa: E402
from aiops.client.torch import RemoteOptimizer, server_settings  # noqa: E402
from aiops.errors import NotReady, UsageError  # noqa: E402
from tests.support import ServerThread  # noqa: E402

nn, optim = torch.nn, torch.optim


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)
    ).double()


def groups_of(model: Any, *, lr: float, decay: float) -> list[dict[str, Any]]:
    """Return groups as they are usual: no decay of biases and norms, a slower head."""
    named = dict(model.named_parameters())
    still = [p for name, p in named.items() if name.endswith("bias") or name.startswith("1.")]
    head = [named["4.weight"]]
    rest = [p for p in named.values() if not any(p is other for other in still + head)]
    return [
        {"params": rest, "lr": lr, "weight_decay": decay},
        {"params": still, "lr": lr, "weight_decay": 0.0},
        {"params": head, "lr": lr / 4, "weight_decay": decay},
    ]


OPTIMIZERS = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.8}),
    "nesterov": (optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adagrad": (optim.Adagrad, {}),
    "rmsprop": (optim.RMSprop, {"alpha": 0.9}),
    "adam": (optim.Adam, {"betas": (0.8, 0.9)}),
    "adamw": (optim.AdamW, {"eps": 1e-6}),
}


def train(model: Any, optimizer: Any) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    for _ in range(30):
        x = torch.randn(16, 6, generator=random, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_server_trains_as_the_local_optimizer(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    local, remote = network(), network()
    optimizer = kind(groups_of(local, lr=1 / 64, decay=1 / 8), lr=1.0, **options)
    told = server_settings(optimizer, local)
    assert told[0] == f"optimizer={name}"
    assert told[-2:] == ["weight_decay=0.125", "weight_decay=0.0@*.bias,1.weight"]
    with ServerThread(policy="asgd", set=told, kernels="numpy") as server:
        named = list(remote.named_parameters())
        groups = groups_of(remote, lr=1 / 64, decay=1 / 8)
        for group in groups:  # with the same options; the names are the module's
            group["params"] = [pair for pair in named if any(pair[1] is p for p in group["params"])]
        with RemoteOptimizer(groups, server.url) as opt:
            assert [group["lr"] for group in opt.param_groups] == [1 / 64, 1 / 64, 1 / 256]
            found = train(remote, opt)
    for one, two in zip(found, train(local, optimizer), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_another_decay_than_the_server_s_is_refused_with_the_flags() -> None:
    model = network()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if n.endswith("weight")]},
        {
            "params": [(n, p) for n, p in named.items() if n.endswith("bias")],
            "weight_decay": 0.0,
        },
    ]
    flags = {"optimizer": "adamw", "weight_decay": 0.5}
    with ServerThread(policy="asgd", set=flags, kernels="numpy") as server:
        with pytest.raises(UsageError) as raised:
            RemoteOptimizer(groups, server.url)
        flags_named = "--set 'weight_decay=0.5' --set 'weight_decay=0.0@*.bias'"
        assert str(raised.value).endswith(f"start the server with {flags_named}")
        with Client(server.url) as client, pytest.raises(NotReady):
            client.fetch()  # the server has no model yet, and takes the one that is mended


def test_a_policy_without_weight_decay_gets_it_in_the_gradients_as_sgd_adds_it() -> None:
    """Each group's own; another value from the next step on; none that is negative."""
    moved = []
    for added in (True, False):
        kept, free = (torch.nn.Parameter(torch.tensor([value])) for value in (2.0, 3.0))
        groups: list[dict[str, Any]] = [{"params": kept}, {"params": free}]
        if added:
            groups[0]["weight_decay"] = 0.5
        with (
            ServerThread(policy="fasgd", kernels="numpy") as server,
            RemoteOptimizer(groups, server.url) as opt,
        ):
            for decay in (0.5, 0.25):
                for p in (kept, free):
                    p.grad = torch.ones(1)
                if added:
                    opt.param_groups[0]["weight_decay"] = decay
                else:
                    kept.grad += decay * kept.detach()
                opt.step()
            moved.append((kept.item(), free.item()))
            opt.param_groups[0]["weight_decay"] = -0.5
            with pytest.raises(UsageError, match=r"'group0.param0' has a weight_decay of -0.5"):
                opt.step()
            assert opt.version == 2
    assert moved[0] == moved[1]


def test_a_decay_that_changes_is_refused_where_it_is_the_server_s() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    with (
        ServerThread(policy="schedule-free", kernels="numpy") as server,
        RemoteOptimizer([{"params": [p], "weight_decay": 0.0}], server.url) as opt,
    ):
        opt.param_groups[0]["weight_decay"] = 0.5
        p.grad = torch.ones(1)
        with pytest.raises(UsageError, match=r"start the server with --set 'weight_decay=0.5'"):
            opt.step()
        assert opt.version == 0


def test_the_workers_own_optimizer_has_the_decay_under_local_training() -> None:
    model = network()
    names = [name for name, _param in model.named_parameters()]
    flags = {"inner_weight_decay": [0.25, "0@*.bias"], "local_steps": 2}
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0},
        {
            "params": [(n, p) for n, p in model.named_parameters() if "weight" in n],
            "weight_decay": 0.25,
        },
    ]
    with (
        ServerThread(policy="diloco", set=flags, workers=1, kernels="numpy") as server,
        RemoteOptimizer(groups, server.url) as opt,
    ):
        assert sorted(opt.worker.params) == sorted(names)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: optim.Adam(p, amsgrad=True), "no amsgrad: it must be False"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "no dampening"),
        (lambda p: optim.RMSprop(p, momentum=0.5), "no momentum"),
        (lambda p: optim.Rprop(p), r"no optimizer Rprop; did you mean 'RMSprop'\?"),
        (
            lambda p: optim.Adam([{"params": p[:1], "eps": 0.5}, {"params": p[1:]}]),
            "groups differ in eps",
        ),
        (lambda p: optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "that is not the module's"),
    ],
)
def test_what_a_server_cannot_do_is_refused(make: Any, match: str) -> None:
    model = network()
    with pytest.raises(UsageError, match=match):
        server_settings(make(list(model.parameters())), model)


def test_names_with_special_characters_become_patterns_of_themselves() -> None:
    found = torch_settings.clauses("lr", {"a[0]": 1.0, "a0": 2.0, "b, c": 2.0, "b": 1.0, "d": 2.0})
    assert found == ["lr=2.0", "lr=1.0@a[[]0],b"]
    found = torch_settings.clauses("lr", {"x, y*": 1.0, "z": 2.0, "w": 2.0})
    assert found == ["lr=2.0", "lr=1.0@x??y[*]"]


def test_names_that_were_given_become_patterns_of_their_groups() -> None:
    """As Hugging Face's Trainer makes them: two groups of parameters without names."""
    names = [f"group{group}.param{number}" for group in range(2) for number in range(11)]
    values = {name: 0.1 if name.startswith("group0") else 0.0 for name in names}
    found = torch_settings.clauses("weight_decay", values)
    assert found == ["weight_decay=0.1", "weight_decay=0.0@group1.*"]
    values["group1.param10"] = 0.2
    found = torch_settings.clauses("weight_decay", values)
    assert found[-1] == "weight_decay=0.2@group1.param10"
    assert "group1.*" not in found[1]


def test_its_examples() -> None:
    assert doctest.testmod(torch_settings).failed == 0
