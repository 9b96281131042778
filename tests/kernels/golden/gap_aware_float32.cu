// Rule gap_aware over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def gap_aware(
//         w: Array,
//         g: Array,
//         sent: Array,
//         m: Array,
//         c: Array,
//         step: Scalar,
//         unbias: Scalar,
//         peak: Scalar,
//         mu: Scalar,
//         beta: Scalar,
//         one_minus_beta: Scalar,
//         eps: Scalar,
//     ) -> tuple[Array, ...]:
//         """Apply eqs 4-8 to one tensor; ``unbias`` corrects the average C, which starts at 0."""
//         gap = 1.0 + absolute(w - sent) / (peak * sqrt(c * unbias) + eps)
//         m = mu * m + g / gap
//         c = beta * c + one_minus_beta * (m * m)
//         return w - step * m, m, c

typedef float real;

static __device__ __forceinline__ real _absolute(real x) { return fabs(x); }

static __device__ __forceinline__ real _sqrt(real x) { return sqrt(x); }

static __device__ __forceinline__ real _flushed(real x) {
    const real least = sizeof(real) == 4 ? 0x1p-126 : 0x1p-1022;  // the least normal number
    return fabs(x) < least ? x * (real)0 : x;
}

extern "C" __global__ void __launch_bounds__(128, 4) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    const real *_base,
    real *_target,
    const real *_grad,
    const real *_sent_,
    real *_m_,
    real *_c_,
    const float peak,
    const float mu,
    const float beta,
    const float one_minus_beta,
    const float eps) {
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
    const real step = (real)_numbers[_row];
    const real unbias = (real)_numbers[_count + _row];
    const unsigned _ahead = 8 * blockDim.x;
    for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {
        real _w[8], _g[8], _sent_read[8], _m_read[8], _c_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
                _sent_read[_k] = (_sent_[_i]);
                _m_read[_k] = _m_[_i];
                _c_read[_k] = _c_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real sent = _sent_read[_k];
                real m = _m_read[_k];
                real c = _c_read[_k];
                real gap;
                gap = (0x1.0p+0f + (_absolute((w - sent)) / ((peak * _sqrt((c * unbias))) + eps)));
                m = ((mu * m) + (g / gap));
                c = ((beta * c) + (one_minus_beta * (m * m)));
                const real _w0 = w - (step * m);
                const real _w1 = m;
                const real _w2 = c;
                _target[_i] = _w0;
                _m_[_i] = _flushed(_w1);
                _c_[_i] = _flushed(_w2);
            }
        }
    }
}
