"""Warm a server's kernels before a client has defined the model.

Importing Numba and reading its cache takes several times as long as all requests of a server's
first client, and compiling takes seconds. So it begins when the server listens, on a thread of its
own. NumPy serves requests until then, with the same bits.
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
    """The steps that warm kernels, in order, on any thread; NumPy serves until then.

    Parameters
    ----------
    rule
        The rule of updates, if the host's kernels run it. The model's dtype is taken to be
        float32, as most are; kernels of another dtype are made when it is known
        (`aiops.store.parameters.Store.warming`).
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.
    codecs
        The codecs in which tensors will be sent.

    Raises
    ------
    UsageError
        When the backend is Numba, which is not installed.
    """

    def __init__(self, rule: Rule | None, backend: str, codecs: Iterable[Codec] = ()) -> None:
        self._rule, self._backend = rule, backend
        self._codecs = {codec.name: codec for codec in codecs}
        if backend == "numba":
            kernels.need_numba()  # before the server listens
        self._pending = kernels.PendingNumba() if backend != "numpy" else None

    def steps(self) -> list[Callable[[], object]]:
        """Return the steps: imports, then kernels, compiled or read from Numba's cache."""
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

    def over(self) -> None:
        """Have the rest of the process use Numba: no further step will be taken."""
        if self._pending is not None:
            self._pending.arrived()

    def _resolve(self) -> str:
        return kernels.resolve(self._backend)

    def _warm_kernel(self, rule: Rule, codec: str | None = None) -> None:
        kernels.build(rule, np.float32, self._backend, codec).warm()

    def _warm_codec(self, codec: Codec) -> None:
        if self._resolve() != "numpy":
            codec.warm()
