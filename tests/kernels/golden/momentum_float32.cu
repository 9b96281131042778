// Rule momentum over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def momentum(
//         w: Array, g: Array, m: Array, step: Scalar, decay: Scalar, mu: Scalar
//     ) -> tuple[Array, Array]:
//         """Gradient descent with a heavy ball (Polyak), undamped."""
//         m = mu * m + (g + decay * w)
//         return w - step * m, m

typedef float real;

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
    real *_m_,
    const float decay,
    const float mu) {
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
        real _w[8], _g[8], _m_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
                _m_read[_k] = _m_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real m = _m_read[_k];
                m = ((mu * m) + (g + (decay * w)));
                const real _w0 = w - (step * m);
                const real _w1 = m;
                _target[_i] = _w0;
                _m_[_i] = _flushed(_w1);
            }
        }
    }
}
