static __device__ __forceinline__ unsigned short _to_bf16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return bits >> 16 & 0x8000u | 0x7fc0u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

extern "C" __global__ void __launch_bounds__(256) narrow(
    const long long _size,
    const float *_source,
    unsigned short *_target) {
    const long long _begin = (long long)blockIdx.x * 2048;
    const long long _end = _size - _begin < 2048 ? _size : _begin + 2048;
    for (long long _i = _begin + threadIdx.x; _i < _end; _i += blockDim.x)
        _target[_i] = _to_bf16(_source[_i]);
}
