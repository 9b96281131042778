"""Clients: blocking, async, and the training loop's friend.

``aiops.client.torch`` and ``aiops.client.jax`` are imported by those who use them.
"""

from __future__ import annotations

from aiops.client.aio import AsyncClient
from aiops.client.blocking import Client
from aiops.client.conversation import Receipt
from aiops.client.params import Params
from aiops.client.worker import Worker

__all__ = ["AsyncClient", "Client", "Params", "Receipt", "Worker"]
