"""Say a PyTorch optimizer's parameter groups to a server, as values of ``--set``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch as _torch

from aiops.algorithms.per_tensor import PerTensor, literal
from aiops.errors import UsageError, nearest

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum",),
    "Adagrad": ("eps",),
    "RMSprop": ("alpha", "eps"),
    "Adam": ("betas", "eps"),
    "AdamW": ("betas", "eps"),
}
"""By the class of ``torch.optim``, the options that the server's optimiser has for all tensors."""

_MUST_BE: Mapping[str, Any] = {
    "dampening": 0,
    "maximize": False,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
    "centered": False,
    "amsgrad": False,
}
"""Options that the server's optimisers have not, and the values with which that is the same."""

_GROUPED = ("lr", "weight_decay")

_GIVEN = re.compile(r"(group\d+\.)param\d+$")


def server_settings(optimizer: _torch.optim.Optimizer, module: _torch.nn.Module) -> list[str]:
    """Return the values of ``--set`` with which a server trains as a local optimizer does.

    They are for the policies whose server has an optimiser: ``asgd``, ``hardsync``, ``softsync``
    and others. Groups become patterns of tensor names::

        print(*(f"--set {each}" for each in server_settings(optimizer, model)))

    Parameters
    ----------
    optimizer
        One of ``torch.optim``: SGD, Adagrad, RMSprop, Adam or AdamW. Its groups may differ in
        ``lr`` and ``weight_decay``.
    module
        It names the parameters, as `RemoteOptimizer` does. Frozen ones are left out.

    Raises
    ------
    UsageError
        When the server has no such optimizer or option, groups differ in another option, or a
        parameter is not the module's.
    """
    kind = type(optimizer).__name__
    if type(optimizer) is not getattr(_torch.optim, kind, None) or kind not in _OPTIONS:
        raise UsageError(f"a server has no optimizer {kind}; {nearest(kind, _OPTIONS)}")
    names = {id(param): name for name, param in module.named_parameters() if param.requires_grad}
    of_names: dict[str, Mapping[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in names:
                of_names[names[id(param)].replace("_orig_mod.", "")] = group
            elif param.requires_grad:
                raise UsageError(f"group {number} has a parameter that is not the module's")
    groups = list({id(group): group for group in of_names.values()}.values())
    if not groups:
        raise UsageError("there is nothing to train: no parameter has requires_grad=True")
    shared = {option: _of_all(groups, option) for option in _OPTIONS[kind]}
    for option, value in _MUST_BE.items():
        if any(group.get(option, value) != value for group in groups):
            raise UsageError(f"a server's {kind} has no {option}: it must be {value}")
    found = [f"optimizer={_name(kind, shared, groups)}"]
    for option, value in shared.items():
        if option == "betas":
            found += [f"beta1={value[0]!r}", f"beta2={value[1]!r}"]
        elif option != "momentum" or value:
            found.append(f"{option}={value!r}")
    for option in _GROUPED:
        found += clauses(option, {name: float(of[option]) for name, of in of_names.items()})
    return found


def _name(kind: str, shared: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the server's name of an optimizer."""
    if kind == "RMSprop" and any(group["momentum"] for group in groups):
        raise UsageError("a server's RMSprop has no momentum: it must be 0")
    if kind != "SGD" or not shared["momentum"]:
        return kind.lower()
    return "nesterov" if _of_all(groups, "nesterov") else "momentum"


def _of_all(groups: Sequence[Mapping[str, Any]], option: str) -> Any:
    """Return the value that all groups have of an option."""
    if any(group[option] != groups[0][option] for group in groups):
        raise UsageError(
            f"groups differ in {option}, and a server has one for all tensors: only"
            f" {' and '.join(_GROUPED)} may differ"
        )
    return groups[0][option]


def clauses(setting: str, values: Mapping[str, float]) -> list[str]:
    """Return the values of ``--set`` that give each tensor its value of a setting, by name.

    >>> decays = {"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1}
    >>> clauses("weight_decay", decays)
    ['weight_decay=0.1', 'weight_decay=0.0@*.bias,1.weight']
    """
    by_value: dict[float, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    # The value that is not 0, so that the setting without a pattern is a usual one.
    usual = max(by_value, key=lambda value: (value != 0, len(by_value[value])))
    found = [f"{setting}={usual!r}"]
    for value, names in by_value.items():
        if value != usual:
            found.append(f"{setting}={value!r}@{','.join(_patterns(names, values))}")
    return found


def _patterns(names: Sequence[str], among: Iterable[str]) -> list[str]:
    """Return patterns that match these names and no others: by their last part, where that does.

    Names that `RemoteOptimizer` has given, ``group0.param3``, go by their group.
    """
    others = [name for name in among if name not in set(names)]
    found = dict[str, None]()
    for name in names:
        group = _GIVEN.match(name)
        if group and not any(other.startswith(group[1]) for other in others):
            found[group[1] + "*"] = None
            continue
        suffix = "." + name.rpartition(".")[2]
        alike = "." in name and not any(other.endswith(suffix) for other in others)
        found["*" + literal(suffix) if alike else literal(name)] = None
    return list(found)


class ServerValues:
    """The values that a server trains each tensor with.

    Parameters
    ----------
    policy, settings
        As the server announced them.
    """

    def __init__(self, policy: str, settings: Mapping[str, Any]) -> None:
        self._policy, self._settings = policy, settings
        self._others = PerTensor.of(str(settings.get("per_tensor", "")))

    def setting(self, option: str) -> str:
        """Return the setting that has an option: the workers' own optimiser's, if there is one."""
        inner = f"inner_{option}"
        return inner if inner in self._settings else option

    def rate(self, tensor: str, usual: float) -> float:
        """Return the learning rate of a tensor; ``usual``: that of tensors without their own."""
        return self._others.value(self.setting("lr"), tensor, usual)

    def check_decays(self, wanted: Mapping[str, float | None]) -> bool:
        """Check the weight decays of the groups here; return whether workers add them.

        They do where the policy has no setting for it: to its gradient, as ``torch.optim.SGD``
        does. Elsewhere the decay is the server's, and has to be the same.

        Parameters
        ----------
        wanted
            The decay of each tensor, by name; None: its group leaves it to the server.

        Raises
        ------
        UsageError
            When a decay is none, or a tensor's is another at the server; then the text has the
            flags with which it is the same.
        """
        asked = {name: value for name, value in wanted.items() if value is not None}
        for name, value in asked.items():
            if not 0 <= value < math.inf:
                raise UsageError(
                    f"the group of {name!r} has a weight_decay of {value}: it must be 0 or more"
                    " and finite"
                )
        key = self.setting("weight_decay")
        if key not in self._settings:
            return True
        usual = float(self._settings[key])
        has = {name: self._others.value(key, name, usual) for name in wanted}
        differing = next((name for name in asked if has[name] != asked[name]), None)
        if differing is not None:
            flags = " ".join(f"--set '{each}'" for each in clauses(key, {**has, **asked}))
            raise UsageError(
                f"the server trains {differing!r} with a weight decay of {has[differing]:g}, and"
                f" its group here has {asked[differing]:g}: start the server with {flags}"
            )
        return False
