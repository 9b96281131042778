"""What the tests of codecs share: which there are, on which shapes, and values of every kind."""

from __future__ import annotations

import numpy as np

from aiops.codecs import Codec, codec_named, find

BACKENDS = ["numba", "numpy"]

SPECS = [
    "raw",
    "fp16",
    "bf16",
    "int8",
    "topk:fraction=0.01",
    "topk:fraction=0.3,values=bf16",
    "topk:fraction=1.0",
    "onebit",
    "lowrank:rank=4",
    "lowrank:rank=2,values=float32",
]

SHAPES = [
    (),
    (0,),
    (1,),
    (3, 0, 2),
    (31,),
    (256,),
    (257,),
    (1024,),
    (3, 347),
    (70, 65),
    (129, 8, 3),
    (66_000,),
]


def kind_of(spec: str) -> type[Codec]:
    """The class that reads what a codec writes."""
    kind = codec_named(find(spec).name)
    assert kind is not None
    return kind


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Flat float32 values of a normal distribution."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def kinds_of_values(size: int) -> dict[str, np.ndarray]:
    """Flat float32 arrays that are hard in one way or another."""
    draw = np.random.default_rng(size)
    signs = draw.choice(np.array([-1, 1], np.float32), size)
    exponents = draw.integers(-149, 56, size)
    tiny = draw.integers(0, 400, size).astype(np.uint32).view(np.float32)
    return {
        "normal": draw.standard_normal(size).astype(np.float32),
        "zeros": np.zeros(size, np.float32),
        "negative zeros": np.full(size, -0.0, np.float32),
        "all alike": np.full(size, -0.37, np.float32),
        "ties": signs * draw.integers(0, 3, size).astype(np.float32),
        "halfway": (draw.integers(-254, 255, size) / 2).astype(np.float32),
        "subnormal": signs * tiny,
        "huge": signs * np.float32(1e17),
        "largest": signs * np.nextafter(np.float32(1e18), np.float32(0)),
        "any exponent": signs * np.ldexp(np.float32(1.3), exponents).astype(np.float32),
        "one alone": np.where(np.arange(size) == size // 2, 5, 0).astype(np.float32),
    }


def encoded(spec: str, values: np.ndarray, shape: tuple[int, ...], backend: str) -> np.ndarray:
    """A copy of one payload, without feedback."""
    encoder = find(spec).encoder(shape, feedback=False, backend=backend)
    return np.frombuffer(bytes(encoder.encode(values)), np.uint8)


def decoded(
    spec: str, payload: np.ndarray, shape: tuple[int, ...], backend: str = "numpy"
) -> np.ndarray:
    """What a payload stands for, flat; it passes its check first."""
    kind = kind_of(spec)
    assert kind.check(payload, shape, backend) is None
    out = np.full(int(np.prod(shape, dtype=np.int64)), np.nan, np.float32)
    kind.decode(payload, shape, out, backend=backend)
    return out
