"""Compute backends: do a store's arithmetic on the host, or on a device with memory of its own.

An `aiops.store.updater.Updater` is the same on both. Its arrays are flat, and slices and views of
them share their memory. Only its `ComputeBackend` reads their values: on a device they are no NumPy
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from aiops import kernels
from aiops.kernels.interface import Kernel, Operands, Spans
from aiops.kernels.parallel import ParallelMap, filled, update
from aiops.kernels.rule import Rule
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Bytes, Ints, Layout, compute_dtype
from aiops.store.gradient import Gradient
from aiops.store.resources import Resources
from aiops.store.snapshots import Version


class ComputeBackend(Protocol):
    """The memory and kernels that an `Updater` works with.

    Attributes
    ----------
    joins
        True if raw values among coded ones are copied together first, to be aligned.
    """

    joins: bool

    @property
    def backend(self) -> str:
        """The kernels in use: ``"numba"``, ``"numpy"`` or ``"cuda"``."""

    def array(self, size: int, dtype: np.dtype[Any], value: float | None = None) -> Array:
        """Return an array in the compute dtype; all elements are ``value``, if there is one."""

    def kernel(self, rule: Rule, dtype: np.dtype[Any], codec: str | None = None) -> Kernel:
        """Return a kernel, as `aiops.kernels.build` does, for arrays of this backend."""

    def folding(self, rule: Rule, dtype: np.dtype[Any]) -> Kernel:
        """Return a kernel whose ``base`` and ``target`` are sums in the compute dtype.

        Its gradients are those that `widened` returns.
        """

    def widened(self, gradient: Array) -> Array:
        """Return a gradient in the dtype that the kernels of `folding` read."""

    def update(
        self, kernel: Kernel, spans: Spans, operands: Operands, *, whole: bool = False
    ) -> Ints:
        """Call a kernel; ``whole``: it reads payloads, one of each tensor."""

    def sum_squares(self, array: Array) -> float:
        """Return the sum of squares of an array."""

    def finite(self, array: Array) -> bool:
        """Return whether all elements of an array are finite."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array."""

    def narrow(self, target: Array, master: Array) -> None:
        """Round a master into the parameters."""

    def resident(self, gradient: Gradient) -> Gradient:
        """Return a gradient whose bytes are in this backend's memory."""

    def dense(self, gradient: Gradient) -> Gradient:
        """Return the gradient with every tensor raw, valid until the next call."""

    def decoded(self, gradient: Gradient) -> Gradient:
        """Return the same on the host, valid until the next call."""

    def read_packed(self) -> frozenset[str]:
        """Return the codecs for which there are kernels that read payloads."""

    def parameters(self, version: Version) -> Sequence[Array]:
        """Return the sections of the version that an update begins with, or of its target."""

    def sent(self, version: Version, current: Version) -> Sequence[Array]:
        """Return the sections of an older version, unchanged by later updates."""

    def load(self, arena: Arena, masters: Sequence[Array | None]) -> None:
        """Load the parameters of an arena; the masters follow."""

    def begin(self, base: Version, target: Version, whole: bool, read_soon: bool) -> None:
        """Prepare an update, of all tensors if ``whole``; ``read_soon`` as for `end`."""

    def end(self, target: Version, read_soon: bool) -> None:
        """Return when an update is done; ``read_soon``: its version will be read before long."""

    def pending_copy(self, version: Version) -> Callable[[], None] | None:
        """Return the copy to be made before a new version's arena may be read; None: none."""

    def on_host(self, array: Array) -> Array:
        """Return the values of an array, as a NumPy array to be read."""

    def fill(self, array: Array, write: Callable[[Array], object]) -> None:
        """Give an array the values that ``write`` writes into a NumPy array of its dtype."""


class HostBackend:
    """The host's own memory, and kernels for its processors."""

    joins = True

    def __init__(self, layout: Layout, backend: str, machine: Resources) -> None:
        self._layout, self._requested = layout, backend
        self._build = kernels.build_later if machine.later else kernels.build
        self._first: Kernel | None = None  # of those made here
        self._parallel_map: ParallelMap = machine.parallel_map
        self._dense = machine.measure("decode", Gradient.dense)
        self._decoded: Bytes | None = None

    @property
    def backend(self) -> str:
        """The kernels in use: ``"numba"`` or ``"numpy"``."""
        return (
            kernels.current_backend(self._requested) if self._first is None else self._first.backend
        )

    def array(self, size: int, dtype: np.dtype[Any], value: float | None = None) -> Array:
        """Return an uninitialised array, or one filled with ``value``."""
        if value is None:
            return np.empty(size, dtype)
        return filled(size, dtype, value, self._parallel_map)

    def kernel(self, rule: Rule, dtype: np.dtype[Any], codec: str | None = None) -> Kernel:
        """Build a kernel, or one that NumPy stands in for until it is compiled."""
        made = self._build(rule, dtype, self._requested, codec)
        self._first = self._first or made
        return made

    def folding(self, rule: Rule, dtype: np.dtype[Any]) -> Kernel:
        """Build a kernel in the compute dtype."""
        return self.kernel(rule, compute_dtype(dtype))

    def widened(self, gradient: Array) -> Array:
        """Return the gradient in the compute dtype, without a copy if it has it."""
        wide: Array = gradient.astype(compute_dtype(gradient.dtype), copy=False)
        return wide

    def update(
        self, kernel: Kernel, spans: Spans, operands: Operands, *, whole: bool = False
    ) -> Ints:
        """Call a kernel, sharing large work with this process's threads."""
        return update(kernel, self._parallel_map, spans, operands, whole=whole)

    def sum_squares(self, array: Array) -> float:
        """Return the sum of squares, by the host's kernels."""
        return kernels.sum_squares(array, self._requested)

    def finite(self, array: Array) -> bool:
        """Return whether all are finite."""
        return kernels.first_infinite(array, self._requested) < 0

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array."""
        target[:] = source

    def narrow(self, target: Array, master: Array) -> None:
        """Round a master into the parameters; what is too large becomes infinity."""
        with np.errstate(over="ignore"):
            target[:] = master

    def resident(self, gradient: Gradient) -> Gradient:
        """Return the gradient: its bytes are on the host already."""
        return gradient

    def dense(self, gradient: Gradient) -> Gradient:
        """Decode the gradient into one buffer that every call uses."""
        found: Gradient = self._dense(
            gradient, self._layout, self._room, self._requested, self._parallel_map
        )
        return found

    def decoded(self, gradient: Gradient) -> Gradient:
        """Decode the gradient, as `dense` does."""
        return self.dense(gradient)

    def _room(self) -> Bytes:
        if self._decoded is None:
            self._decoded = aligned(self._layout.nbytes)
        return self._decoded

    def read_packed(self) -> frozenset[str]:
        """Return the codecs whose payloads the host's kernels read."""
        return kernels.PACKED

    def parameters(self, version: Version) -> Sequence[Array]:
        """Return the sections of the version's arena."""
        return version.arena.sections

    def sent(self, version: Version, current: Version) -> Sequence[Array]:
        """Return the sections of the version's arena."""
        return version.arena.sections

    def load(self, arena: Arena, masters: Sequence[Array | None]) -> None:
        """Copy the parameters into the masters; the arena itself stays where it is."""
        for master, section in zip(masters, arena.sections, strict=True):
            if master is not None:
                np.copyto(master, section)

    def begin(self, base: Version, target: Version, whole: bool, read_soon: bool) -> None:
        """Copy the base, where the update leaves tensors of another arena unwritten."""
        if target is not base and not whole:
            np.copyto(target.arena.data, base.arena.data)

    def end(self, target: Version, read_soon: bool) -> None:
        """Nothing is left to be done: kernels on the host have written the arena."""

    def pending_copy(self, version: Version) -> Callable[[], None] | None:
        """Return None: the arena can be read at once."""
        return None

    def on_host(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def fill(self, array: Array, write: Callable[[Array], object]) -> None:
        """Have the array itself written."""
        write(array)
