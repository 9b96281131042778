// Rule adaptive over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def adaptive(
//         w: Array,
//         g: Array,
//         sent: Array,
//         ms: Array,
//         step: Scalar,
//         lam: Scalar,
//         m: Scalar,
//         one_minus_m: Scalar,
//         eps: Scalar,
//     ) -> tuple[Array, ...]:
//         """One update with λ over the root of the gradients' mean square."""
//         ms = m * ms + one_minus_m * (g * g)
//         return w - step * (g + lam / sqrt(ms + eps) * g * g * (w - sent)), ms

typedef float real;

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
    real *_ms_,
    const float lam,
    const float m,
    const float one_minus_m,
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
    const unsigned _ahead = 8 * blockDim.x;
    for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {
        real _w[8], _g[8], _sent_read[8], _ms_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
                _sent_read[_k] = (_sent_[_i]);
                _ms_read[_k] = _ms_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real sent = _sent_read[_k];
                real ms = _ms_read[_k];
                ms = ((m * ms) + (one_minus_m * (g * g)));
                const real _w0 = w - (step * (g + ((((lam / _sqrt((ms + eps))) * g) * g) * (w - sent))));
                const real _w1 = ms;
                _target[_i] = _w0;
                _ms_[_i] = _flushed(_w1);
            }
        }
    }
}
