"""The async client and worker with the blocking ones' face, so that one suite can ask both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from aiops.client import AsyncClient, AsyncWorker
from tests.support import PATIENCE


class Adapter:
    """An `AsyncClient` or `AsyncWorker` on a loop in a thread of its own, with a blocking face."""

    def __init__(
        self,
        new_loop: Callable[[], asyncio.AbstractEventLoop],
        *arguments: Any,
        of: type[AsyncClient] | type[AsyncWorker] = AsyncClient,
        **named: Any,
    ) -> None:
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.client = self.run(self._make(of, *arguments, **named))
        except BaseException:
            self._end()
            raise

    async def _make(self, of: Any, *arguments: Any, **named: Any) -> Any:
        client = of(*arguments, **named)
        try:
            return await client.connect()
        except BaseException:
            await client.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not callable(found):
            return found
        return lambda *arguments, **named: self.run(found(*arguments, **named))

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.run(self.client.close())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()
