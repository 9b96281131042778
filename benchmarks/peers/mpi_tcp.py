"""MPI over loopback TCP: the peer `mpi` with another of Open MPI's transports."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.base import Setting
from benchmarks.peers.mpi import Server, Worker, missing

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = {
    "pml": "ob1",
    "btl": "self,tcp",
    "btl_tcp_if_include": "lo",
    "btl_tcp_links": 1,
    "btl_tcp_sndbuf": 0,
    "btl_tcp_rcvbuf": 0,
    "btl_tcp_eager_limit": 65536,
    "mpi_yield_when_idle": 1,
    "whole": False,
}
"""Open MPI's own parameters, where a socket buffer of 0 bytes is left to the kernel.

Buffers of 1 MiB, two links, fragments of 1 MiB and UCX made no difference that could be told from
the noise; not to yield did harm."""
ENVIRONMENT: Mapping[str, str] = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
