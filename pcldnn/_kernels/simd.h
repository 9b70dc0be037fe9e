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

/* where mask, a, else b */
PCL_INLINE vec vec_select(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* max(a, 0) that lets NaN through: a diverged network must stay visible. */
PCL_INLINE vec vec_relu(vec a) { return (vec)((ivec)a & ~(a <= vec_zero())); }

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

/* The parts of the micro-kernel (tile.pxi), over `vectors` vectors and the pixels lo <= p < hi of a register tile. Here
 * and not in Cython because gcc unrolls a loop early enough to keep the sums in registers only by pragma. */
#define PCL_SUMS \
    _Pragma("GCC unroll 32") \
    for (int i = 0, p = 0, v = 0; i < PCL_TILE * PCL_VECTORS; i++, p = i / PCL_VECTORS, v = i % PCL_VECTORS) \
        if (lo <= p && p < hi && v < vectors)

/* sum += a * s with the sum where it was. In the kind CUT (tile.pxi) gcc 12 otherwise multiplies into other registers
 * and copies back, a third of all instructions; in the others it is this that makes it copy. */
#if defined(__FMA__)
#define PCL_ADD_IN_PLACE(sum, a, s) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(s))
#else
#define PCL_ADD_IN_PLACE(sum, a, s) (sum) += (a) * (s)
#endif

/* Sums begin at zero, or at `start`: a bias, or what an earlier call has left. */
PCL_INLINE void tile_begin(int width, int vectors, vec *acc, const float *start, long sp, long sv) {
    const int lo = 0, hi = width;
    if (start) {
        PCL_SUMS acc[i] = vec_load(start + v * sv + p * sp);
    } else {
        PCL_SUMS acc[i] = vec_zero();
    }
}

/* One step of the sum; `cut`: of kind CUT, see above. */
PCL_INLINE void tile_step(int lo, int hi, int vectors, vec *acc, const float *x, long xp, const float *w, long wv,
                          int cut) {
    vec filter[PCL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) filter[v] = vec_load(w + v * wv);
    if (cut) {
        PCL_SUMS PCL_ADD_IN_PLACE(acc[i], filter[v], vec_set(x[p * xp]));
    } else {
        PCL_SUMS acc[i] += filter[v] * x[p * xp];
    }
}

PCL_INLINE void tile_end(int width, int vectors, vec *acc, float *out, long op, long ov, int add, int relu, int past) {
    const int lo = 0, hi = width;
    if (add) {
        PCL_SUMS acc[i] += vec_load(out + v * ov + p * op);
    }
    if (relu) {
        PCL_SUMS acc[i] = vec_relu(acc[i]);
    }
    if (past) {
        PCL_SUMS vec_store_past(out + v * ov + p * op, acc[i]);
    } else {
        PCL_SUMS vec_store(out + v * ov + p * op, acc[i]);
    }
}

/* PCL_WIDTHS(f, width, ...) calls f(width, ...) with a compile-time constant, 0 < width <= PCL_TILE, and PCL_RANGES(f,
 * width, lo, hi, ...) calls f(lo, hi, ...) likewise, 0 <= lo < hi <= width, so that the always-inlined f keeps its
 * accumulators in registers whatever part of the tile takes part. */
#if PCL_TILE != 6 || PCL_VECTORS > 4
#error "no table for this register tile: change PCL_RANGES, and `run` in tile.pxi"
#endif
#define PCL_WIDTH_CASE(f, width, ...) case width: f(width, __VA_ARGS__); break;
#define PCL_WIDTHS(f, width, ...) \
    switch (width) { \
        PCL_WIDTH_CASE(f, 1, __VA_ARGS__) PCL_WIDTH_CASE(f, 2, __VA_ARGS__) PCL_WIDTH_CASE(f, 3, __VA_ARGS__) \
        PCL_WIDTH_CASE(f, 4, __VA_ARGS__) PCL_WIDTH_CASE(f, 5, __VA_ARGS__) PCL_WIDTH_CASE(f, 6, __VA_ARGS__) \
    }
#define PCL_CASE(f, w, lo, hi, ...) case ((lo) * 8 + (hi)): if ((hi) <= (w)) f(lo, hi, __VA_ARGS__); break;
#define PCL_RANGES(f, w, lo, hi, ...) \
    switch ((lo) * 8 + (hi)) { \
        PCL_CASE(f, w, 0, 1, __VA_ARGS__) PCL_CASE(f, w, 0, 2, __VA_ARGS__) PCL_CASE(f, w, 0, 3, __VA_ARGS__) \
        PCL_CASE(f, w, 0, 4, __VA_ARGS__) PCL_CASE(f, w, 0, 5, __VA_ARGS__) PCL_CASE(f, w, 0, 6, __VA_ARGS__) \
        PCL_CASE(f, w, 1, 2, __VA_ARGS__) PCL_CASE(f, w, 1, 3, __VA_ARGS__) PCL_CASE(f, w, 1, 4, __VA_ARGS__) \
        PCL_CASE(f, w, 1, 5, __VA_ARGS__) PCL_CASE(f, w, 1, 6, __VA_ARGS__) PCL_CASE(f, w, 2, 3, __VA_ARGS__) \
        PCL_CASE(f, w, 2, 4, __VA_ARGS__) PCL_CASE(f, w, 2, 5, __VA_ARGS__) PCL_CASE(f, w, 2, 6, __VA_ARGS__) \
        PCL_CASE(f, w, 3, 4, __VA_ARGS__) PCL_CASE(f, w, 3, 5, __VA_ARGS__) PCL_CASE(f, w, 3, 6, __VA_ARGS__) \
        PCL_CASE(f, w, 4, 5, __VA_ARGS__) PCL_CASE(f, w, 4, 6, __VA_ARGS__) PCL_CASE(f, w, 5, 6, __VA_ARGS__) \
    }

#endif
