"""A client's side of a server's restart: what is not sent again, and what was lost."""

from __future__ import annotations

import logging

from aiops.client.known_run import AcknowledgedPushes
from aiops.client.request_kinds import ReapplyRequest, Request
from aiops.client.server_info import ServerInfo
from aiops.errors import Restarted
from aiops.wire.messages import Welcome

_log = logging.getLogger("aiops.client")


class Restarts:
    """Compares what a client has of a server with what the server's welcome says is left.

    Parameters
    ----------
    info
        The server, as far as it is known.
    acknowledged
        The pushes that it has acknowledged.

    Attributes
    ----------
    rolled_back
        Acknowledged pushes that were lost when the server was started again; at most these, if it
        did not know this client any more.
    """

    def __init__(self, info: ServerInfo, acknowledged: AcknowledgedPushes) -> None:
        self._info, self._acknowledged = info, acknowledged
        self.rolled_back = 0

    def welcomed(self, welcome: Welcome, server: str) -> None:
        """Learn what a welcome says, and count what is lost; raises as `ServerInfo.welcomed`."""
        run = self._info.run
        continued, acks, known = run.continued_by(welcome), run.acks, run.name
        self._info.welcomed(welcome)
        if continued:
            self._roll_back(welcome, acks, server)
        elif welcome.run != known:
            self._acknowledged.clear()

    def _roll_back(self, welcome: Welcome, acks: str, server: str) -> None:
        """Count the pushes that were acknowledged, at a level of ``acks``, and have been lost."""
        lost = self._acknowledged.roll_back(welcome.last_seq)
        if not lost:
            return
        self.rolled_back += lost
        self._info.run.last_loss = self._info.connection[1]
        forgotten = not welcome.last_seq  # or all are lost: the server knows of none
        _log.warning(
            "%s came back at version %s: %s%s that it had acknowledged (--acks %s) %s lost%s",
            *(server, f"{welcome.version:,}", "at most " if forgotten else ""),
            *("1 push" if lost == 1 else f"{lost:,} pushes", acks),
            *("is" if lost == 1 else "are", ", as it knows none of them" if forgotten else ""),
        )

    def outdated(self, request: Request, server: str) -> Restarted | None:
        """Return the error of a push that refers to what the server has lost, or None.

        That is the version that it was computed at, or the gradient that is to be applied again.
        ``server``: its URL, for the text.
        """
        (_client, epoch), run = request.connection, self._info.run
        gradient_lost = type(request) is ReapplyRequest and epoch < run.last_loss
        if not gradient_lost and not run.lost(epoch, request.base, request.table):
            return None
        attempted = request.attempted and request.refusal is None
        if run.of_another(epoch):
            what = "was restarted since this gradient was computed, and its parameters are others"
            outcome = (
                "it was sent before, and may have been applied to the parameters of the earlier run"
            )
        else:
            known = request.base >= 0
            lost = f"has lost version {request.base:,}" if known else "may have lost the version"
            what = f"was restarted, and {lost}, which this gradient was computed at"
            outcome = "it was sent before, and is not part of the parameters that are left"
        return Restarted(
            f"{server} {what}: fetch them and compute it again;"
            f" {outcome if attempted else 'it was not pushed'}"
        )
