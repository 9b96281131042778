"""What a server makes ready before anybody has told it the model: its kernels.

Importing Numba and reading its cache takes several times as long as all that a server's first
client asks for, and compiling takes seconds. So it begins when the server listens, on a thread of
its own, and NumPy answers who is quicker than that, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from aiops import kernels
from aiops.codecs import Codec
from aiops.kernels.rule import Rule

__all__ = ["Warmup"]


class Warmup:
    """The steps that make kernels ready, for any thread, in order; until then NumPy executes them.

    Parameters
    ----------
    rule
        What updates are made by, if by kernels for this machine's processors. The model's dtype is
        taken to be float32, as most are: kernels of another are made when it is known
        (`aiops.store.parameters.Store.warming`).
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.
    codecs
        In which tensors will travel.
    """

    def __init__(self, rule: Rule | None, backend: str, codecs: Iterable[Codec] = ()) -> None:
        self._rule, self._backend = rule, backend
        self._codecs = {codec.name: codec for codec in codecs}
        self._pending = kernels.PendingNumba() if backend != "numpy" else None

    def steps(self) -> list[Callable[[], object]]:
        """Return what imports, and compiles or reads what an earlier process has compiled."""
        if self._pending is None:
            return []
        packed = sorted(kernels.PACKED & self._codecs.keys())
        rules = [self._rule] if self._rule is not None else []
        return [
            self._resolve,
            *(partial(kernels.warm_survey, dtype, self._backend) for dtype in kernels.SURVEYED),
            *(partial(self._warm_kernel, rule) for rule in rules),
            *(partial(self._warm_codec, codec) for codec in self._codecs.values()),
            self._pending.arrived,
            *(partial(self._warm_kernel, rule, name) for rule in rules for name in packed),
        ]

    def _resolve(self) -> str:
        return kernels.resolve(self._backend)

    def _warm_kernel(self, rule: Rule, codec: str | None = None) -> None:
        kernels.build(rule, np.float32, self._backend, codec).warm()

    def _warm_codec(self, codec: Codec) -> None:
        if self._resolve() != "numpy":
            codec.warm()
