/* CRC-32, the one of zlib: eight bytes at a time by tables, and of long data 64 or 256 bytes at a
 * time where the processor multiplies without carries (`aiops/kernels/checksum.py` has the reason
 * why). Where it multiplies 32 or 64 bytes at once, they are copied meanwhile at little cost.
 */

#include "answers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FOLDS
#endif

#define POLYNOMIAL 0xEDB88320u
#define WIDE 256 /* bytes that are folded at once, of longer data */

static uint32_t tables[8][256];
static int folds, width; /* whether this processor multiplies so; 64 or 32 bytes at once, or 0 */

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int index = 1; index < 8; index++) {
            uint32_t crc = tables[index - 1][byte];
            tables[index][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
#ifdef FOLDS
    folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    if (folds && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"))
        width = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? 64 : 32;
#endif
}

/* Take bytes into a state, which is a CRC with all of its bits turned. */
static uint32_t take(uint32_t state, const unsigned char *data, size_t size)
{
    for (; size >= 8; size -= 8, data += 8) {
        uint32_t low = (data[0] | data[1] << 8 | data[2] << 16 | (uint32_t)data[3] << 24) ^ state;
        state = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^
                tables[4][low >> 24] ^ tables[3][data[4]] ^ tables[2][data[5]] ^
                tables[1][data[6]] ^ tables[0][data[7]];
    }
    for (; size > 0; size--)
        state = tables[0][(state ^ *data++) & 0xFF] ^ state >> 8;
    return state;
}

#ifdef FOLDS
/* Return what has the same remainder as a block and the one before it, which is multiplied. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i before, __m128i by,
                                                                    __m128i block)
{
    return _mm_xor_si128(block, _mm_xor_si128(_mm_clmulepi64_si128(before, by, 0x00),
                                              _mm_clmulepi64_si128(before, by, 0x11)));
}

/* Take whole blocks of 64 bytes into a state. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t
take_folded(uint32_t state, const unsigned char *data, size_t size)
{
    const __m128i far = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); /* 64 bytes further on */
    const __m128i near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0); /* 16 bytes */
    const __m128i *from = (const __m128i *)data;
    __m128i block[4];
    for (int index = 0; index < 4; index++)
        block[index] = _mm_loadu_si128(from++);
    block[0] = _mm_xor_si128(block[0], _mm_cvtsi32_si128((int)state));
    for (size -= 64; size >= 64; size -= 64)
        for (int index = 0; index < 4; index++)
            block[index] = fold(block[index], far, _mm_loadu_si128(from++));
    for (int index = 1; index < 4; index++)
        block[index] = fold(block[index - 1], near, block[index]);
    unsigned char last[16];
    _mm_storeu_si128((__m128i *)last, block[3]);
    return take(0, last, sizeof last);
}

/* Take whole blocks of `WIDE` bytes into a state, and copy them, if `to` is not NULL. */
#define IN_VECTORS __attribute__((target("vpclmulqdq,avx512f,avx512bw,pclmul,sse4.1")))

IN_VECTORS static inline __m512i fold_wide(__m512i before, __m512i by, __m512i block)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(before, by, 0x00),
                                     _mm512_clmulepi64_epi128(before, by, 0x11), block, 0x96);
}

IN_VECTORS static uint32_t take_wide(uint32_t state, char *to, const char *data, size_t size)
{
    const __m512i far = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    __m512i block[4];
    unsigned char last[WIDE];
    for (int index = 0; index < 4; index++) {
        block[index] = _mm512_loadu_si512(data + 64 * index);
        if (to != NULL)
            _mm512_storeu_si512(to + 64 * index, block[index]);
    }
    block[0] = _mm512_xor_si512(block[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (size_t at = WIDE; at < size; at += WIDE)
        for (int index = 0; index < 4; index++) {
            __m512i next = _mm512_loadu_si512(data + at + 64 * index);
            if (to != NULL)
                _mm512_storeu_si512(to + at + 64 * index, next);
            block[index] = fold_wide(block[index], far, next);
        }
    for (int index = 0; index < 4; index++)
        _mm512_storeu_si512(last + 64 * index, block[index]);
    _mm256_zeroupper(); /* else code of other instructions is half as fast from here on */
    return take_folded(0, last, WIDE);
}

/* The same where it multiplies 32 bytes at once. */
#define IN_HALVES __attribute__((target("vpclmulqdq,avx2,pclmul,sse4.1")))

IN_HALVES static inline __m256i fold_half(__m256i before, __m256i by, __m256i block)
{
    return _mm256_xor_si256(block, _mm256_xor_si256(_mm256_clmulepi64_epi128(before, by, 0x00),
                                                    _mm256_clmulepi64_epi128(before, by, 0x11)));
}

IN_HALVES static uint32_t take_halves(uint32_t state, char *to, const char *data, size_t size)
{
    const __m256i far = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    __m256i block[8];
    unsigned char last[WIDE];
    for (int index = 0; index < 8; index++) {
        block[index] = _mm256_loadu_si256((const __m256i *)(data + 32 * index));
        if (to != NULL)
            _mm256_storeu_si256((__m256i *)(to + 32 * index), block[index]);
    }
    block[0] = _mm256_xor_si256(block[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)state)));
    for (size_t at = WIDE; at < size; at += WIDE)
        for (int index = 0; index < 8; index++) {
            __m256i next = _mm256_loadu_si256((const __m256i *)(data + at + 32 * index));
            if (to != NULL)
                _mm256_storeu_si256((__m256i *)(to + at + 32 * index), next);
            block[index] = fold_half(block[index], far, next);
        }
    for (int index = 0; index < 8; index++)
        _mm256_storeu_si256((__m256i *)(last + 32 * index), block[index]);
    _mm256_zeroupper();
    return take_folded(0, last, WIDE);
}
#endif

/* Find the CRC of bytes after others, and copy them, if `to` is not NULL. */
static uint32_t take_all(uint32_t crc, char *to, const char *data, size_t size)
{
    uint32_t state = ~crc;
#ifdef FOLDS
    if (width != 0 && size >= WIDE) {
        size_t whole = size & ~(size_t)(WIDE - 1);
        state = width == 64 ? take_wide(state, to, data, whole)
                            : take_halves(state, to, data, whole);
        to = to == NULL ? NULL : to + whole;
        data += whole;
        size -= whole;
    }
#endif
    if (to != NULL) {
        memcpy(to, data, size);
        data = to; /* what is told is of the copy */
    }
#ifdef FOLDS
    if (folds && size >= 64) {
        size_t whole = size & ~(size_t)63;
        state = take_folded(state, (const unsigned char *)data, whole);
        data += whole;
        size -= whole;
    }
#endif
    return ~take(state, (const unsigned char *)data, size);
}

uint32_t crc_of(uint32_t crc, const void *data, size_t size)
{
    return take_all(crc, NULL, data, size);
}

uint32_t copy_with_crc(char *to, const void *data, size_t size)
{
    return take_all(0, to, data, size);
}

static PyObject *crc32(PyObject *module, PyObject *given)
{
    (void)module;
    Py_buffer data;
    unsigned int before = 0;
    if (!PyArg_ParseTuple(given, "y*|I", &data, &before))
        return NULL;
    PyObject *found = PyLong_FromUnsignedLong(crc_of(before, data.buf, (size_t)data.len));
    PyBuffer_Release(&data);
    return found;
}

static PyObject *copy_crc32(PyObject *module, PyObject *given)
{
    (void)module;
    Py_buffer to, data;
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(given, "w*y*", &to, &data))
        return NULL;
    if (to.len == data.len)
        found = PyLong_FromUnsignedLong(copy_with_crc(to.buf, data.buf, (size_t)data.len));
    else
        PyErr_SetString(PyExc_ValueError, "a copy is as long as what is copied");
    PyBuffer_Release(&to);
    PyBuffer_Release(&data);
    return found;
}

static PyMethodDef functions[] = {
    {"crc32", crc32, METH_VARARGS, "See _core.pyi."},
    {"copy_crc32", copy_crc32, METH_VARARGS, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

int add_crc(PyObject *module)
{
    make_tables();
    return PyModule_AddFunctions(module, functions);
}
