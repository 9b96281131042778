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

extern "C" __global__ void __launch_bounds__(256) narrow(
    const long long _size,
    const float *_source,
    unsigned short *_target) {
    const long long _begin = (long long)blockIdx.x * 2048;
    const long long _end = _size - _begin < 2048 ? _size : _begin + 2048;
    for (long long _i = _begin + threadIdx.x; _i < _end; _i += blockDim.x)
        _target[_i] = _to_fp16(_source[_i]);
}
