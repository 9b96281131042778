"""Keep each worker's last gradient, so that the server can apply it again without its bytes.

For B-FASGD's skipped pushes (Odena 2016, section 2.3): where a gate keeps a gradient from being
sent, the server may apply the worker's last one once more. The cache has a bound in bytes; it
evicts the gradients of the workers that have not pushed for longest, which then push again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiops.engine.receive import PushSink
from aiops.model.layout import Cover
from aiops.store.gradient import Gradient


class CachedGradient:
    """The sink of a gradient that is applied again; the cache owns it, so `free` does nothing.

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
        """The tensors that it has, at the versions that it was first pushed with."""
        gradient = self.take()
        return gradient.whole or gradient.cover

    def take(self) -> Gradient:
        """Return it."""
        assert self.gradient is not None, "the update queue has seen that it is kept"
        return self.gradient

    def free(self) -> None:
        """Do nothing: the cache frees it."""


class GradientCache:
    """The last gradients of one engine's workers.

    Parameters
    ----------
    bound
        Bytes kept in all; 0: nothing is kept.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.nbytes = 0
        self.evicted = 0  # gradients dropped because of the bound
        self._kept: OrderedDict[int, Gradient] = OrderedDict()

    def keep(self, worker: int, sink: PushSink) -> None:
        """Keep a gradient that has been applied, instead of its worker's last one."""
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
        """Return a worker's last gradient; its `gradient` is None if it is not kept."""
        gradient = self._kept.get(worker)
        if gradient is not None:
            self._kept.move_to_end(worker)
        return CachedGradient(gradient)

    def state(self, number: Callable[[Gradient], int]) -> dict[str, Any]:
        """Return the workers with a gradient, as plain values, for `restore`.

        ``number``: returns the number under which a gradient is kept.
        """
        kept = [[worker, number(gradient)] for worker, gradient in self._kept.items()]
        return {"evicted": self.evicted, "kept": kept}

    def restore(self, state: Mapping[str, Any], gradients: Sequence[Gradient]) -> None:
        """Continue from what `state` returned; ``gradients`` are those kept, by their numbers."""
        self.evicted = state["evicted"]
        self._kept = OrderedDict((worker, gradients[number]) for worker, number in state["kept"])
        self.nbytes = sum(len(gradient.data) for gradient in self._kept.values())

    def forget(self, worker: int) -> None:
        """Let a worker's gradient go."""
        gradient = self._kept.pop(worker, None)
        if gradient is not None:
            self.nbytes -= len(gradient.data)
            if gradient.on_drop is not None:
                gradient.on_drop()
