"""Orthogonalise the momentum of matrices, which workers push in the place of gradients.

A gradient of a matrix is nearly of low rank: a few directions hold nearly all of it. A step along
it is as long as those allow, and makes next to nothing of all others. Orthogonalised, all
directions are of one length (Jordan et al. 2024, *Muon*; Bernstein & Newhouse 2024, *Old optimizer,
new norm*). So a matrix takes long steps with small changes of what it does, and a stale gradient is
less wrong: `schedule-free` has measured what that is worth.

It is done where the gradient is made, since it takes matrix products: as many as 2 + 1700/n with a
mini-batch of 128 rows (m × n, m ≤ n, m a multiple of 128), and a training step takes three.
PyTorch's tensors stay on their device for it (`torch_directions`). Servers go on with updates
element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from aiops.client.dlpack import on_host
from aiops.client.encode_push import little_endian
from aiops.client.params import MakeRoom, Params
from aiops.client.strategies.plan import Plan
from aiops.codecs.base import LIMIT
from aiops.kernels.orthogonalise import operations, orthogonalised
from aiops.model.layout import Array, Layout
from aiops.model.matrices import as_matrix

_OfTensors: TypeAlias = Callable[[Mapping[str, Any], Params | None], dict[str, Array]]

_LONG = 1e8
"""Operations that take a millisecond or a few."""


def _no_room() -> None:
    return None


class Directions:
    """The momentum of the matrices of one worker.

    The plan's key ``orthogonal`` is the memory µ of the momentum, in [0, 1).

    Parameters
    ----------
    plan
        The client plan.
    layout
        The model's tensors, of which some are matrices (`aiops.model.matrices.as_matrix`).

    Raises
    ------
    UsageError
        When the plan's value is none.
    """

    def __init__(self, plan: Mapping[str, Any], layout: Layout) -> None:
        self._memory = Plan(plan).real("orthogonal", 0, 1)
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        matrices = {name: as_matrix(tensor.shape) for name, tensor in self._tensors.items()}
        shapes = {name: matrix for name, matrix in matrices.items() if matrix}
        # Arrays, and tensors where a gradient's device is not the host.
        self._momenta: dict[str, Any] = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
        self._next: dict[str, Any] = {}  # with the last gradients, until they count
        self._operations = sum(operations(*shape) for shape in shapes.values())
        # Makes those of PyTorch's tensors, once there is one.
        self._of_tensors: _OfTensors | None = None

    @property
    def names(self) -> frozenset[str]:
        """Those of the tensors that are matrices."""
        return frozenset(self._momenta)

    def of(
        self, gradients: Mapping[str, Array], make_room: MakeRoom = _no_room
    ) -> dict[str, Array]:
        """Return the gradients of a mini-batch, with directions in the place of matrices'.

        A direction has the shape and dtype of its gradient, and about its length: less if the
        momentum is of low rank. (Of one length, the many small gradients of what is learnt by heart
        would count as much as the few large ones.) Of a momentum below 1e-30 it is of zeros. A
        gradient that is not of its tensor's shape or dtype, or not finite and below 1e18, is
        returned as it is, and refused where it is pushed. Gradients count in later directions once
        `took` is called.

        Parameters
        ----------
        gradients
            By tensor.
        make_room
            Returns arrays into which directions of PyTorch's tensors on CUDA devices are copied.
            Default: they get arrays of their own.

        Raises
        ------
        UsageError
            When a matrix's gradient cannot be read as an array (`on_host`).
        """
        self._next.clear()
        of_torch = {n: g for n, g in gradients.items() if n in self._momenta and _is_of_torch(g)}
        made = self._directions_in_torch(of_torch, make_room) if of_torch else {}
        return {
            name: made[name] if name in made else self._direction(name, gradient)
            for name, gradient in gradients.items()
        }

    def took(self) -> None:
        """Have the gradients of the last `of` count in later directions: their step was taken."""
        self._momenta.update(self._next)
        self._next.clear()

    def elsewhere(
        self, gradients: Mapping[str, Any], make_room: MakeRoom = _no_room
    ) -> Callable[[], dict[str, Array]] | None:
        """Return what does as `of` in another thread, if it takes more than milliseconds; or None.

        On any device: `of` waits for it, and for the gradients that it still computes.
        """
        if self._operations < _LONG:
            return None
        devices = {each.device for each in gradients.values() if _is_of_torch(each)}
        if not devices:
            return lambda: self.of(gradients)
        from aiops.client.torch_arrays import on_same_streams

        room = make_room() if any(each.type == "cuda" for each in devices) else None
        return on_same_streams(devices, lambda: self.of(gradients, lambda: room))

    def _directions_in_torch(
        self, gradients: Mapping[str, Any], make_room: MakeRoom
    ) -> dict[str, Array]:
        """Return the directions of tensors, without those that do not fit."""
        if self._of_tensors is None:
            from aiops.client.strategies.torch_directions import TorchDirections

            made = TorchDirections(self._memory, self._momenta, self._next, self._tensors)
            self._of_tensors = made.of
        away = any(each.is_cuda for each in gradients.values())
        return self._of_tensors(gradients, make_room() if away else None)

    def _direction(self, name: str, gradient: Array) -> Array:
        momentum = self._momenta.get(name)
        if momentum is None:
            return gradient
        values, tensor = little_endian(on_host(name, gradient)), self._tensors[name]
        if values.shape != tensor.shape or values.dtype != tensor.dtype:
            return gradient
        with np.errstate(invalid="ignore"):  # a 16-bit NaN
            largest = float(np.abs(values).max())
        if not largest < LIMIT:  # as NaN is not
            return gradient
        new = values.reshape(momentum.shape).astype(np.float32, copy=False)
        momentum = on_host(name, momentum) * np.float32(self._memory)
        momentum += np.float32(1 - self._memory) * new
        self._next[name] = momentum
        found = np.ascontiguousarray(orthogonalised(momentum))
        found *= np.float32(max(momentum.shape) ** 0.5 * _root_mean_square(new, largest))
        return found.astype(values.dtype, copy=False).reshape(values.shape)

    def __bool__(self) -> bool:
        """False if no tensor is a matrix."""
        return bool(self._momenta)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays, by name, that later directions depend on.

        The momenta of tensors that are not on the host are not among them.
        """
        return {name: each for name, each in self._momenta.items() if isinstance(each, np.ndarray)}


def _root_mean_square(values: Array, largest: float) -> float:
    """Return it, of values with that magnitude, whose squares may be infinite or 0."""
    scaled = values.reshape(-1) / (np.float32(largest) or np.float32(1))
    return largest * math.sqrt(float(np.dot(scaled, scaled)) / scaled.size)


def _is_of_torch(gradient: Any) -> bool:
    """Return whether a gradient is PyTorch's, which is not imported for that."""
    return type(gradient).__module__.partition(".")[0] == "torch"
