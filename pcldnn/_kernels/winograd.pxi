# Winograd convolution, 3x3 filters with stride 1: forward, input gradient, weight gradient.
#
# a. A tile of 6x6 outputs is evaluated at 8x8 points: y = A' [(G w G') . (B' x B)] A with 64 products in the place of
#    324 (Lavin & Gray 2016). The points are 0, +-P, +-Q, +-R and infinity, P = 9/16, Q = 1, R = 13/8: their powers are
#    exact in float32, and the largest error is that of 4x4 outputs with the usual points 0, +-1, +-2 (found by trying
#    some, scripts/numerics_report.py; Barabasz et al. 2020 and Alam et al. 2022 choose points for the same reason).
# b. What remains of a size that 6 does not divide is computed by a tile of 2 (4 points: 0, +-Q, infinity), of 4 (6
#    points: 0, +-P, +-R, infinity) or, for 5, of 6. The transforms are separable, so a tile may have unlike sizes.
#    Each point has the scaling of the full tile: all tiles share the same transformed filters, and 14x14 outputs take
#    20x20 products.
# c. Arrays in the transformed domain are (point, tile, channel): point (i, j) is number 8 i + j. Rows of channels are
#    the vectors of the transforms, the reduction of forward and input gradient, and both operands of the weight
#    gradient. Tiles are ordered full x rest, full x full, rest x full, rest x rest (rows x columns): every point has
#    its tiles in one range.
# d. A batch is some tiles of all images, as many of each kind in every batch. Per batch: transform the inputs, multiply
#    point by point with the register tile of tile.pxi (pixels are tiles), transform the outputs. `tiles` and `k_blocks`
#    bound the memory of a batch. Each sum has one order, which depends on shapes and blocking only.
# e. Either all threads share a batch, or each has its own (`private`): then V and M may stay in its L2.
# f. Weight gradient: (B' x B)' (A dy A') summed over the tiles of all batches in the transformed domain, then G' . G.

cdef extern from *:
    """
    #define WG_P 0.5625f
    #define WG_R 1.625f
    #define WG_P2 (WG_P * WG_P)
    #define WG_R2 (WG_R * WG_R)
    #define WG_S0 (-1 / (WG_P2 * WG_R2))
    #define WG_SP (1 / (2 * WG_P2 * (WG_P2 - 1) * (WG_P2 - WG_R2)))
    #define WG_SQ (1 / (2 * (1 - WG_P2) * (1 - WG_R2)))
    #define WG_SR (1 / (2 * WG_R2 * (WG_R2 - WG_P2) * (WG_R2 - 1)))
    #if PCL_WIDTH == 16 && defined(__AVX512F__)
    #include <immintrin.h>
    #define WG_STREAM(p, a) _mm512_stream_ps(p, (__m512)(a))
    #define WG_FENCE() _mm_sfence()
    #elif PCL_WIDTH == 8 && defined(__AVX__)
    #include <immintrin.h>
    #define WG_STREAM(p, a) _mm256_stream_ps(p, (__m256)(a))
    #define WG_FENCE() _mm_sfence()
    #elif defined(__SSE2__)
    #include <emmintrin.h>
    #define WG_STREAM(p, a) _mm_stream_ps(p, (__m128)(a))
    #define WG_FENCE() _mm_sfence()
    #else
    #define WG_STREAM(p, a) vec_store(p, a)
    #define WG_FENCE()
    #endif
    #define WG_LINE (PCL_WIDTH < 16 ? 16 / PCL_WIDTH : 1)
    """
    const float P1 "WG_P"
    const float Q2 "1.0f"                     # Q is 1
    const float R1 "WG_R"
    const float P2 "WG_P2"
    const float R2 "WG_R2"
    const float S0 "WG_S0"                    # scale of a filter at point 0, +-P, +-Q, +-R: 1 / N of the full tile
    const float SP "WG_SP"
    const float SQ "WG_SQ"
    const float SR "WG_SR"
    const int LINE "WG_LINE"                  # channel blocks of a cache line
    void store_past "WG_STREAM"(float* p, vec a) nogil    # to memory, past the caches: for aligned p
    void store_fence "WG_FENCE"() nogil

cdef enum:
    POINTS = 64
    STRIP = 192              # tiles summed per visit of dU: two lines of each stay in L1
    STREAM = 8388608         # transformed filters of so many elements are written past the caches: they do not fit
    CHUNK_TILES = 8          # tiles of a job of the transforms


cdef struct Winograd:
    const float* x                            # input of forward and weight gradient; dy in the input gradient
    const float* u
    const float* bias
    float* y                                  # output of forward and input gradient; dy in the weight gradient
    float* v                                  # transformed input (POINTS, tiles, v_tile)
    float* m                                  # products (POINTS, tiles, m_tile); transformed dy in the weight gradient
    float* du                                 # sum of products of the weight gradient
    float* dw
    Py_ssize_t images, in_blocks, out_blocks, H, W, P, Q, pad_h, pad_w
    Py_ssize_t rows, cols                     # full tiles of an image
    int row_rest, col_rest                    # size of the one tile behind them: 0 (there is none), 2 or 4
    Py_ssize_t v_tile, v_point, m_tile, m_point
    Py_ssize_t tiles, k_blocks, c_blocks      # of a batch; of a group of output channels; of a visit of the products
    Py_ssize_t batches
    bint relu


cdef struct Batch:
    Py_ssize_t first[4]                       # number among its kind of the first tile of each kind (decision c)
    Py_ssize_t start[5]                       # its position in the batch


# --- one dimension: each function writes its results `step` apart ---------------------------------------------------


cdef inline bint has_point(int size, int point) noexcept nogil:
    """Whether tiles of this size use the point: 0, P, -P, Q, -Q, R, -R, infinity."""
    return size == 6 or point == 0 or point == 7 or (point == 3 or point == 4) == (size == 2)


cdef inline void store_pair(vec even, vec odd, float* out, Py_ssize_t step) noexcept nogil:
    store(out, even + odd)
    store(out + step, even - odd)


cdef inline void input_points(int size, const float* d, Py_ssize_t in_step, float* out, Py_ssize_t step) noexcept nogil:
    """B' d: size + 2 inputs at the points."""
    cdef vec d0 = load(d), d1 = load(d + in_step), d2 = load(d + 2 * in_step), d3 = load(d + 3 * in_step)
    cdef vec d4, d5, d6, d7
    if size == 6:
        d4, d5 = load(d + 4 * in_step), load(d + 5 * in_step)
        d6, d7 = load(d + 6 * in_step), load(d + 7 * in_step)
        store(out, d6 - (P2 + Q2 + R2) * d4 + (P2 + R2 + P2 * R2) * d2 - (P2 * R2) * d0)
        store_pair(d6 - (Q2 + R2) * d4 + R2 * d2, P1 * d5 - (P1 * (Q2 + R2)) * d3 + (P1 * R2) * d1, out + step, step)
        store_pair(d6 - (P2 + R2) * d4 + (P2 * R2) * d2, d5 - (P2 + R2) * d3 + (P2 * R2) * d1, out + 3 * step, step)
        store_pair(d6 - (P2 + Q2) * d4 + P2 * d2, R1 * d5 - (R1 * (P2 + Q2)) * d3 + (R1 * P2) * d1,
                   out + 5 * step, step)
        store(out + 7 * step, d7 - (P2 + Q2 + R2) * d5 + (P2 + R2 + P2 * R2) * d3 - (P2 * R2) * d1)
    elif size == 4:
        d4, d5 = load(d + 4 * in_step), load(d + 5 * in_step)
        store(out, (P2 + R2) * d2 - (P2 * R2) * d0 - d4)
        store_pair((P2 - Q2) * d4 - ((P2 - Q2) * R2) * d2, ((P2 - Q2) * P1) * d3 - ((P2 - Q2) * P1 * R2) * d1,
                   out + step, step)
        store_pair((R2 - Q2) * d4 - ((R2 - Q2) * P2) * d2, ((R2 - Q2) * R1) * d3 - ((R2 - Q2) * R1 * P2) * d1,
                   out + 5 * step, step)
        store(out + 7 * step, d5 - (P2 + R2) * d3 + (P2 * R2) * d1)
    else:
        store(out, (P2 * R2) * (d2 - d0))
        store_pair(((Q2 - P2) * (Q2 - R2)) * d2, ((Q2 - P2) * (Q2 - R2)) * d1, out + 3 * step, step)
        store(out + 7 * step, d3 - d1)


cdef inline void gradient_points(int size, const float* y, Py_ssize_t in_step, float* out,
                                 Py_ssize_t step) noexcept nogil:
    """A y: `size` output gradients at the points."""
    cdef vec y0 = load(y), y1 = load(y + in_step), y2, y3, y4, y5
    store(out, y0)
    if size == 6:
        y2, y3 = load(y + 2 * in_step), load(y + 3 * in_step)
        y4, y5 = load(y + 4 * in_step), load(y + 5 * in_step)
        store_pair(y0 + P2 * y2 + (P2 * P2) * y4, P1 * y1 + (P1 * P2) * y3 + (P1 * P2 * P2) * y5, out + step, step)
        store_pair(y0 + y2 + y4, y1 + y3 + y5, out + 3 * step, step)
        store_pair(y0 + R2 * y2 + (R2 * R2) * y4, R1 * y1 + (R1 * R2) * y3 + (R1 * R2 * R2) * y5, out + 5 * step, step)
        store(out + 7 * step, y5)
    elif size == 4:
        y2, y3 = load(y + 2 * in_step), load(y + 3 * in_step)
        store_pair(y0 + P2 * y2, P1 * y1 + (P1 * P2) * y3, out + step, step)
        store_pair(y0 + R2 * y2, R1 * y1 + (R1 * R2) * y3, out + 5 * step, step)
        store(out + 7 * step, y3)
    else:
        store_pair(y0, y1, out + 3 * step, step)
        store(out + 7 * step, y1)


cdef inline void filter_points(vec w0, vec w1, vec w2, float* out, Py_ssize_t step) noexcept nogil:
    """G w: the 3 taps at the points."""
    store(out, S0 * w0)
    store_pair(SP * w0 + (SP * P2) * w2, (SP * P1) * w1, out + step, step)
    store_pair(SQ * w0 + SQ * w2, SQ * w1, out + 3 * step, step)
    store_pair(SR * w0 + (SR * R2) * w2, (SR * R1) * w1, out + 5 * step, step)
    store(out + 7 * step, w2)


cdef inline void output_values(int size, const float* m, Py_ssize_t in_step, float* out,
                               Py_ssize_t step) noexcept nogil:
    """A' m: the `size` outputs."""
    cdef vec s, d, s2, d2, s3, d3
    if size == 6:
        s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
        s2, d2 = load(m + 3 * in_step) + load(m + 4 * in_step), load(m + 3 * in_step) - load(m + 4 * in_step)
        s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
        store(out, load(m) + s + s2 + s3)
        store(out + step, P1 * d + d2 + R1 * d3)
        store(out + 2 * step, P2 * s + s2 + R2 * s3)
        store(out + 3 * step, (P1 * P2) * d + d2 + (R1 * R2) * d3)
        store(out + 4 * step, (P2 * P2) * s + s2 + (R2 * R2) * s3)
        store(out + 5 * step, (P1 * P2 * P2) * d + d2 + (R1 * R2 * R2) * d3 + load(m + 7 * in_step))
    elif size == 4:
        s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
        s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
        store(out, load(m) + s + s3)
        store(out + step, P1 * d + R1 * d3)
        store(out + 2 * step, P2 * s + R2 * s3)
        store(out + 3 * step, (P1 * P2) * d + (R1 * R2) * d3 + load(m + 7 * in_step))
    else:
        store(out, load(m) + load(m + 3 * in_step) + load(m + 4 * in_step))
        store(out + step, load(m + 3 * in_step) - load(m + 4 * in_step) + load(m + 7 * in_step))


cdef inline void filter_values(const float* m, Py_ssize_t in_step, float* out, Py_ssize_t step) noexcept nogil:
    """G' m: the 3 taps."""
    cdef vec s, d, s2, d2, s3, d3
    s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
    s2, d2 = load(m + 3 * in_step) + load(m + 4 * in_step), load(m + 3 * in_step) - load(m + 4 * in_step)
    s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
    store(out, S0 * load(m) + SP * s + SQ * s2 + SR * s3)
    store(out + step, (SP * P1) * d + SQ * d2 + (SR * R1) * d3)
    store(out + 2 * step, (SP * P2) * s + SQ * s2 + (SR * R2) * s3 + load(m + 7 * in_step))


# --- one tile, b channels -------------------------------------------------------------------------------------------


cdef void input_tile(int mr, int mc, const float* x, Py_ssize_t H, Py_ssize_t W, Py_ssize_t row, Py_ssize_t col,
                     float* v, Py_ssize_t v_point) noexcept nogil:
    """v = B' x B of the (mr + 2) x (mc + 2) inputs from (row, col) on; those outside of the image are zero."""
    cdef float framed[64 * b]
    cdef float t[64 * b]
    cdef const float* d = x + (row * W + col) * b
    cdef Py_ssize_t in_row = W * b
    cdef int i, j
    if row < 0 or col < 0 or row + mr + 2 > H or col + mc + 2 > W:
        for i in range(mr + 2):
            for j in range(mc + 2):
                store(framed + (8 * i + j) * b, load(d + i * in_row + j * b)
                      if 0 <= row + i and row + i < H and 0 <= col + j and col + j < W else zero())
        d = framed
        in_row = 8 * b
    for j in range(mc + 2):
        input_points(mr, d + j * b, in_row, t + j * b, 8 * b)
    for i in range(8):
        if has_point(mr, i):
            input_points(mc, t + 8 * i * b, b, v + 8 * i * v_point, v_point)


cdef void output_tile(int mr, int mc, const float* m, Py_ssize_t m_point, vec bias, bint relu, float* y,
                      Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row, Py_ssize_t col) noexcept nogil:
    """relu?(A' m A + bias) to the mr x mc outputs from (row, col) on, as far as they exist."""
    cdef float t[48 * b]
    cdef float values[6 * b]
    cdef vec value
    cdef int i, j, rows = <int>min(mr, P - row), cols = <int>min(mc, Q - col)
    y += (row * Q + col) * b
    for j in range(8):
        if has_point(mc, j):
            output_values(mr, m + j * m_point, 8 * m_point, t + j * b, 8 * b)
    for i in range(rows):
        output_values(mc, t + 8 * i * b, b, values, b)
        for j in range(cols):
            value = load(values + j * b) + bias
            store(y + (i * Q + j) * b, vrelu(value) if relu else value)


cdef void gradient_tile(int mr, int mc, const float* dy, Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row, Py_ssize_t col,
                        float* d, Py_ssize_t d_point) noexcept nogil:
    """d = A dy A' of the mr x mc output gradients from (row, col) on."""
    cdef float framed[48 * b]
    cdef float t[48 * b]
    cdef const float* y = dy + (row * Q + col) * b
    cdef Py_ssize_t in_row = Q * b
    cdef int i, j
    if row + mr > P or col + mc > Q:
        for i in range(mr):
            for j in range(mc):
                store(framed + (6 * i + j) * b,
                      load(y + i * in_row + j * b) if row + i < P and col + j < Q else zero())
        y = framed
        in_row = 6 * b
    for j in range(mc):
        gradient_points(mr, y + j * b, in_row, t + j * b, 6 * b)
    for i in range(8):
        if has_point(mr, i):
            gradient_points(mc, t + 6 * i * b, b, d + 8 * i * d_point, d_point)


# --- batches of tiles -----------------------------------------------------------------------------------------------


cdef void split(Py_ssize_t size, Py_ssize_t* full, int* rest) noexcept nogil:
    """Cut `size` outputs: decision b."""
    full[0] = (size + 1) // 6
    rest[0] = <int>((size - 6 * full[0] + 1) // 2 * 2) if size > 6 * full[0] else 0


cdef void start_batch(Winograd* g, Py_ssize_t i, Batch* batch) noexcept nogil:
    """Which tiles belong to batch i."""
    cdef Py_ssize_t counts[4]
    cdef int kind
    counts[0] = g.images * g.rows * (g.col_rest > 0)
    counts[1] = g.images * g.rows * g.cols
    counts[2] = g.images * (g.row_rest > 0) * g.cols
    counts[3] = g.images * (g.row_rest > 0) * (g.col_rest > 0)
    batch.start[0] = 0
    for kind in range(4):
        batch.first[kind] = counts[kind] * i // g.batches
        batch.start[kind + 1] = batch.start[kind] + counts[kind] * (i + 1) // g.batches - batch.first[kind]


cdef void point_range(Winograd* g, Batch* batch, int point, Py_ssize_t* lo, Py_ssize_t* hi) noexcept nogil:
    """Positions of the tiles that use a point."""
    cdef bint full_row = not has_point(g.row_rest, point // 8), full_col = not has_point(g.col_rest, point % 8)
    lo[0] = batch.start[1 if full_col else 0]
    hi[0] = batch.start[2 if full_row else 3 if full_col else 4]


cdef struct Tile:
    Py_ssize_t image, row, col                # and first output
    int mr, mc                                # outputs


cdef Tile locate(Winograd* g, Batch* batch, Py_ssize_t position) noexcept nogil:
    """The tile at a position of a batch."""
    cdef int kind = (position >= batch.start[1]) + (position >= batch.start[2]) + (position >= batch.start[3])
    cdef Py_ssize_t number = batch.first[kind] + position - batch.start[kind]
    cdef bint full_row = kind < 2, full_col = kind == 1 or kind == 2
    cdef Py_ssize_t rows = g.rows if full_row else 1, cols = g.cols if full_col else 1
    return Tile(image=number // (rows * cols),
                row=6 * (number // cols % rows) if full_row else 6 * g.rows,
                col=6 * (number % cols) if full_col else 6 * g.cols,
                mr=6 if full_row else g.row_rest, mc=6 if full_col else g.col_rest)


cdef void transform_inputs(Winograd* g, Batch* batch, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t t0,
                           Py_ssize_t t1) noexcept nogil:
    """V of channel blocks c0..c1 at positions t0..t1."""
    cdef Py_ssize_t t, c
    cdef Tile tile
    for t in range(t0, t1):
        tile = locate(g, batch, t)
        for c in range(c0, c1):
            input_tile(tile.mr, tile.mc, g.x + (tile.image * g.in_blocks + c) * g.H * g.W * b, g.H, g.W,
                       tile.row - g.pad_h, tile.col - g.pad_w, g.v + t * g.v_tile + c * b, g.v_point)


cdef void transform_gradients(Winograd* g, Batch* batch, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                              Py_ssize_t t1) noexcept nogil:
    """Transformed dy of channel blocks k0..k1 at positions t0..t1."""
    cdef Py_ssize_t t, k
    cdef Tile tile
    for t in range(t0, t1):
        tile = locate(g, batch, t)
        for k in range(k0, k1):
            gradient_tile(tile.mr, tile.mc, g.y + (tile.image * g.out_blocks + k) * g.P * g.Q * b, g.P, g.Q,
                          tile.row, tile.col, g.m + t * g.m_tile + k * b, g.m_point)


cdef void transform_outputs(Winograd* g, Batch* batch, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                            Py_ssize_t t1) noexcept nogil:
    """y of channel blocks k0..k1, which lie from block `group` on in M, at positions t0..t1."""
    cdef Py_ssize_t t, k
    cdef Tile tile
    for t in range(t0, t1):
        tile = locate(g, batch, t)
        for k in range(k0, k1):
            output_tile(tile.mr, tile.mc, g.m + t * g.m_tile + (k - group) * b, g.m_point,
                        zero() if g.bias == NULL else load(g.bias + k * b), g.relu,
                        g.y + (tile.image * g.out_blocks + k) * g.P * g.Q * b, g.P, g.Q, tile.row, tile.col)


# --- products -------------------------------------------------------------------------------------------------------


cdef inline void tile_sum(int width, const float* x, Py_ssize_t xp, Py_ssize_t x0, const float* w, Py_ssize_t wv,
                          Py_ssize_t w0, Py_ssize_t steps, float* y, Py_ssize_t yp, Py_ssize_t yv, bint first,
                          bint two) noexcept nogil:
    """One register tile: y = (or +=, unless `first`) the sum over `steps` of outer products."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over
    over.n0, over.x0, over.w0 = steps, x0, w0
    over.n1, over.x1, over.w1 = 1, 0, 0
    over.n2, over.x2, over.w2 = 1, 0, 0
    over.ahead = 0
    if first:
        tile_fill(a0, a1, NULL, two)
    else:
        tile_load(a0, a1, width, y, yp, yv, two)
    run(0, width, a0, a1, x, xp, w, wv, &over, two)
    tile_store(a0, a1, width, y, yp, yv, False, two)


cdef void tile_sum_two(int width, const float* x, Py_ssize_t xp, Py_ssize_t x0, const float* w, Py_ssize_t wv,
                       Py_ssize_t w0, Py_ssize_t steps, float* y, Py_ssize_t yp, Py_ssize_t yv,
                       bint first) noexcept nogil:
    tile_sum(width, x, xp, x0, w, wv, w0, steps, y, yp, yv, first, True)


cdef void tile_sum_one(int width, const float* x, Py_ssize_t xp, Py_ssize_t x0, const float* w, Py_ssize_t wv,
                       Py_ssize_t w0, Py_ssize_t steps, float* y, Py_ssize_t yp, Py_ssize_t yv,
                       bint first) noexcept nogil:
    tile_sum(width, x, xp, x0, w, wv, w0, steps, y, yp, yv, first, False)


cdef void product_tiles(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t group, Py_ssize_t k,
                        Py_ssize_t lo, Py_ssize_t hi, bint two) noexcept nogil:
    """M of a point, channel blocks k (and k + 1), tiles lo..hi: (+)= V times U over input channel blocks c0..c1."""
    cdef Py_ssize_t channels = g.in_blocks * b, t
    cdef int i, width, parts = tiles_of(hi - lo)
    cdef const float* u = g.u + ((point * g.out_blocks + k) * channels + c0 * b) * b
    cdef const float* v = g.v + point * g.v_point + c0 * b
    cdef float* m = g.m + point * g.m_point + (k - group) * b
    for i in range(parts):
        t = lo + tile_start(hi - lo, parts, i)
        width = <int>(lo + tile_start(hi - lo, parts, i + 1) - t)
        if two:
            tile_sum_two(width, v + t * g.v_tile, g.v_tile, 1, u, channels * b, b, (c1 - c0) * b,
                         m + t * g.m_tile, g.m_tile, b, c0 == 0)
        else:
            tile_sum_one(width, v + t * g.v_tile, g.v_tile, 1, u, channels * b, b, (c1 - c0) * b,
                         m + t * g.m_tile, g.m_tile, b, c0 == 0)


cdef void multiply(Winograd* g, Batch* batch, int point, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1) noexcept nogil:
    """M of a point and channel blocks k0..k1, where `group` is the first block that M holds."""
    cdef Py_ssize_t lo, hi, c0, c1, k
    point_range(g, batch, point, &lo, &hi)
    c0 = 0
    while c0 < g.in_blocks and lo < hi:
        c1 = min(c0 + g.c_blocks, g.in_blocks)
        k = k0
        while k < k1:
            product_tiles(g, point, c0, c1, group, k, lo, hi, k + 1 < k1)
            k += 2
        c0 = c1


cdef void gradient_sum(const float* v, Py_ssize_t v_tile, const float* d, Py_ssize_t d_tile, Py_ssize_t tiles,
                       float* du, Py_ssize_t du_block, bint first) noexcept nogil:
    """`tile_sum_two` for TILE input channels, that asks for the next ones: nothing else fetches rows so far apart.

    The loop of one turn makes the innermost one unroll early (see simd.h).
    """
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Py_ssize_t i
    cdef int p, once
    cdef float s
    cdef vec w0, w1
    if first:
        tile_fill(a0, a1, NULL, True)
    else:
        tile_load(a0, a1, TILE, du, b, du_block, True)
    for once in range(1):
        for i in range(tiles):
            prefetch(v + 2 * TILE - 1)
            w0 = load(d)
            w1 = load(d + b)
            for p in range(TILE):
                s = v[p]
                a0[p] = a0[p] + w0 * s
                a1[p] = a1[p] + w1 * s
            v += v_tile
            d += d_tile
    tile_store(a0, a1, TILE, du, b, du_block, False, True)


cdef void gradient_products(Winograd* g, int point, Py_ssize_t k, Py_ssize_t lo, Py_ssize_t hi, bint first,
                            bint two) noexcept nogil:
    """dU of a point, channel blocks k (and k + 1): (+)= V' times transformed dy over tiles lo..hi."""
    cdef Py_ssize_t channels = g.in_blocks * b, c
    cdef int i, width, parts = tiles_of(channels)
    cdef float* du = g.du + (point * g.out_blocks + k) * channels * b
    cdef const float* v = g.v + point * g.v_point + lo * g.v_tile
    cdef const float* d = g.m + point * g.m_point + lo * g.m_tile + k * b
    for i in range(parts):
        c = tile_start(channels, parts, i)
        width = <int>(tile_start(channels, parts, i + 1) - c)
        if two and width == TILE:
            gradient_sum(v + c, g.v_tile, d, g.m_tile, hi - lo, du + c * b, channels * b, first)
        elif two:
            tile_sum_two(width, v + c, 1, g.v_tile, d, b, g.m_tile, hi - lo, du + c * b, b, channels * b, first)
        else:
            tile_sum_one(width, v + c, 1, g.v_tile, d, b, g.m_tile, hi - lo, du + c * b, b, channels * b, first)


cdef void multiply_gradients(Winograd* g, Batch* batch, bint first, int point, Py_ssize_t k0,
                             Py_ssize_t k1) noexcept nogil:
    """dU of a point and channel blocks k0..k1; `first`: nothing is in it yet."""
    cdef Py_ssize_t lo, hi, t0, t1, k
    point_range(g, batch, point, &lo, &hi)
    t0 = lo
    while t0 < hi or (first and t0 == lo):
        t1 = min(t0 + STRIP, hi)
        k = k0
        while k < k1:
            gradient_products(g, point, k, t0, t1, first and t0 == lo, k + 1 < k1)
            k += 2
        t0 += STRIP


# --- passes ---------------------------------------------------------------------------------------------------------


cdef Py_ssize_t odd_lines(Py_ssize_t size) noexcept nogil:
    """At least `size` floats, an odd number of cache lines: equal places of successive rows fall in different sets."""
    return ((size + 15) // 16 | 1) * 16


cdef void layout_batch(Winograd* g, Py_ssize_t m_blocks, float* scratch) noexcept nogil:
    """Strides and places of V and M for batches of g.tiles."""
    g.v_tile = odd_lines(g.in_blocks * b)
    g.m_tile = odd_lines(m_blocks * b)
    g.v_point = odd_lines(g.tiles * g.v_tile)
    g.m_point = odd_lines(g.tiles * g.m_tile)
    g.v = scratch
    g.m = scratch + POINTS * g.v_point


def winograd_scratch_size(Py_ssize_t in_blocks, Py_ssize_t out_blocks, Py_ssize_t tiles, Py_ssize_t batches):
    """Elements of V and M of batches of `tiles` tiles; `out_blocks` as many as M holds; `batches` at the same time."""
    return batches * POINTS * (odd_lines(tiles * odd_lines(in_blocks * b))
                               + odd_lines(tiles * odd_lines(out_blocks * b)))


cdef void own_batches(Winograd* shared, Py_ssize_t worker, Py_ssize_t workers, Py_ssize_t size) noexcept nogil:
    """Every `workers`-th batch, in memory of its own."""
    cdef Winograd g = shared[0]
    cdef Batch batch
    cdef Py_ssize_t i = worker, k, k1, c
    cdef int point
    layout_batch(&g, g.k_blocks, shared.v + worker * size)
    while i < g.batches:
        start_batch(&g, i, &batch)
        c = 0
        while c < g.in_blocks:
            transform_inputs(&g, &batch, c, min(c + LINE, g.in_blocks), 0, batch.start[4])
            c += LINE
        k = 0
        while k < g.out_blocks:
            k1 = min(k + g.k_blocks, g.out_blocks)
            for point in range(POINTS):
                multiply(&g, &batch, point, k, k, k1)
            c = k
            while c < k1:
                transform_outputs(&g, &batch, k, c, min(c + LINE, k1), 0, batch.start[4])
                c += LINE
            k = k1
        i += workers


cdef void shared_inputs(Winograd* g, Batch* batch, int num_threads) noexcept nogil:
    cdef Py_ssize_t job, chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES
    cdef Py_ssize_t lines = (g.in_blocks + LINE - 1) // LINE
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_inputs(g, batch, job // chunks * LINE, min((job // chunks + 1) * LINE, g.in_blocks),
                         job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void shared_gradients(Winograd* g, Batch* batch, int num_threads) noexcept nogil:
    cdef Py_ssize_t job, chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES
    cdef Py_ssize_t lines = (g.out_blocks + LINE - 1) // LINE
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_gradients(g, batch, job // chunks * LINE, min((job // chunks + 1) * LINE, g.out_blocks),
                            job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void shared_products(Winograd* g, Batch* batch, Py_ssize_t k, Py_ssize_t k1, int num_threads) noexcept nogil:
    """The products and outputs of channel blocks k..k1."""
    cdef Py_ssize_t pairs = (k1 - k + 1) // 2, parts = min(pairs, (2 * num_threads + 31) // 32), job
    cdef Py_ssize_t chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES, lines = (k1 - k + LINE - 1) // LINE
    for job in prange(POINTS * parts, num_threads=num_threads, schedule="static", chunksize=1):
        multiply(g, batch, <int>(job // parts), k, k + 2 * (pairs * (job % parts) // parts),
                 min(k + 2 * (pairs * (job % parts + 1) // parts), k1))
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_outputs(g, batch, k, k + job // chunks * LINE, min(k + (job // chunks + 1) * LINE, k1),
                          job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void winograd_pass(Winograd* g, bint private, float* scratch, int num_threads) noexcept nogil:
    """Forward or input gradient."""
    cdef Batch batch
    cdef Py_ssize_t i, k, size
    cdef int worker
    layout_batch(g, g.k_blocks, scratch)
    if private:
        size = POINTS * (g.v_point + g.m_point)
        for worker in prange(num_threads, num_threads=num_threads, schedule="static", chunksize=1):
            own_batches(g, worker, num_threads, size)
        return
    for i in range(g.batches):
        start_batch(g, i, &batch)
        shared_inputs(g, &batch, num_threads)
        k = 0
        while k < g.out_blocks:
            shared_products(g, &batch, k, min(k + g.k_blocks, g.out_blocks), num_threads)
            k += g.k_blocks


cdef void weight_grad_pass_winograd(Winograd* g, int num_threads) noexcept nogil:
    cdef Batch batch
    cdef Py_ssize_t i, job, pairs = (g.out_blocks + 1) // 2, parts = min(pairs, (2 * num_threads + 31) // 32)
    for i in range(g.batches):
        start_batch(g, i, &batch)
        shared_inputs(g, &batch, num_threads)
        shared_gradients(g, &batch, num_threads)
        for job in prange(POINTS * parts, num_threads=num_threads, schedule="static", chunksize=1):
            multiply_gradients(g, &batch, i == 0, <int>(job // parts), 2 * (pairs * (job % parts) // parts),
                               min(2 * (pairs * (job % parts + 1) // parts), g.out_blocks))
    for job in prange(g.out_blocks * g.in_blocks, num_threads=num_threads, schedule="static"):
        restore_filters(g, job // g.in_blocks, job % g.in_blocks)


cdef void restore_filters(Winograd* g, Py_ssize_t k, Py_ssize_t c) noexcept nogil:
    """dweight of one block: G' dU G. The block is gathered first: points often lie a power of two apart."""
    cdef float du[POINTS * b * b]
    cdef float t[24 * b]
    cdef Py_ssize_t block = (k * g.in_blocks + c) * b * b, du_point = g.out_blocks * g.in_blocks * b * b
    cdef float* dw = g.dw + 9 * block
    cdef int lane, point, i, j
    for point in range(POINTS):
        memcpy(du + point * b * b, g.du + point * du_point + block, b * b * sizeof(float))
    for lane in range(b):
        for j in range(8):
            filter_values(du + (j * b + lane) * b, 8 * b * b, t + j * b, 8 * b)
        for i in range(3):
            filter_values(t + 8 * i * b, b, dw + (3 * i * b + lane) * b, b * b)


cdef void transform_filter(const float* w, float* u, Py_ssize_t u_point, bint input_grad, bint stream) noexcept nogil:
    """U of one block of filters (3, 3, b, b); with `input_grad` rows and columns in reverse, channels transposed."""
    cdef float buffer[POINTS * b * b]
    cdef float t[24 * b]
    cdef float square[b * b]
    cdef const float* f
    cdef Py_ssize_t tap = -b * b if input_grad else b * b
    cdef int lane, point, i, j
    for lane in range(b):
        f = w + lane * b + (8 * b * b if input_grad else 0)
        for j in range(3):
            filter_points(load(f + j * tap), load(f + (3 + j) * tap), load(f + (6 + j) * tap), t + j * b, 3 * b)
        for i in range(8):
            filter_points(load(t + 3 * i * b), load(t + (3 * i + 1) * b), load(t + (3 * i + 2) * b),
                          buffer + (8 * i * b + lane) * b, b * b)
    for point in range(POINTS):
        f = buffer + point * b * b
        if input_grad:
            transpose(f, b, square)
            f = square
        for i in range(b):
            if stream:
                store_past(u + point * u_point + i * b, load(f + i * b))
            else:
                store(u + point * u_point + i * b, load(f + i * b))


cdef void transform_filters(const float* w, float* u, Py_ssize_t KB, Py_ssize_t CB, Py_ssize_t k, bint input_grad,
                            bint stream) noexcept nogil:
    """U of the filters of one block of output channels."""
    cdef Py_ssize_t c, block
    for c in range(CB):
        block = c * KB + k if input_grad else k * CB + c
        transform_filter(w + (k * CB + c) * 9 * b * b, u + block * b * b, KB * CB * b * b, input_grad, stream)
    if stream:
        store_fence()


def winograd_transform_filter(const float[:, :, :, :, :, ::1] weight,     # IN   (KB, CB, 3, 3, b, b)
                              float[:, :, :, ::1] u,                      # OUT  (64, KB, CB * b, b)
                              bint input_grad=False, int num_threads=1):
    """u = G w G' at the 64 points, for `winograd_forward`.

    With `input_grad` the filters are transposed and flipped, for `winograd_input_grad`: u is (64, CB, KB * b, b).
    """
    cdef Py_ssize_t KB = weight.shape[0], CB = weight.shape[1], job, size = KB * CB * b * b
    cdef bint stream
    cdef const float* w
    cdef float* out
    checks.winograd_transform_filter(dims(weight), dims(u), input_grad, num_threads)
    checks.width("weight", weight.shape[5], b)
    if size == 0:
        return
    w = &weight[0, 0, 0, 0, 0, 0]
    out = &u[0, 0, 0, 0]
    stream = POINTS * size >= STREAM and (<size_t>out) % (b * sizeof(float)) == 0
    for job in prange(KB, nogil=True, num_threads=num_threads, schedule="static"):
        transform_filters(w, out, KB, CB, job, input_grad, stream)


cdef int winograd_arrays(Winograd* g, tuple x, tuple y, tuple padding, blocking) except -1:
    """Extents of a pass from the shapes of its arrays; its blocking."""
    g.images, g.in_blocks, g.H, g.W, _ = x
    _, g.out_blocks, g.P, g.Q, _ = y
    g.pad_h, g.pad_w = padding
    split(g.P, &g.rows, &g.row_rest)
    split(g.Q, &g.cols, &g.col_rest)
    tiles = g.images * (g.rows + (g.row_rest > 0)) * (g.cols + (g.col_rest > 0))
    most, g.k_blocks, g.c_blocks, _ = checks.blocking(blocking, (tiles, g.out_blocks, g.in_blocks, False),
                                                      checks.WINOGRAD_BLOCKING)
    g.batches = max(-(-tiles // max(most, 1)), 1)
    g.tiles = -(-tiles // g.batches) + 3      # each of the four kinds is rounded
    g.k_blocks = min(g.k_blocks, g.out_blocks)
    return 0


cdef int winograd_run(const float[:, :, :, :, ::1] x, const float[:, :, :, ::1] u, bias, float[:, :, :, :, ::1] y,
                      tuple padding, bint relu, float[::1] scratch, blocking, int num_threads) except -1:
    cdef Winograd g
    cdef const float[::1] bias_view
    cdef bint private
    if x.shape[0] == 0 or y.shape[1] == 0 or y.shape[2] == 0 or y.shape[3] == 0:
        return 0
    winograd_arrays(&g, dims(x), dims(y), padding, blocking)
    private = blocking is not None and blocking[3]
    g.bias = NULL
    if bias is not None:
        bias_view = bias
        g.bias = &bias_view[0]
    g.x, g.u, g.y = &x[0, 0, 0, 0, 0], &u[0, 0, 0, 0], &y[0, 0, 0, 0, 0]
    g.relu = relu
    scratch = scratch_of(scratch, winograd_scratch_size(g.in_blocks, g.k_blocks, g.tiles,
                                                        num_threads if private else 1))
    with nogil:
        winograd_pass(&g, private, &scratch[0], num_threads)
    return 0


def winograd_forward(const float[:, :, :, :, ::1] x,         # IN   (N, CB, H, W, b)
                     const float[:, :, :, ::1] u,            # IN   (64, KB, CB * b, b), winograd_transform_filter
                     bias,                                   # IN   (KB * b) or None
                     float[:, :, :, :, ::1] y,               # OUT  (N, KB, P, Q, b)
                     tuple padding, bint relu=False,
                     float[::1] scratch=None,                # TMP  winograd_scratch_size(...)
                     blocking=None, int num_threads=1):
    """y = relu?(conv2d(x, weight) + bias) for 3x3 filters and stride 1.

    Parameters
    ----------
    padding : (int, int)
    blocking : (int, int, int, bool), optional
        Tiles of a batch, blocks of K whose products are held at a time, blocks of C per visit of the products,
        and whether each thread has batches of its own; `pcldnn.blocking.winograd_forward` solves for all four.
    """
    checks.winograd_forward(dims(x), dims(u), None if bias is None else dims(bias), dims(y), padding, num_threads)
    checks.width("x", x.shape[4], b)
    winograd_run(x, u, bias, y, padding, relu, scratch, blocking, num_threads)


def winograd_input_grad(const float[:, :, :, :, ::1] dy,     # IN   (N, KB, P, Q, b)
                        const float[:, :, :, ::1] u,         # IN   (64, CB, KB * b, b), transposed and flipped
                        float[:, :, :, :, ::1] dx,           # OUT  (N, CB, H, W, b)
                        tuple padding,
                        float[::1] scratch=None,             # TMP  winograd_scratch_size(...)
                        blocking=None, int num_threads=1):
    """dx: gradient of winograd_forward with respect to x: the convolution of dy with padding 2 - padding."""
    checks.winograd_input_grad(dims(dy), dims(u), dims(dx), padding, num_threads)
    checks.width("dy", dy.shape[4], b)
    winograd_run(dy, u, None, dx, (2 - padding[0], 2 - padding[1]), False, scratch, blocking, num_threads)


def winograd_weight_grad(const float[:, :, :, :, ::1] x,     # IN   (N, CB, H, W, b)
                         const float[:, :, :, :, ::1] dy,    # IN   (N, KB, P, Q, b)
                         float[:, :, :, :, :, ::1] dweight,  # OUT  (KB, CB, 3, 3, b, b)
                         tuple padding,
                         float[::1] scratch=None,            # TMP  64 * KB * CB * b * b + winograd_scratch_size(...)
                         blocking=None, int num_threads=1):
    """dweight: gradient with respect to the filters, summed over the images (zeros when N = 0).

    Only the first entry of `blocking`, the tiles of a batch, is looked at: it sets the order of the sums.
    """
    cdef Winograd g
    cdef Py_ssize_t size
    checks.winograd_weight_grad(dims(x), dims(dy), dims(dweight), padding, num_threads)
    checks.width("x", x.shape[4], b)
    size = dweight.shape[0] * dweight.shape[1] * b * b
    if size == 0:
        return
    if x.shape[0] == 0:
        memset(&dweight[0, 0, 0, 0, 0, 0], 0, 9 * size * sizeof(float))
        return
    winograd_arrays(&g, dims(x), dims(dy), padding, blocking)
    g.x, g.y, g.dw = &x[0, 0, 0, 0, 0], <float*>&dy[0, 0, 0, 0, 0], &dweight[0, 0, 0, 0, 0, 0]
    scratch = scratch_of(scratch, POINTS * size + winograd_scratch_size(g.in_blocks, g.out_blocks, g.tiles, 1))
    g.du = &scratch[0]
    layout_batch(&g, g.out_blocks, g.du + POINTS * size)
    with nogil:
        weight_grad_pass_winograd(&g, num_threads)
