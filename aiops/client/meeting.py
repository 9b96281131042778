"""The async client of a worker that averages: it also joins rounds."""

from __future__ import annotations

from collections.abc import Mapping

from aiops.client.asyncio.client import AsyncClient
from aiops.errors import BadPush, ConnectionLost
from aiops.model.layout import Array, Layout
from aiops.wire import messages


class MeetingClient(AsyncClient):
    """An `AsyncClient` that also joins rounds of averaging."""

    async def meet(self, host: str, port: int, rounds: int) -> messages.Round:
        """Wait for a round, reachable at ``host`` and ``port``; with port 0, withdraw."""
        told: messages.Round = await self._run(lambda: self._requests.meet(host, port, rounds))
        return told

    async def agree(self, arrays: Mapping[str, Array]) -> Layout:
        """Check that this model is the server's, or define it; return its layout.

        Raises
        ------
        BadPush
            When the server's has other tensors; the text names the first difference.
        """
        if self._session.info.layout is not None:
            difference = self._session.info.layout.difference(Layout.of(arrays))
            if difference:
                raise BadPush(f"{self.url}: the server's model is another one: {difference}")
        else:
            await self.define_again(arrays)
        return self._session.info.known_layout

    async def define_again(self, arrays: Mapping[str, Array]) -> None:
        """Offer the model, without fetching any."""
        await self._run(lambda: self._requests.define(arrays))

    @property
    def local_host(self) -> str:
        """This side's address of the connection to the server."""
        connection = self._connection
        if connection is None or connection.transport is None:
            raise ConnectionLost(f"{self.url}: there is no connection")
        if self.near:  # this side is where the server is
            return connection.host
        return str(connection.transport.get_extra_info("sockname")[0])
