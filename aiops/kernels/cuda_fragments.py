"""Hold the pieces of CUDA C++ that generated kernels are assembled from.

The text includes nothing and uses little: threads, blocks, one barrier, one atomic addition of
integers, IEEE arithmetic. So the tests can compile it for a CPU too, and compare its results with
NumPy's bits where there is no GPU. It must be compiled with `OPTIONS`: a contracted multiply-add or
a flushed subnormal would give other bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiops.kernels.interface import STATISTIC_CAP, STATISTIC_SCALE
from aiops.kernels.payloads import INT8_BLOCK, ONEBIT_BITS, ONEBIT_BLOCK

__all__ = ["KEYWORDS", "OPTIONS", "number", "pieces", "spelt"]

OPTIONS = (
    *("--std=c++17", "--fmad=false", "--ftz=false"),
    *("--prec-div=true", "--prec-sqrt=true"),
)
"""The options that NVRTC must be given."""

_FIXED = f"""\
static __device__ __forceinline__ long long _fixed(real x) {{
    const real cap = {int(STATISTIC_CAP)};
    x = x * (real){int(STATISTIC_SCALE)};
    x = x < cap ? x : cap;  // NaN counts as the cap
    return (long long)(x > -cap ? x : -cap);
}}
"""

PIECES: Mapping[str, str] = {
    "maximum": """\
static __device__ __forceinline__ real _maximum(real x, real y) {
    return (x != x ? x : y != y ? y : x > y ? x : y) + (real)0;
}
""",
    "minimum": """\
static __device__ __forceinline__ real _minimum(real x, real y) {
    return (x != x ? x : y != y ? y : x < y ? x : y) + (real)0;
}
""",
    "absolute": """\
static __device__ __forceinline__ real _absolute(real x) { return fabs(x); }
""",
    "sqrt": """\
static __device__ __forceinline__ real _sqrt(real x) { return sqrt(x); }
""",
    "sign": """\
static __device__ __forceinline__ real _sign(real x) {
    return x > (real)0 ? (real)1 : x < (real)0 ? (real)-1 : x + (real)0;
}
""",
    "flushed": """\
static __device__ __forceinline__ real _flushed(real x) {
    const real least = sizeof(real) == 4 ? 0x1p-126 : 0x1p-1022;  // the least normal number
    return fabs(x) < least ? x * (real)0 : x;
}
""",
    "fixed": _FIXED,
    "fp16": """\
static __device__ __forceinline__ float _fp16(unsigned short half) {
    unsigned bits = (half & 0x7fffu) << 13;
    if ((half & 0x7c00) == 0x7c00)
        bits |= 0x7f800000u;
    else if (half & 0x7c00)
        bits += 0x38000000u;
    else  // subnormal
        bits = __float_as_uint(__uint_as_float(bits + 0x38800000u) - 0x1p-14f);
    return __uint_as_float(bits | (half & 0x8000u) << 16);
}
""",
    "to_fp16": """\
static __device__ __forceinline__ unsigned short _to_fp16(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
    const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
    if (bits > 0x7f800000u)
        return sign | 0x7e00u;
    if (bits >= 0x477ff000u)  // 65520, which would be rounded to 65536
        return sign | 0x7c00u;
    if (bits < 0x38800000u)  // subnormal: the addition rounds
        return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u);
    return sign | (bits + 0xc8000fffu + (bits >> 13 & 1u)) >> 13;
}
""",
    "bf16": """\
static __device__ __forceinline__ float _bf16(unsigned short half) {
    return __uint_as_float((unsigned)half << 16);
}
""",
    "to_bf16": """\
static __device__ __forceinline__ unsigned short _to_bf16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return bits >> 16 & 0x8000u | 0x7fc0u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
""",
    # A payload lies at any address, so it is read byte by byte.
    "half_at": """\
static __device__ __forceinline__ unsigned short _half_at(const unsigned char *at) {
    return at[0] | at[1] << 8;
}
""",
    "word_at": """\
static __device__ __forceinline__ unsigned _word_at(const unsigned char *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | (unsigned)at[3] << 24;
}
""",
    "int8": f"""\
static __device__ __forceinline__ float _int8(
    const unsigned char *payload, long long size, long long i) {{
    const long long scales = (size + {INT8_BLOCK - 1}) / {INT8_BLOCK};
    const float scale = __uint_as_float(_word_at(payload + 4 * (i / {INT8_BLOCK})));
    return (float)(signed char)payload[4 * scales + i] * scale;
}}
""",
    "onebit": f"""\
static __device__ __forceinline__ float _onebit(
    const unsigned char *payload, long long size, long long i) {{
    const long long block = i / {ONEBIT_BLOCK}, rest = size - block * {ONEBIT_BLOCK};
    const int width = rest < {ONEBIT_BLOCK} ? (int)rest : {ONEBIT_BLOCK};
    const int words = (width + {ONEBIT_BITS - 1}) / {ONEBIT_BITS};
    const int at = (int)(i % {ONEBIT_BLOCK}), bit = at / words;
    const long long scales = (size + {ONEBIT_BLOCK - 1}) / {ONEBIT_BLOCK};
    const long long word = scales + block * {ONEBIT_BLOCK // ONEBIT_BITS} + at % words;
    const unsigned negative = _word_at(payload + 4 * word) >> bit << 31;
    return __uint_as_float(_word_at(payload + 4 * block) | negative);
}}
""",
}
"""Functions by their name without its underscore; each stands after those that it calls."""

NEEDS: Mapping[str, tuple[str, ...]] = {"int8": ("word_at",), "onebit": ("word_at",)}
"""The pieces that a piece calls."""

_TAKEN = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class compl concept const consteval constexpr constinit const_cast continue co_await
co_return co_yield decltype default delete do double dynamic_cast else enum explicit export
extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return
restrict short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename typeof union unsigned using virtual void
volatile wchar_t while xor xor_eq real linux unix threadIdx blockIdx blockDim gridDim warpSize
sqrt fabs
"""

KEYWORDS = frozenset(_TAKEN.split())
"""Names that a rule may use and this text may not."""


def pieces(names: Iterable[str]) -> str:
    """Return the text of these pieces and of those that they call, in order."""
    wanted = set(names)
    wanted |= {needed for name in wanted for needed in NEEDS.get(name, ())}
    order = sorted(wanted, key=lambda name: (name in NEEDS, list(PIECES).index(name)))
    return "\n".join(PIECES[name] for name in order)


def spelt(name: str) -> str:
    """Return a name of a rule as a C++ name: unchanged, unless C++ or a macro uses it.

    >>> spelt("gamma"), spelt("new"), spelt("γ")
    ('gamma', '_x6e6577', '_xceb3')
    """
    plain = name.isascii() and name not in KEYWORDS and not name.isupper()  # macros are upper case
    return name if plain else f"_x{name.encode().hex()}"


def number(value: float, real: str) -> str:
    """Return a number as an exact literal of the type ``"float"`` or ``"double"``.

    >>> number(0.5, "float"), number(-2.0, "double")
    ('0x1.0p-1f', '(-0x1.0p+1)')
    """
    digits, exponent = value.hex().split("p")
    whole, point, rest = digits.partition(".")
    text = f"{whole}{point}{rest.rstrip('0') or '0'}p{exponent}{'f' if real == 'float' else ''}"
    return f"({text})" if text.startswith("-") else text
