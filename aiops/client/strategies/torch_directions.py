"""Directions of PyTorch's tensors, made where the tensors are: `Directions` has the mathematics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch as _torch

from aiops.client.params import Params
from aiops.client.strategies.torch_graphs import Graphs
from aiops.client.torch_arrays import finish_copies, host_copy, lock_cuda_pages, to_array
from aiops.codecs.base import LIMIT
from aiops.kernels.orthogonalise import largest, orthogonalised
from aiops.model.layout import Array, Tensor
from aiops.model.matrices import as_matrix

MOST_STACKED = 1 << 23
"""The most elements of matrices of which a device makes the directions at once.

Until there are about as many, to start the kernels takes the host longer than they take a GPU. More
are not captured, either, which would keep memory.
"""

MOST_ON_HOST = 1
"""The most matrices that are stacked on the host, where there is nothing to start."""

_USES = 3
"""The use of a `_Stack` in which it is captured."""

_KEPT = 2
"""Stacks of one kind that are kept: if all matrices have gradients there are no more."""

_MOST_CAPTURED = 6
"""The most stacks of one kind that are captured in all: it holds up the device each time."""


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
        self._shapes = {name: as_matrix(tensors[name].shape) for name in momenta}
        self._stacks: dict[_Kind, dict[int, _Stack]] = {}
        self._graphs: dict[Any, Graphs] = {}  # by CUDA device
        self._captured: Counter[_Kind] = Counter()

    def of(self, gradients: Mapping[str, Any], room: Params | None) -> dict[str, Array]:
        """Return the directions of some gradients, on the host, in the gradients' dtypes.

        Those that do not fit their tensors are left out. Directions of gradients on CUDA devices
        are copied into the arrays of ``room``; None: into others.
        """
        fitting = {n: g.detach() for n, g in gradients.items() if self._fits(n, g)}
        lock_cuda_pages(room, fitting)
        here: dict[str, Any] = {}
        for kind, names in self._alike(fitting):
            here |= self._directions(kind, names, fitting, room)
        finish_copies({each.device for each in fitting.values()})
        return {name: to_array(here[name]) for name in fitting}

    def _fits(self, name: str, gradient: Any) -> bool:
        if type(gradient) not in (_torch.Tensor, _torch.nn.Parameter):
            return False  # spread over several processes, say
        tensor, has_values = self._tensors[name], gradient.device.type != "meta"
        fits = tuple(gradient.shape) == tensor.shape and gradient.layout == _torch.strided
        return fits and has_values and str(gradient.dtype) == f"torch.{tensor.dtype.name}"

    def _alike(self, gradients: Mapping[str, Any]) -> Iterator[tuple[_Kind, list[str]]]:
        """Yield the kind and the names of matrices that are stacked."""
        found: dict[_Kind, list[str]] = {}
        for name, gradient in gradients.items():
            kind = gradient.device, gradient.dtype, self._shapes[name]
            found.setdefault(kind, []).append(name)
        for kind, names in found.items():
            on_host = kind[0].type == "cpu"
            most = MOST_ON_HOST if on_host else MOST_STACKED // gradients[names[0]].numel()
            for begin in range(0, len(names), max(1, most)):
                yield kind, names[begin : begin + max(1, most)]

    def _directions(
        self, kind: _Kind, names: Sequence[str], gradients: Mapping[str, Any], room: Params | None
    ) -> dict[str, Any]:
        """Return the directions of matrices that are alike; they may be on their way."""
        device = kind[0]
        before = [_torch.as_tensor(self._momenta[name], device=device) for name in names]
        stack = self._stack(kind, len(names))
        was_captured = stack.captured
        found, momenta = stack.directions([gradients[name] for name in names], before)
        self._captured[kind] += stack.captured and not was_captured
        on_host = device.type == "cpu"
        self._next |= {
            name: each.numpy() if on_host else each
            for name, each in zip(names, momenta, strict=True)
        }
        return {
            name: host_copy(
                each.reshape(gradients[name].shape).contiguous(),
                None if room is None else room[name],
            )
            for name, each in zip(names, found, strict=True)
        }

    def _stack(self, kind: _Kind, count: int) -> _Stack:
        """Return that of ``count`` matrices of a kind; some others are kept."""
        kept, device = self._stacks.setdefault(kind, {}), kind[0]
        stack = kept.pop(count, None)
        if stack is None:
            if device.type == "cuda" and device not in self._graphs:
                self._graphs[device] = Graphs(device)
            may = self._captured[kind] < _MOST_CAPTURED
            stack = _Stack(self._memory, self._graphs.get(device) if may else None)
        kept[count] = stack  # the last now
        if len(kept) > _KEPT:  # the oldest goes, but one that is captured stays longer
            del kept[min(list(kept)[:-1], key=lambda each: kept[each].captured)]
        return stack


_Kind: TypeAlias = tuple[Any, Any, tuple[int, int] | None]
"""A device, a dtype, and a matrix's shape."""


class _Stack:
    """Makes the directions of a number of matrices of one kind, all at once.

    Parameters
    ----------
    memory
        µ.
    graphs
        Captures the work; None: that is not to be.
    """

    def __init__(self, memory: float, graphs: Graphs | None) -> None:
        self._memory, self._graphs, self._uses = memory, graphs, 0
        self._values: Any = None  # what a graph reads is where it was when the graph was captured
        self._momenta: Any = None
        self._made: Sequence[Any] = ()
        self._replay: Callable[[], None] | None = None

    @property
    def captured(self) -> bool:
        """True if the work is."""
        return self._replay is not None

    def directions(
        self, gradients: Sequence[Any], momenta: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Return the directions, [count, m, n], and the momenta with the gradients, [m, n] each.

        The directions' memory may be that of the next: take a copy of them before.
        """
        shape = momenta[0].shape
        values = _stacked([each.reshape(shape) for each in gradients], self._values)
        before = _stacked(momenta, self._momenta)
        self._uses += 1
        if self._uses == _USES and self._graphs is not None and values.numel() <= MOST_STACKED:
            self._capture(self._graphs, values, before)
        if self._replay is None:
            found, after = _directions(values, before, self._memory)
            if len(after) == 1:
                return found, list(after)
        else:
            self._replay()
            found, after = self._made
        # Each by itself, as a slice would keep the stack.
        return found, [each.clone() for each in after]

    def _capture(self, graphs: Graphs, values: Any, momenta: Any) -> None:
        """Record what is to be done, for all further steps."""
        values, momenta = values.clone(), momenta.clone()
        captured = graphs.captured(lambda: _directions(values, momenta, self._memory))
        if captured is not None:
            self._replay, self._made = captured
            self._values, self._momenta = values, momenta


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
