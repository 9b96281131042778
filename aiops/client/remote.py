"""What the PyTorch and the JAX client have in common: a worker underneath, and its goodbye."""

from __future__ import annotations

import weakref

from aiops.client.sync.worker import Worker
from aiops.common.closing import Closing


class Remote(Closing):
    """Holds a `Worker`, which says goodbye when this is closed, collected, or the program ends."""

    worker: Worker
    _finalizer: weakref.finalize[..., Remote]

    def _hold(self, worker: Worker) -> None:
        self.worker = worker
        self._finalizer = weakref.finalize(self, _leave, worker)

    @property
    def version(self) -> int:
        """The model version of the parameters."""
        return self.worker.version

    def close(self) -> None:
        """Push what has not been pushed yet, and say goodbye; may be called twice.

        (Without it, when this is collected or the program ends, there is only the goodbye: steps
        that a policy with local steps has not pushed yet are then lost.)
        """
        if self._finalizer.detach() is not None:
            self.worker.close()

    def abandon(self) -> None:
        """Say goodbye, without pushing the rest."""
        self._finalizer()
        self.close()


def _leave(worker: Worker) -> None:
    """Say goodbye; in a fork, such as a DataLoader's, that does nothing."""
    worker.close(flush=False)
