"""Training on Ray clusters: servers and workers as actors; `train` and the calls of its loops.

The decisions (`worker_group`, `dealing`, `checkpoint_list`) need no Ray; all else does, and is
loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiops.ray.context import get_checkpoint, get_context, get_dataset_shard, report
    from aiops.ray.running_server import RunningServer, server
    from aiops.ray.training import train

__all__ = [
    "RunningServer",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "server",
    "train",
]

_PUBLIC = {
    "RunningServer": "running_server",
    "get_checkpoint": "context",
    "get_context": "context",
    "get_dataset_shard": "context",
    "report": "context",
    "server": "running_server",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'aiops.ray' has no attribute {name!r}")
    try:
        importlib.import_module("ray.train")
    except ImportError as missing:
        raise ImportError(
            f"aiops.ray needs Ray with Ray Train, and {missing.name or 'a part of it'} is not here:"
            " pip install 'aiops-ps[ray]'",
            name=missing.name,
        ) from missing
    return getattr(importlib.import_module(f"aiops.ray.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
