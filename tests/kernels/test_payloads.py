"""A kernel that reads its gradient out of payloads has the bits of decoding first."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN
from aiops.algorithms import find as algorithm
from aiops.codecs import codec_named, find
from aiops.errors import UsageError
from aiops.kernels import Rule, Spans, build, numba_kernel
from aiops.kernels.payloads import FORMATS, format_named
from tests.kernels.rules import EVERYTHING, FASGD, PASSED_ON, SGD
from tests.rows import each_row

BACKENDS = ["numba", "numpy"]
SIZES = [1, 300, 0, 1024, 40_000, 33, 1025]
"""Elements of the tensors; the model is 7 elements longer at both ends."""

NUMBA = [*(("fasgd", name) for name in FORMATS), ("everything", "onebit")]
"""The rules and formats that are compiled: to a rule, a gradient is one however it was read."""

RULES = {"sgd": SGD, "fasgd": FASGD, "everything": EVERYTHING, "passed on": PASSED_ON}


class Model:
    """Tensors side by side, a payload of each at any address, and the decoded gradient."""

    def __init__(self, rule: Rule, name: str) -> None:
        draw = np.random.default_rng(3)
        total = sum(SIZES) + 14
        self.rule = rule
        self.arrays = [draw.standard_normal(total).astype(np.float32) for _ in range(9)]
        edges = np.cumsum([7, *SIZES])
        self.lo, self.hi = edges[:-1], edges[1:]
        self.decoded = np.zeros(total, np.float32)
        buffer, self.src = b"abc", []
        for lo, hi in zip(self.lo, self.hi, strict=True):
            gradient = draw.standard_normal(hi - lo).astype(np.float32)
            payload = find(name).encoder(gradient.shape, feedback=False).encode(gradient)
            kind = codec_named(name)
            assert kind is not None
            bytes_ = np.frombuffer(payload, np.uint8)
            kind.decode(bytes_, gradient.shape, self.decoded[lo:hi])
            self.src.append(len(buffer))
            buffer += bytes(payload) + b"x"
        self.payloads = np.frombuffer(buffer, np.uint8)

    def spans(self, src: object) -> Spans:
        step = 0.1 + 0.01 * np.arange(len(SIZES))
        more = np.full((len(SIZES), len(self.rule.scalars)), 0.7)
        return Spans(self.lo, self.hi, np.array(src), step, more)

    def update(self, kernel: object, src: object, grad: np.ndarray, in_place: bool) -> list:
        """Run a kernel; return the bytes of all that it may have written, and the sums."""
        base, target, *others = (array.copy() for array in self.arrays)
        state = others[: len(self.rule.state)]
        reads = others[len(state) : len(state) + len(self.rule.reads)]
        target = base if in_place else target
        sums = kernel(self.spans(src), 0.5, base, grad, target, state, reads)
        return [array.tobytes() for array in (base, target, *state)] + [sums.tolist()]


@pytest.mark.parametrize(
    ("backend", "rule", "name"),
    [
        *(("numba", *case) for case in NUMBA),
        *(("numpy", rule, name) for rule in RULES for name in FORMATS),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_the_bits_are_those_of_decoding_first(
    backend: str, rule: str, name: str, in_place: bool
) -> None:
    model = Model(RULES[rule], name)
    plain = build(model.rule, np.float32, "numpy")
    packed = build(model.rule, np.float32, backend, grad=name)
    packed.warm()
    assert packed.backend == backend
    wanted = model.update(plain, model.lo, model.decoded, in_place)
    assert model.update(packed, model.src, model.payloads, in_place) == wanted


@each_row("name", FORMATS)
@each_row("backend", BACKENDS)
@each_row("src", [-1, 4])
def test_a_payload_that_does_not_lie_in_the_buffer(name: str, backend: str, src: int) -> None:
    kernel = build(FASGD, np.float32, backend, grad=name)
    length = FORMATS[name].length(40)
    buffer = np.zeros(length + 3, np.uint8)
    w, state = np.ones(40, np.float32), list(np.ones((3, 40), np.float32))
    spans = Spans(np.array([0]), np.array([40]), np.array([src]), np.array([0.5]))
    with pytest.raises(
        UsageError, match=rf"from gradient bytes {src} on, of {length + 3} \({length} are"
    ):
        kernel(spans, 1.0, w, buffer, w, state)
    assert (w == 1.0).all()
    spans.src[0] = 3
    kernel(spans, 1.0, w, buffer, w, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_that_holds_no_bytes(backend: str) -> None:
    kernel = build(FASGD, np.float32, backend, grad="int8")
    w, state = np.ones(40, np.float32), list(np.ones((3, 40), np.float32))
    with pytest.raises(UsageError, match="grad that has dtype float32, not uint8"):
        kernel(Spans.whole(40, 0.5), 1.0, w, np.zeros(99, np.float32), w, state)
    grad = np.zeros(200, np.uint8)
    spans = Spans(*(np.zeros(2, np.int64) for _ in range(3)), np.ones(2))
    spans.src = spans.src[:1]
    with pytest.raises(UsageError, match="was given spans with 2 lo, 2 hi, 1 src"):
        kernel(spans, 1.0, w, grad, w, state)
    inside = grad[:160].view(np.float32)
    with pytest.raises(UsageError, match="overlap in memory"):
        kernel(Spans.whole(40, 0.5), 1.0, inside, grad, inside, state)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_payloads_are_of_float32(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"to read gradients of 'int8' for dtype {dtype}"):
        build(SGD, dtype, grad="int8")


def test_a_codec_that_kernels_do_not_read() -> None:
    text = "kernels cannot read gradients of 'topk'; known: bf16, fp16, int8, onebit"
    with pytest.raises(UsageError, match=re.escape(text)):
        build(SGD, np.float32, grad="topk")
    assert format_named("int8") is FORMATS["int8"]


@each_row("name", FORMATS)
def test_lengths_are_the_codecs(name: str) -> None:
    sizes = np.array([0, 1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 70_000])
    lengths = [find(name).most((size,)) for size in sizes.tolist()]
    assert FORMATS[name].length(sizes).tolist() == lengths


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_loops_run_in_vectors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # code from a cache has no text to look at
    text = build(SGD, np.float32, "numba", grad=name).text
    title = f"looked_at_{name}"
    numba_kernel._compile.__wrapped__(title, text, "float32", states=0, packed=True)
    module = next(m for key, m in sys.modules.items() if f"aiops_kernel_{title}" in key)
    try:
        for loop in (module._in_place, module._out_of_place):
            (code,) = loop.inspect_llvm().values()
            assert re.search(r"fsub <\d+ x float>", code)
            assert not re.search(r"f(mul|add|sub|div) [a-z]*(fast|contract|reassoc)", code)
            assert not re.search(r"llvm\.fm(a|uladd)", code)
    finally:
        del sys.modules[module.__name__]


@each_row("name", FORMATS)
@each_row("policy", sorted(BUILT_IN))
def test_no_name_of_a_loader_is_one_of_a_rule(policy: str, name: str) -> None:
    """A state `u` is `_u_` in the loops: no parameter of a loader may be that."""
    kernel = build(algorithm(policy).make({}).rule(), np.float32, "numba", grad=name)
    assert isinstance(kernel, numba_kernel.NumbaKernel)
    compile(kernel.text, policy, "exec")
