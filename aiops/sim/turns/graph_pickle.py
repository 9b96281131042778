"""Pickles of live objects with arrays that share memory, closures and compiled kernels.

`pickle` does most of it; this module adds:

* An array that shares another's memory (a tensor in an arena, a payload in a buffer) shares it
  again, and memory is aligned as it was. The bytes of arrays stand apart from the pickle, so that
  nothing is copied, on the way out or in.
* Closures are carried with their code, struct layouts with their format. Kernels are compiled
  again.
* Objects that the reader has of its own (a task) are referred to by a name.
"""

from __future__ import annotations

import functools
import importlib
import marshal
import pickle
import sys
import weakref
from collections.abc import Mapping
from io import BytesIO
from struct import Struct
from types import CellType, CodeType, FunctionType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from aiops import kernels
from aiops.kernels.numba_kernel import NumbaKernel

Array = NDArray[Any]

_ALIGNED = 64


def write(root: object, named: Mapping[str, object]) -> tuple[bytes, list[Array]]:
    """Return a graph as a pickle, and the arrays whose bytes belong behind it, in order.

    Parameters
    ----------
    root
        An object; all that can be reached from it is the graph.
    named
        Objects that are no part of it, by the names under which `read` is given others.

    Raises
    ------
    pickle.PicklingError, TypeError
        When an object of the graph exists only in this process.
    """
    file = BytesIO()
    pickler = _Pickler(file, named)
    pickler.dump(root)
    return file.getvalue(), pickler.arrays


def read(pickled: bytes, arrays: IO[bytes], named: Mapping[str, object]) -> Any:
    """Return the root of a graph that was written; the bytes are trusted like code.

    Parameters
    ----------
    pickled
        Of `write`.
    arrays
        A file of the arrays' bytes, one array after the other.
    named
        Objects by name.
    """
    return _Unpickler(BytesIO(pickled), arrays, named).load()


def contents(array: Array) -> memoryview:
    """Return the bytes of an array of `write`."""
    return _flat(array).data if array.size else memoryview(b"")


def _flat(array: Array) -> Array:
    """Return an array's bytes in the order of memory, without a copy if it is contiguous."""
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8)
    return np.ascontiguousarray(array.T).reshape(-1).view(np.uint8)


class _Pickler(pickle.Pickler):
    """Notes arrays that own their memory, and refers to them by number."""

    def __init__(self, file: IO[bytes], named: Mapping[str, object]) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[Array] = []
        self._numbers: dict[int, tuple[object, ...]] = {}  # by id; `arrays` keeps them alive
        self._names = {id(thing): ("named", name) for name, thing in named.items()}

    def persistent_id(self, thing: object) -> tuple[object, ...] | None:
        """Return the reference to an object that is no part of the pickle; None: it is one."""
        found = self._names.get(id(thing)) or self._numbers.get(id(thing))
        if found is None and type(thing) is np.ndarray and _owner(thing) is thing:
            c_contiguous = thing.flags.c_contiguous
            shape = thing.shape if c_contiguous else thing.shape[::-1]
            where = thing.ctypes.data % _ALIGNED
            found = ("array", len(self.arrays), thing.dtype, shape, c_contiguous, where)
            self.arrays.append(thing)
            self._numbers[id(thing)] = found
        return found

    def reducer_override(self, thing: Any) -> Any:
        """Return the recipe of an object; NotImplemented: pickle has one."""
        kind = type(thing)
        if kind is np.ndarray:
            owner = _owner(thing)
            offset = thing.ctypes.data - owner.ctypes.data
            shown = thing.dtype, thing.shape, thing.strides, thing.flags.writeable
            return _view, (owner, offset, *shown)
        if kind is memoryview:
            return _memory(thing)
        if kind is weakref.ref:
            return (weakref.ref, (thing(),)) if thing() is not None else (_dead_reference, ())
        if kind is FunctionType and not _importable(thing):
            return _closure(thing)
        if kind is CellType:
            return _cell, (), _held(thing), None, None, _fill
        if kind is Struct:
            return Struct, (thing.format,)
        return _compiled(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], arrays: IO[bytes], named: Mapping[str, object]) -> None:
        super().__init__(file)
        self._file, self._named = arrays, named
        self._found: list[Array] = []

    def persistent_load(self, pid: Any) -> object:
        """Return the object of a reference; arrays are first referred to in their order."""
        if pid[0] == "named":
            return self._named[pid[1]]
        _array, number, dtype, shape, c_contiguous, where = pid
        if number == len(self._found):
            array = _empty(dtype, shape, where)
            into = contents(array)
            if len(into) and self._file.readinto(into) != len(into):  # type: ignore[attr-defined]
                raise pickle.UnpicklingError("it ends within an array")
            self._found.append(array if c_contiguous else array.T)
        return self._found[number]


# ---------------------------------------------------------------- arrays


def _owner(array: Array) -> Array:
    """Return the array that owns an array's memory; itself, if no other array does."""
    while True:
        base: object = array.base
        if isinstance(base, memoryview):
            base = base.obj
        if type(base) is not np.ndarray:
            return array
        array = base


def _empty(dtype: np.dtype[Any], shape: tuple[int, ...], where: int) -> Array:
    """Return an array whose address has this remainder, so that it is aligned as it was."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNED, np.uint8)
    skip = (where - raw.ctypes.data) % _ALIGNED
    found: Array = raw[skip : skip + nbytes].view(dtype).reshape(shape)
    return found


def _view(
    owner: Array,
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,
) -> Array:
    """Return an array that shows a part of another's memory."""
    whole = owner if owner.flags.c_contiguous else owner.T
    found: Array = np.ndarray(shape, dtype, whole.reshape(-1).view(np.uint8).data, offset, strides)
    found.flags.writeable = writeable
    return found


def _memory(view: memoryview) -> Any:
    """Return the recipe of a memoryview."""
    if not view.nbytes:
        return memoryview, (bytearray(),)
    if isinstance(view.obj, bytes | bytearray):
        start = np.frombuffer(view, np.uint8).ctypes.data
        offset = start - np.frombuffer(view.obj, np.uint8).ctypes.data
        return _part, (view.obj, offset, offset + view.nbytes)
    return memoryview, (np.frombuffer(view, np.uint8),)


def _part(whole: bytes | bytearray, start: int, stop: int) -> memoryview:
    return memoryview(whole)[start:stop]


# ---------------------------------------------------------------- code


def _importable(function: FunctionType) -> bool:
    found: object = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _closure(function: FunctionType) -> Any:
    """Return the recipe of a function that was defined in a function."""
    code = marshal.dumps(function.__code__)
    made = code, function.__module__, function.__qualname__, function.__closure__
    state = function.__defaults__, function.__kwdefaults__
    return _function, made, state, None, None, _complete


def _function(
    code: bytes, module: str, qualname: str, cells: tuple[CellType, ...] | None
) -> FunctionType:
    compiled: CodeType = marshal.loads(code)
    names = vars(importlib.import_module(module))
    made = FunctionType(compiled, names, compiled.co_name, None, cells)
    made.__qualname__, made.__module__ = qualname, module
    return made


def _complete(function: FunctionType, state: tuple[Any, Any]) -> None:
    function.__defaults__, function.__kwdefaults__ = state


def _cell() -> CellType:
    return CellType()  # filled afterwards: its contents may refer to it


def _held(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _fill(cell: CellType, held: tuple[Any, ...]) -> None:
    for contents in held:
        cell.cell_contents = contents


class _Gone:
    """A referent that is collected at once: the target of a dead weak reference."""


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(_Gone())


def _compiled(thing: Any) -> Any:
    """Return the recipe of a compiled kernel or function."""
    if isinstance(thing, NumbaKernel):
        packed = None if thing.packed is None else thing.packed.name
        return _kernel, (thing.rule, thing.dtype, packed)
    function = getattr(thing, "py_func", None)
    if function is None or not type(thing).__module__.startswith("numba"):
        return NotImplemented
    return _attribute, (function.__module__, function.__qualname__)


def _kernel(rule: kernels.Rule, dtype: np.dtype[Any], packed: str | None) -> kernels.Kernel:
    return kernels.build(rule, dtype, "numba", packed)


@functools.cache
def _attribute(module: str, name: str) -> object:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
