"""Measure what `aiops.launch.findings` judges: this machine, a server, a disk."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from aiops._version import __version__
from aiops.client.sync.client import Client
from aiops.client.variables import tls_files
from aiops.common import urls
from aiops.common.launchers import PORT
from aiops.common.tls_files import CA, CERT
from aiops.common.urls import ServerAddress
from aiops.errors import AiopsError, Unauthorised
from aiops.launch.findings import Machine, Reach, StateDisk
from aiops.launch.security_findings import CertificateSeen
from aiops.net import dns, unix_socket
from aiops.net.certificates import expiry
from aiops.net.cpu_count import BLAS, usable
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsClient

_PACKAGES = (
    *("numpy", "numba", "uvloop", "safetensors", "torch", "jax"),
    *("cupy-cuda12x", "cupy-cuda13x", "cupy"),
)
_PINGS = 5
_SYNCS = 5
_NO_LIMIT = 1 << 60  # bytes: what a control group without a limit says


def reach(server: ServerAddress, token: str | None, timeout: float) -> Reach:
    """Try to reach a server, stage by stage."""
    stages: dict[str, float] = {}
    began = time.perf_counter()
    try:
        addresses = dns.addresses_waited_for(server.host, timeout, lambda: None)
    except OSError as error:
        return Reach(server.url, stages, error=str(error.strerror or error))
    stages["address"] = time.perf_counter() - began
    ip, error_text = None, ""
    for address in addresses:
        began = time.perf_counter()
        try:
            socket.create_connection((address, server.port), timeout / len(addresses)).close()
        except OSError as error:
            error_text = f"{address} cannot be connected to: {error.strerror or error}"
        else:
            stages["connect"], ip = time.perf_counter() - began, address
            break
    if ip is None:
        return Reach(server.url, stages, addresses[0], error_text)
    began = time.perf_counter()
    try:
        with Client(server.url, token=token, timeout=timeout, name="aiops doctor") as client:
            client.ping()
            stages["welcome"] = time.perf_counter() - began
            trip = min(client.ping() for _ in range(_PINGS))
            asked = time.time()
            report = client.stats()
            theirs = report.get("time")
            clock = None if theirs is None else theirs - (asked + time.time()) / 2
            return Reach(
                *(server.url, stages, ip, "", False, trip, clock, client.near, report),
            )
    except AiopsError as error:
        return Reach(server.url, stages, ip, str(error), isinstance(error, Unauthorised))


def served_certificate(server: ServerAddress, ip: str, timeout: float) -> CertificateSeen | None:
    """Return the certificate that a server of TLS shows; None: it shows none that is accepted."""
    with contextlib.suppress(OSError, AiopsError):
        target = TlsClient(tls_files(None)).target(server.host)
        with (
            socket.create_connection((ip, server.port), timeout) as plain,
            target.context.wrap_socket(plain, server_hostname=target.host) as secure,
        ):
            until = (secure.getpeercert() or {}).get("notAfter")
        if isinstance(until, str):
            return CertificateSeen(f"that of {server.url}", ssl.cert_time_to_seconds(until))
    return None


def certificates(environment: Mapping[str, str]) -> list[CertificateSeen]:
    """Return the certificates that are set here, as far as they can be read."""
    found = []
    for variable in (CA, CERT):
        path = environment.get(variable)
        if path:
            with contextlib.suppress(AiopsError):  # who uses them says what is wrong
                found.append(CertificateSeen(f"{variable} {path}", expiry(Path(path))))
    return found


def machine(environment: Mapping[str, str], token: str | None, port: int | None) -> Machine:
    """Return the facts of this machine; ``port``: that of a server here, if one is meant."""
    text = environment.get(PORT, "")
    at = port if port is not None else int(text) if text.isdigit() else urls.PORT
    return Machine(
        usable(),
        _memory(),
        _descriptors(),
        {name: version for name in _PACKAGES if (version := _version(name))},
        {name: environment[name] for name in BLAS if name in environment},
        _shared_memory(),
        *(at, CURRENT_ENVIRONMENT.get().free_port("127.0.0.1", at)),
        bool(token),
        __version__,
    )


def state_disk(folder: Path) -> StateDisk:
    """Return the facts of the disk of a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        spent, path = [], folder / f".aiops-doctor-{os.getpid()}"
        try:
            with path.open("wb", buffering=0) as file:
                for _ in range(_SYNCS):
                    began = time.perf_counter()
                    file.write(bytes(4096))
                    os.fsync(file.fileno())
                    spent.append(time.perf_counter() - began)
        finally:
            path.unlink(missing_ok=True)
        space = os.statvfs(folder)
    except OSError as error:
        return StateDisk(str(folder), str(error.strerror or error))
    free = space.f_bavail * space.f_frsize
    return StateDisk(str(folder), "", free, _kind(folder.resolve()), sorted(spent)[_SYNCS // 2])


def _kind(folder: Path) -> str:
    """Return the type of the file system of a folder; empty where the system does not tell."""
    best, kind = "", ""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point, its_kind = line.split()[1:3]
            if folder.is_relative_to(point) and len(point) >= len(best):
                best, kind = point, its_kind
    return kind


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _memory() -> int:
    """Return the bytes that are available: the machine's, and within this control group's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(1024 * int(ln.split()[1]) for ln in lines if ln.startswith("MemAvailable"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int(Path("/sys/fs/cgroup", limit).read_text())
            if most < _NO_LIMIT:
                left = most - int(Path("/sys/fs/cgroup", used).read_text())
                found = min(found, max(0, left))
    return found


def _descriptors() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # not a Unix
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_limit = resource.RLIM_INFINITY
    return (None if soft == no_limit else soft), (None if hard == no_limit else hard)


def _shared_memory() -> str:
    if unix_socket.wanted():
        return ""
    if os.environ.get("AIOPS_NO_SHM"):
        return "AIOPS_NO_SHM turns it off"
    return "this system has no anonymous shared memory (memfd_create), which Linux has"
