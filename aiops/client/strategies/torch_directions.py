"""Directions of PyTorch's tensors, made where the tensors are: `Directions` has the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch as _torch

from aiops.client.torch_arrays import HostCopy, finish_copies, to_array
from aiops.codecs.base import LIMIT
from aiops.kernels.orthogonalise import orthogonalised
from aiops.model.layout import Array, Tensor


class TorchDirections:
    """The momentum of matrices whose gradients are tensors.

    All is computed in float32, also under ``torch.autocast``, on the tensor's device, which works
    on while the host asks for more: the host waits once, for the directions themselves. With
    products in bfloat16 a direction of low rank would be up to 50 times too long: set no less than
    ``torch.set_float32_matmul_precision("high")`` (TF32: a length within 1.4 %).

    Parameters
    ----------
    memory
        µ.
    momenta
        float32[m, n], by name of the matrix: arrays, or tensors on any device.
    following
        Is given the momenta with the last gradients: arrays of those on the host, else tensors.
    tensors
        The model's, by name.
    """

    def __init__(
        self,
        memory: float,
        momenta: Mapping[str, Any],
        following: dict[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._memory, self._tensors = memory, tensors
        self._momenta, self._next = momenta, following
        self._copies = {name: HostCopy() for name in momenta}

    def of(self, gradients: Mapping[str, Any]) -> dict[str, Array]:
        """Return the directions of some gradients, on the host, in the gradients' dtypes.

        Those that do not fit their tensors are left out. The memory of a direction that was copied
        from a device is that of the next, too.
        """
        made = {
            name: self._direction(name, gradient.detach())
            for name, gradient in gradients.items()
            if self._fits(name, gradient)
        }
        here = {name: self._copies[name].of(each) for name, each in made.items()}
        finish_copies({each.device for each in made.values()})
        return {name: to_array(each) for name, each in here.items()}

    def _fits(self, name: str, gradient: Any) -> bool:
        if type(gradient) not in (_torch.Tensor, _torch.nn.Parameter):
            return False  # spread over several processes, say
        tensor, has_values = self._tensors[name], gradient.device.type != "meta"
        fits = tuple(gradient.shape) == tensor.shape and gradient.layout == _torch.strided
        return fits and has_values and str(gradient.dtype) == f"torch.{tensor.dtype.name}"

    def _direction(self, name: str, gradient: Any) -> Any:
        momentum = _torch.as_tensor(self._momenta[name], device=gradient.device)
        values = gradient.reshape(momentum.shape)
        # Chosen on the device: to look at the values here would be to wait for each matrix.
        largest = values.abs().amax().float()
        usable = largest < LIMIT
        given = values.float()
        new = momentum * self._memory + given * (1 - self._memory)
        momentum = _torch.where(usable, new, momentum)
        self._next[name] = momentum.numpy() if momentum.device.type == "cpu" else momentum
        with _as_they_are(momentum.device.type):
            found = orthogonalised(momentum)
        scaled = given / (largest + (largest == 0))  # squares of what is tiny are 0
        length = largest * scaled.square().mean().sqrt()
        found = found * (length * max(momentum.shape) ** 0.5)
        found = _torch.where(usable, found.to(values.dtype), values)
        return found.reshape(gradient.shape).contiguous()


def _as_they_are(kind: str) -> AbstractContextManager[Any]:
    """Return what keeps products on a kind of device in the dtype of their factors."""
    try:
        without: AbstractContextManager[Any] = _torch.autocast(kind, enabled=False)
    except RuntimeError:  # a kind that has no other products
        return nullcontext()
    return without
