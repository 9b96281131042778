"""Encoding of a client's gradients as the parts and payloads of a push."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from aiops.client.coding import Coding, Encoded
from aiops.client.dlpack import on_host
from aiops.client.params import Params
from aiops.codecs import raw
from aiops.errors import UsageError, nearest
from aiops.model.layout import MAX_PART, Array, Ints, Layout, Tensor, level_of, split
from aiops.model.parts import Part, Parts


def parts_of(
    layout: Layout,
    arrays: Mapping[str, Array],
    versions: Ints | int,
    coding: Coding | None = None,
    encoded: Encoded | None = None,
) -> tuple[Parts, list[list[memoryview]]]:
    """Return the parts and views that some tensors travel as, in arena order.

    ``versions`` are the tensors', or that of all of them.
    Neighbours of equal version share a part: an ungated push of a whole model is one payload. With
    ``coding`` some may travel coded; their payloads are appended to ``encoded``.

    Raises
    ------
    UsageError
        When there is no array, or one does not fit its tensor.
    BadPush
        When a value cannot be coded. In either case nothing has been encoded.
    """
    if not layout.tensors:
        raise UsageError("the push holds no tensor: this model has none, only tables")
    if not hasattr(arrays, "keys"):  # in line: every general step comes by here
        check_by_name(arrays)
    level = versions if isinstance(versions, int) else level_of(versions)
    room = arrays if type(arrays) is not dict and isinstance(arrays, Params) else None
    if coding is None and room is not None and _fits(room.layout, layout):
        parts = layout.parts(_each(layout, versions))
        data = room.arena.data.data
        return parts, [[data[part.start : part.stop]] for part in parts]
    whole = _whole(layout, arrays, level) if coding is None and level is not None else None
    if whole is not None:
        return whole
    chosen = sorted(_index(layout, name) for name in arrays)
    if not chosen:
        raise UsageError("the push holds no tensor: push at least one gradient")
    checked = {
        index: _checked(layout.tensors[index], arrays[layout.tensors[index].name])
        for index in chosen
    }
    encoded = [] if encoded is None else encoded
    try:
        return _parts(layout, checked, _each(layout, versions), coding, encoded)
    except BaseException:
        if coding is not None:
            coding.take_back(encoded)
        raise


def check_by_name(gradients: object) -> None:
    """Raise `UsageError` unless gradients are arrays by name."""
    if not hasattr(gradients, "keys"):
        loss = " (a function returns them alone, without a loss)" * isinstance(gradients, tuple)
        raise UsageError(
            f"gradients are arrays by name, as {{'w': array}}, not {type(gradients).__name__}{loss}"
        )


def _each(layout: Layout, versions: Ints | int) -> Ints:
    """Return the version of each tensor."""
    if isinstance(versions, int):
        return np.full(len(layout.tensors), versions, np.int64)
    return versions


_part = partial(tuple.__new__, Part)  # what Part(*item) does, in a third of the time


def _fits(one: Layout, other: Layout) -> bool:
    return one is other or one.rows == other.rows


def _parts(
    layout: Layout,
    arrays: Mapping[int, Array],
    versions: Ints,
    coding: Coding | None,
    encoded: Encoded,
) -> tuple[Parts, list[list[memoryview]]]:
    """Return the parts and views of some arrays that fit, by the indices of their tensors."""
    found: list[Part] = []
    payloads: list[list[memoryview]] = []
    for index, array in arrays.items():
        tensor, version = layout.tensors[index], int(versions[index])
        if coding is not None and coding.coded(index):
            for coded, name, payload in coding.encode(index, array, encoded):
                stop = coded.offset + coded.nbytes
                found.append(Part(coded.offset, stop, name, len(payload), version))
                payloads.append([payload.data])
            continue
        view = raw.encode(array)
        for part in split(tensor.offset, tensor.offset + tensor.nbytes, raw.NAME, version):
            piece = view[part.start - tensor.offset : part.stop - tensor.offset]
            joined = _join(found[-1], part) if found else None
            if joined is not None:
                found[-1] = joined
                payloads[-1].append(piece)
            else:
                found.append(part)
                payloads.append([piece])
    return tuple(found), payloads


def _whole(
    layout: Layout, arrays: Mapping[str, Array], version: int
) -> tuple[Parts, list[list[memoryview]]] | None:
    """Encode the usual case: all tensors, of one version, in arrays that are sent as they are."""
    if layout.nbytes > MAX_PART or len(arrays) != len(layout.tensors):
        return None
    views: list[memoryview] = []
    for tensor in layout.tensors:
        array = arrays.get(tensor.name)
        if type(array) is not np.ndarray or array.dtype != tensor.dtype:
            return None
        if array.shape != tensor.shape or not array.flags.c_contiguous:
            return None
        if array.size:
            views.append(array.reshape(-1).view(np.uint8).data)
    return (_part((0, layout.nbytes, raw.NAME, layout.nbytes, version)),), [views]


def gather(layout: Layout, arrays: Mapping[str, Array], into: Params) -> Ints:
    """Copy some tensors, where they are not there, into an arena; return which, in arena order.

    Raises
    ------
    UsageError
        When there is none, or one does not fit its tensor; nothing has been copied then.
    """
    chosen = sorted(_index(layout, name) for name in arrays)
    if not chosen:
        raise UsageError("there is no gradient: give at least one")
    checked = [
        _checked(tensor, arrays[tensor.name])
        for tensor in (layout.tensors[index] for index in chosen)
    ]
    for index, array in zip(chosen, checked, strict=True):
        mine = into[layout.tensors[index].name]
        there = array.flags.c_contiguous and array.ctypes.data == mine.ctypes.data
        if not there:
            mine[...] = array
    return layout.all if len(chosen) == len(layout.tensors) else np.array(chosen, np.int64)


def _join(left: Part, right: Part) -> Part | None:
    joined = Part(left.start, right.stop, left.codec, left.nbytes + right.nbytes, left.version)
    fits = left.stop == right.start and left.version == right.version
    fits = fits and left.codec == right.codec
    return joined if fits and joined.nbytes <= MAX_PART else None


def _index(layout: Layout, name: str) -> int:
    if name not in layout.index:
        raise UsageError(f"the model has no tensor {name!r}; {nearest(name, layout.index)}")
    return layout.index[name]


def _checked(tensor: Tensor, array: Array) -> Array:
    array = little_endian(on_host(tensor.name, array))
    if array.shape != tensor.shape:
        raise UsageError(
            f"{tensor.name!r}: the gradient has shape {array.shape}, the tensor {tensor.shape}"
        )
    if array.dtype != tensor.dtype:
        raise UsageError(
            f"{tensor.name!r}: the gradient is {array.dtype.name}, the tensor"
            f" {tensor.dtype.name}: convert it with .astype({tensor.dtype.name!r})"
        )
    return array


def little_endian(array: Array) -> Array:
    """Return an array with its bytes in little-endian order."""
    order = array.dtype.newbyteorder("<") if array.dtype.str.startswith(">") else array.dtype
    return array.astype(order, copy=False)
