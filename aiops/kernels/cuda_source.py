"""Write a program as a CUDA C++ kernel: one pass over all spans, a block of threads per tile."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aiops.kernels.cuda_fragments import number, pieces, spelt
from aiops.kernels.device import KernelSource
from aiops.kernels.payloads import FORMATS
from aiops.kernels.rule_program import Dialect, Program, bare

__all__ = ["THREADS", "TILE", "ArrayTypes", "text"]

THREADS = 128
"""Threads of a block, at most; a power of two."""

TILE = 2048
"""Elements of a tile, which the threads of a block process together."""

GROUP = 8
"""Elements of which a thread reads everything before it writes any: their reads are under way at
once, which the compiler cannot arrange itself, as a write may be to what is read next. Half as many
in float64, or of many arrays."""

BLOCKS, BLOCKS_WITHOUT_STATE = 4, 6
"""Blocks that a multiprocessor is to have room for at once: of 512 threads each may have 128
registers. Without a bound the compiler takes fewer registers than that, and reads less at once."""

MANY = 8
"""Arrays of which a group does not fit into so few registers, and there is no bound."""

_REAL = {"float32": "float", "float64": "double"}
_HALVES = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ArrayTypes:
    """The dtypes of a kernel's arrays, by NumPy's names.

    Attributes
    ----------
    real
        The compute dtype, and that of ``base`` and the state.
    wire
        That of ``target`` and the reads: a 16-bit dtype if ``base`` is a master copy.
    grad
        That of the gradient; with ``packed``, the codec of the payloads that it holds as bytes.
    packed
        Whether the gradient is payloads.
    """

    real: str
    wire: str
    grad: str
    packed: bool = False


class _CudaDialect(Dialect):
    """C++; collects the pieces that the text calls."""

    def __init__(self, real: str) -> None:
        self._real = real
        self.needs: set[str] = set()

    def literal(self, value: float) -> str:
        rounded = np.float32(value) if self._real == "float" else value
        return number(float(rounded), self._real)

    def name(self, name: str) -> str:
        return spelt(name)

    def call(self, word: str, arguments: Sequence[str]) -> str:
        if word == "where":
            return f"({arguments[0]} ? {arguments[1]} : {arguments[2]})"
        self.needs.add(word)
        return f"_{word}({', '.join(arguments)})"

    def assignment(self, name: str, value: str) -> str:
        return f"{name} = {value};"


def text(program: Program, kinds: ArrayTypes) -> KernelSource:
    """Return the kernel ``update`` for a program.

    Its arguments: the number n of spans; their table, int64[4 n + 1] (the lo of all, hi, src, then
    the first tile of each, and the number of tiles); their numbers, float64 (the steps of all, then
    the scalars of each); the factor; base, target and gradient; the reads; the state; the
    constants; and, if the rule has a statistic or a gauge, the sums, which the kernel adds to. It
    is launched with a block for each tile.
    """
    return _CudaWriter(program, kinds).text()


class _CudaWriter:
    def __init__(self, program: Program, kinds: ArrayTypes) -> None:
        self._program, self._kinds = program, kinds
        self._real = _REAL[kinds.real]
        self._many = 2 + len(program.reads) + len(program.states) >= MANY
        self._group_size = GROUP // 2 if self._many or self._real == "double" else GROUP
        self._master = kinds.wire != kinds.real
        self._wire = "unsigned short" if self._master else "real"
        self._dialect = _CudaDialect(self._real)
        self._needs = self._dialect.needs

    def text(self) -> KernelSource:
        parameters, body = self._parameters(), self._body()
        bounds = str(THREADS)
        if not self._many:
            bounds += f", {BLOCKS if self._program.states else BLOCKS_WITHOUT_STATE}"
        listed = ",\n".join(f"    {kind} {name}".replace("* ", "*") for kind, name in parameters)
        source = (
            f"{self._header()}\ntypedef {self._real} real;\n\n{pieces(self._needs)}\n"
            f'extern "C" __global__ void __launch_bounds__({bounds}) update(\n'
            f"{listed}) {{\n"
            f"{textwrap.indent(body, '    ')}}}\n"
        )
        return KernelSource("update", source, tuple(parameters))

    def _header(self) -> str:
        program, kinds = self._program, self._kinds
        gradient = f"payloads of {kinds.grad}" if kinds.packed else f"gradients of {kinds.grad}"
        over = f"{kinds.wire} with masters of {kinds.real}" if self._master else kinds.real
        rule = textwrap.indent(program.text.rstrip(), "//     ", lambda line: True)
        return (
            f"// Rule {program.name} over {over}, from {gradient}.\n"
            "// Written by aiops.kernels; edits are lost. The rule:\n//\n"
            + rule.replace("     \n", "\n")
            + "\n"
        )

    # ------------------------------------------------------------ parameters

    def _parameters(self) -> list[tuple[str, str]]:
        program, kinds = self._program, self._kinds
        if kinds.packed:
            gradient = "unsigned char"
        else:
            gradient = "unsigned short" if kinds.grad in _HALVES else "real"
        base = "real *" if self._master else "const real *"
        found = [
            ("const long long", "_count"),
            ("const long long *", "_spans"),
            ("const double *", "_numbers"),
            ("const double", "_scale"),
            (base, "_base"),
            (f"{self._wire} *", "_target"),
            (f"const {gradient} *", "_grad"),
            *((f"const {self._wire} *", _array(name)) for name in program.reads),
            *(("real *", _array(name)) for name in program.states),
            *((f"const {self._real}", self._outer(name)) for name in program.constants),
        ]
        if program.summed is not None:
            found.append(("unsigned long long *", "_sums"))
        return found

    def _outer(self, name: str) -> str:
        """Return the name of a scalar outside the loop, since the loop may assign to it."""
        return f"_{spelt(name)}_" if name in self._program.assigned else spelt(name)

    # ------------------------------------------------------------ the body

    def _body(self) -> str:
        program = self._program
        numbers = [
            f"const real {self._outer(name)} = (real)_numbers[{place}];"
            for name, place in self._places()
        ]
        summed = program.summed is not None
        lines = [
            "long long _row = 0;  // the span that this block's tile is of",
            "for (long long _beyond = _count; _beyond - _row > 1;) {",
            "    const long long _middle = (_row + _beyond) / 2;",
            "    if (_spans[3 * _count + _middle] <= (long long)blockIdx.x)",
            "        _row = _middle;",
            "    else",
            "        _beyond = _middle;",
            "}",
            "const long long _lo = _spans[_row], _hi = _spans[_count + _row];",
            "const long long _src = _spans[2 * _count + _row];",
            "const long long _tile = blockIdx.x - _spans[3 * _count + _row];",
            f"const long long _begin = _lo + _tile * {TILE};",
            f"const long long _end = _hi - _begin < {TILE} ? _hi : _begin + {TILE};",
            "const real _factor = (real)_scale;",
            *numbers,
            *(["long long _sum = 0;"] if summed else []),
            f"const unsigned _ahead = {self._group_size} * blockDim.x;",
            "for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {",
            *(f"    {line}" for line in self._group()),
            "}",
            *(_REDUCE if summed else []),
        ]
        return "\n".join(lines) + "\n"

    def _group(self) -> list[str]:
        """Return the statements for the elements ``_at``, ``_at + blockDim.x`` and so on."""
        loaded = self._loaded()
        size = self._group_size
        declared = ", ".join(f"{name}[{size}]" for name, _source in loaded)
        reads = [f"{name}[_k] = {source};" for name, source in loaded]
        return [f"real {declared};", *_each(size, reads), *_each(size, self._element())]

    def _loaded(self) -> list[tuple[str, str]]:
        """Return the arrays that hold what is read of a group, each with what fills it."""
        program = self._program
        widen = f"_{_HALVES[self._kinds.wire]}" if self._master else ""
        if self._master and program.reads:
            self._needs.add(_HALVES[self._kinds.wire])
        return [
            ("_w", "_base[_i]"),
            ("_g", self._gradient()),
            *((_read(name), f"{widen}({_array(name)}[_i])") for name in program.reads),
            *((_read(name), f"{_array(name)}[_i]") for name in program.states),
        ]

    def _places(self) -> list[tuple[str, str]]:
        """Return the step and the scalars of a span, each with its index in the numbers."""
        scalars = self._program.scalars
        width = f"_row * {len(scalars)}" if len(scalars) > 1 else "_row"
        places = [("step", "_row")]
        for index, name in enumerate(scalars):
            places.append((name, f"_count + {width} + {index}" if index else f"_count + {width}"))
        return places

    def _element(self) -> list[str]:
        """Return the statements for element ``_i``."""
        program, dialect = self._program, self._dialect
        scalars = [*(name for name, _place in self._places()), *program.constants]
        lines = [
            f"real {spelt(name)} = {self._outer(name)};"
            for name in scalars
            if name in program.assigned
        ]
        lines += ["real w = _w[_k];", "real g = _g[_k] * _factor;", *self._reads()]
        lines += [f"real {spelt(name)} = {_read(name)}[_k];" for name in program.states]
        lines += self._locals(["w", "g", *program.reads, *program.states, *scalars])
        lines += dialect.statements(program)
        results = [bare(dialect.write(result)) for result in program.results]
        # A result may be the old value of another array, but all of them are in registers by now.
        lines += [f"const real _w{index} = {value};" for index, value in enumerate(results)]
        if self._master:
            narrow = f"to_{_HALVES[self._kinds.wire]}"
            self._needs.add(narrow)
            lines += ["_base[_i] = _w0;", f"_target[_i] = _{narrow}(_w0);"]
        else:
            lines.append("_target[_i] = _w0;")
        for index, name in enumerate(program.states, 1):
            self._needs.add("flushed")
            lines.append(f"{_array(name)}[_i] = _flushed(_w{index});")
        if program.summed is not None:
            self._needs.add("fixed")
            # The stored value differs only where a subnormal became zero; both count as 0.
            lines.append(f"_sum += _fixed(_w{program.summed});")
        return lines

    def _locals(self, known: Sequence[str]) -> list[str]:
        """Declare the local names of the rule, as bool where every value is a comparison."""
        kinds: dict[str, set[bool]] = {}
        for assignment in self._program.body:
            if assignment.name not in known:
                kinds.setdefault(assignment.name, set()).add(assignment.value.boolean)
        return [
            f"{'bool' if kind == {True} else 'real'} {spelt(name)};" for name, kind in kinds.items()
        ]

    def _reads(self) -> list[str]:
        reads = self._program.reads
        if not self._master:
            return [f"real {spelt(name)} = {_read(name)}[_k];" for name in reads]
        if not reads:
            return []
        # Rules subtract reads from the master. What rounding took from the master is added to them,
        # so that the difference of equal parameters is 0.
        half = _HALVES[self._kinds.wire]
        self._needs |= {half, f"to_{half}"}
        return [
            f"const real _rest = w - _{half}(_to_{half}(w));",
            *(f"real {spelt(name)} = {_read(name)}[_k] + _rest;" for name in reads),
        ]

    def _gradient(self) -> str:
        kinds = self._kinds
        if not kinds.packed:
            element = "_grad[_src + (_i - _lo)]"
            if kinds.grad not in _HALVES:
                return element
            self._needs.add(_HALVES[kinds.grad])
            return f"_{_HALVES[kinds.grad]}({element})"
        needs, value = _PAYLOADS[kinds.grad]
        self._needs |= set(needs)
        return value


_PAYLOADS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "raw": (("word_at",), "__uint_as_float(_word_at(_grad + _src + 4 * (_i - _lo)))"),
    "fp16": (("fp16", "half_at"), "_fp16(_half_at(_grad + _src + 2 * (_i - _lo)))"),
    "bf16": (("bf16", "half_at"), "_bf16(_half_at(_grad + _src + 2 * (_i - _lo)))"),
    "int8": (("int8",), "_int8(_grad + _src, _hi - _lo, _i - _lo)"),
    "onebit": (("onebit",), "_onebit(_grad + _src, _hi - _lo, _i - _lo)"),
}
"""The pieces that reading an element of a payload calls, and its expression, by codec."""

assert set(FORMATS) < set(_PAYLOADS)

_REDUCE = (
    # The sums are integers, so the order of additions makes no difference.
    f"__shared__ unsigned long long _parts[{THREADS}];",
    "_parts[threadIdx.x] = (unsigned long long)_sum;",
    "for (unsigned _half = blockDim.x / 2; _half > 0; _half /= 2) {",
    "    __syncthreads();",
    "    if (threadIdx.x < _half)",
    "        _parts[threadIdx.x] += _parts[threadIdx.x + _half];",
    "}",
    "if (threadIdx.x == 0)",
    "    atomicAdd(_sums + _row, _parts[0]);",
)


def _array(name: str) -> str:
    """Return the name of the array whose current element is ``name``."""
    return f"_{spelt(name)}_"


def _read(name: str) -> str:
    """Return the name of what was read of that array for a group."""
    return f"_{spelt(name)}_read"


def _each(size: int, statements: Sequence[str]) -> list[str]:
    """Return a loop over the elements ``_i`` of a group of that size; ``_k`` counts them."""
    return [
        "#pragma unroll",
        f"for (int _k = 0; _k < {size}; _k++) {{",
        "    const long long _i = _at + _k * blockDim.x;",
        "    if (_i < _end) {",
        *(f"        {statement}" for statement in statements),
        "    }",
        "}",
    ]
