/* Functions on whole vectors: exp, tanh, logistic, partial loads, sums in double, random words.
 *
 * (a) exp and tanh follow expf and tanhf of the Cephes library (S. L. Moshier, netlib.org/cephes/single): same range
 *     reduction and coefficients, all lanes computed alike, special values chosen by masks at the end. Largest error
 *     over all floats, measured: 1.1 units in the last place (exp), 1.3 (tanh), 2.4 (logistic); the tests
 *     hold them to 2, 2 and 3.
 * (b) Results under the smallest normal number become 0: denormal arithmetic costs a hundred times more on some CPUs,
 *     and no sum here sees the difference. NaN stays NaN.
 * (c) A row that does not end on a whole vector ends with vec_load_some / vec_store_some: same arithmetic, no scalar
 *     path to keep equal to the vector one.
 */
#ifndef PCL_SIMD_MATH_H
#define PCL_SIMD_MATH_H

#include <stdint.h>
#include <string.h>

#include "simd.h"

/* The first `count` lanes, the others `fill`. */
PCL_INLINE vec vec_load_some(const float *p, int count, float fill) {
    vec a = vec_set(fill);
    memcpy(&a, p, (size_t)count * sizeof(float));
    return a;
}

PCL_INLINE void vec_store_some(float *p, vec a, int count) { memcpy(p, &a, (size_t)count * sizeof(float)); }

/* b in its first `count` lanes, else a */
PCL_INLINE vec vec_first_lanes(vec a, vec b, int count) {
    ivec lane;
#pragma GCC unroll 16
    for (int i = 0; i < PCL_WIDTH; i++) lane[i] = i;
    return vec_select(lane < count, b, a);
}

/* Larger of the two; NaN when either is. */
PCL_INLINE vec vec_max(vec a, vec b) { return vec_select((b > a) | (b != b), b, a); }

/* best = max(best, a), and where it came from: `where` becomes `tap` in the lanes that changed. NaN wins. */
PCL_INLINE void vec_argmax(vec *best, ivec *where, vec a, int tap) {
    ivec better = (a > *best) | (a != a);
    *best = vec_select(better, a, *best);
    *where = (better & tap) | (~better & *where);
}

/* a in the lanes where `where` is `tap`, else 0 */
PCL_INLINE vec vec_where(ivec where, int tap, vec a) { return (vec)((where == tap) & (ivec)a); }

PCL_INLINE ivec ivec_set(int s) { return (ivec){0} + s; }

PCL_INLINE float vec_largest(vec a) {
    float most = a[0];
    for (int i = 1; i < PCL_WIDTH; i++) most = a[i] > most ? a[i] : most;
    return most;
}

/* -1 where a <= 0, 0 where a > 0 or NaN */
PCL_INLINE ivec vec_not_above_zero(vec a) { return a <= vec_zero(); }

/* sum[i] += a[i] in double */
PCL_INLINE void vec_add_double(double *sum, vec a) {
    for (int i = 0; i < PCL_WIDTH; i++) sum[i] += (double)a[i];
}

PCL_INLINE vec vec_exp(vec x) {
    /* n = round(x / ln 2): adding 1.5 * 2^23 leaves the integer in the low bits of the float. */
    const vec magic = vec_set(12582912.0f);
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f; /* ln 2 in two parts; the first product is exact */
    r = r + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* times 2^n in the exponent bits; outside these bounds that is wrong and replaced */
    vec result = (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23));
    result = vec_select(x < 88.7228394f, result, x + __builtin_inff()); /* inf or NaN */
    return vec_select(x < -87.336f, vec_zero(), result);
}

PCL_INLINE vec vec_logistic(vec x) { return 1.0f / (1.0f + vec_exp(-x)); }

PCL_INLINE vec vec_tanh(vec x) {
    const ivec sign = (ivec){0} + (int)0x80000000;
    vec size = (vec)((ivec)x & ~sign);
    vec z = x * x;
    vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vec small = p * z * x + x;
    vec large = 1.0f - 2.0f / (vec_exp(size + size) + 1.0f);
    large = (vec)((ivec)large | ((ivec)x & sign));
    return vec_select(size < 0.625f, small, large); /* NaN compares false and passes through exp */
}

/* First word of Philox4x32-10 (Salmon et al. 2011) for one counter a lane: word < threshold gives a mask of -1. */
PCL_INLINE ivec vec_philox_below(const uint32_t *unit, uint32_t sample_low, uint32_t sample_high, uint32_t epoch,
                                 uint32_t seed, uint32_t layer, uint32_t threshold) {
    uint32_t c0[PCL_WIDTH], c1[PCL_WIDTH], c2[PCL_WIDTH], c3[PCL_WIDTH];
    ivec below;
    for (int i = 0; i < PCL_WIDTH; i++) c0[i] = unit[i], c1[i] = sample_low, c2[i] = sample_high, c3[i] = epoch;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < PCL_WIDTH; i++) {
            uint64_t first = (uint64_t)c0[i] * 0xD2511F53u, second = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(second >> 32) ^ c1[i] ^ seed;
            c1[i] = (uint32_t)second;
            c2[i] = (uint32_t)(first >> 32) ^ c3[i] ^ layer;
            c3[i] = (uint32_t)first;
        }
        seed += 0x9E3779B9u;
        layer += 0xBB67AE85u;
    }
    for (int i = 0; i < PCL_WIDTH; i++) below[i] = c0[i] < threshold ? -1 : 0;
    return below;
}

#endif
