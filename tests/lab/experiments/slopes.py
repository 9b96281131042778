"""The gradient of a task beside the slope of its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiops.client.params import Params
from aiops.model.layout import Ints, Layout

if TYPE_CHECKING:
    from aiops.lab.experiments.torch_task import TorchTask

_STEP = 2e-3  # to either side


def params_of(task: TorchTask, seed: int = 0) -> Params:
    """Return initial parameters of a task, as a client has them."""
    initial = task.initial(seed)
    params = Params(Layout.of(initial))
    for name, array in initial.items():
        params[name][...] = array
    return params


def is_slope(task: TorchTask, name: str, rows: Ints) -> bool:
    """Return whether a tensor's gradient is the slope of the cost, along a direction drawn."""
    import torch
    from torch.nn import functional

    params, out = params_of(task), params_of(task)
    task.gradient(params, rows, out)
    along = np.random.default_rng(0).normal(size=out[name].shape).astype(np.float32)
    ends = []
    for sign in (1, -1):
        params[name][...] += np.float32(sign * _STEP) * along
        with torch.no_grad():
            ends.append(float(functional.cross_entropy(*task.scores(task.weights(params), rows))))
        params[name][...] -= np.float32(sign * _STEP) * along
    slope = float((out[name] * along).sum())
    return bool(np.isclose((ends[0] - ends[1]) / (2 * _STEP), slope, rtol=0.1, atol=5e-3))
