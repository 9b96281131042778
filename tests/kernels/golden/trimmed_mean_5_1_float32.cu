// Rule trimmed_mean_5_1 over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def trimmed_mean_5_1(w, g, g2, g3, g4, step):
//         v0 = minimum(w, g4)
//         v1 = maximum(w, g4)
//         v2 = minimum(v0, g2)
//         v3 = maximum(v0, g2)
//         v4 = minimum(g, g3)
//         v5 = maximum(g, g3)
//         v6 = minimum(v3, v1)
//         v7 = maximum(v3, v1)
//         v9 = maximum(v2, v4)
//         v10 = minimum(v6, v5)
//         v11 = maximum(v6, v5)
//         v12 = minimum(v9, v7)
//         v13 = maximum(v9, v7)
//         v14 = minimum(v12, v10)
//         v15 = maximum(v12, v10)
//         v16 = minimum(v11, v13)
//         return ((v14 + v15 + v16) / 3.0,)

typedef float real;

static __device__ __forceinline__ real _maximum(real x, real y) {
    return (x != x ? x : y != y ? y : x > y ? x : y) + (real)0;
}

static __device__ __forceinline__ real _minimum(real x, real y) {
    return (x != x ? x : y != y ? y : x < y ? x : y) + (real)0;
}

extern "C" __global__ void __launch_bounds__(128, 6) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    const real *_base,
    real *_target,
    const real *_grad,
    const real *_g2_,
    const real *_g3_,
    const real *_g4_) {
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
        real _w[8], _g[8], _g2_read[8], _g3_read[8], _g4_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
                _g2_read[_k] = (_g2_[_i]);
                _g3_read[_k] = (_g3_[_i]);
                _g4_read[_k] = (_g4_[_i]);
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real g2 = _g2_read[_k];
                real g3 = _g3_read[_k];
                real g4 = _g4_read[_k];
                real v0;
                real v1;
                real v2;
                real v3;
                real v4;
                real v5;
                real v6;
                real v7;
                real v9;
                real v10;
                real v11;
                real v12;
                real v13;
                real v14;
                real v15;
                real v16;
                v0 = _minimum(w, g4);
                v1 = _maximum(w, g4);
                v2 = _minimum(v0, g2);
                v3 = _maximum(v0, g2);
                v4 = _minimum(g, g3);
                v5 = _maximum(g, g3);
                v6 = _minimum(v3, v1);
                v7 = _maximum(v3, v1);
                v9 = _maximum(v2, v4);
                v10 = _minimum(v6, v5);
                v11 = _maximum(v6, v5);
                v12 = _minimum(v9, v7);
                v13 = _maximum(v9, v7);
                v14 = _minimum(v12, v10);
                v15 = _maximum(v12, v10);
                v16 = _minimum(v11, v13);
                const real _w0 = ((v14 + v15) + v16) / 0x1.8p+1f;
                _target[_i] = _w0;
            }
        }
    }
}
