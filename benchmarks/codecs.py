"""How fast codecs are, and how much they leave: ``python -m benchmarks.codecs``.

Every codec is measured on one core, beside the same mathematics as one would write it down in NumPy
and in PyTorch (which do less: no error feedback, no packed payload where that is not one call, and
no check of what came), and beside a plain copy of the tensor. Figures are bytes of float32 tensor
per second, medians; everything is measured in one run, each contender once per round and in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aiops.codecs import Codec, find
from aiops.kernels.vocabulary import Array
from benchmarks import report

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
WAYS = ("encode", "with feedback", "decode", "decode and add", "check")

Pair = tuple[Callable[[], object], Callable[[], object]]
"""What encodes, and what decodes what that made."""


def run(size: int = 1 << 24, repeats: int = 9) -> dict[str, Any]:
    """Measure every codec over a matrix of about ``size`` float32 elements, on one core.

    Returns the machine's description and, per codec, ``bytes_per_element`` and ``gb_per_s``:
    contender → way (see `WAYS`) → figure. ``copy`` is that of a plain copy.
    """
    about = report.machine(("numpy", "numba", "torch"))
    rows = max(1, int(size**0.5))
    shape = (rows, max(1, size // rows))
    tensor = np.random.default_rng(0).standard_normal(shape, np.float32)
    other = np.zeros_like(tensor)
    with _one_core():
        found = {spec: _measure(find(spec), tensor, repeats) for spec in SPECS}
        copied = _medians({"copy": lambda: np.copyto(other, tensor)}, repeats)["copy"]
    return {
        "benchmark": "codecs",
        "shape": shape,
        "repeats": repeats,
        "copy": tensor.nbytes / copied / 1e9,
        "codecs": found,
        "machine": about,
    }


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
    for name, (encode, decode) in _peers(codec, tensor).items():
        calls |= {(name, "encode"): encode, (name, "decode"): decode}
    speeds: dict[str, dict[str, float]] = {}
    for (name, way), seconds in _medians(calls, repeats).items():
        speeds.setdefault(name, {})[way] = flat.nbytes / seconds / 1e9
    return {"bytes_per_element": len(payload) / flat.size, "gb_per_s": speeds}


def _medians(calls: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles, and touches every page
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def _peers(codec: Codec, tensor: Array) -> dict[str, Pair]:
    """Return the codec's mathematics as one would write them down elsewhere."""
    numpy_made = {
        "fp16": _numpy_fp16,
        "bf16": _numpy_bf16,
        "int8": _numpy_int8,
        "onebit": _numpy_onebit,
        "topk": _numpy_topk,
        "lowrank": _numpy_lowrank,
    }
    found = {"NumPy": numpy_made[codec.name](codec, tensor)}
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(1)
    made = _torch(torch, codec, torch.from_numpy(tensor))
    return found if made is None else {**found, "PyTorch": made}


def _numpy_fp16(codec: Codec, tensor: Array) -> Pair:
    sent = tensor.astype(np.float16)
    return lambda: tensor.astype(np.float16), lambda: sent.astype(np.float32)


def _numpy_bf16(codec: Codec, tensor: Array) -> Pair:
    def encode() -> Array:
        bits = tensor.view(np.uint32)
        return ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype(np.uint16)

    sent = encode()
    return encode, lambda: (sent.astype(np.uint32) << 16).view(np.float32)


def _numpy_int8(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    blocks = flat[: flat.size // 256 * 256].reshape(-1, 256)

    def encode() -> tuple[Array, Array]:
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
        return scales, np.rint(blocks / scales).astype(np.int8)

    scales, codes = encode()
    return encode, lambda: codes * scales


def _numpy_onebit(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    blocks = flat[: flat.size // 1024 * 1024].reshape(-1, 1024)

    def encode() -> tuple[Array, Array]:
        return np.abs(blocks).mean(axis=1, keepdims=True), np.packbits(blocks < 0, axis=1)

    scales, signs = encode()
    return encode, lambda: np.where(np.unpackbits(signs, axis=1), -scales, scales)


def _numpy_topk(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    kept = max(1, round(getattr(codec, "fraction") * flat.size))  # noqa: B009

    def encode() -> tuple[Array, Array]:
        indices = np.argpartition(np.abs(flat), -kept)[-kept:]
        return indices, flat[indices]

    def decode() -> Array:
        out = np.zeros_like(flat)
        out[indices] = values
        return out

    indices, values = encode()
    return encode, decode


def _numpy_lowrank(codec: Codec, tensor: Array) -> Pair:
    rank = getattr(codec, "rank")  # noqa: B009
    first = np.random.default_rng(1).standard_normal((tensor.shape[1], rank), np.float32)

    def encode() -> tuple[Array, Array]:
        p, _ = np.linalg.qr(tensor @ first)
        return p, tensor.T @ p

    p, q = encode()
    return encode, lambda: p @ q.T


def _torch(torch: Any, codec: Codec, tensor: Any) -> Pair | None:
    """Return what PyTorch has, by name; there is nothing like ``onebit`` in it."""
    flat = tensor.reshape(-1)
    if codec.name in ("fp16", "bf16"):
        dtype = torch.float16 if codec.name == "fp16" else torch.bfloat16
        sent = tensor.to(dtype)
        return lambda: tensor.to(dtype), lambda: sent.to(torch.float32)
    if codec.name == "int8":
        blocks = flat[: flat.numel() // 256 * 256].reshape(-1, 256)

        def quantise() -> tuple[Any, Any]:
            scales = blocks.abs().amax(dim=1, keepdim=True) / 127
            return scales, (blocks / scales).round().to(torch.int8)

        scales, codes = quantise()
        return quantise, lambda: codes * scales
    if codec.name == "topk":
        kept = max(1, round(getattr(codec, "fraction") * flat.numel()))  # noqa: B009

        def largest() -> tuple[Any, Any]:
            _, indices = flat.abs().topk(kept, sorted=False)
            return indices, flat[indices]

        indices, values = largest()
        return largest, lambda: torch.zeros_like(flat).index_put_((indices,), values)
    if codec.name == "lowrank":
        first = torch.randn(tensor.shape[1], getattr(codec, "rank"))  # noqa: B009

        def factors() -> tuple[Any, Any]:
            p, _ = torch.linalg.qr(tensor @ first)
            return p, tensor.T @ p

        p, q = factors()
        return factors, lambda: p @ q.T
    return None


@contextmanager
def _one_core() -> Iterator[None]:
    """Stay on one core, where the system can be told so: libraries would use all."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(usable)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def show(found: dict[str, Any]) -> None:
    """Print the report of :func:`run` as a table."""
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
        f" median of {found['repeats']}"
    )
    columns = ("codec", "written in", "bytes/element", *WAYS)
    report.show(report.table(title, columns, rows, text_columns=2), found["machine"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 24, help="elements (default 16777216)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--json", type=Path, help="write the report to this file as well")
    options = parser.parse_args(arguments)
    found = run(options.size, options.repeats)
    show(found)
    if options.json is not None:
        report.write_json(options.json, found)


if __name__ == "__main__":
    main()
