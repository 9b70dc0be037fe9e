/* Functions on whole vectors: exp, tanh, logistic, maxima, partial loads, sums in double, random words.
 *
 * (a) exp has the range reduction and the polynomial of expf in the Cephes library (S. L. Moshier,
 *     netlib.org/cephes/single), tanh is the rational function of Eigen (Eigen/src/Core/MathFunctionsImpl.h),
 *     which needs no exp and one division. Largest error over all floats, measured: exp 1.1 units in the last
 *     place, tanh 6.5 (that is 4e-7 near 1, where it is largest), logistic 2.4. NaN stays NaN.
 * (b) exp under the smallest normal number becomes 0: denormal arithmetic costs a hundred times more on some
 *     CPUs, and no sum here sees the difference.
 * (c) A row that does not end on a whole vector ends with vec_load_some / vec_store_some: same arithmetic, no
 *     scalar path to keep equal to the vector one.
 * (d) Intrinsics only where the compiler finds no instruction for the generic form (tried with gcc 12): min,
 *     max, whether a mask is empty, and the multiplication of 32-bit integers to 64 bits.
 */
#ifndef PCL_SIMD_MATH_H
#define PCL_SIMD_MATH_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

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

/* Larger and smaller of the two, b when either is NaN: one instruction on x86, which the compiler does not find. */
#if defined(__AVX512F__)
PCL_INLINE vec vec_max(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
PCL_INLINE vec vec_min(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
PCL_INLINE vec vec_max(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
PCL_INLINE vec vec_min(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
PCL_INLINE vec vec_max(vec a, vec b) { return (vec)_mm_max_ps((__m128)a, (__m128)b); }
PCL_INLINE vec vec_min(vec a, vec b) { return (vec)_mm_min_ps((__m128)a, (__m128)b); }
#else
PCL_INLINE vec vec_max(vec a, vec b) { return vec_select(a > b, a, b); }
PCL_INLINE vec vec_min(vec a, vec b) { return vec_select(a < b, a, b); }
#endif

/* -1 in the lanes that are NaN */
PCL_INLINE ivec vec_isnan(vec a) { return a != a; }

/* Whether any lane of a mask is -1. */
PCL_INLINE int ivec_any(ivec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < PCL_WIDTH; i++) any |= mask[i];
    return any != 0;
#endif
}

/* a in the lanes where x is best, else 0; these lanes of a become 0, so that another x that is as good gets nothing. */
PCL_INLINE vec vec_take_where(vec x, vec best, vec *a) {
    ivec hit = x == best;
    vec taken = (vec)(hit & (ivec)*a);
    *a = vec_select(hit, vec_zero(), *a);
    return taken;
}

/* best = max(best, a), and where it came from: `where` becomes `tap` in the lanes that changed. NaN wins. */
PCL_INLINE void vec_argmax(vec *best, ivec *where, vec a, int tap) {
    ivec better = (a > *best) | (a != a);
    *best = vec_select(better, a, *best);
    *where = (better & tap) | (~better & *where);
}

/* tap in the lanes where x is best, elsewhere `where` */
PCL_INLINE ivec vec_place(ivec where, vec x, vec best, int tap) {
    ivec hit = x == best;
    return (hit & tap) | (~hit & where);
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

/* x between low and high; NaN stays NaN */
PCL_INLINE vec vec_clamp(vec x, float low, float high) { return vec_min(vec_set(high), vec_max(vec_set(low), x)); }

/* exp(x); 0 below x = -87.68 (2^-126.5), infinity above x = 88.37 (2^127.5) */
PCL_INLINE vec vec_exp(vec x) {
    /* n = round(x / ln 2): adding 1.5 * 2^23 leaves the integer in the low bits of the float. n = -127 and 128 are the
     * exponent fields of 0 and infinity. */
    const vec magic = vec_set(12582912.0f);
    x = vec_clamp(x, -88.0f, 89.0f);
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f; /* ln 2 in two parts; the first product is exact */
    r = r + n * 2.12194440e-4f;
    vec square = r * r; /* polynomial in pairs: a short chain of dependent operations is worth more than few of them */
    vec high = (r * 1.9875691500e-4f + 1.3981999507e-3f) * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
    vec p = (high * square + (r * 1.6666665459e-1f + 5.0000001201e-1f)) * square + r;
    vec power = (vec)(((ivec)shifted - ((ivec)magic - 127)) << 23);
    return (p + 1.0f) * power;
}

PCL_INLINE vec vec_logistic(vec x) { return 1.0f / (1.0f + vec_exp(-x)); }

PCL_INLINE vec vec_tanh(vec x) {
    x = vec_clamp(x, -7.90531110763549805f, 7.90531110763549805f);
    vec z = x * x;
    vec p = z * -2.76076847742355e-16f + 2.00018790482477e-13f;
    p = p * z - 8.60467152213735e-11f;
    p = p * z + 5.12229709037114e-08f;
    p = p * z + 1.48572235717979e-05f;
    p = p * z + 6.37261928875436e-04f;
    p = p * z + 4.89352455891786e-03f;
    vec q = z * 1.19825839466702e-06f + 1.18534705686654e-04f;
    q = q * z + 2.26843463243900e-03f;
    q = q * z + 4.89352518554385e-03f;
    return x * (p / q);
}

typedef uint32_t uvec __attribute__((vector_size(4 * PCL_WIDTH), may_alias));
typedef uint64_t wide __attribute__((vector_size(4 * PCL_WIDTH), may_alias));

/* Product of the low halves of 64-bit lanes with a 32-bit number. */
PCL_INLINE wide wide_multiply(wide a, uint32_t factor) {
#if defined(__AVX512F__)
    return (wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
    return (wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
    return (a & 0xFFFFFFFFu) * (uint64_t)factor;
#endif
}

/* Ten rounds of Philox4x32 on the words in the low halves of c[0..3]; the high halves hold rubbish throughout. */
PCL_INLINE void wide_philox(wide c[4], uint32_t seed, uint32_t layer) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        wide first = wide_multiply(c[0], 0xD2511F53u), second = wide_multiply(c[2], 0xCD9E8D57u);
        c[0] = (second >> 32) ^ c[1] ^ (uint64_t)seed;
        c[1] = second;
        c[2] = (first >> 32) ^ c[3] ^ (uint64_t)layer;
        c[3] = first;
        seed += 0x9E3779B9u;
        layer += 0xBB67AE85u;
    }
}

/* Philox4x32-10 (Salmon et al. 2011) with key (seed, layer) and, in lane i, counter (start + i*step, sample, epoch):
 * below[w] is -1 in the lanes whose word w is less than threshold. */
PCL_INLINE void vec_philox_below(ivec below[4], uint32_t start, uint32_t step, uint64_t sample, uint32_t epoch,
                                 uint32_t seed, uint32_t layer, uint32_t threshold) {
    uvec lane;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < PCL_WIDTH; i++) lane[i] = i;
    const wide none = {0};
    wide even[4] = {(wide)(start + lane * step), none + (sample & 0xFFFFFFFFu), none + (sample >> 32), none + epoch};
    wide odd[4] = {even[0] >> 32, even[1], even[2], even[3]};
    wide_philox(even, seed, layer);
    wide_philox(odd, seed, layer);
    for (int w = 0; w < 4; w++) {
        uvec word = (uvec)((even[w] & 0xFFFFFFFFu) | (odd[w] << 32));
        below[w] = (ivec)(word < threshold);
    }
}

#endif
