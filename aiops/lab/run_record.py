"""The record of a run, as JSON: its name, time, machine, versions, settings and results.

The demo, ``aiops bandwidth``, ``aiops experiment`` and ``aiops bench`` all write such records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import aiops
from aiops.net.cpu_count import usable

PACKAGES = (
    *("numpy", "msgpack", "numba", "uvloop", "pyzmq", "grpcio", "torch", "jax"),
    *("mpi4py", "ray"),
)
"""The packages whose versions a record states, where installed; aiops comes first."""

Versions: TypeAlias = Mapping[str, str | None]
"""Versions of what a result depends on, down to the last bit, by name."""


def record(
    kind: str,
    name: str,
    options: Any,
    results: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a run.

    Parameters
    ----------
    kind, name
        ``benchmark``, ``experiment`` or ``demo``, and which.
    options
        Its settings: a dataclass, or a mapping of plain values.
    results
        What was measured; it may replace a key of the record.
    about
        The description of the machine, made before the run; default: `machine` now.

    Returns
    -------
    ``{kind: name, "machine": ..., "options": ..., **results}``.
    """
    fields = dataclasses.asdict(options) if dataclasses.is_dataclass(options) else dict(options)  # type: ignore[arg-type]
    made = {kind: name, "machine": machine() if about is None else dict(about), "options": fields}
    return {**made, **results}


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; OSError when it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; OSError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record as JSON with a line for each row of its lists of rows: so it can be compared.

    The folder is made where there is none; OSError when the file cannot be written.
    """
    parts = []
    for name, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in value)
            parts.append(f'  "{name}": [\n{lines}\n  ]')
        else:
            parts.append(f'  "{name}": {json.dumps(value, ensure_ascii=False)}')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


@functools.cache
def versions() -> Versions:
    """Return the versions on which the last bit of a result depends, aiops' sources among them."""
    return {
        "aiops": aiops.__version__,
        "sources": sources(Path(aiops.__file__).parent),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("numpy", "numba", "torch")},
    }


def sources(package: Path) -> str:
    """Return a digest of a package's modules, which change between two releases."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return the description of this machine: what it takes to repeat a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable(),
        "memory_gib": round(physical_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "kernel_settings": _kernel_settings(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "revision": _revision(),
        "packages": {name: v for name in ("aiops-ps", *packages) if (v := _version(name))},
        "load_at_start": round(os.getloadavg()[0], 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def physical_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(about: Mapping[str, Any]) -> str:
    """Put `machine`'s description on two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    versions += ", compiled" * about.get("compiled", False)  # of reports before 2026-11-23
    return (
        f"{about['cpu']}, {about['usable_cores']} of {about['cores']} cores,"
        f" {about['memory_gib']} GiB, {about['system']}, {about['python']}\n{versions}"
    )


def _revision() -> str | None:
    """Return the commit of aiops' checkout, with a + when files have changed; None: no checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if not done.returncode else ""

    try:
        if not git("ls-files", Path(__file__).name):  # installed, perhaps within another checkout
            return None
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(git("status", "--porcelain")) if commit else None
    except OSError:  # there is no git
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    )
    return next(names, "") or platform.processor() or platform.machine()


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
