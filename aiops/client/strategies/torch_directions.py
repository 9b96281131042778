"""Directions of PyTorch's tensors, made where the tensors are: `Directions` has the mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch as _torch

from aiops.client.params import Params
from aiops.client.torch_arrays import finish_copies, host_copy, page_lock, to_array
from aiops.codecs.base import LIMIT
from aiops.kernels.orthogonalise import largest, orthogonalised
from aiops.model.layout import Array, Tensor
from aiops.model.matrices import as_matrix

MOST_STACKED = 1 << 23
"""The most elements of matrices of which a device makes the directions at once.

To start a kernel takes the host longer than a GPU needs for a matrix of 1024 × 1024. Of larger ones
it is not so, and they are not captured, which would keep memory.
"""

_USES = 3
"""The use of a `_Stack` in which it is captured. Libraries allocate in the first."""


class TorchDirections:
    """The momentum of matrices whose gradients are tensors.

    All is computed in float32, also under ``torch.autocast``, on the tensor's device, which works
    on while the host asks for more: the host waits once, for the directions themselves. With
    products in bfloat16 a direction of low rank would be up to 50 times too long: set no less than
    ``torch.set_float32_matmul_precision("high")`` (TF32: a length within 1.4 %).

    On a device matrices of one shape are stacked, and on CUDA devices the work on a stack is
    captured as a graph, so that the host starts it with one call and not with 75 for each matrix.

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
        self._stacks: dict[tuple[Any, ...], _Stack] = {}
        self._pools: dict[Any, Any] = {}

    def of(self, gradients: Mapping[str, Any], room: Params | None) -> dict[str, Array]:
        """Return the directions of some gradients, on the host, in the gradients' dtypes.

        Those that do not fit their tensors are left out. Directions of gradients on CUDA devices
        are copied into the arrays of ``room``, if there is any: there is none if none is on one.
        """
        if room is not None:
            page_lock(room)
        fitting = {n: g.detach() for n, g in gradients.items() if self._fits(n, g)}
        here: dict[str, Any] = {}
        for names in self._alike(fitting):
            here |= self._directions(names, [fitting[name] for name in names], room)
        finish_copies({each.device for each in fitting.values()})
        return {name: to_array(here[name]) for name in fitting}

    def _fits(self, name: str, gradient: Any) -> bool:
        if type(gradient) not in (_torch.Tensor, _torch.nn.Parameter):
            return False  # spread over several processes, say
        tensor, has_values = self._tensors[name], gradient.device.type != "meta"
        fits = tuple(gradient.shape) == tensor.shape and gradient.layout == _torch.strided
        return fits and has_values and str(gradient.dtype) == f"torch.{tensor.dtype.name}"

    def _alike(self, gradients: Mapping[str, Any]) -> list[list[str]]:
        """Return the names of the matrices that are stacked; on the host each is alone."""
        found: dict[Any, list[list[str]]] = {}
        for name, gradient in gradients.items():
            stacks = found.setdefault(self._kind(name, gradient), [])
            on_host = gradient.device.type == "cpu"
            most = 1 if on_host else max(1, MOST_STACKED // gradient.numel())
            if not stacks or len(stacks[-1]) >= most:
                stacks.append([])
            stacks[-1].append(name)
        return [names for stacks in found.values() for names in stacks]

    def _kind(self, name: str, gradient: Any) -> tuple[Any, ...]:
        return gradient.device, gradient.dtype, as_matrix(self._tensors[name].shape)

    def _directions(
        self, names: Sequence[str], gradients: Sequence[Any], room: Params | None
    ) -> dict[str, Any]:
        """Return the directions of matrices that are alike; they may be on their way."""
        kind = (*self._kind(names[0], gradients[0]), len(names))
        stack = self._stacks.get(kind)
        if stack is None:
            stack = self._stacks[kind] = _Stack(*kind, self._memory, self._pools)  # type: ignore[call-arg]
        device = gradients[0].device
        momenta = [_torch.as_tensor(self._momenta[name], device=device) for name in names]
        found, momenta = stack.directions(gradients, momenta)
        on_host = device.type == "cpu"
        self._next |= {
            name: each.numpy() if on_host else each
            for name, each in zip(names, momenta, strict=True)
        }
        return {
            name: host_copy(
                each.reshape(gradient.shape).contiguous(), None if room is None else room[name]
            )
            for name, each, gradient in zip(names, found, gradients, strict=True)
        }


class _Stack:
    """Makes the directions of matrices of one shape, dtype and device, all at once."""

    def __init__(
        self,
        device: Any,
        dtype: Any,
        shape: tuple[int, int],
        count: int,
        memory: float,
        pools: dict[Any, Any],
    ) -> None:
        self._memory, self._pools, self._uses = memory, pools, 0
        self._values: Any = None
        self._momenta: Any = None
        self._made: Any = None
        self._replay: Any = None
        made = (count, *shape)
        self._captures = device.type == "cuda" and math.prod(made) <= MOST_STACKED
        if self._captures:  # a graph reads what is where it was when the graph was captured
            self._values = _torch.empty(made, dtype=dtype, device=device)
            self._momenta = _torch.empty(made, device=device)

    def directions(self, gradients: Sequence[Any], momenta: Sequence[Any]) -> tuple[Any, Any]:
        """Return the directions, and the momenta with the gradients, [count, m, n] each.

        The directions' memory may be that of the next: take a copy of them before.
        """
        shape = momenta[0].shape
        values = _stacked([each.reshape(shape) for each in gradients], self._values)
        before = _stacked(momenta, self._momenta)
        self._uses += 1
        if self._captures and self._uses == _USES:
            self._capture()
        if self._replay is None:
            return _directions(values, before, self._memory)
        self._replay()
        found, after = self._made
        return found, after.clone()

    def _capture(self) -> None:
        """Record what is to be done with a stack, for all further ones."""
        device = self._values.device
        if device not in self._pools:  # graphs that run one after the other share their memory
            self._pools[device] = _torch.cuda.graph_pool_handle()
        graph, pool = _torch.cuda.CUDAGraph(), self._pools[device]
        with (
            _torch.cuda.device(device),
            # Other threads may go on to use the device.
            _torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._made = _directions(self._values, self._momenta, self._memory)
        self._replay = graph.replay


def _stacked(matrices: Sequence[Any], into: Any) -> Any:
    """Return matrices as one tensor, [count, m, n]; a view of one that need not be ``into``."""
    if into is None and len(matrices) == 1:
        return matrices[0][None]
    return _torch.stack(list(matrices), out=into)


def _directions(values: Any, momenta: Any, memory: float) -> tuple[Any, Any]:
    """Return the directions of gradients, [count, m, n], and the momenta with them, float32."""
    # Chosen on the device: to look at the values here would be to wait for each matrix.
    most = largest(values).float()
    usable = most < LIMIT
    given = values.float()
    momenta = _torch.where(usable, momenta * memory + given * (1 - memory), momenta)
    with _as_they_are(momenta.device.type):
        found = orthogonalised(momenta)
    scaled = given / (most + (most == 0))  # squares of what is tiny are 0
    length = most * scaled.square().mean((1, 2), keepdim=True).sqrt()
    found = found * (length * max(momenta.shape[1:]) ** 0.5)
    return _torch.where(usable, found.to(values.dtype), values), momenta


def _as_they_are(kind: str) -> AbstractContextManager[Any]:
    """Return what keeps products on a kind of device in the dtype of their factors."""
    try:
        without: AbstractContextManager[Any] = _torch.autocast(kind, enabled=False)
    except RuntimeError:  # a kind that has no other products
        return nullcontext()
    return without
