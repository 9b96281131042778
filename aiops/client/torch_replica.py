"""A PyTorch module, as averaging sees it."""

from __future__ import annotations

from typing import Any

import torch as _torch

from aiops.averaging.ring_allreduce import Flat
from aiops.client.torch_arrays import to_array, to_tensor
from aiops.client.torch_params import sort_out
from aiops.model.arena import Arena
from aiops.model.layout import Array


class Module:
    """The trainable parameters of a module, on any device.

    Parameters that are frozen when it is made, and buffers (the running statistics of BatchNorm),
    stay the worker's own.

    Raises
    ------
    UsageError
        When a parameter cannot be trained so; the text names it.
    """

    def __init__(self, module: _torch.nn.Module) -> None:
        _groups, trained, _frozen = sort_out(module)
        self._params = {tensor.name: tensor.param for tensor in trained}

    def arrays(self) -> dict[str, Array]:
        """Return the parameters as arrays in host memory."""
        return {name: to_array(p.detach().cpu()) for name, p in self._params.items()}

    def copy_out(self, arena: Arena) -> None:
        """Copy the values into an arena."""
        for name, view in arena.views.items():
            to_tensor(view).copy_(self._params[name].detach())

    def prepare(self, mean: Flat, base: Arena) -> list[tuple[Any, Any, Any]]:
        """Return each parameter with its mean and base, on its own device."""
        found = []
        for name, values in mean.views:
            param = self._params[name]
            tensors = (to_tensor(a).reshape(param.shape) for a in (values, base.views[name]))
            found.append((param, *(tensor.to(param.device) for tensor in tensors)))
        return found

    @_torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def add(self, prepared: list[tuple[Any, Any, Any]]) -> None:
        """Add mean − base."""
        for param, mean, base in prepared:
            added = param.to(mean.dtype) + (mean - base.to(mean.dtype))
            param.copy_(_torch.where(param == base, mean, added))
