"""aiops: an asyncio-native parameter server for asynchronous SGD.

>>> import aiops
>>> aiops.__version__
'0.1.0'
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from aiops._version import __version__

if TYPE_CHECKING:
    from aiops import data, errors
    from aiops.client.asyncio.client import AsyncClient
    from aiops.client.asyncio.worker import AsyncWorker
    from aiops.client.sync.client import Client
    from aiops.client.sync.worker import Worker
    from aiops.common.tls_files import Tls
    from aiops.model.tables import Table
    from aiops.server import serve

__all__ = [
    "AsyncClient",
    "AsyncWorker",
    "Client",
    "Table",
    "Tls",
    "Worker",
    "__version__",
    "data",
    "errors",
    "serve",
]

# Loaded when first used, so that importing aiops costs next to nothing.
_PUBLIC = {
    "AsyncClient": "aiops.client.asyncio.client",
    "AsyncWorker": "aiops.client.asyncio.worker",
    "Client": "aiops.client.sync.client",
    "Table": "aiops.model.tables",
    "Tls": "aiops.common.tls_files",
    "Worker": "aiops.client.sync.worker",
    "serve": "aiops.server",
    "errors": "aiops.errors",
    "client": "aiops.client",
    "data": "aiops.data",
}


_loading = threading.RLock()  # two threads that import two parts of a package wait for each other


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'aiops' has no attribute {name!r}")
    with _loading:
        module = importlib.import_module(_PUBLIC[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
