"""Base classes of objects that are closed when their ``with`` block ends."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A base for classes with a `close`: ``with`` calls it, however the block ends."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release all resources after the block failed; by default as `close` does."""
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
    """The same for ``async with``, which connects first, and closes if that fails."""

    async def connect(self) -> Self:
        """Make it ready; by default there is nothing to do."""
        return self

    async def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    async def abandon(self) -> None:
        """Release all resources after the block failed; by default as `close` does."""
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
