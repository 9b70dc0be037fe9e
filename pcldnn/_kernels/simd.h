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

/* The ends of a register tile, a0 and a1 being its two vectors of output channels (a1 unused unless `two`). Here and
 * not in Cython because gcc unrolls an outermost loop early enough to keep the arrays in registers only by pragma. */
#define PCL_PIXELS _Pragma("GCC unroll 16") for (int p = 0; p < PCL_TILE; p++)

/* Take up the sums that an earlier block of input channels has left in y. */
PCL_INLINE void tile_load(vec *a0, vec *a1, int width, const float *y, long yp, long yv, int two) {
    PCL_PIXELS {
        a0[p] = p < width ? vec_load(y + p * yp) : vec_zero();
        a1[p] = two && p < width ? vec_load(y + yv + p * yp) : vec_zero();
    }
}

/* Add to the sums those that an earlier block has left in y. */
PCL_INLINE void tile_add(vec *a0, vec *a1, int width, const float *y, long yp, long yv, int two) {
    PCL_PIXELS if (p < width) {
        a0[p] += vec_load(y + p * yp);
        if (two) a1[p] += vec_load(y + yv + p * yp);
    }
}

/* Start every pixel from the bias of its channels, or from zero when there is none. */
PCL_INLINE void tile_fill(vec *a0, vec *a1, const float *bias, int two) {
    vec b0 = bias ? vec_load(bias) : vec_zero(), b1 = bias && two ? vec_load(bias + PCL_WIDTH) : vec_zero();
    PCL_PIXELS { a0[p] = b0; a1[p] = b1; }
}

PCL_INLINE void tile_store(const vec *a0, const vec *a1, int width, float *y, long yp, long yv, int relu, int two) {
    PCL_PIXELS if (p < width) {
        vec_store(y + p * yp, relu ? vec_relu(a0[p]) : a0[p]);
        if (two) vec_store(y + yv + p * yp, relu ? vec_relu(a1[p]) : a1[p]);
    }
}

/* PCL_RANGES(f, lo, hi, ...) calls f(lo, hi, ...) with lo and hi as compile-time constants, 0 <= lo < hi <= PCL_TILE,
 * so that the always-inlined f keeps its accumulators in registers whatever part of the tile takes part. With tiles
 * of 14 a range that begins beyond 3, which takes padding of 4 and more, runs pixel by pixel to bound the code size. */
#define PCL_CASE(f, lo, hi, ...) case ((lo) * 32 + (hi)): f(lo, hi, __VA_ARGS__); break;
#define PCL_TO_6(f, lo, ...) \
    PCL_CASE(f, lo, 1, __VA_ARGS__) PCL_CASE(f, lo, 2, __VA_ARGS__) PCL_CASE(f, lo, 3, __VA_ARGS__) \
    PCL_CASE(f, lo, 4, __VA_ARGS__) PCL_CASE(f, lo, 5, __VA_ARGS__) PCL_CASE(f, lo, 6, __VA_ARGS__)
#define PCL_TO_14(f, lo, ...) \
    PCL_TO_6(f, lo, __VA_ARGS__) \
    PCL_CASE(f, lo, 7, __VA_ARGS__) PCL_CASE(f, lo, 8, __VA_ARGS__) PCL_CASE(f, lo, 9, __VA_ARGS__) \
    PCL_CASE(f, lo, 10, __VA_ARGS__) PCL_CASE(f, lo, 11, __VA_ARGS__) PCL_CASE(f, lo, 12, __VA_ARGS__) \
    PCL_CASE(f, lo, 13, __VA_ARGS__) PCL_CASE(f, lo, 14, __VA_ARGS__)
#if PCL_TILE == 6
#define PCL_RANGES(f, lo, hi, ...) \
    switch ((lo) * 32 + (hi)) { \
        PCL_TO_6(f, 0, __VA_ARGS__) PCL_TO_6(f, 1, __VA_ARGS__) PCL_TO_6(f, 2, __VA_ARGS__) \
        PCL_TO_6(f, 3, __VA_ARGS__) PCL_TO_6(f, 4, __VA_ARGS__) PCL_TO_6(f, 5, __VA_ARGS__) \
    }
#elif PCL_TILE == 14
#define PCL_RANGES(f, lo, hi, ...) \
    switch ((lo) * 32 + (hi)) { \
        PCL_TO_14(f, 0, __VA_ARGS__) PCL_TO_14(f, 1, __VA_ARGS__) \
        PCL_TO_14(f, 2, __VA_ARGS__) PCL_TO_14(f, 3, __VA_ARGS__) \
    default: \
        for (int pcl_p = (lo); pcl_p < (hi); pcl_p++) switch (pcl_p) { \
            PCL_PIXEL(f, 4, __VA_ARGS__) PCL_PIXEL(f, 5, __VA_ARGS__) PCL_PIXEL(f, 6, __VA_ARGS__) \
            PCL_PIXEL(f, 7, __VA_ARGS__) PCL_PIXEL(f, 8, __VA_ARGS__) PCL_PIXEL(f, 9, __VA_ARGS__) \
            PCL_PIXEL(f, 10, __VA_ARGS__) PCL_PIXEL(f, 11, __VA_ARGS__) PCL_PIXEL(f, 12, __VA_ARGS__) \
            PCL_PIXEL(f, 13, __VA_ARGS__) \
        } \
    }
#define PCL_PIXEL(f, p, ...) case (p): f(p, (p) + 1, __VA_ARGS__); break;
#else
#error "no table of ranges for this register tile: add one to simd.h"
#endif

#endif
