"""The workload of workers that train with AdamW, in their own loops."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aiops.lab.workloads.tasks import TaskWorkload
from aiops.model.layout import Array
from aiops.sim.cluster.workload import Gradient


class AdamWWorkload(TaskWorkload):
    """A task whose gradients are the steps that PyTorch's AdamW takes with them, at the rate 1.

    Moments are each worker's own (β₂ 0.95), gradients are clipped to a norm of 1, and no weight
    decays. A worker that subtracts such a gradient, times its rate, trains with AdamW.
    """

    def gradient(self, worker: int, seed: int) -> Gradient:
        """Return one worker's steps as a function of its parameters; it reuses their arrays."""
        plain = super().gradient(worker, seed)
        moved = {n: torch.zeros(a.shape) for n, a in self.task.initial(0).items()}
        optimizer = torch.optim.AdamW(moved.values(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
        steps = {name: tensor.numpy() for name, tensor in moved.items()}

        def step(params: Mapping[str, Array]) -> Mapping[str, Array]:
            for name, gradient in plain(params).items():
                steps[name][...] = 0
                moved[name].grad = torch.from_numpy(gradient)
            torch.nn.utils.clip_grad_norm_(moved.values(), 1.0)
            optimizer.step()
            for array in steps.values():
                array *= -1
            return steps

        return step
