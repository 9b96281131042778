"""Write a program as the text of a fused scalar loop for Numba.

The dialect of Numba (`aiops.kernels.rule_program.Dialect`) is Python, with every value kept in the
compute dtype.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import lru_cache

from aiops.kernels.gradient_loaders import LOADERS, PLAIN, GradientLoader
from aiops.kernels.interface import STATISTIC_CAP, STATISTIC_SCALE
from aiops.kernels.rule_program import ARITY, Dialect, Program, bare

__all__ = ["DIRECT", "GENERATOR", "MOST_STATES", "NumbaDialect", "numba_text"]

GENERATOR = 7
"""Version of the generated text; part of a compiled kernel's identity."""


MOST_STATES = 8
"""The most state arrays of a rule that has ``direct``."""

DIRECT = (
    *("count", "size", "lo", "hi", "src", "step", "more", "factor", "base", "grad", "target"),
    *(f"state_{index}" for index in range(MOST_STATES)),
    *("constants", "sums"),
)
"""The arguments of ``direct``, for every rule. ``count`` spans of arrays of ``size`` elements;
pointers to the arrays, of which those that the rule does not have may be NULL. ``sums`` has an
element more than there are spans, which becomes 1 if the arguments fit."""


class NumbaDialect(Dialect):
    """Python for Numba; collects the literals and words that the text has to define.

    To Numba a Python literal is a float64, which would widen the expression and make it several
    times slower, so each literal becomes a module constant of the compute dtype.
    """

    def __init__(self) -> None:
        self.literals: dict[str, str] = {}
        self.words: set[str] = set()

    def literal(self, value: float) -> str:
        """Return the name of the module constant that holds ``value``."""
        return self.literals.setdefault(repr(value), f"_c{len(self.literals)}")

    def name(self, name: str) -> str:
        """Return the name as it is."""
        return name

    def call(self, word: str, arguments: Sequence[str]) -> str:
        """Spell a call of a word's scalar implementation."""
        assert word in ARITY
        self.words.add(word)
        return f"_{word}({', '.join(bare(argument) for argument in arguments)})"

    def assignment(self, name: str, value: str) -> str:
        """Spell an assignment; Numba infers the type."""
        return f"{name} = {bare(value)}"


@lru_cache(maxsize=256)
def numba_text(program: Program, real: str, packed: str | None = None) -> str:
    """Return the Python module that computes ``program`` over arrays of dtype ``real``.

    Its function ``update(lo, hi, src, step, more, factor, base, grad, target, *state, *reads,
    constants)`` checks the spans and the arrays (ValueError if they do not fit; nothing is changed
    then) and returns the sum of its statistic or gauge per span. ``more`` holds the scalars of one
    span after the other, in one dimension (`Spans.flat`); a rule without scalars has no such
    parameter. ``packed`` is the codec of the payloads in ``grad``, or None.
    :mod:`aiops.kernels.numba_kernel` compiles the function.

    Without payloads and reads there is ``direct`` too, of the arguments `DIRECT`, which calls
    ``_update``: that is set to ``update`` when it has been compiled.
    """
    dialect = NumbaDialect()
    loader = PLAIN if packed is None else LOADERS[packed]
    loops = [_loop(program, dialect, loader, in_place=place) for place in (True, False)]
    always = {"ahead", "disjoint", "loop", "misfit", "overlap", "part"}
    direct = packed is None and not program.reads
    always |= {"read_only", "writable"} if direct else set()
    words = sorted(always | dialect.words | loader.words)
    imports = "".join(f"from aiops.kernels.numba_jit import {word} as _{word}\n" for word in words)
    constants = "".join(f"{name} = _real({value})\n" for value, name in dialect.literals.items())
    if program.summed is not None:
        constants += f"_scale = _real({STATISTIC_SCALE!r})\n_cap = _real({STATISTIC_CAP!r})\n"
    header = (
        f"# Rule {program.name} as one fused loop over {real}, in place and out of place.\n"
        f"# Written by aiops.kernels (generator {GENERATOR}); edits are lost. The rule:\n#\n"
        + textwrap.indent(program.text.rstrip(), "#     ", lambda line: True).replace(
            "     \n", "\n"
        )
    )
    return (
        f"{header}\n\nimport numpy as _np\n\n{imports}\n"
        f"_real = _np.{real}\n{constants}\n"
        + "\n".join(loops)
        + "\n"
        + _entry(program, loader)
        + (_direct(program) if direct else "")
    )


def _loop(
    program: Program, dialect: NumbaDialect, loader: GradientLoader, *, in_place: bool
) -> str:
    """Return the loop over one span; base and target are one array if ``in_place``.

    There are two loops so that each can declare all its arrays disjoint. LLVM would otherwise check
    every pair at run time before it enters the vectorised loop, which takes time on small tensors,
    and beyond a number of pairs that depends on its version it would not vectorise at all.
    """
    scalars = ("step", *program.scalars, *program.constants)
    hidden = {name: _outer(name) if name in program.assigned else name for name in scalars}
    states = [_outer(state) for state in program.states]
    target = "_w_" if in_place else "_target"
    read = {name: _outer(name) for name in (*program.reads, *program.states)}
    arrays = ["_w_", *([] if in_place else ["_target"]), *loader.parameters, *read.values()]
    body = [f"{name} = {outer}" for name, outer in hidden.items() if name != outer]
    body += ["w = _w_[_i]", f"g = {loader.gradient} * _factor"]
    body += [f"{name} = {array}[_i]" for name, array in read.items()]
    body += dialect.statements(program)
    # A result may be the old value of another array, but all of them are in scalars by now.
    w, *fresh = [bare(dialect.write(result)) for result in program.results[: 1 + len(states)]]
    body.append(f"{target}[_i] = {w}")
    for state, value in zip(states, fresh, strict=True):
        dialect.words.add("flushed")
        body.append(f"{state}[_i] = _flushed({value})")
    before: list[str] = []
    after: list[str] = []
    if program.summed is not None:
        observed = dialect.write(program.results[program.summed])
        before = ["_low = _np.int32(0)", "_high = _np.int32(0)"]
        # The stored value differs only where a subnormal became zero; both count as 0.
        body.append(f"_q = _np.int32(max(-_cap, min(_cap, {observed} * _scale)))")
        body += _ADD_UP
        after = ["_sum += _np.int64(_low) + _np.int64(_high) * 65536"]
    asked = [f"_ahead({array}, _b)" for array in arrays if array not in loader.parameters]
    asked += [f"_ahead({array}, _b)" for array in loader.ahead]
    inner = ["for _j in range(min(_m, _w_.size - _b)):", "    _i = _np.uintp(_b + _j)"]
    depth = 1 + sum(line.endswith(":") for line in loader.turns)
    name = "_in_place" if in_place else "_out_of_place"
    return f"""
@_loop
def {name}({", ".join([*arrays, "_factor", *hidden.values()])}):
    _disjoint()
    _sum = 0
{_indented(loader.turns, 1)}
{_indented([*asked, *before, *inner], depth)}
{_indented(body, depth + 1)}
{_indented(after, depth)}
    return _sum
"""


# A sum of 64 bits would halve the vectors of the whole loop. So the upper and the lower 16 bits of
# a turn's items are added up in 32 bits, which cannot overflow.
_ADD_UP = (
    "_low = _np.int32(_low + (_q & _np.int32(65535)))",
    "_high = _np.int32(_high + (_q >> _np.int32(16)))",
)


def _indented(lines: Sequence[str], depth: int) -> str:
    return textwrap.indent("\n".join(lines), " " * 4 * depth)


def _entry(program: Program, loader: GradientLoader) -> str:
    """Return ``update``: it checks everything, then runs one of the loops over every span."""
    states = [_outer(state) for state in program.states]
    reads = [_outer(read) for read in program.reads]
    written = ["_target", *states]
    pairs = [(one, two) for index, one in enumerate(written) for two in written[index + 1 :]]
    pairs += [(array, "_grad") for array in written] + [(array, "_base") for array in states]
    pairs += [(array, read) for read in reads for array in written]
    # By |, not by or: Numba takes longer for many short blocks than for one long one.
    clash = "".join(f"        | _overlap({one}, {two})\n" for one, two in pairs)
    smallest = ", ".join(f"{array}.size" for array in ("_base", *written, *reads))
    width = len(program.scalars)
    short = f" or _more.size != _lo.size * {width}" if width else ""
    sections = "".join(f"        {line}\n" for line in loader.sections)
    if sections:
        sections = f"        _n = _z - _a\n{sections}"
    fits = "_misfit(_lo, _hi, _src, _step, _size, _grad.size)"
    beyond = ""
    if loader.length:  # of bytes, and a span's gradient begins at any of them
        fits = "_src.size != _lo.size or _misfit(_lo, _hi, _lo, _step, _size, _size)"
        beyond = f"""
    for _t in range(_lo.size):
        _n = _hi[_t] - _lo[_t]
        if _src[_t] < 0 or _src[_t] > _grad.size - ({loader.length}):
            raise ValueError("a span does not fit")"""
    gradient = "".join(f"                {argument},\n" for argument in loader.arguments)
    passed = [f"_part({array}, _a, _z)" for array in (*reads, *states)]
    passed += ["_real(_factor)", "_real(_step[_t])"]
    passed += [f"_real(_more[_t * {width} + {index}])" for index in range(width)]
    passed += [f"_constants[{index}]" for index in range(len(program.constants))]
    shared = "".join(f"                {argument},\n" for argument in passed)
    parameters = ["_lo", "_hi", "_src", "_step", *(["_more"] if width else []), "_factor"]
    parameters += ["_base", "_grad", "_target", *states, *reads]
    return f"""
def update({", ".join([*parameters, "_constants"])}):
    _same = _base.ctypes.data == _target.ctypes.data
    if (
        ((not _same) & _overlap(_base, _target))
{clash}    ):
        raise ValueError("arrays overlap")
    _size = min({smallest})
    if {fits}{short}:
        raise ValueError("a span does not fit"){beyond}
    _sums = _np.zeros(_lo.size, _np.int64)
    for _t in range(_lo.size):
        _a, _z, _s = _lo[_t], _hi[_t], _src[_t]
{sections}        if _same:
            _sums[_t] = _in_place(
                _part(_target, _a, _z),
{gradient}{shared}            )
        else:
            _sums[_t] = _out_of_place(
                _part(_base, _a, _z),
                _part(_target, _a, _z),
{gradient}{shared}            )
    return _sums
"""


def _direct(program: Program) -> str:
    """Return ``direct``: ``update`` for callers that have pointers, and no arrays."""
    width = len(program.scalars)
    given = [f"_read_only({name}, _count)" for name in ("_lo", "_hi", "_src", "_step")]
    given += [f"_read_only(_more, _count * {width})"] if width else []
    given += ["_factor", "_read_only(_base, _size)", "_read_only(_grad, _size)"]
    states = (f"_state_{index}" for index in range(len(program.states)))
    given += [f"_writable({name}, _size)" for name in ("_target", *states)]
    given += [f"_read_only(_constants, {len(program.constants)})"]
    arguments = "".join(f"        {each},\n" for each in given)
    return f"""

def direct({", ".join(f"_{name}" for name in DIRECT)}):
    _found = _update(
{arguments}    )
    for _t in range(_count):
        _sums[_t] = _found[_t]
    _sums[_count] = 1
"""


def _outer(name: str) -> str:
    """Return the name outside the loop of a rule's name: of an array, or a reassigned scalar."""
    return f"_{name}_"
