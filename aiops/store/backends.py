"""Where a store's arithmetic is done: on the host, or on a device with memory of its own.

A `Stepping` (`aiops.store.updater`) is the same on both. Its arrays are flat, and slices and views
of them are the same memory; what they hold only its `ComputeBackend` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from aiops import kernels
from aiops.kernels.interface import Kernel, Spans
from aiops.kernels.parallel import ParallelMap, filled, update
from aiops.kernels.rule import Rule
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Bytes, Ints, Layout, compute_dtype
from aiops.store.gradient import Gradient
from aiops.store.resources import Resources
from aiops.store.snapshots import Version


class ComputeBackend(Protocol):
    """What a `Stepping` asks of where it is.

    Attributes
    ----------
    joins
        Whether raw values among coded ones are brought together first, to be aligned.
    """

    joins: bool

    @property
    def backend(self) -> str:
        """Which kernels run: ``"numba"``, ``"numpy"`` or ``"cuda"``."""

    def array(self, size: int, dtype: np.dtype[Any], value: float | None = None) -> Array:
        """Return an array in the compute dtype; all elements are ``value``, if there is one."""

    def kernel(self, rule: Rule, dtype: np.dtype[Any], codec: str | None = None) -> Kernel:
        """Return what `aiops.kernels.build` does, for arrays that lie here."""

    def folding(self, rule: Rule, dtype: np.dtype[Any]) -> Kernel:
        """Return a kernel whose ``base`` and ``target`` are sums in the compute dtype.

        Its gradients have the dtype itself, or what `widened` made of that.
        """

    def widened(self, gradient: Array) -> Array:
        """Return a gradient as those kernels read it."""

    def update(
        self,
        kernel: Kernel,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
        *,
        whole: bool = False,
    ) -> Ints:
        """Call a kernel; ``whole``: it reads payloads, one of each tensor."""

    def sum_squares(self, array: Array) -> float:
        """Return `aiops.kernels.sum_squares`."""

    def narrow(self, target: Array, master: Array) -> None:
        """Round a master into the parameters."""

    def taken(self, gradient: Gradient) -> Gradient:
        """Return a gradient whose bytes lie here."""

    def dense(self, gradient: Gradient) -> Gradient:
        """Return the same with every tensor raw; it is valid until the next is asked for."""

    def read_packed(self) -> frozenset[str]:
        """Return the codecs for which there are kernels that read payloads."""

    def parameters(self, version: Version) -> Sequence[Array]:
        """Return the sections of the version that an update begins with, or of its target."""

    def sent(self, version: Version, current: Version) -> Sequence[Array]:
        """Return the sections of an older version, as it is."""

    def load(self, arena: Arena, masters: Sequence[Array | None]) -> None:
        """Make what lies here the parameters of an arena."""

    def begin(self, base: Version, target: Version, whole: bool, wanted: bool) -> None:
        """Hear of an update, of all tensors if ``whole``; ``wanted`` as `end` will be told."""

    def end(self, target: Version, wanted: bool) -> None:
        """Return when an update is done; ``wanted``: its version will be read before long."""

    def remaining(self, version: Version) -> Callable[[], None] | None:
        """Return what is left to do before a new version's arena may be read, if anything."""

    def shown(self, array: Array) -> Array:
        """Return what an array holds, to be looked at."""


class HostBackend:
    """The host's own memory, and kernels for its processors."""

    joins = True

    def __init__(self, layout: Layout, backend: str, machine: Resources) -> None:
        self._layout, self._wish = layout, backend
        self._build = kernels.build_later if machine.later else kernels.build
        self._first: Kernel | None = None  # of those made here
        self._parallel_map: ParallelMap = machine.parallel_map
        self._dense = machine.measure("decode", Gradient.dense)
        self._decoded: Bytes | None = None

    @property
    def backend(self) -> str:
        """See `ComputeBackend`."""
        return kernels.current_backend(self._wish) if self._first is None else self._first.backend

    def array(self, size: int, dtype: np.dtype[Any], value: float | None = None) -> Array:
        """See `ComputeBackend`."""
        if value is None:
            return np.empty(size, dtype)
        return filled(size, dtype, value, self._parallel_map)

    def kernel(self, rule: Rule, dtype: np.dtype[Any], codec: str | None = None) -> Kernel:
        """See `ComputeBackend`."""
        made = self._build(rule, dtype, self._wish, codec)
        self._first = self._first or made
        return made

    def folding(self, rule: Rule, dtype: np.dtype[Any]) -> Kernel:
        """See `ComputeBackend`."""
        return self.kernel(rule, compute_dtype(dtype))

    def widened(self, gradient: Array) -> Array:
        """See `ComputeBackend`."""
        wide: Array = gradient.astype(compute_dtype(gradient.dtype), copy=False)
        return wide

    def update(
        self,
        kernel: Kernel,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
        *,
        whole: bool = False,
    ) -> Ints:
        """See `ComputeBackend`."""
        arrays = factor, base, grad, target, state, reads
        return update(kernel, self._parallel_map, spans, *arrays, whole=whole)

    def sum_squares(self, array: Array) -> float:
        """See `ComputeBackend`."""
        return kernels.sum_squares(array, self._wish)

    def narrow(self, target: Array, master: Array) -> None:
        """See `ComputeBackend`."""
        with np.errstate(over="ignore"):
            target[:] = master

    def taken(self, gradient: Gradient) -> Gradient:
        """See `ComputeBackend`."""
        return gradient

    def dense(self, gradient: Gradient) -> Gradient:
        """See `ComputeBackend`."""
        found: Gradient = self._dense(
            gradient, self._layout, self._room, self._wish, self._parallel_map
        )
        return found

    def _room(self) -> Bytes:
        if self._decoded is None:
            self._decoded = aligned(self._layout.nbytes)
        return self._decoded

    def read_packed(self) -> frozenset[str]:
        """See `ComputeBackend`."""
        return kernels.PACKED

    def parameters(self, version: Version) -> Sequence[Array]:
        """See `ComputeBackend`."""
        return version.arena.sections

    def sent(self, version: Version, current: Version) -> Sequence[Array]:
        """See `ComputeBackend`."""
        return version.arena.sections

    def load(self, arena: Arena, masters: Sequence[Array | None]) -> None:
        """See `ComputeBackend`."""
        for master, section in zip(masters, arena.sections, strict=True):
            if master is not None:
                np.copyto(master, section)

    def begin(self, base: Version, target: Version, whole: bool, wanted: bool) -> None:
        """See `ComputeBackend`."""
        if target is not base and not whole:
            np.copyto(target.arena.data, base.arena.data)

    def end(self, target: Version, wanted: bool) -> None:
        """See `ComputeBackend`."""

    def remaining(self, version: Version) -> Callable[[], None] | None:
        """See `ComputeBackend`."""
        return None

    def shown(self, array: Array) -> Array:
        """See `ComputeBackend`."""
        return array
