// Rule sgd over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def sgd(w: Array, g: Array, step: Scalar) -> tuple[Array]:
//         """Plain stochastic gradient descent: θ ← θ − step · g."""
//         return (w - step * g,)

typedef float real;


extern "C" __global__ void __launch_bounds__(128, 6) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    const real *_base,
    real *_target,
    const real *_grad) {
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
        real _w[8], _g[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                const real _w0 = w - (step * g);
                _target[_i] = _w0;
            }
        }
    }
}
