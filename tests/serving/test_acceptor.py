"""The numbers of connections."""

from __future__ import annotations

import asyncio

from aiops.serving.config import Config
from aiops.serving.server import Server
from aiops.state.row_kinds import STEADY_ROW
from tests.pipes import Piped


def test_numbers_begin_again_and_are_never_of_two_open_connections() -> None:
    async def trial() -> tuple[list[int], list[int]]:
        server = Server(Config())
        await server.start()
        try:
            pipes = [Piped(server, f"{1:032x}")]
            server.connections._number = (1 << 32) - 2
            pipes += [Piped(server, f"{at:032x}") for at in (2, 3)]
            numbers = [pipe.protocol.number for pipe in pipes]
            return numbers, server.engine.membership.peers()
        finally:
            server.stop()
            await server.serve()

    numbers, joined = asyncio.run(trial())
    assert numbers == [1, (1 << 32) - 1, 2]
    assert joined == numbers
    assert STEADY_ROW.pack(max(numbers), 0, 0, 0, 0, 0)
