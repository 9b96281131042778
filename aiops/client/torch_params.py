"""The tensors of a PyTorch program that are trained, their names, and their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch as _torch

from aiops.client.params import Params
from aiops.client.sync.client import Client
from aiops.client.torch_arrays import host_copy, to_tensor
from aiops.errors import UsageError, nearest

Pairs = list[tuple[str, Any]]
"""Names and tensors."""

_DTYPES = (_torch.float64, _torch.float32, _torch.float16, _torch.bfloat16)

_OPTIONS = {"params", "param_names", "lr", "initial_lr", "weight_decay", "name"}
"""The options that a parameter group may have; all others are settings of the server."""


@dataclass(slots=True, eq=False)
class TrainedTensor:
    """One parameter: the module's tensor, and the worker's copy."""

    name: str
    group: int
    param: Any
    rate: float = 1.0  # the group's lr with which its gradients are pushed as they are
    server: Any = None  # shares the memory of the worker's arena
    seen: int = 0  # the parameter's own version counter after it was last overwritten

    def host(self, gradient: Any, room: Params | None) -> Any:
        """Return a gradient as a CPU tensor of the registered dtype (see `host_copy`)."""
        into = None if room is None else room[self.name]
        return host_copy(gradient.to(self.server.dtype), into)


def groups_of(params: Any) -> list[tuple[dict[str, Any], Pairs]]:
    """Return, per parameter group, its options and its (name, tensor) pairs."""
    if isinstance(params, _torch.nn.Module):
        params = params.named_parameters()  # which names a tied weight once
    if isinstance(params, _torch.Tensor):
        raise UsageError("give the optimizer a module or a list of parameters, not one tensor")
    items = list(params)
    if not items or not isinstance(items[0], Mapping):
        items = [{"params": items}]
    return [_group(number, item) for number, item in enumerate(items)]


def _group(number: int, item: Any) -> tuple[dict[str, Any], Pairs]:
    if not isinstance(item, Mapping) or "params" not in item:
        raise UsageError(f"group {number} is not a dict with 'params': give groups, or parameters")
    strange = sorted(item.keys() - _OPTIONS)
    if strange:
        raise UsageError(
            f"group {number} sets {strange[0]!r}, but the rule and its settings are the server's:"
            " set it there (aiops.client.torch.server_settings returns the flags of a local"
            " optimizer); a group here has 'params', 'lr' and 'weight_decay'"
        )
    members = item["params"]
    if isinstance(members, set | frozenset):
        raise UsageError(f"group {number} is a set, whose order is random: give a list")
    members = [members] if isinstance(members, _torch.Tensor) else list(members)
    pairs = [
        member if isinstance(member, tuple) else (f"group{number}.param{index}", member)
        for index, member in enumerate(members)
    ]
    options = {key: item[key] for key in item if key not in ("params", "param_names")}
    # torch.compile wraps a module and renames its parameters; the other workers may not.
    return options, [(str(name).replace("_orig_mod.", ""), param) for name, param in pairs]


def sort_out(
    params: Any, *, alone: bool = True
) -> tuple[list[dict[str, Any]], list[TrainedTensor], Pairs]:
    """Return the groups for `torch.optim.Optimizer`, what is trained, and what is frozen.

    ``alone``: whether something must be trained, since there are no embeddings beside it.
    """
    groups: list[dict[str, Any]] = []
    tensors: list[TrainedTensor] = []
    frozen: Pairs = []
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, (options, pairs) in enumerate(groups_of(params)):
        trained: Pairs = []
        for name, param in pairs:
            if not isinstance(param, _torch.Tensor):
                raise UsageError(f"{name!r} is a {type(param).__name__}, not a tensor")
            if id(param) in names:
                raise UsageError(
                    f"{name!r} is the same tensor as {names[id(param)]!r}: give each one once, as"
                    " module.named_parameters() does"
                )
            if name in taken:
                raise UsageError(f"two parameters are called {name!r}: give them different names")
            names[id(param)] = name
            taken.add(name)
            if param.requires_grad:
                _check(name, param)
                trained.append((name, param))
            else:
                frozen.append((name, param))
        tensors.extend(TrainedTensor(name, number, param) for name, param in trained)
        members = {"params": [p for _, p in trained], "param_names": [n for n, _ in trained]}
        groups.append({**options, **members})
    if not tensors and alone:
        raise UsageError("there is nothing to train: no parameter has requires_grad=True")
    return groups, tensors, frozen


def _check(name: str, param: Any) -> None:
    """Refuse a parameter that cannot be trained remotely."""
    if _torch.nn.parameter.is_lazy(param):
        raise UsageError(
            f"{name!r} has no shape yet: run the lazy module once before the optimizer is made"
        )
    if param.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UsageError(
            f"{name!r} is {param.dtype}, which cannot be trained remotely; {known} can"
        )
    if param.layout != _torch.strided or param.is_meta:
        raise UsageError(f"{name!r} is sparse or has no memory: only dense tensors can be trained")
    if not param.is_leaf:
        raise UsageError(f"{name!r} was computed from other tensors: give those to the optimizer")


def fetch_into(
    params: Any,
    url: str | None = None,
    *,
    token: str | None = None,
    timeout: float = 60.0,
) -> int:
    """Overwrite parameters with the server's newest as an observer, to evaluate or to export them.

    They are those of ``Client.fetch(evaluation=True)``.

    Parameters
    ----------
    params
        As `RemoteOptimizer`'s; frozen or not. What the server does not have stays as it is.
    url, token, timeout
        As `Client`'s.

    Returns
    -------
    The model version.

    Raises
    ------
    NotReady
        When no worker has defined the model yet.
    UsageError
        When a tensor of the server's is missing here or has another shape; nothing has changed.
    """
    mine = {name: tensor for _, pairs in groups_of(params) for name, tensor in pairs}
    with Client(url, token=token, timeout=timeout) as client:
        url = client.url
        theirs = client.fetch(evaluation=True)
    for name, array in theirs.items():
        if name not in mine:
            raise UsageError(f"{name!r} of {url} is no parameter here; {nearest(name, mine)}")
        if tuple(mine[name].shape) != array.shape:
            raise UsageError(
                f"{name!r} has shape {array.shape} at {url}, but {tuple(mine[name].shape)} here"
            )
    with _torch.no_grad():
        for name, array in theirs.items():
            mine[name].copy_(to_tensor(array))
    return theirs.version
