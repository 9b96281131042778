"""What every benchmark's report has in common: the machine, the statistics, the table, the file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

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
        "usable_cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "kernel_settings": _kernel_settings(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: v for name in ("aiops-ps", *packages) if (v := _version(name))},
        "load_at_start": _load(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the greatest of some figures (at least one)."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1
) -> Table:
    """Make a table; the first ``text_columns`` columns are left-aligned, the others are figures.

    An empty row draws a line between sections.
    """
    made = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < text_columns else "right", no_wrap=True)
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def describe(about: Mapping[str, Any]) -> str:
    """Put `machine`'s description on two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return (
        f"{about['cpu']}, {about['usable_cores']} of {about['cores']} cores,"
        f" {about['memory_gib']} GiB, {about['system']}, {about['python']}\n{versions}"
    )


def show(made: Table, about: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table and the machine it was measured on; figures are never cut off."""
    console = console or Console()
    natural = console.measure(made, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, natural)
    console.print(made)
    console.print(describe(about), style="dim", highlight=False, soft_wrap=True)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, replacing the file whole."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(report, indent=2) + "\n")
    fresh.replace(path)


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


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def main(
    parser: argparse.ArgumentParser,
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    shown: Callable[[dict[str, Any]], Table],
    argv: Sequence[str] | None,
    lists: Mapping[str, Callable[[str], Any]] | None = None,
) -> None:
    """Run a benchmark from the command line; exit with 2 when an option is wrong.

    Parameters
    ----------
    parser
        Of its options; ``--json FILE`` is added.
    measure
        Takes the options, and returns the report.
    shown
        Lays the report out.
    argv
        The command line; None: the process's.
    lists
        Options that hold several values with commas between, and what reads one of them.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    chosen = vars(parser.parse_args(argv))
    path = chosen.pop("json")
    try:
        for name, read in (lists or {}).items():
            chosen[name] = tuple(map(read, chosen[name].split(",")))
        result = measure(chosen)
    except ValueError as error:  # a UsageError is one
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; all processes are ended", file=sys.stderr)
        raise SystemExit(130) from None
    if path:
        write_json(path, result)
    show(shown(result), result["machine"])


def say(line: str) -> None:
    """Tell on stderr how far it is."""
    print(line, file=sys.stderr, flush=True)
