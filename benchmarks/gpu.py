"""A GPU's updates, beside the speed of its memory and its link: ``python -m benchmarks.gpu``.

The limit of a kernel is the device's own copy of 256 MiB, in bytes read and written a second; that
of a push that is applied there is the upload of the same bytes from page-locked memory, and of one
whose version is read afterwards the upload and the download. Each contender runs once per round, in
turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from aiops.kernels import Rule, Spans, cupy_device
from aiops.kernels.cuda_source import ArrayTypes
from aiops.kernels.device import Device
from aiops.kernels.device_kernel import DeviceKernel
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.model.layout import Cover, Layout
from aiops.model.shared_memory import Memory
from aiops.store.cuda_backend import PageLocked
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store, UpdateJob
from aiops.store.resources import Resources
from benchmarks import kernels, plots, report
from benchmarks.compare import Cell

__all__ = ["main", "run"]

SINGLE = ArrayTypes("float32", "float32", "float32")


def run(
    device: Device, size: int = 1 << 26, repeats: int = 15, names: Sequence[str] = kernels.USUAL
) -> dict[str, Any]:
    """Measure rules over ``size`` float32 parameters (64 Mi: 256 MiB) on a device.

    Returns the machine's description, and cells: contender → ``ms`` (median, min, max),
    ``gb_per_s`` and ``of_limit``.
    """
    known = kernels.rules()
    cells: dict[str, Any] = _kernels(device, size, repeats, {name: known[name] for name in names})
    cells |= _pushes(device, size, repeats, known["fasgd"])
    options = {"size": size, "repeats": repeats, "rules": list(names)}
    results = {"device": device.name, "cells": cells}
    return record("benchmark", "gpu", options, results, machine(("numpy",)))


def _kernels(
    device: Device, size: int, repeats: int, rules: Mapping[str, Rule]
) -> dict[str, dict[str, Any]]:
    stream, nbytes = device.stream(), 4 * size
    most = max(len(rule.state) + len(rule.reads) for rule in rules.values())
    arrays = [device.allocate(nbytes).view(np.float32) for _ in range(2 + most)]
    # No zeros: to divide them takes another way, which takes longer.
    values = np.random.default_rng(0).random(size, np.float32) + np.float32(0.5)
    for array in arrays:
        stream.upload(array.view(np.uint8), values.view(np.uint8))
    stream.finish()

    def copy() -> None:
        stream.copy(arrays[0], arrays[1])
        stream.finish()

    def updating(rule: Rule) -> Callable[[], None]:
        kernel = DeviceKernel(rule, SINGLE, device, stream)
        spans = Spans.whole(size, kernels.STEP, [kernels.SCALAR] * len(rule.scalars))
        w, g, *others = arrays
        states, reads = others[: len(rule.state)], others[len(rule.state) :][: len(rule.reads)]

        def update() -> None:
            kernel(spans, 1.0, w, g, w, states, reads)
            stream.finish()

        return update

    moved = {"limit: a copy": 2 * nbytes}
    contenders: dict[str, Callable[[], None]] = {"limit: a copy": copy}
    for name, rule in rules.items():
        contenders[f"{name}, fused"] = updating(rule)
        moved[f"{name}, fused"] = nbytes * (3 + 2 * len(rule.state) + len(rule.reads))
    return _compared(contenders, moved, repeats)


def _pushes(device: Device, size: int, repeats: int, rule: Rule) -> dict[str, dict[str, Any]]:
    layout = Layout.of({"w": np.empty(size, np.float32)})
    machine = Resources(PageLocked(Memory(), device), device=device)
    arena = machine.memory.holding(layout, np.zeros(layout.nbytes, np.uint8))
    store = Store(layout, rule, arena=arena, machine=machine)
    data = machine.memory.buffer(layout.nbytes)
    data[:] = 0
    stream, there = device.stream(), device.allocate(layout.nbytes)
    back = device.host(layout.nbytes)
    cover = Cover(layout.all, layout.starts, True, 0, None)

    def up() -> None:
        stream.upload(there, data)
        stream.finish()

    def both() -> None:
        up()
        stream.download(back, there)
        stream.finish()

    def push() -> None:
        job = UpdateJob(
            store,
            store.cost,
            gradient=Gradient(data, cover),
            steps=np.full(1, 0.01),
            touched=layout.all,
        )
        job.target = store.begin()
        store.commit(job.target, job.touched, job.run())

    def read() -> None:
        lease = store.lease()
        lease.version.arena  # noqa: B018
        lease.release()

    def exchange() -> None:
        read()
        push()
        read()

    one = {"limit: upload": layout.nbytes, "a push, applied": layout.nbytes}
    two = {"limit: upload, download": 2 * layout.nbytes, "applied, and read": 2 * layout.nbytes}
    found = _compared(dict(zip(one, (up, push), strict=True)), one, repeats)
    return found | _compared(dict(zip(two, (both, exchange), strict=True)), two, repeats)


def _compared(
    contenders: Mapping[str, Callable[[], None]], moved: Mapping[str, int], repeats: int
) -> dict[str, dict[str, Any]]:
    """Run each once per round; the first is the limit of the others."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # compiles
    for _ in range(repeats):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            seconds[name].append(time.perf_counter() - start)
    limit = next(iter(contenders))
    fastest = moved[limit] / statistics.median(seconds[limit])
    return {
        name: {
            "ms": report.spread([1e3 * each for each in found]),
            "gb_per_s": report.spread([moved[name] / each / 1e9 for each in found]),
            "of_limit": report.spread([moved[name] / each / fastest for each in found]),
            "limit": limit,
        }
        for name, found in seconds.items()
    }


def cells(found: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: what is not a limit, beside it."""
    for name, each in found["cells"].items():
        if name != each["limit"]:
            yield Cell.of(name, "speed", each["of_limit"], beside="limit")


def figure(found: Mapping[str, Any]) -> Figure:
    """Draw what each moves in a second."""
    names = list(found["cells"])
    speeds = {row: found["cells"][name]["gb_per_s"] for row, name in enumerate(names)}
    lines = [plots.rows("bytes of all streams", speeds)]
    panel = Panel(found["device"], "GB/s", "", lines, bottom=0, ticks=names)
    return Figure("Updates on a GPU, beside its memory and its link", [panel], 1)


def table(found: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows = [
        (
            name,
            f"{each['ms']['median']:.3f}",
            f"{each['gb_per_s']['median']:.1f}",
            f"{each['of_limit']['median']:.2f}",
        )
        for name, each in found["cells"].items()
    ]
    size, repeats = found["options"]["size"], found["options"]["repeats"]
    title = f"{size:,} float32 parameters on {found['device']}, median of {repeats}"
    return report.table(title, ("what", "ms", "GB/s", "of limit"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="which GPU (default cuda, the first)")
    parser.add_argument("--size", type=int, default=1 << 26, help="parameters (default 67108864)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--rules", default=",".join(kernels.USUAL), help="names, or all")

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        names = tuple(kernels.rules()) if chosen["rules"] == ("all",) else chosen["rules"]
        device = cupy_device.CupyDevice(cupy_device.number_of(chosen["device"]) or 0)
        return run(device, chosen["size"], chosen["repeats"], names)

    report.main(parser, measure, table, arguments, {"rules": str}, drawn=figure)


if __name__ == "__main__":
    main()
