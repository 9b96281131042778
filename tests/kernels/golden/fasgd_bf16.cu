// Rule fasgd over float32, from payloads of bf16.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def fasgd(
//         w: Array,
//         g: Array,
//         n: Array,
//         b: Array,
//         v: Array,
//         step: np.floating[Any],
//         gamma: np.floating[Any],
//         one_minus_gamma: np.floating[Any],
//         beta: np.floating[Any],
//         one_minus_beta: np.floating[Any],
//         eps: np.floating[Any],
//     ) -> tuple[Array, Array, Array, Array]:
//         """Apply equations 4-8 to one tensor; ``step`` is α/max(τ, least)."""
//         n = gamma * n + one_minus_gamma * (g * g)
//         b = gamma * b + one_minus_gamma * g
//         v = beta * v + one_minus_beta * sqrt(maximum(n - b * b, 0.0) + eps)
//         return w - step / v * g, n, b, v

typedef float real;

static __device__ __forceinline__ real _maximum(real x, real y) {
    return (x != x ? x : y != y ? y : x > y ? x : y) + (real)0;
}

static __device__ __forceinline__ real _sqrt(real x) { return sqrt(x); }

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

static __device__ __forceinline__ float _bf16(unsigned short half) {
    return __uint_as_float((unsigned)half << 16);
}

static __device__ __forceinline__ unsigned short _half_at(const unsigned char *at) {
    return at[0] | at[1] << 8;
}

extern "C" __global__ void __launch_bounds__(128, 4) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    const real *_base,
    real *_target,
    const unsigned char *_grad,
    real *_n_,
    real *_b_,
    real *_v_,
    const float gamma,
    const float one_minus_gamma,
    const float beta,
    const float one_minus_beta,
    const float eps,
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
    const real step = (real)_numbers[_row];
    long long _sum = 0;
    const unsigned _ahead = 8 * blockDim.x;
    for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {
        real _w[8], _g[8], _n_read[8], _b_read[8], _v_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _bf16(_half_at(_grad + _src + 2 * (_i - _lo)));
                _n_read[_k] = _n_[_i];
                _b_read[_k] = _b_[_i];
                _v_read[_k] = _v_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real n = _n_read[_k];
                real b = _b_read[_k];
                real v = _v_read[_k];
                n = ((gamma * n) + (one_minus_gamma * (g * g)));
                b = ((gamma * b) + (one_minus_gamma * g));
                v = ((beta * v) + (one_minus_beta * _sqrt((_maximum((n - (b * b)), 0x0.0p+0f) + eps))));
                const real _w0 = w - ((step / v) * g);
                const real _w1 = n;
                const real _w2 = b;
                const real _w3 = v;
                _target[_i] = _w0;
                _n_[_i] = _flushed(_w1);
                _b_[_i] = _flushed(_w2);
                _v_[_i] = _flushed(_w3);
                _sum += _fixed(_w3);
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
