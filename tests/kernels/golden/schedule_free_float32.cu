// Rule schedule_free over float32, from gradients of float32.
// Written by aiops.kernels; edits are lost. The rule:
//
//     def schedule_free(
//         w: Array,
//         g: Array,
//         s: Array,
//         u: Array,
//         o: Array,
//         step: Scalar,
//         pace: Scalar,
//         root: Scalar,
//         share: Scalar,
//         rest: Scalar,
//         lean: Scalar,
//         ahead: Scalar,
//         bend: Scalar,
//         decay: Scalar,
//         per_rate: Scalar,
//         weight: Scalar,
//         beta2: Scalar,
//         one_minus_beta2: Scalar,
//         eps: Scalar,
//     ) -> tuple[Array, Array, Array, Array, Array]:
//         """One update: ``w`` is ŷ, ``u`` is z − x, ``o`` is ŷ − x; ``rest`` is 1 − ``share``.
//
//         The gauge is above 0 where this step goes on in the direction of z − x. Its ``weight`` is 0
//         where the rate is 0, of tensors that keep their values, and else a sixteenth: a sum counts 64 of
//         one element at most. ``per_rate`` is 1/α: to divide each element takes a GPU longer.
//         """
//         s = beta2 * s + one_minus_beta2 * (g * g)
//         e = g / (root * sqrt(s) + eps)
//         d = step * pace * (e + decay * w)
//         x = w - o
//         gone = u
//         u = u - d
//         x = x + share * u
//         u = rest * u
//         o = lean * u - ahead * d
//         return x + o, s, u, o, -weight * e * (per_rate * gone + bend * e)

typedef float real;

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

extern "C" __global__ void __launch_bounds__(128, 4) update(
    const long long _count,
    const long long *_spans,
    const double *_numbers,
    const double _scale,
    const real *_base,
    real *_target,
    const real *_grad,
    real *_s_,
    real *_u_,
    real *_o_,
    const float beta2,
    const float one_minus_beta2,
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
    const real pace = (real)_numbers[_count + _row * 10];
    const real root = (real)_numbers[_count + _row * 10 + 1];
    const real share = (real)_numbers[_count + _row * 10 + 2];
    const real rest = (real)_numbers[_count + _row * 10 + 3];
    const real lean = (real)_numbers[_count + _row * 10 + 4];
    const real ahead = (real)_numbers[_count + _row * 10 + 5];
    const real bend = (real)_numbers[_count + _row * 10 + 6];
    const real decay = (real)_numbers[_count + _row * 10 + 7];
    const real per_rate = (real)_numbers[_count + _row * 10 + 8];
    const real weight = (real)_numbers[_count + _row * 10 + 9];
    long long _sum = 0;
    const unsigned _ahead = 8 * blockDim.x;
    for (long long _at = _begin + threadIdx.x; _at < _end; _at += _ahead) {
        real _w[8], _g[8], _s_read[8], _u_read[8], _o_read[8];
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                _w[_k] = _base[_i];
                _g[_k] = _grad[_src + (_i - _lo)];
                _s_read[_k] = _s_[_i];
                _u_read[_k] = _u_[_i];
                _o_read[_k] = _o_[_i];
            }
        }
        #pragma unroll
        for (int _k = 0; _k < 8; _k++) {
            const long long _i = _at + _k * blockDim.x;
            if (_i < _end) {
                real w = _w[_k];
                real g = _g[_k] * _factor;
                real s = _s_read[_k];
                real u = _u_read[_k];
                real o = _o_read[_k];
                real e;
                real d;
                real x;
                real gone;
                s = ((beta2 * s) + (one_minus_beta2 * (g * g)));
                e = (g / ((root * _sqrt(s)) + eps));
                d = ((step * pace) * (e + (decay * w)));
                x = (w - o);
                gone = u;
                u = (u - d);
                x = (x + (share * u));
                u = (rest * u);
                o = ((lean * u) - (ahead * d));
                const real _w0 = x + o;
                const real _w1 = s;
                const real _w2 = u;
                const real _w3 = o;
                const real _w4 = ((-weight) * e) * ((per_rate * gone) + (bend * e));
                _target[_i] = _w0;
                _s_[_i] = _flushed(_w1);
                _u_[_i] = _flushed(_w2);
                _o_[_i] = _flushed(_w3);
                _sum += _fixed(_w4);
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
