"""Compile loops with Numba; the scalar functions that they call, and the checks of a call.

This is the only module of aiops that imports Numba at its top, so others import it inside the
functions that need it. Each word has the bits of its namesake in :mod:`aiops.kernels.vocabulary`.
"""

from __future__ import annotations

import functools
import math
import platform
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from aiops.kernels.gradient_loaders import TURN
from aiops.kernels.lazy_numba import HELPERS, NumbaWord
from aiops.kernels.numba_registries import load_registries

__all__ = [
    "AHEAD",
    "FOLDED",
    "absolute",
    "address",
    "ahead",
    "array_of",
    "bf16_to_float",
    "compile_loop",
    "compiled",
    "disjoint",
    "entry",
    "float_to_fp16",
    "float_to_fp16_bits",
    "flushed",
    "fold_crc",
    "fp16_bits_to_float",
    "fp16_to_float",
    "loop",
    "maximum",
    "minimum",
    "misfit",
    "onebit_to_float",
    "overlap",
    "part",
    "pointer_to",
    "prefetch",
    "read_only",
    "sign",
    "sqrt",
    "where",
    "writable",
]

F = TypeVar("F", bound=Callable[..., Any])

load_registries()


def array_of(dtype: str, *, writable: bool = False) -> Any:
    """Return Numba's type of a one-dimensional contiguous array.

    Arrays that are only read may be read-only and unaligned, because a gradient lies at any address
    of a receive buffer. So one compiled variant serves every array; on x86 and ARM it is as fast.
    """
    return types.Array(getattr(types, dtype), 1, "C", readonly=not writable, aligned=False)


def compiled(function: F, signature: Any, *, cache: bool) -> F:
    """Compile ``function`` for ``signature``; keep the machine code on disk if ``cache``."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        compiled: F = numba.njit(signature, cache=cache, **options)(function)
    except RuntimeError as error:
        # Numba found no folder in which it may write its cache.
        if not cache or "cannot cache" not in str(error):
            raise
        compiled = numba.njit(signature, **options)(function)
    return compiled


def address(function: Callable[..., Any], signature: Any, *, cache: bool) -> int:
    """Compile ``function`` for callers in C; return its address, which stays valid.

    An exception of it goes to `sys.unraisablehook`, and the caller does not see it.
    """
    options: dict[str, Any] = {"error_model": "numpy"}
    try:
        made = numba.cfunc(signature, cache=cache, **options)(function)
    except RuntimeError as error:
        if not cache or "cannot cache" not in str(error):
            raise
        made = numba.cfunc(signature, **options)(function)
    _KEPT.append(made)
    found: int = made.address
    return found


def pointer_to(dtype: str) -> Any:
    """Return Numba's type of a pointer to numbers."""
    return types.CPointer(getattr(types, dtype))


_KEPT = list[Any]()  # those whose addresses have been given out


def compile_loop(function: F, signature: Any) -> F:
    """Compile a loop of a module that does not import Numba, and keep the machine code on disk.

    ``function`` is a plain function of a module. Where it names helpers or stand-ins of
    `aiops.kernels.lazy_numba`, it gets what Numba makes of them.
    """
    assert isinstance(function, FunctionType)
    bound: F = _bound(function, _namespace(function.__module__))
    return compiled(bound, signature, cache=True)


def entry(function: Callable[..., Any], signature: Any) -> int:
    """Return the `address` of such a function, as `compile_loop` binds it."""
    assert isinstance(function, FunctionType)
    return address(_bound(function, _namespace(function.__module__)), signature, cache=True)


@functools.cache
def _namespace(module: str) -> dict[str, Any]:
    """Return the globals of a module's loops: the module's, with the helpers compiled."""
    found = dict(vars(sys.modules[module]))
    for name, value in found.items():
        if isinstance(value, NumbaWord):
            found[name] = globals()[value.name]
        elif isinstance(value, FunctionType) and value in HELPERS:
            home = found if value.__module__ == module else _namespace(value.__module__)
            found[name] = numba.njit(error_model="numpy", **HELPERS[value])(_bound(value, home))
    return found


def _bound(function: Any, namespace: dict[str, Any]) -> Any:
    """Return the same function with other globals."""
    made = FunctionType(function.__code__, namespace, function.__name__)
    made.__qualname__ = function.__qualname__
    return made


def _word(function: F) -> F:
    inlined: F = numba.njit(forceinline=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    return inlined


def loop(function: F) -> F:
    """Return a loop that compiled code can call, and Python cannot.

    What Python would call, a wrapper, takes nearly as long to compile as a short loop.
    """
    options = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made: F = numba.njit(error_model="numpy", **options)(function)
    return made


def _disjoint(typing_context: Any) -> Any:
    """Declare that no two arrays among the enclosing function's arguments overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for argument in builder.function.args:
            if str(argument.type) in ("float*", "double*"):  # an array's data
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), generate


disjoint = intrinsic(_disjoint)


AHEAD = 512
"""Elements between a turn of a loop and those that it prefetches."""

LINE = 64
"""Bytes of a cache line on nearly every processor."""


def _ask(context: Any, builder: Any, kind: Any, array: Any, place: Any, lines: int) -> Any:
    """Emit prefetches of cache lines, beginning with that of an element of a flat array."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    called = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch")
    to_read, keep, data = (ir.Constant(word, value) for value in (0, 3, 1))
    flat = context.make_array(kind)(context, builder, array)
    first = builder.bitcast(builder.gep(flat.data, [place]), byte)
    for line in range(lines):
        at = builder.gep(first, [ir.Constant(ir.IntType(64), LINE * line)])
        builder.call(prefetch, [at, to_read, keep, data])
    return context.get_dummy_value()


def _prefetched(typing_context: Any, array: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flat, first = arguments
        return _ask(context, builder, signature.args[0], flat, first, 1)

    return types.void(array, types.int64), generate


def _turn_ahead(typing_context: Any, array: Any, place: Any) -> Any:
    lines = max(1, TURN * np.dtype(str(array.dtype)).itemsize // LINE)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flat, first = arguments
        later = builder.add(first, ir.Constant(first.type, AHEAD))
        return _ask(context, builder, signature.args[0], flat, later, lines)

    return types.void(array, types.int64), generate


prefetch = intrinsic(_prefetched)
"""``prefetch(array, index)`` prefetches the cache line of an element, which need not exist."""

ahead = intrinsic(_turn_ahead)
"""``ahead(array, index)`` prefetches the elements of the turn `AHEAD` elements later."""


def _part(typing_context: Any, array: Any, start: Any, stop: Any) -> Any:
    """Cut a part out of a flat array, whose bounds the caller has checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole, first, last = arguments
        cut = context.make_array(signature.return_type)(context, builder, whole)
        size = builder.sub(last, first)
        cut.data = builder.gep(cut.data, [first])
        cut.nitems, cut.shape = size, cgutils.pack_array(builder, [size])
        return impl_ret_borrowed(context, builder, signature.return_type, cut._getvalue())

    return array(array, types.int64, types.int64), generate


def _overlap(typing_context: Any, one: Any, two: Any) -> Any:
    """Compare where two contiguous arrays begin and end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        edges = []
        for kind, value in zip(signature.args, arguments, strict=True):
            array = context.make_array(kind)(context, builder, value)
            begin = builder.ptrtoint(array.data, ir.IntType(64))
            edges.append((begin, builder.add(begin, builder.mul(array.nitems, array.itemsize))))
        (first, first_end), (second, second_end) = edges
        return builder.and_(
            builder.icmp_unsigned("<", first, second_end),
            builder.icmp_unsigned("<", second, first_end),
        )

    return types.boolean(one, two), generate


def _given(typing_context: Any, pointer: Any, size: Any, *, writable: bool) -> Any:
    """Make a flat array, as of `array_of`, of numbers of which C has a pointer."""
    kind = types.Array(pointer.dtype, 1, "C", readonly=not writable, aligned=False)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, count = arguments
        made = context.make_array(kind)(context, builder)
        width = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        step = context.get_constant(types.intp, width)
        shape, strides = (cgutils.pack_array(builder, [each]) for each in (count, step))
        populate_array(made, data, shape, strides, step, None)
        return made._getvalue()

    return kind(pointer, types.int64), generate


def _read_only(typing_context: Any, pointer: Any, size: Any) -> Any:
    return _given(typing_context, pointer, size, writable=False)


def _writable(typing_context: Any, pointer: Any, size: Any) -> Any:
    return _given(typing_context, pointer, size, writable=True)


read_only = intrinsic(_read_only)
"""``read_only(pointer, size)``: an array of numbers in C's memory, which is only read."""

writable = intrinsic(_writable)
"""The same, which may be written to."""

part = intrinsic(_part)
"""``part(array, start, stop)`` is ``array[start:stop]`` within the bounds.

Numba's slices take any bounds, and so much code that it is a third of a kernel's compilation.
"""

overlap = intrinsic(_overlap)
"""``overlap(one, two)``: whether two contiguous arrays share memory."""


def _power(exponent: int) -> int:
    """Return x to a power modulo the polynomial of CRC-32, its bits reflected."""
    found = 1 << 31
    for _ in range(exponent):
        found = found >> 1 ^ (0xEDB8_8320 if found & 1 else 0)
    return found << 1  # a product of reflected numbers is one bit too low


def _folded(typing_context: Any, array: Any, into: Any) -> Any:
    """Fold a flat array of whole blocks of `FOLDED` bytes into one block with the same CRC-32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64, byte = ir.IntType(64), ir.IntType(8)
        vector = ir.VectorType(i64, 2 * _CARRYLESS)
        called = ir.FunctionType(vector, [vector, vector, byte])
        name = "llvm.x86.pclmulqdq" + {1: "", 2: ".256", 4: ".512"}[_CARRYLESS]
        multiply = cgutils.get_or_insert_function(builder.module, called, name)
        bits = 8 * FOLDED
        pair = [ir.Constant(i64, _power(bits + 32)), ir.Constant(i64, _power(bits - 32))]
        by = ir.Constant(vector, pair * _CARRYLESS)

        def lane_at(array: Any, index: Any, lane: int) -> Any:
            first = builder.bitcast(array.data, vector.as_pointer())
            return builder.gep(first, [builder.add(index, ir.Constant(i64, lane))])

        flat, out = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        zero, step = ir.Constant(i64, 0), ir.Constant(i64, _LANES)
        lanes = [cgutils.alloca_once(builder, vector) for _ in range(_LANES)]
        for lane, kept in enumerate(lanes):
            builder.store(builder.load(lane_at(flat, zero, lane), align=1), kept)
        words = [0xFFFF_FFFF, *[0] * (2 * _CARRYLESS - 1)]  # the first state
        state = ir.Constant(vector, [ir.Constant(i64, word) for word in words])
        builder.store(builder.xor(builder.load(lanes[0]), state), lanes[0])
        size = builder.extract_value(flat.shape, 0)
        count = builder.udiv(size, ir.Constant(i64, FOLDED // _LANES))
        with cgutils.for_range_slice(builder, step, count, step, i64) as (index, _count):
            for lane, kept in enumerate(lanes):
                old, new = builder.load(kept), builder.load(lane_at(flat, index, lane), align=1)
                low = builder.call(multiply, [old, by, ir.Constant(byte, 0x00)])
                high = builder.call(multiply, [old, by, ir.Constant(byte, 0x11)])
                builder.store(builder.xor(builder.xor(low, high), new), kept)
        for lane, kept in enumerate(lanes):
            builder.store(builder.load(kept), lane_at(out, zero, lane), align=1)
        return context.get_dummy_value()

    return types.void(array, into), generate


@_word
def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """Return ``then`` if ``condition`` holds, else ``otherwise``; both are evaluated."""
    return then if condition else otherwise


@_word
def sqrt(x: Any) -> Any:
    """Return the square root, NaN below zero."""
    return math.sqrt(x)


@_word
def maximum(x: Any, y: Any) -> Any:
    """Return the larger value; NaN if either is; a zero is +0."""
    return (y if y != y else max(x, y)) + type(x)(0.0)


@_word
def minimum(x: Any, y: Any) -> Any:
    """Return the smaller value; NaN if either is; a zero is +0."""
    return (y if y != y else min(x, y)) + type(x)(0.0)


@_word
def absolute(x: Any) -> Any:
    """Return the absolute value."""
    return abs(x)


@_word
def sign(x: Any) -> Any:
    """Return -1, +0 or 1 by the sign, NaN for NaN."""
    real = type(x)
    if x > real(0.0):
        return real(1.0)
    if x < real(0.0):
        return real(-1.0)
    return x + real(0.0)


def flushed(x: Any) -> Any:
    """Return ``x``, or if it is subnormal a zero of its sign."""
    return x * type(x)(0.0) if abs(x) < np.finfo(type(x)).tiny else x


@overload(flushed, jit_options={"forceinline": True, "error_model": "numpy"})  # type: ignore
def _flushed(x: Any) -> Any:
    # On the bits, which takes two vector instructions instead of four.
    real: Any = np.float32 if x == types.float32 else np.float64
    bits: Any = np.uint32 if x == types.float32 else np.uint64
    exponent, sign, zero = real(np.inf).view(bits), real(-0.0).view(bits), bits(0)

    def code(x: Any) -> Any:
        pattern = real(x).view(bits)
        kept = pattern if bits(pattern & exponent) != zero else bits(pattern & sign)
        return bits(kept).view(real)

    return code


_F, _U = np.float32, np.uint32
_S13, _S16, _NEGATIVE = _U(13), _U(16), _U(0x8000_0000)
_LEAST_NORMAL, _LEAST_NORMAL_VALUE = _U(113 << 23), _F(2.0**-14)
_BIAS = _U((127 - 15) << 23)
_MAGNITUDE, _SIGN, _EXPONENT = _U(0x7FFF), _U(0x8000), _U(0x7C00)
_MAGNITUDE_32 = _U(0x7FFF_FFFF)
_MAGIC = _F(0.5)  # added to a magnitude below 2**-14, rounds it to a multiple of 2**-24
_MAGIC_BITS = _U(126 << 23)
_REBIAS = _U((15 - 127) % 2**32 << 23 & 0xFFFF_FFFF)
_ONE, _ROUND_13 = _U(1), _U(0xFFF)


@_word
def fp16_bits_to_float(half: Any) -> Any:
    """Return the float32 of the bits of a finite binary16; without a branch, so it vectorises.

    After F. Giesen's half_to_float_fast.
    """
    magnitude = _U(_U(_U(half) & _MAGNITUDE) << _S13)
    normal = _U(magnitude + _BIAS)
    small = _F(_U(magnitude + _LEAST_NORMAL).view(np.float32) - _LEAST_NORMAL_VALUE)
    tiny = _U(_U(half) & _EXPONENT) == _U(0)
    bits = _F(small).view(np.uint32) if tiny else normal
    return _U(bits | _U(_U(_U(half) & _SIGN) << _S16)).view(np.float32)


@_word
def float_to_fp16_bits(value: Any) -> Any:
    """Return the bits of a float32 of at most 65,504 rounded to binary16, ties to even.

    After F. Giesen's float_to_half_fast3_rtne.
    """
    bits = _F(value).view(np.uint32)
    magnitude = _U(bits & _MAGNITUDE_32)
    small = _U(_F(_U(magnitude).view(np.float32) + _MAGIC).view(np.uint32) - _MAGIC_BITS)
    odd = _U(_U(magnitude >> _S13) & _ONE)
    normal = _U(_U(_U(_U(magnitude + _REBIAS) + _ROUND_13) + odd) >> _S13)
    half = small if magnitude < _LEAST_NORMAL else normal
    return _U(half | _U(_U(bits >> _S16) & _SIGN))


def _widened(typing_context: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _narrowed(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


# Numba has no binary16 on CPUs, but most CPUs convert it. On others LLVM would call a function that
# does not exist, so integers are used instead.
_FEATURES = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
HAS_FP16 = "+f16c" in _FEATURES or platform.machine() in ("aarch64", "arm64")
fp16_to_float = intrinsic(_widened) if HAS_FP16 else fp16_bits_to_float
float_to_fp16 = intrinsic(_narrowed) if HAS_FP16 else float_to_fp16_bits


@_word
def bf16_to_float(half: Any) -> Any:
    """Return the float32 whose upper half has these bits."""
    return _U(_U(half) << _S16).view(np.float32)


@_word
def onebit_to_float(word: Any, mask: Any, scale: Any) -> Any:
    """Return the scale, negative if the bit of a mask is set in a word."""
    positive = _F(scale).view(np.uint32)
    negative = _U(positive | _NEGATIVE)
    return _U(negative if _U(_U(word) & _U(mask)) != _U(0) else positive).view(np.float32)


@_word
def misfit(lo: Any, hi: Any, src: Any, step: Any, size: Any, grad_size: Any) -> Any:
    """Return whether a span reaches outside the arrays, or the columns differ in length."""
    if not (lo.size == hi.size and lo.size == src.size and lo.size == step.size):
        return True
    for row in range(lo.size):
        if lo[row] < 0 or hi[row] < lo[row] or hi[row] > size:
            return True
        if src[row] < 0 or src[row] > grad_size - (hi[row] - lo[row]):
            return True
    return False


# Without carry-less multiplication zlib takes checksums.
_WIDE = "+vpclmulqdq" in _FEATURES
_CARRYLESS = (4 if "+avx512f" in _FEATURES else 2) if _WIDE else int("+pclmul" in _FEATURES)
_LANES = 4  # multiplications that run side by side
FOLDED = 16 * _LANES * _CARRYLESS
"""Bytes of a block of `fold_crc`; 0 on a processor that cannot execute it."""

fold_crc = intrinsic(_folded)
"""``fold_crc(array, into)``: see `_folded`; ``into`` is of `FOLDED` bytes."""
