/* The vector type, and the few things about it that Cython cannot say.
 *
 * `vec` holds PCL_WIDTH floats through the compiler's vector extension: + - * are elementwise, a scalar operand is
 * broadcast, and `acc + w * s` contracts to one fused multiply-add (-ffp-contract=fast). Loads and stores need only
 * the alignment of a float. Comparisons give `ivec` masks of 0 and -1.
 */
#ifndef PCL_SIMD_H
#define PCL_SIMD_H

#ifndef PCL_WIDTH
#error "PCL_WIDTH (lanes of a vector) must be defined: setup.py takes it from isa.py"
#endif

typedef float vec __attribute__((vector_size(4 * PCL_WIDTH), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(4 * PCL_WIDTH), aligned(4), may_alias));

#define PCL_INLINE static inline __attribute__((always_inline, unused))

PCL_INLINE vec vec_load(const float *p) { return *(const vec *)p; }
PCL_INLINE void vec_store(float *p, vec a) { *(vec *)p = a; }
PCL_INLINE vec vec_zero(void) { return (vec){0}; }
PCL_INLINE vec vec_set(float s) { return s - (vec){0}; } /* s - 0 keeps the sign of -0, s + 0 would not */

/* To memory, past the caches; p is aligned. Before others read it: vec_fence. */
#if PCL_WIDTH == 16 && defined(__AVX512F__)
#include <immintrin.h>
PCL_INLINE void vec_store_past(float *p, vec a) { _mm512_stream_ps(p, (__m512)a); }
PCL_INLINE void vec_fence(void) { _mm_sfence(); }
#elif PCL_WIDTH == 8 && defined(__AVX__)
#include <immintrin.h>
PCL_INLINE void vec_store_past(float *p, vec a) { _mm256_stream_ps(p, (__m256)a); }
PCL_INLINE void vec_fence(void) { _mm_sfence(); }
#elif defined(__SSE2__)
#include <emmintrin.h>
PCL_INLINE void vec_store_past(float *p, vec a) { _mm_stream_ps(p, (__m128)a); }
PCL_INLINE void vec_fence(void) { _mm_sfence(); }
#else
PCL_INLINE void vec_store_past(float *p, vec a) { vec_store(p, a); }
PCL_INLINE void vec_fence(void) {}
#endif

/* One byte a lane. */
typedef signed char bvec __attribute__((vector_size(PCL_WIDTH), aligned(1), may_alias));
PCL_INLINE ivec vec_load_bytes(const signed char *p) { return __builtin_convertvector(*(const bvec *)p, ivec); }
PCL_INLINE void vec_store_bytes(signed char *p, ivec a) { *(bvec *)p = __builtin_convertvector(a, bvec); }

/* where mask, a, else b */
PCL_INLINE vec vec_select(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* max(0, a) as vmaxps of tile_x86.py has it: NaN passes, for a diverged network must stay visible, and so does -0. */
PCL_INLINE vec vec_relu(vec a) { return (vec)((ivec)a & ~(vec_zero() > a)); }

/* The PCL_WIDTH x PCL_WIDTH transpose: PCL_WIDTH vectors at src, `stride` floats apart, to contiguous rows at dst.
 * log2(width) rounds of interleaving vector i with vector i + width/2. */
PCL_INLINE void vec_transpose(const float *src, long stride, float *dst) {
    vec a[PCL_WIDTH], t[PCL_WIDTH];
    ivec low, high;
#pragma GCC unroll 16
    for (int i = 0; i < PCL_WIDTH; i++) {
        a[i] = vec_load(src + i * stride);
        low[i] = i / 2 + (i % 2) * PCL_WIDTH;
        high[i] = low[i] + PCL_WIDTH / 2;
    }
#pragma GCC unroll 4
    for (int n = 1; n < PCL_WIDTH; n *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < PCL_WIDTH / 2; i++) {
            t[2 * i] = __builtin_shuffle(a[i], a[i + PCL_WIDTH / 2], low);
            t[2 * i + 1] = __builtin_shuffle(a[i], a[i + PCL_WIDTH / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < PCL_WIDTH; i++) a[i] = t[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < PCL_WIDTH; i++) vec_store(dst + i * PCL_WIDTH, a[i]);
}

/* Ask for the cache line at p, or for the few lines that a tile reads from one row. Any address is allowed. */
PCL_INLINE void prefetch(const float *p) { __builtin_prefetch(p, 0, 3); }
PCL_INLINE void prefetch_row(const float *p) {
    prefetch(p);
    prefetch(p + 16);
    prefetch(p + 32);
    prefetch(p + 48);
}

#endif
