// Rule everything over float16 with masters of float32, from gradients of float16.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def everything(
//         w: Array,
//         g: Array,
//         old: Array,
//         seen: Array,
//         m: Array,
//         k: Array,
//         step: Scalar,
//         last: Scalar,
//         share: Scalar,
//         decay: Scalar,
//     ) -> tuple[Array, ...]:
//         """Two reads and two scalars, one of each reassigned, and choices made by scalars."""
//         ending = last > 0.5
//         share = where(ending, share, -share) + where(share == last, 0.1, step)
//         old = where(last <= share, w - old, old)
//         step = step * maximum(share, 0.25) * abs(last) + sign(share) * 1e-3
//         m = where(ending, decay * m + g, m)
//         k = where(last < 0, share, where(ending, seen, 0.3 * k))
//         return w - step * m + sqrt(abs(share)) * old, m, k

typedef float real;

static __device__ __forceinline__ real _maximum(real x, real y) {
    return (x != x ? x : y != y ? y : x > y ? x : y) + (real)0;
}

static __device__ __forceinline__ real _absolute(real x) { return fabs(x); }

static __device__ __forceinline__ real _sqrt(real x) { return sqrt(x); }

static __device__ __forceinline__ real _sign(real x) {
    return x > (real)0 ? (real)1 : x < (real)0 ? (real)-1 : x + (real)0;
}

static __device__ __forceinline__ real _flushed(real x) {
    const real least = sizeof(real) == 4 ? 0x1p-126 : 0x1p-1022;  // the least normal number
    return fabs(x) < least ? x * (real)0 : x;
}

static __device__ __forceinline__ long long _fixed(real x) {
    const real cap = 1073741824;
    x = x * (real)16777216;
    x = x < cap ? x : cap;  // NaN counts as the cap
    return (long long)(x > -cap ? x : -cap);
}

static __device__ __forceinline__ float _fp16(unsigned short half) {
    unsigned bits = (half & 0x7fffu) << 13;
    if ((half & 0x7c00) == 0x7c00)
        bits |= 0x7f800000u;
    else if (half & 0x7c00)
        bits += 0x38000000u;
    else  // subnormal
        bits = __float_as_uint(__uint_as_float(bits + 0x38800000u) - 0x1p-14f);
    return __uint_as_float(bits | (half & 0x8000u) << 16);
}

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

extern "C" __global__ void __launch_bounds__(128, 4) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    real *_base,
    unsigned short *_target,
    const unsigned short *_grad,
    const unsigned short *_old_,
    const unsigned short *_seen_,
    real *_m_,
    real *_k_,
    const float decay,
    unsigned long long *_sums) {
    long long _row = 0;  // the span that this block's tile is of
    for (long long _beyond = _count; _beyond - _row > 1;) {
        const long long _middle = (_row + _beyond) / 2;
        if (_spans[3 * _count + _middle] <= (long long)blockIdx.x)
            _row = _middle;
        else
            _beyond = _middle;
    }
    const long long _lo = _spans[_row], _hi = _spans[_count + _row];
    const long long _src = _spans[2 * _count + _row];
    const long long _tile = blockIdx.x - _spans[3 * _count + _row];
    const long long _begin = _lo + _tile * 2048;
    const long long _end = _hi - _begin < 2048 ? _hi : _begin + 2048;
    const real _factor = (real)_scale;
    const real _step_ = (real)_numbers[_row];
    const real last = (real)_numbers[_count + _row * 2];
    const real _share_ = (real)_numbers[_count + _row * 2 + 1];
    long long _sum = 0;
    const unsigned _ahead = 8 * blockDim.x;
    for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {
        real _w[8], _g[8], _old_read[8], _seen_read[8], _m_read[8], _k_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _fp16(_grad[_src + (_i - _lo)]);
                _old_read[_k] = _fp16(_old_[_i]);
                _seen_read[_k] = _fp16(_seen_[_i]);
                _m_read[_k] = _m_[_i];
                _k_read[_k] = _k_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real step = _step_;
                real share = _share_;
                real w = _w[_k];
                real g = _g[_k] * _factor;
                const real _rest = w - _fp16(_to_fp16(w));
                real old = _old_read[_k] + _rest;
                real seen = _seen_read[_k] + _rest;
                real m = _m_read[_k];
                real k = _k_read[_k];
                bool ending;
                ending = (last > 0x1.0p-1f);
                share = ((ending ? share : (-share)) + ((share == last) ? 0x1.99999ap-4f : step));
                old = ((last <= share) ? (w - old) : old);
                step = (((step * _maximum(share, 0x1.0p-2f)) * _absolute(last)) + (_sign(share) * 0x1.0624dep-10f));
                m = (ending ? ((decay * m) + g) : m);
                k = ((last < 0x0.0p+0f) ? share : (ending ? seen : (0x1.333334p-2f * k)));
                const real _w0 = (w - (step * m)) + (_sqrt(_absolute(share)) * old);
                const real _w1 = m;
                const real _w2 = k;
                _base[_i] = _w0;
                _target[_i] = _to_fp16(_w0);
                _m_[_i] = _flushed(_w1);
                _k_[_i] = _flushed(_w2);
                _sum += _fixed(_w2);
            }
        }
    }
    __shared__ unsigned long long _parts[128];
    _parts[threadIdx.x] = (unsigned long long)_sum;
    for (unsigned _half = blockDim.x / 2; _half > 0; _half /= 2) {
        __syncthreads();
        if (threadIdx.x < _half)
            _parts[threadIdx.x] += _parts[threadIdx.x + _half];
    }
    if (threadIdx.x == 0)
        atomicAdd(_sums + _row, _parts[0]);
}
