"""Clients: blocking, async, the training loop's friend (both ways), and the model averager.

``aiops.client.torch`` and ``aiops.client.jax`` are imported by those who use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiops.client.asyncio.client import AsyncClient
from aiops.client.asyncio.worker import AsyncWorker
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker

if TYPE_CHECKING:
    from aiops.client.asyncio.averager import AsyncModelAverager
    from aiops.client.sync.averager import ModelAverager

__all__ = [
    "AsyncClient",
    "AsyncModelAverager",
    "AsyncWorker",
    "Client",
    "ModelAverager",
    "Params",
    "Receipt",
    "Worker",
]

_AVERAGERS = {
    "AsyncModelAverager": "aiops.client.asyncio.averager",
    "ModelAverager": "aiops.client.sync.averager",
}


def __getattr__(name: str) -> Any:
    if name not in _AVERAGERS:
        raise AttributeError(f"module 'aiops.client' has no attribute {name!r}")
    return getattr(importlib.import_module(_AVERAGERS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
