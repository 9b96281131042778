static __device__ __forceinline__ long long _gap(const unsigned char *gaps, long long last) {
    long long first = last;  // a varint: the lowest 7 bits come first
    while (first > 0 && gaps[first - 1] >= 128)
        first--;
    long long gap = 0;
    for (long long at = first; at <= last; at++)
        gap |= (long long)(gaps[at] & 127) << 7 * (at - first);
    return gap;
}

static __device__ __forceinline__ void _count(
    const unsigned char *gaps, long long size, long long *entries, long long *elements) {
    for (unsigned at = threadIdx.x; at < 256; at += blockDim.x) {
        const long long begin = (long long)blockIdx.x * 4096 + at * 16;
        entries[at] = elements[at] = 0;
        for (long long i = begin; i < size && i < begin + 16; i++)
            if (gaps[i] < 128) {
                entries[at]++;
                elements[at] += _gap(gaps, i) + 1;
            }
    }
}

static __device__ __forceinline__ unsigned _word_at(const unsigned char *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | (unsigned)at[3] << 24;
}

static __device__ __forceinline__ float _int8(
    const unsigned char *payload, long long size, long long i) {
    const long long scales = (size + 255) / 256;
    const float scale = __uint_as_float(_word_at(payload + 4 * (i / 256)));
    return (float)(signed char)payload[4 * scales + i] * scale;
}

extern "C" __global__ void __launch_bounds__(256) spread(
    const long long _size,
    const unsigned char *_gaps,
    const long long *_totals,
    const long long _kept,
    const unsigned char *_values,
    float *_target) {
    __shared__ long long _entries[256], _elements[256];
    _count(_gaps, _size, _entries, _elements);
    __syncthreads();
    if (threadIdx.x == 0) {  // where each segment's first entry is, and what comes before it
        long long _entry = 0, _element = 0;
        for (unsigned _block = 0; _block < blockIdx.x; _block++) {
            _entry += _totals[2 * _block];
            _element += _totals[2 * _block + 1];
        }
        for (int _at = 0; _at < 256; _at++) {
            const long long _more = _entries[_at], _further = _elements[_at];
            _entries[_at] = _entry;
            _elements[_at] = _element;
            _entry += _more;
            _element += _further;
        }
    }
    __syncthreads();
    for (unsigned _at = threadIdx.x; _at < 256; _at += blockDim.x) {
        const long long _begin = (long long)blockIdx.x * 4096 + _at * 16;
        long long _entry = _entries[_at], _element = _elements[_at];
        for (long long _i = _begin; _i < _size && _i < _begin + 16; _i++)
            if (_gaps[_i] < 128) {
                _element += _gap(_gaps, _i) + 1;
                _target[_element - 1] = 0.0f + _int8(_values, _kept, _entry);
                _entry++;
            }
    }
}
