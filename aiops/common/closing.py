"""What is closed when its ``with`` block ends."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A base for what has a `close`: ``with`` calls it, however the block ends."""

    def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Do this instead when the block failed; if nothing else is said, `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


class AsyncClosing:
    """The same for ``async with``, which connects first; what cannot connect is closed, too."""

    async def connect(self) -> Self:
        """Have it ready; if nothing else is said, it is."""
        return self

    async def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError

    async def abandon(self) -> None:
        """Do this instead when the block failed; if nothing else is said, `close`."""
        await self.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except BaseException:
            await self.abandon()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self.abandon()
