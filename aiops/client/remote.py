"""The part that the PyTorch and the JAX client share: a worker, which they close."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from aiops.client.params import Params
from aiops.client.strategies.plan import Plan
from aiops.client.sync.worker import Worker
from aiops.common.closing import Closing
from aiops.errors import ConnectionLost, DeadlineExceeded, Refused

_log = logging.getLogger("aiops.client")


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

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``; all else as `Worker.log`."""
        self.worker.log(**values)

    def close(self) -> None:
        """Push what has not been pushed yet, take over the model, and leave the server.

        Where there was something to push, the parameters here are the server's newest afterwards.
        Under a policy whose model is evaluated elsewhere than gradients are computed, such as
        ``schedule-free``, they are always, and as they are there; if they cannot be fetched, a
        warning says so. Those that were changed here since the last step stay. It may be called
        twice, and no step can be taken after it.

        Without it, when this is collected or the program ends, the worker leaves without a push:
        steps that a policy with local steps has not pushed yet are then lost, and a warning says
        how many.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push failed; the connection is closed all the same.
        """
        if self._finalizer.detach() is None or self.worker.closed:  # also in a fork
            return
        try:
            behind = self.worker.unpushed
            self.worker.push_rest()
            if Plan(self.worker.plan).truth("evaluation"):
                self._show_evaluated()
                return
            if behind:
                self.worker.refresh()
            self._show(self.worker.params)
        finally:
            self.worker.abandon()

    def _show_evaluated(self) -> None:
        """Take over the server's parameters where the model is evaluated, if it is there still."""
        try:
            found = self.worker.evaluation()
        except (ConnectionLost, DeadlineExceeded, Refused) as error:
            _log.warning(
                "the parameters of %s where its model is evaluated could not be fetched, and those"
                " here are where gradients were computed: %s",
                *(self.worker.url, error),
            )
            found = self.worker.params
        self._show(found)

    def _show(self, params: Params) -> None:
        """Take over these parameters."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Leave the server without pushing the rest."""
        if self._finalizer.detach() is not None:
            self.worker.abandon()


def _leave(worker: Worker) -> None:
    """Leave the server; in a fork, such as a DataLoader's, that does nothing."""
    if not worker.closed and worker.unpushed:
        _log.warning(
            "this worker leaves %s, and has not pushed its last %d steps, which are lost: call"
            " close() at the end of training",
            *(worker.url, worker.unpushed),
        )
    worker.abandon()
