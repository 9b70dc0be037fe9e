/* The micro-kernel of tile.pxi, in so far as Cython cannot say it: what it is told, the parts of which the compiler
 * makes it, and, where setup.py has had one written (tile_x86.py), its table of functions in assembler.
 */
#ifndef PCL_TILE_H
#define PCL_TILE_H

#include <stddef.h>

#include "simd.h"

typedef struct {
    ptrdiff_t lo, hi, steps, x, w;
} Segment;

typedef struct {
    ptrdiff_t n0, x0, w0, n1, x1, w1, n2, x2, w2, ahead;
    const float *next;
    ptrdiff_t next_step, next1;
    const Segment *segments;
    ptrdiff_t n_segments;
} Reduction;

typedef struct {
    const float *start;
    ptrdiff_t start_p, start_v;
    float *out;
    ptrdiff_t out_p, out_v, add, relu, past;
} Ends;

/* The parts of the micro-kernel (tile.pxi), over `vectors` vectors and the pixels lo <= p < hi of a register tile. Here
 * and not in Cython because gcc unrolls a loop early enough to keep the sums in registers only by pragma. */
#define PCL_SUMS \
    _Pragma("GCC unroll 32") \
    for (int i = 0, p = 0, v = 0; i < PCL_TILE * PCL_VECTORS; i++, p = i / PCL_VECTORS, v = i % PCL_VECTORS) \
        if (lo <= p && p < hi && v < vectors)

/* Sums begin at zero, or at `start`: a bias, or what an earlier call has left. */
PCL_INLINE void tile_begin(int width, int vectors, vec *acc, const float *start, long sp, long sv) {
    const int lo = 0, hi = width;
    if (start) {
        PCL_SUMS acc[i] = vec_load(start + v * sv + p * sp);
    } else {
        PCL_SUMS acc[i] = vec_zero();
    }
}

/* One step of the sum. */
PCL_INLINE void tile_step(int lo, int hi, int vectors, vec *acc, const float *x, long xp, const float *w, long wv) {
    vec filter[PCL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) filter[v] = vec_load(w + v * wv);
    PCL_SUMS acc[i] += filter[v] * x[p * xp];
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
#error "no table for this register tile: change PCL_RANGES, `run` in tile.pxi and, for x86-64, `pixel` in tile_x86.py"
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

/* PCL_ASSEMBLED and, where that is 1, `assembled_tile`: one register tile; kind: its number among tile_x86.py's. */
#include "tile_x86.h"
#if !PCL_ASSEMBLED
PCL_INLINE void assembled_tile(int kind, int width, int vectors, const Ends *ends, const float *x, ptrdiff_t xp,
                               const float *w, ptrdiff_t wv, const Reduction *over) {}
#endif

#endif
