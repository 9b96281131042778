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


extern "C" __global__ void __launch_bounds__(256) count(
    const long long _size,
    const unsigned char *_gaps,
    long long *_totals) {
    __shared__ long long _entries[256], _elements[256];
    _count(_gaps, _size, _entries, _elements);
    __syncthreads();
    if (threadIdx.x == 0) {
        _totals[2 * blockIdx.x] = _totals[2 * blockIdx.x + 1] = 0;
        for (int _at = 0; _at < 256; _at++) {
            _totals[2 * blockIdx.x] += _entries[_at];
            _totals[2 * blockIdx.x + 1] += _elements[_at];
        }
    }
}
