static __device__ __forceinline__ float _bf16(unsigned short half) {
    return __uint_as_float((unsigned)half << 16);
}

extern "C" __global__ void __launch_bounds__(256) squares(
    const long long _size,
    const unsigned short *_array,
    double *_lanes) {
    for (unsigned _at = threadIdx.x; _at < 256; _at += blockDim.x) {
        const long long _lane = (long long)blockIdx.x * 256 + _at;
        const long long _begin = _lane / 16 * 16384;
        if (_begin >= _size)
            break;
        const long long _end = _size - _begin < 16384 ? _size : _begin + 16384;
        double _sum = 0;
        for (long long _i = _begin + _lane % 16; _i < _end; _i += 16) {
            const double _x = _bf16(_array[_i]);
            _sum += _x * _x;
        }
        _lanes[_lane] = _sum;
    }
}
