"""The part that the PyTorch and the JAX client share: a worker, which they close."""

from __future__ import annotations

import weakref

from aiops.client.sync.worker import Worker
from aiops.common.closing import Closing


class Remote(Closing):
    """Base that holds a `Worker`, and ends it when closed, collected, or at the program's end."""

    worker: Worker
    _finalizer: weakref.finalize[..., Remote]

    def _hold(self, worker: Worker) -> None:
        self.worker = worker
        self._finalizer = weakref.finalize(self, _leave, worker)

    @property
    def version(self) -> int:
        """The model version of the parameters."""
        return self.worker.version

    @property
    def rolled_back(self) -> int:
        """Acknowledged pushes that the server lost before it was started again, as `Worker`'s."""
        return self.worker.rolled_back

    def close(self) -> None:
        """Push what has not been pushed yet, and leave the server; may be called twice.

        Without it, when this is collected or the program ends, the worker leaves without a push:
        steps that a policy with local steps has not pushed yet are then lost.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push failed; the connection is closed all the same.
        """
        if self._finalizer.detach() is not None:
            self.worker.close()

    def abandon(self) -> None:
        """Leave the server without pushing the rest."""
        self._finalizer()
        self.close()


def _leave(worker: Worker) -> None:
    """Leave the server; in a fork, such as a DataLoader's, that does nothing."""
    worker.close(flush=False)
