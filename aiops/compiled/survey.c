/* Find the largest magnitude of a gradient, and whether all of its values are fit. */

#include "answers.h"
#include <math.h>

/* Return the largest magnitude of a section, as an integer: the bits of its elements but for the
 * sign. `aiops.kernels.scan.survey` compares it block by block, and finds the same. */
#if defined(__GNUC__) && !defined(__clang__)
#define IN_VECTORS __attribute__((optimize("O3")))
#else
#define IN_VECTORS
#endif
#define LARGEST_OF(name, type, how)                                                               \
    how static uint64_t name(const char *data, Py_ssize_t nbytes, type mask)                      \
    {                                                                                             \
        type largest = 0, element;                                                                \
        for (Py_ssize_t at = 0; at < nbytes; at += sizeof(type)) {                                \
            memcpy(&element, data + at, sizeof element);                                          \
            element &= mask;                                                                      \
            largest = element > largest ? element : largest;                                      \
        }                                                                                         \
        return (uint64_t)largest;                                                                 \
    }
LARGEST_OF(largest_of_2, int16_t, IN_VECTORS) /* without a sign: as good, and processors have them */
LARGEST_OF(largest_of_8, int64_t, IN_VECTORS)
LARGEST_OF(plain_largest_of_4, int32_t, IN_VECTORS)

/* The usual elements, by what the processor has: the greater of two integers is one step there. */
#ifdef __x86_64__
#define WIDE IN_VECTORS __attribute__((target("avx2")))
LARGEST_OF(wide_largest_of_4, int32_t, WIDE)

static uint64_t largest_of_4(const char *data, Py_ssize_t nbytes, int32_t mask)
{
    return __builtin_cpu_supports("avx2") ? wide_largest_of_4(data, nbytes, mask)
                                          : plain_largest_of_4(data, nbytes, mask);
}
#else
#define largest_of_4 plain_largest_of_4
#endif

#define HALF 0x7C00 /* the first unfit magnitude of binary16: its infinity */

/* Return the number whose magnitude has these bits: `aiops.kernels.scan.largest_magnitude`. */
static double number_of(const Surveyed *section, uint64_t bits)
{
    union { uint64_t bits; double value; } wide = {.bits = bits};
    union { uint32_t bits; float value; } narrow = {.bits = (uint32_t)bits};
    if (section->itemsize == 8)
        return wide.value;
    if (section->itemsize == 4)
        return narrow.value;
    if (section->limit != HALF) { /* bfloat16 is the upper half of a float */
        narrow.bits <<= 16;
        return narrow.value;
    }
    int exponent = (int)(bits >> 10);
    double digits = (double)(bits & 0x3FF);
    return exponent ? ldexp(1024 + digits, exponent - 25) : ldexp(digits, -24);
}

int are_fit(const char *data, Py_ssize_t nbytes)
{
    return largest_of_4(data, nbytes, 0x7FFFFFFF) < 0x5D5E0B6B; /* aiops.kernels.scan */
}

int survey(const Answers *self, const char *data, double *largest)
{
    *largest = 0.0;
    for (Py_ssize_t index = 0; index < self->section_count; index++) {
        const Surveyed *section = &self->sections[index];
        uint64_t found = section->itemsize == 2
                             ? largest_of_2(data, section->nbytes, (int16_t)section->mask)
                         : section->itemsize == 4
                             ? largest_of_4(data, section->nbytes, (int32_t)section->mask)
                             : largest_of_8(data, section->nbytes, (int64_t)section->mask);
        if (found >= section->limit)
            return 0;
        double number = number_of(section, found);
        *largest = number > *largest ? number : *largest;
        data += section->nbytes;
    }
    return 1;
}
