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
    spread
        Those among them of rows that lie on several shards.

    Attributes
    ----------
    rolled_back
        Acknowledged pushes that were lost when the server was started again; at most these, if it
        did not know this client any more.
    """

    rolled_back: int

    def __init__(
        self, info: ServerInfo, acknowledged: AcknowledgedPushes, spread: AcknowledgedPushes
    ) -> None:
        self._info, self._acknowledged, self._spread = info, acknowledged, spread
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
            self._spread.clear()

    def _roll_back(self, welcome: Welcome, acks: str, server: str) -> None:
        """Count the pushes that were acknowledged, at a level of ``acks``, and have been lost."""
        lost = self._acknowledged.roll_back(welcome.last_seq)
        self._spread.roll_back(welcome.last_seq)
        if lost:
            self._info.run.last_loss = self._info.connection[1]
            name = f"{server} came back at version {welcome.version:,}"
            self._tell(lost, name, acks, forgotten=not welcome.last_seq)

    def shard_welcomed(self, last_seq: int, server: str) -> None:
        """Count the pushes of rows that a shard has lost, and others may have still.

        Parameters
        ----------
        last_seq
            The highest number of such a push that counts there.
        server
            Its name.
        """
        runs = self._spread.runs
        if not runs or runs[-1][1] <= last_seq:
            return
        gone = [(max(low, last_seq + 1), high) for low, high in runs if high > last_seq]
        self._spread.roll_back(last_seq)
        lost = sum(self._acknowledged.remove(low, high) for low, high in gone)
        if lost:
            name = f"{server} came back without the rows of some pushes"
            self._tell(lost, name, self._info.run.acks, forgotten=not last_seq)

    def _tell(self, lost: int, what: str, acks: str, *, forgotten: bool) -> None:
        """Count lost pushes; ``forgotten``: or all are lost, as the server knows of none."""
        self.rolled_back += lost
        _log.warning(
            "%s: %s%s that it had acknowledged (--acks %s) %s lost%s",
            *(what, "at most " if forgotten else ""),
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
