"""The speed of codecs, and the bytes that they leave: ``python -m benchmarks.codecs``.

Every codec is measured on one core, beside the same mathematics as one would write it down in NumPy
and in PyTorch (which do less: no error feedback, no packed payload where that is not one call, and
no check of what came), and beside a plain copy of the tensor. Figures are bytes of float32 tensor
per second, of the fastest round: what else runs on the machine can only slow one down. Then the
update kernels that read their gradient out of payloads, beside decoding first, and beside a loop
that only moves as many bytes (the limit). Everything is measured in one run, each contender once
per round and in turn.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from aiops.codecs import Codec, find
from aiops.kernels import Kernel, Rule, Spans, build
from aiops.kernels.vocabulary import Array
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.codec_peers import peers
from benchmarks.compare import Cell
from benchmarks.kernels import USUAL, rules

__all__ = ["SPECS", "main", "run"]

SPECS = (
    "fp16",
    "bf16",
    "int8",
    "onebit",
    "topk:fraction=0.01",
    "topk:fraction=0.001",
    "lowrank:rank=4",
)
APPLIED = {
    "fp16": (np.uint16, 1),
    "bf16": (np.uint16, 1),
    "int8": (np.int8, 1),
    "onebit": (np.uint32, 32),
}
"""The codecs that kernels read, and the items of their payloads, by elements in each."""

WAYS = ("encode", "with feedback", "decode", "decode and add", "check")


def run(size: int = 1 << 24, repeats: int = 15) -> dict[str, Any]:
    """Measure every codec over a matrix of about ``size`` float32 elements, on one core.

    Returns the machine's description and, per codec, ``bytes_per_element`` and ``gb_per_s``:
    contender → way (see `WAYS`) → figure. ``copy`` is that of a plain copy. ``applied``: rule →
    codec (``"float32"``: none) → ``ms`` of the kernel that reads its payload (``fused``), of
    decoding first (``apart``), and of a loop that reads and writes as many bytes (``limit``).
    """
    about = machine(("numpy", "numba", "torch"))
    rows = max(1, int(size**0.5))
    shape = (rows, max(1, size // rows))
    tensor = np.random.default_rng(0).standard_normal(shape, np.float32)
    other = np.zeros_like(tensor)
    with _one_core():
        found = {spec: _measure(find(spec), tensor, repeats) for spec in SPECS}
        copied = _fastest({"copy": lambda: np.copyto(other, tensor)}, repeats)["copy"]
        applied = {name: _applied(rules()[name], tensor.reshape(-1), repeats) for name in USUAL}
    results = {
        "shape": shape,
        "repeats": repeats,
        "copy": tensor.nbytes / copied / 1e9,
        "codecs": found,
        "applied": applied,
    }
    return record("benchmark", "codecs", {"size": size, "repeats": repeats}, results, about)


def _measure(codec: Codec, tensor: Array, repeats: int) -> dict[str, Any]:
    flat, shape, out = tensor.reshape(-1), tensor.shape, np.zeros(tensor.size, np.float32)
    plain = codec.encoder(shape, feedback=False)
    keeping = codec.encoder(shape, feedback=True)
    kind = type(codec)
    payload = np.frombuffer(bytes(plain.encode(flat)), np.uint8)
    ours: dict[str, Callable[[], object]] = {
        "encode": lambda: plain.encode(flat),
        "with feedback": lambda: keeping.encode(flat),
        "decode": lambda: kind.decode(payload, shape, out),
        "decode and add": lambda: kind.decode(payload, shape, out, add=True),
        "check": lambda: kind.check(payload, shape),
    }
    calls = {("aiops", way): call for way, call in ours.items()}
    for name, (encode, decode) in peers(codec, tensor).items():
        calls |= {(name, "encode"): encode, (name, "decode"): decode}
    speeds: dict[str, dict[str, float]] = {}
    for (name, way), seconds in _fastest(calls, repeats).items():
        speeds.setdefault(name, {})[way] = flat.nbytes / seconds / 1e9
    return {"bytes_per_element": len(payload) / flat.size, "gb_per_s": speeds}


def _applied(rule: Rule, gradient: Array, repeats: int) -> dict[str, dict[str, float]]:
    """Measure an update whose gradient is a payload, in place, beside its limit."""
    size, spans = gradient.size, Spans.whole(gradient.size, 0.005)
    weights, decoded = np.zeros_like(gradient), np.zeros_like(gradient)
    state = [np.full(size, value, np.float32) for value in rule.state.values()]
    plain, limit = build(rule, np.float32), _limit(len(state), 1)
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("float32", "fused"): lambda: plain(spans, 1.0, weights, gradient, weights, state),
        ("float32", "limit"): lambda: limit(weights, gradient, *state, np.float32(1.0)),
    }
    for name, (item, per) in APPLIED.items():
        kernel, kind = build(rule, np.float32, grad=name), type(find(name))
        encoded = find(name).encoder((size,), feedback=False).encode(gradient)
        payload = np.array(np.frombuffer(encoded, np.uint8))
        items, loop = np.zeros(size // per, item), _limit(len(state), per)

        def fused(kernel: Kernel = kernel, payload: Array = payload) -> None:
            kernel(spans, 1.0, weights, payload, weights, state)

        def apart(kind: type[Codec] = kind, payload: Array = payload) -> None:
            kind.decode(payload, (size,), decoded)
            plain(spans, 1.0, weights, decoded, weights, state)

        def moved(items: Array = items, loop: Callable[..., None] = loop) -> None:
            loop(weights, items, *state, np.float32(1.0))

        calls |= {(name, "fused"): fused, (name, "apart"): apart, (name, "limit"): moved}
    found: dict[str, dict[str, float]] = {}
    for (name, way), seconds in _fastest(calls, repeats).items():
        found.setdefault(name, {})[way] = 1e3 * seconds
    return found


def _limit(states: int, per: int) -> Callable[..., None]:
    """Compile the loop that moves a rule's streams, and items of ``per`` elements each.

    Items of several elements are read as `onebit` lays them out, row after row of elements beside
    the same items: so it runs in full vectors, whatever an item holds.
    """
    import numba

    from aiops.kernels.numba_jit import disjoint

    def move_1(w: Any, g: Any, scale: Any, row: Any) -> None:
        disjoint()
        for start in range(0, w.size // (row * per) * row * per, row):
            here, item = np.uintp(start), np.uintp(start // (row * per) * row)
            for i in range(np.uintp(row)):
                w[here + i] = (w[here + i] + np.float32(g[item + i])) * scale

    def move_4(w: Any, g: Any, n: Any, b: Any, v: Any, scale: Any, row: Any) -> None:
        disjoint()
        for start in range(0, w.size // (row * per) * row * per, row):
            here, item = np.uintp(start), np.uintp(start // (row * per) * row)
            for i in range(np.uintp(row)):
                w[here + i] = (w[here + i] + np.float32(g[item + i])) * scale
                n[here + i] = n[here + i] * scale
                b[here + i] = b[here + i] * scale
                v[here + i] = v[here + i] * scale

    loop: Callable[..., None] = numba.njit(nogil=True)(move_4 if states else move_1)
    return lambda w, *others: loop(w, *others, w.size if per == 1 else per)


def _fastest(calls: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles, and touches every page
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(each) for name, each in times.items()}


@contextmanager
def _one_core() -> Iterator[None]:
    """Stay on one core, where the system allows it: libraries would use all."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(usable)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def cells(found: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: ours beside a copy, and beside the limit."""
    for spec, each in found["codecs"].items():
        for way, speed in each["gb_per_s"]["aiops"].items():
            yield Cell.once(f"{spec}, {way}", "GB/s", speed / found["copy"], beside="copy")
    for rule, each in found["applied"].items():
        for name, ms in each.items():
            share = ms["limit"] / ms["fused"]
            yield Cell.once(f"{rule} of {name}", "speed", share, beside="limit")


def figure(found: Mapping[str, Any]) -> Figure:
    """Draw how fast tensors are coded, and how long updates take that read payloads."""
    speeds = {spec: each["gb_per_s"] for spec, each in found["codecs"].items()}
    names = ["no codec", *(short(spec) for spec in speeds)]
    panels = []
    for way in ("encode", "with feedback", "decode"):
        copied = plots.once("plain copy", {0: found["copy"]})
        lines = [copied]
        for writer in ("aiops", "NumPy", "PyTorch"):
            rows = {
                row: each[writer][way]
                for row, each in enumerate(speeds.values(), 1)
                if way in each.get(writer, ())
            }
            if rows:
                lines.append(plots.once(writer, rows))
        panels.append(Panel(way, "GB/s of tensor", "", lines, bottom=0, ticks=names))
    panels += [_update(rule, each) for rule, each in found["applied"].items()]
    return Figure("Codecs on one core, and updates that read their payloads", panels, 3)


def _update(rule: str, found: Mapping[str, Mapping[str, float]]) -> Panel:
    labels = {"fused": "update from the payload", "apart": "decoding first", "limit": "limit"}
    lines: list[Series] = []
    for way, label in labels.items():
        times = {row: ms[way] for row, ms in enumerate(found.values()) if way in ms}
        lines.append(plots.once(label, times))
    return Panel(f"{rule}: an update", "milliseconds", "", lines, bottom=0, ticks=list(found))


def short(spec: str) -> str:
    """Write a codec without the names of its settings."""
    name, _colon, settings = spec.partition(":")
    return " ".join([name, *(pair.partition("=")[2] for pair in settings.split(",") if pair)])


def tables(found: Mapping[str, Any]) -> Group:
    """Make the two tables of a report."""
    return Group(_coded_table(found), _applied_table(found))


def _coded_table(found: Mapping[str, Any]) -> Table:
    rows: list[Sequence[str]] = [
        ("raw", "plain copy", "4.000", *[f"{found['copy']:.2f}"] * 1, *[""] * (len(WAYS) - 1))
    ]
    for spec, each in found["codecs"].items():
        rows.append(())
        for index, (name, speeds) in enumerate(each["gb_per_s"].items()):
            figures = [f"{speeds[way]:.2f}" if way in speeds else "" for way in WAYS]
            length = f"{each['bytes_per_element']:.3f}" if not index else ""
            rows.append(("" if index else spec, name, length, *figures))
    title = (
        f"{' x '.join(map(str, found['shape']))} float32 on one core, GB/s of tensor,"
        f" fastest of {found['repeats']}"
    )
    columns = ("codec", "written in", "bytes/element", *WAYS)
    return report.table(title, columns, rows, text_columns=2)


def _applied_table(found: Mapping[str, Any]) -> Table:
    rows: list[Sequence[str]] = []
    for rule, each in found["applied"].items():
        if rows:
            rows.append(())
        for name, ms in each.items():
            apart = f"{ms['apart'] / ms['fused']:.2f}" if "apart" in ms else ""
            rows.append(
                (rule, name, f"{ms['fused']:.2f}", f"{ms['limit'] / ms['fused']:.2f}", apart)
            )
    title = "an update that reads its gradient out of the payload, in place"
    columns = ("rule", "gradient", "ms", "of limit", "x decoding first")
    return report.table(title, columns, rows, text_columns=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 24, help="elements (default 16777216)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        return run(**chosen)

    report.main(parser, measure, tables, arguments, drawn=figure)


if __name__ == "__main__":
    main()
