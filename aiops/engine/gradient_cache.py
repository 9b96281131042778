"""The last gradient of each worker, kept so that it can be applied again on a word.

For B-FASGD's skipped pushes (Odena 2016, section 2.3): where a gate keeps a gradient from being
sent, the server may apply the worker's last one once more. What is kept has a bound; the gradients
of those who have not pushed for longest give way, and are then sent anew.
"""

from __future__ import annotations

from collections import OrderedDict

from aiops.engine.receive import PushSink
from aiops.model.layout import Cover
from aiops.store.gradient import Gradient


class CachedGradient:
    """The sink of a gradient that is applied again: it is the cache's, so nothing is given back.

    Parameters
    ----------
    gradient
        None: it is not kept any more.
    """

    fault = None

    def __init__(self, gradient: Gradient | None) -> None:
        self.gradient = gradient

    @property
    def cover(self) -> Cover:
        """Which tensors it has, at the versions that it was first pushed with."""
        gradient = self.take()
        return gradient.whole or gradient.cover

    def take(self) -> Gradient:
        """Return it."""
        assert self.gradient is not None
        return self.gradient

    def free(self) -> None:
        """Leave it to the cache."""


class GradientCache:
    """The cache.

    Parameters
    ----------
    bound
        Bytes kept in all; 0: nothing is kept.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.nbytes = 0
        self.evicted = 0  # gradients that gave way
        self._kept: OrderedDict[int, Gradient] = OrderedDict()

    def keep(self, worker: int, sink: PushSink) -> None:
        """Keep a worker's gradient, which has been applied, in the place of its last one."""
        self.forget(worker)
        if not self.bound:
            sink.free()
            return
        gradient = sink.keep()
        self._kept[worker] = gradient
        self.nbytes += len(gradient.data)
        while self.nbytes > self.bound:
            self.forget(next(iter(self._kept)))
            self.evicted += 1

    def find(self, worker: int) -> CachedGradient:
        """Return a worker's last gradient, or nothing, if it is not kept any more."""
        gradient = self._kept.get(worker)
        if gradient is not None:
            self._kept.move_to_end(worker)
        return CachedGradient(gradient)

    def forget(self, worker: int) -> None:
        """Let a worker's gradient go."""
        gradient = self._kept.pop(worker, None)
        if gradient is not None:
            self.nbytes -= len(gradient.data)
            if gradient.let_go is not None:
                gradient.let_go()
