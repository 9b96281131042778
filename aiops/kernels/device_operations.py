"""Run the operations of a device besides updates: sums of squares, rounding, decoding top-k."""

from __future__ import annotations

import functools

import numpy as np

from aiops.kernels.cuda_fragments import pieces
from aiops.kernels.device import Argument, Bytes, Device, DeviceArray, DeviceStream, KernelSource
from aiops.kernels.scan import LANES, SUM_BLOCK

__all__ = ["DeviceOperations", "narrow_text", "spread_text", "squares_text"]

_THREADS = 256  # of a block; a power of two
_TILE = 2048  # elements that a block rounds
_SEGMENT = 16  # bytes of gaps that a thread reads at a time
_CHUNK = _THREADS * _SEGMENT
_HALVES = {"float16": "fp16", "bfloat16": "bf16"}
_TYPES = {"float32": "float", "float64": "double"}


class DeviceOperations:
    """The operations of one device, queued on one stream."""

    def __init__(self, device: Device, stream: DeviceStream) -> None:
        self._device, self._stream = device, stream
        self._functions: dict[KernelSource, object] = {}
        self._lanes: tuple[Bytes, DeviceArray] | None = None
        self._totals: DeviceArray | None = None

    def sum_squares(self, array: DeviceArray) -> float:
        """Return the sum of ``x * x``, with the bits of `aiops.kernels.sum_squares`."""
        blocks = -(-array.size // SUM_BLOCK)
        if not blocks:
            return 0.0
        nbytes = 8 * blocks * LANES
        if self._lanes is None or len(self._lanes[0]) < nbytes:
            self._lanes = self._device.host(nbytes), self._device.allocate(nbytes)
        host, there = self._lanes[0][:nbytes], self._lanes[1][:nbytes]
        each = _THREADS // LANES
        self._run(squares_text(array.dtype.name), -(-blocks // each), array.size, array, there)
        self._stream.download(host, there)
        self._stream.finish()
        with np.errstate(all="ignore"):  # overflow to infinity is no error
            lanes = np.add.accumulate(host.view(np.float64).reshape(-1, LANES), axis=1)[:, -1]
            return float(np.add.accumulate(np.concatenate(([0.0], lanes)))[-1])

    def narrow(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queue the rounding of float32[n] ``source`` into a 16-bit ``target``."""
        text = narrow_text(target.dtype.name)
        self._run(text, -(-source.size // _TILE), source.size, source, target)

    def spread(
        self, target: DeviceArray, values: DeviceArray, gaps: DeviceArray, kept: int, form: str
    ) -> None:
        """Queue the decoding of a top-k payload into ``target``, float32.

        ``values`` and ``gaps`` are sections of the payload, uint8, as `aiops.codecs.topk` specifies
        them; they must have been checked. ``kept`` is the number of values, ``form`` their codec,
        ``int8`` or ``bf16``.
        """
        self._stream.clear(target.view(np.uint8))
        chunks = -(-gaps.size // _CHUNK)
        if not chunks:
            return
        if self._totals is None or self._totals.size < 16 * chunks:
            self._totals = self._device.allocate(16 * chunks)
        count, spread = spread_text(form)
        self._run(count, chunks, gaps.size, gaps, self._totals)
        given = gaps.size, gaps, self._totals, kept, values, target
        self._run(spread, chunks, *given)

    def _run(self, text: KernelSource, blocks: int, *given: int | DeviceArray) -> None:
        function = self._functions.get(text)
        if function is None:
            function = self._functions[text] = self._device.function(text)
        arguments: list[Argument] = [
            np.int64(argument) if isinstance(argument, int) else argument for argument in given
        ]
        if blocks:
            self._stream.launch(function, blocks, _THREADS, arguments)


def _written(
    name: str, parameters: list[tuple[str, str]], needs: tuple[str, ...], body: str
) -> KernelSource:
    listed = ",\n".join(f"    {kind} {word}".replace("* ", "*") for kind, word in parameters)
    source = (
        f"{pieces(needs)}\n"
        f'extern "C" __global__ void __launch_bounds__({_THREADS})'
        f" {name}(\n{listed}) {{\n{body}}}\n"
    )
    return KernelSource(name, source, tuple(parameters))


@functools.cache
def squares_text(dtype: str) -> KernelSource:
    """Return ``squares``: the sum of each lane of each block, as `aiops.kernels.scan` adds them."""
    half = _HALVES.get(dtype)
    kind = "unsigned short" if half else _TYPES[dtype]
    value = f"_{half}(_array[_i])" if half else "_array[_i]"
    body = f"""\
    for (unsigned _at = threadIdx.x; _at < {_THREADS}; _at += blockDim.x) {{
        const long long _lane = (long long)blockIdx.x * {_THREADS} + _at;
        const long long _begin = _lane / {LANES} * {SUM_BLOCK};
        if (_begin >= _size)
            break;
        const long long _end = _size - _begin < {SUM_BLOCK} ? _size : _begin + {SUM_BLOCK};
        double _sum = 0;
        for (long long _i = _begin + _lane % {LANES}; _i < _end; _i += {LANES}) {{
            const double _x = {value};
            _sum += _x * _x;
        }}
        _lanes[_lane] = _sum;
    }}
"""
    parameters = [
        ("const long long", "_size"),
        (f"const {kind} *", "_array"),
        ("double *", "_lanes"),
    ]
    return _written("squares", parameters, (half,) if half else (), body)


@functools.cache
def narrow_text(dtype: str) -> KernelSource:
    """Return ``narrow``, which rounds float32 to a 16-bit dtype."""
    half = _HALVES[dtype]
    body = f"""\
    const long long _begin = (long long)blockIdx.x * {_TILE};
    const long long _end = _size - _begin < {_TILE} ? _size : _begin + {_TILE};
    for (long long _i = _begin + threadIdx.x; _i < _end; _i += blockDim.x)
        _target[_i] = _to_{half}(_source[_i]);
"""
    parameters = [
        ("const long long", "_size"),
        ("const float *", "_source"),
        ("unsigned short *", "_target"),
    ]
    return _written("narrow", parameters, (f"to_{half}",), body)


_GAP = f"""\
static __device__ __forceinline__ long long _gap(const unsigned char *gaps, long long last) {{
    long long first = last;  // a varint: the lowest 7 bits come first
    while (first > 0 && gaps[first - 1] >= 128)
        first--;
    long long gap = 0;
    for (long long at = first; at <= last; at++)
        gap |= (long long)(gaps[at] & 127) << 7 * (at - first);
    return gap;
}}

static __device__ __forceinline__ void _count(
    const unsigned char *gaps, long long size, long long *entries, long long *elements) {{
    for (unsigned at = threadIdx.x; at < {_THREADS}; at += blockDim.x) {{
        const long long begin = (long long)blockIdx.x * {_CHUNK} + at * {_SEGMENT};
        entries[at] = elements[at] = 0;
        for (long long i = begin; i < size && i < begin + {_SEGMENT}; i++)
            if (gaps[i] < 128) {{
                entries[at]++;
                elements[at] += _gap(gaps, i) + 1;
            }}
    }}
}}

"""

_BEFORE = f"""\
    __shared__ long long _entries[{_THREADS}], _elements[{_THREADS}];
    _count(_gaps, _size, _entries, _elements);
    __syncthreads();
"""


@functools.cache
def spread_text(form: str) -> tuple[KernelSource, KernelSource]:
    """Return ``count``, of the entries and elements of each chunk of gaps, and ``spread``."""
    counted = f"""{_BEFORE}\
    if (threadIdx.x == 0) {{
        _totals[2 * blockIdx.x] = _totals[2 * blockIdx.x + 1] = 0;
        for (int _at = 0; _at < {_THREADS}; _at++) {{
            _totals[2 * blockIdx.x] += _entries[_at];
            _totals[2 * blockIdx.x + 1] += _elements[_at];
        }}
    }}
"""
    value = (
        "_int8(_values, _kept, _entry)"
        if form == "int8"
        else "_bf16(_half_at(_values + 2 * _entry))"
    )
    spread = f"""{_BEFORE}\
    if (threadIdx.x == 0) {{  // where each segment's first entry is, and what comes before it
        long long _entry = 0, _element = 0;
        for (unsigned _block = 0; _block < blockIdx.x; _block++) {{
            _entry += _totals[2 * _block];
            _element += _totals[2 * _block + 1];
        }}
        for (int _at = 0; _at < {_THREADS}; _at++) {{
            const long long _more = _entries[_at], _further = _elements[_at];
            _entries[_at] = _entry;
            _elements[_at] = _element;
            _entry += _more;
            _element += _further;
        }}
    }}
    __syncthreads();
    for (unsigned _at = threadIdx.x; _at < {_THREADS}; _at += blockDim.x) {{
        const long long _begin = (long long)blockIdx.x * {_CHUNK} + _at * {_SEGMENT};
        long long _entry = _entries[_at], _element = _elements[_at];
        for (long long _i = _begin; _i < _size && _i < _begin + {_SEGMENT}; _i++)
            if (_gaps[_i] < 128) {{
                _element += _gap(_gaps, _i) + 1;
                _target[_element - 1] = 0.0f + {value};
                _entry++;
            }}
    }}
"""
    shared = [("const long long", "_size"), ("const unsigned char *", "_gaps")]
    first = [*shared, ("long long *", "_totals")]
    second = [
        *shared,
        ("const long long *", "_totals"),
        ("const long long", "_kept"),
        ("const unsigned char *", "_values"),
        ("float *", "_target"),
    ]
    needs = ("int8",) if form == "int8" else ("bf16", "half_at")
    texts = _written("count", first, (), counted), _written("spread", second, needs, spread)
    one, other = (KernelSource(each.name, _GAP + each.source, each.parameters) for each in texts)
    return one, other
