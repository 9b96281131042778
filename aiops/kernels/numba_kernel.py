"""Execute a rule as one generated loop, compiled by Numba, with the bits of NumPy."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels import cache, numba_source
from aiops.kernels.interface import Spans, check
from aiops.kernels.payloads import PayloadFormat
from aiops.kernels.rule import Rule
from aiops.kernels.rule_program import Program
from aiops.kernels.vocabulary import Array

__all__ = ["NumbaKernel"]

Update = Callable[..., npt.NDArray[np.int64]]


class NumbaKernel:
    """A rule over float32 or float64 as one compiled loop; implements ``Kernel``.

    The text is generated on construction, and compiled by the first call or by :meth:`warm`. The
    loop releases the GIL and runs on the calling thread.

    Attributes
    ----------
    direct
        The address of the loop as a C function of the arguments `aiops.kernels.numba_source.DIRECT`
        (void; integers and sums are int64, ``step``, ``more`` and ``factor`` float64, and the other
        arrays of the kernel's dtype); 0 without one, or before `enter`.
    """

    backend = "numba"

    def __init__(
        self,
        rule: Rule,
        program: Program,
        dtype: np.dtype[Any],
        packed: PayloadFormat | None = None,
    ) -> None:
        self.rule = rule
        self.dtype = dtype
        self.packed = packed
        self.text = numba_source.numba_text(
            program, dtype.name, None if packed is None else packed.name
        )
        self._scalars, self._reads = len(rule.scalars), len(rule.reads)
        self._constants = np.array(list(rule.constants.values()), dtype)
        self._update: Update = self._first_update
        self.direct = 0

    def __repr__(self) -> str:
        return f"<NumbaKernel {self.rule.name} {self.dtype}>"

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
    ) -> npt.NDArray[np.int64]:
        """Update every span in one compiled loop, as `Kernel` specifies."""
        try:
            if len(reads) != self._reads:  # or one of them would pass for a missing state array
                raise ValueError("reads do not fit")
            return self._update(
                spans.lo,
                spans.hi,
                spans.src,
                spans.step,
                *(spans.flat(self._scalars) if self._scalars or spans.scalars.size else ()),
                factor,
                base,
                grad,
                target,
                *state,
                *reads,
                self._constants,
            )
        except (TypeError, ValueError):
            # The compiled code reports that something does not fit; `check` finds out what.
            check(
                *(self.rule, spans, base, grad, target, state, reads),
                compute=self.dtype,
                wire=self.dtype,
                packed=self.packed,
            )
            raise

    def warm(self) -> NumbaKernel:
        """Compile, or load the machine code of an earlier process; return this kernel."""
        rule = self.rule
        self._update = _compile(
            rule.name,
            self.text,
            self.dtype.name,
            states=len(rule.state),
            reads=self._reads,
            scalars=self._scalars > 0,
            packed=self.packed is not None,
        )
        return self

    def enter(self) -> None:
        """Compile it for callers in C, once it is `warm`: `direct`."""
        rule = self.rule
        if self.packed is None and not rule.reads and len(rule.state) <= numba_source.MOST_STATES:
            self.direct = _address(rule.name, self.text, self.dtype.name)

    @property
    def constants(self) -> Array:
        """The rule's constants, as compiled code takes them."""
        return self._constants

    def _first_update(self, *arguments: Any) -> npt.NDArray[np.int64]:
        self.warm()
        return self._update(*arguments)


@functools.cache
def _compile(
    name: str,
    text: str,
    real: str,
    *,
    states: int,
    reads: int = 0,
    scalars: bool = False,
    packed: bool = False,
) -> Update:
    from numba import types

    from aiops.kernels.numba_jit import array_of, compiled

    module, on_disk = _module(name, text)
    integers, read, written = array_of("int64"), array_of(real), array_of(real, writable=True)
    numbers = [array_of("float64")] * (2 if scalars else 1)
    arguments = [integers, integers, integers, *numbers, types.float64]
    gradient = array_of("uint8") if packed else read
    arguments += [read, gradient, written, *[written] * states, *[read] * reads, read]
    signature = types.Array(types.int64, 1, "C")(*arguments)
    update: Update = compiled(module.update, signature, cache=on_disk)
    module._update = update  # type: ignore[attr-defined]
    return update


@functools.cache
def _module(name: str, text: str) -> tuple[ModuleType, bool]:
    return cache.load(f"{name}_{_identity(text)}", text)


@functools.cache
def _address(name: str, text: str, real: str) -> int:
    from numba import types

    from aiops.kernels.numba_jit import address, pointer_to

    module, on_disk = _module(name, text)
    integers, rates, numbers = pointer_to("int64"), pointer_to("float64"), pointer_to(real)
    kinds = dict.fromkeys(numba_source.DIRECT, numbers)
    kinds |= dict.fromkeys(("count", "size"), types.int64) | {"factor": types.float64}
    kinds |= dict.fromkeys(("lo", "hi", "src", "sums"), integers)
    kinds |= dict.fromkeys(("step", "more"), rates)
    return address(module.direct, types.void(*kinds.values()), cache=on_disk)


def _identity(text: str) -> str:
    """Return a hash of all that the machine code depends on, except the CPU, which Numba checks.

    The text holds the rule's source, the dtype and the generator's version. The helpers that it
    imports are compiled into it, and Numba's cache does not notice when those change.
    """
    import numba

    from aiops.kernels import numba_jit

    helpers = Path(numba_jit.__file__).read_bytes()
    parts = (text.encode(), helpers, numba.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
