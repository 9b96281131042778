"""The machine that somebody measures on, in words and numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiops.net.cpu_count import usable
from aiops.wire.compiled import COMPILED

PACKAGES = (
    *("numpy", "msgpack", "numba", "uvloop", "pyzmq", "grpcio", "torch", "jax"),
    *("mpi4py", "ray"),
)
"""The packages whose versions a report states, where installed; aiops comes first."""


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Describe this machine: everything that somebody needs who wants to repeat a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "kernel_settings": _kernel_settings(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "revision": _revision(),
        "compiled": COMPILED,
        "packages": {name: v for name in ("aiops-ps", *packages) if (v := _version(name))},
        "load_at_start": _load(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe(about: Mapping[str, Any]) -> str:
    """Put `machine`'s description on two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    versions += ", compiled" * about.get("compiled", False)
    return (
        f"{about['cpu']}, {about['usable_cores']} of {about['cores']} cores,"
        f" {about['memory_gib']} GiB, {about['system']}, {about['python']}\n{versions}"
    )


def _revision() -> str | None:
    """Name the commit that is checked out, with a + when files have changed; None: not in one."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if not done.returncode else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(git("status", "--porcelain")) if commit else None
    except OSError:  # there is no git
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    )
    return next(names, "") or platform.processor() or platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _kernel_settings() -> dict[str, str]:
    """Settings that move a loopback figure more than most code does."""
    paths = {
        "net.core.wmem_max": "/proc/sys/net/core/wmem_max",
        "net.ipv4.tcp_wmem": "/proc/sys/net/ipv4/tcp_wmem",
        "net.ipv4.tcp_rmem": "/proc/sys/net/ipv4/tcp_rmem",
        "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    }
    return {name: " ".join(text.split()) for name, path in paths.items() if (text := _read(path))}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
