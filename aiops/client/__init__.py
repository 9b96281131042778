"""Clients: blocking, async, the training loop's friend (both ways), and the model averager.

``aiops.client.torch`` and ``aiops.client.jax`` are imported by those who use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiops.client.aio import AsyncClient
from aiops.client.aioworker import AsyncWorker
from aiops.client.blocking import Client
from aiops.client.params import Params
from aiops.client.requests import Receipt
from aiops.client.worker import Worker

if TYPE_CHECKING:
    from aiops.client.aioaverager import AsyncModelAverager
    from aiops.client.averager import ModelAverager

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
    "AsyncModelAverager": "aiops.client.aioaverager",
    "ModelAverager": "aiops.client.averager",
}


def __getattr__(name: str) -> Any:
    if name not in _AVERAGERS:
        raise AttributeError(f"module 'aiops.client' has no attribute {name!r}")
    return getattr(importlib.import_module(_AVERAGERS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
