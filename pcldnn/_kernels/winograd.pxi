# Winograd convolution, 3x3 filters with stride 1: forward, input gradient, weight gradient.
#
# a. A tile of 4x4 outputs is evaluated at 6x6 points: y = A' [(G w G') . (B' x B)] A with 36 products in the place of
#    144 (Lavin & Gray 2016). The points are 0, +-P, +-Q and infinity with P = 11/16, Q = 11/8: powers are exact in
#    float32, and the largest error is about a fifth of that of the usual +-1, +-2, near the optimum P = 1/Q = 1/sqrt 2
#    (scripts/numerics_report.py; Barabasz et al. 2020 and Alam et al. 2022 choose points for the same reason).
# b. What remains of a size that 4 does not divide is 1 or 2: a tile of 2 (4 points), or 3: a tile of 4. The transforms
#    are separable, so tiles are 4x4, 4x2, 2x4 or 2x2. The points of 2 are 0, +-P, infinity, with the scaling of 4:
#    all tiles share the same transformed filters, and 14x14 outputs take 22x22 products.
# c. Arrays in the transformed domain are (point, tile, channel): point (i, j) is number 6 i + j. Rows of channels are
#    the vectors of the transforms, the reduction of forward and input gradient, and both operands of the weight
#    gradient. Tiles are ordered 4x2, 4x4, 2x4, 2x2, so that every point has its tiles in one range.
# d. A batch is some tiles of all images, as many of each shape in every batch. Per batch: transform the inputs, multiply
#    point by point with the register tile of tile.pxi (pixels are tiles), transform the outputs. `tiles` and `k_blocks`
#    bound the memory of a batch. Each sum has one order, which depends on shapes and blocking only.
# e. Either all threads share a batch, or each has its own (`private`): then V and M may stay in its L2.
# f. Weight gradient: (B' x B)' (A dy A') summed over the tiles of all batches in the transformed domain, then G' . G.

cdef extern from *:
    """
    #define WG_P 0.6875f
    #define WG_Q 1.375f
    #define WG_P2 (WG_P * WG_P)
    #define WG_Q2 (WG_Q * WG_Q)
    #define WG_P3 (WG_P2 * WG_P)
    #define WG_Q3 (WG_Q2 * WG_Q)
    #define WG_SUM (WG_P2 + WG_Q2)
    #define WG_PRODUCT (WG_P2 * WG_Q2)
    #define WG_DIFFERENCE (WG_P2 - WG_Q2)
    #define WG_S0 (1 / WG_PRODUCT)
    #define WG_SP (1 / (2 * WG_P2 * WG_DIFFERENCE))
    #define WG_SQ (-1 / (2 * WG_Q2 * WG_DIFFERENCE))
    #define WG_LINE (PCL_WIDTH < 16 ? 16 / PCL_WIDTH : 1)
    """
    const float P1 "WG_P"
    const float Q1 "WG_Q"
    const float P2 "WG_P2"
    const float Q2 "WG_Q2"
    const float P3 "WG_P3"
    const float Q3 "WG_Q3"
    const float SUM "WG_SUM"                  # P^2 + Q^2
    const float PRODUCT "WG_PRODUCT"          # P^2 Q^2
    const float DIFFERENCE "WG_DIFFERENCE"    # P^2 - Q^2
    const float S0 "WG_S0"                    # scale of a filter at point 0, at +-P, at +-Q: all of 1/N in the filter
    const float SP "WG_SP"
    const float SQ "WG_SQ"
    const int LINE "WG_LINE"                  # channel blocks of a cache line


cdef struct Winograd:
    const float* x                            # input of forward and weight gradient; dy in the input gradient
    const float* u
    const float* bias
    float* y                                  # output of forward and input gradient; dy in the weight gradient
    float* v                                  # transformed input (36, tiles, v_tile)
    float* m                                  # products (36, tiles, m_tile); transformed dy in the weight gradient
    float* du                                 # sum of products of the weight gradient
    float* dw
    Py_ssize_t images, in_blocks, out_blocks, H, W, P, Q, pad_h, pad_w
    Py_ssize_t rows4, rows2, cols4, cols2     # tiles of an image, by size
    Py_ssize_t v_tile, v_point, m_tile, m_point
    Py_ssize_t tiles, k_blocks, c_blocks      # of a batch; of a group of output channels; of a visit of the products
    Py_ssize_t batches
    bint relu


cdef struct Batch:
    Py_ssize_t first[4]                       # number among its kind of the first tile 4x2, 4x4, 2x4, 2x2
    Py_ssize_t start[5]                       # its position in the batch


# --- one dimension: each function writes its results `step` apart ---------------------------------------------------


cdef inline bint has_point(int size, int point) noexcept nogil:
    """Whether tiles of this size use the point: 0, P, -P, Q, -Q, infinity."""
    return size == 4 or point < 3 or point == 5


cdef inline void input_points(int size, vec d0, vec d1, vec d2, vec d3, vec d4, vec d5, float* out,
                              Py_ssize_t step) noexcept nogil:
    """B' d: size + 2 inputs at the points."""
    cdef vec even, odd
    if size == 4:
        store(out, PRODUCT * d0 - SUM * d2 + d4)
        even = d4 - Q2 * d2
        odd = P1 * d3 - (P1 * Q2) * d1
        store(out + step, even + odd)
        store(out + 2 * step, even - odd)
        even = d4 - P2 * d2
        odd = Q1 * d3 - (Q1 * P2) * d1
        store(out + 3 * step, even + odd)
        store(out + 4 * step, even - odd)
        store(out + 5 * step, PRODUCT * d1 - SUM * d3 + d5)
    else:
        store(out, PRODUCT * d0 - Q2 * d2)
        even = DIFFERENCE * d2
        odd = (DIFFERENCE * P1) * d1
        store(out + step, even + odd)
        store(out + 2 * step, even - odd)
        store(out + 5 * step, d3 - P2 * d1)


cdef inline void gradient_points(int size, vec y0, vec y1, vec y2, vec y3, float* out, Py_ssize_t step) noexcept nogil:
    """A y: `size` output gradients at the points."""
    cdef vec even, odd
    store(out, y0)
    if size == 4:
        even = y0 + P2 * y2
        odd = P1 * y1 + P3 * y3
        store(out + step, even + odd)
        store(out + 2 * step, even - odd)
        even = y0 + Q2 * y2
        odd = Q1 * y1 + Q3 * y3
        store(out + 3 * step, even + odd)
        store(out + 4 * step, even - odd)
        store(out + 5 * step, y3)
    else:
        odd = P1 * y1
        store(out + step, y0 + odd)
        store(out + 2 * step, y0 - odd)
        store(out + 5 * step, y1)


cdef inline void filter_points(vec w0, vec w1, vec w2, float* out, Py_ssize_t step) noexcept nogil:
    """G w: the 3 taps at the points."""
    cdef vec even, odd
    store(out, S0 * w0)
    even = SP * w0 + (SP * P2) * w2
    odd = (SP * P1) * w1
    store(out + step, even + odd)
    store(out + 2 * step, even - odd)
    even = SQ * w0 + (SQ * Q2) * w2
    odd = (SQ * Q1) * w1
    store(out + 3 * step, even + odd)
    store(out + 4 * step, even - odd)
    store(out + 5 * step, w2)


cdef inline void output_values(int size, const float* m, Py_ssize_t step, vec* out) noexcept nogil:
    """A' m: the `size` outputs, from values `step` apart."""
    cdef vec s, d, s2, d2
    s = load(m + step) + load(m + 2 * step)
    d = load(m + step) - load(m + 2 * step)
    if size == 4:
        s2 = load(m + 3 * step) + load(m + 4 * step)
        d2 = load(m + 3 * step) - load(m + 4 * step)
        out[0] = load(m) + s + s2
        out[1] = P1 * d + Q1 * d2
        out[2] = P2 * s + Q2 * s2
        out[3] = P3 * d + Q3 * d2 + load(m + 5 * step)
    else:
        out[0] = load(m) + s
        out[1] = P1 * d + load(m + 5 * step)


cdef inline void filter_values(const float* m, Py_ssize_t step, vec* out) noexcept nogil:
    """G' m: the 3 taps, from values `step` apart."""
    cdef vec s, d, s2, d2
    s = load(m + step) + load(m + 2 * step)
    d = load(m + step) - load(m + 2 * step)
    s2 = load(m + 3 * step) + load(m + 4 * step)
    d2 = load(m + 3 * step) - load(m + 4 * step)
    out[0] = S0 * load(m) + SP * s + SQ * s2
    out[1] = (SP * P1) * d + (SQ * Q1) * d2
    out[2] = (SP * P2) * s + (SQ * Q2) * s2 + load(m + 5 * step)


# --- one tile, b channels -------------------------------------------------------------------------------------------


cdef inline void input_tile(int mr, int mc, const float* x, Py_ssize_t H, Py_ssize_t W, Py_ssize_t row, Py_ssize_t col,
                            float* v, Py_ssize_t v_point) noexcept nogil:
    """v = B' x B of the (mr + 2) x (mc + 2) inputs from (row, col) on; those outside of the image are zero."""
    cdef float zeros[6 * b]
    cdef float t[36 * b]
    cdef const float* rows[6]
    cdef int i, j
    for i in range(6):
        store(zeros + i * b, zero())
    for i in range(mr + 2):
        rows[i] = x + ((row + i) * W + col) * b if 0 <= row + i and row + i < H else zeros
    for j in range(mc + 2):
        if 0 <= col + j and col + j < W:
            if mr == 4:
                input_points(4, load(rows[0] + j * b), load(rows[1] + j * b), load(rows[2] + j * b),
                             load(rows[3] + j * b), load(rows[4] + j * b), load(rows[5] + j * b), t + j * b, 6 * b)
            else:
                input_points(2, load(rows[0] + j * b), load(rows[1] + j * b), load(rows[2] + j * b),
                             load(rows[3] + j * b), zero(), zero(), t + j * b, 6 * b)
        else:
            for i in range(6):
                store(t + (i * 6 + j) * b, zero())
    for i in range(6):
        if has_point(mr, i):
            if mc == 4:
                input_points(4, load(t + 6 * i * b), load(t + (6 * i + 1) * b), load(t + (6 * i + 2) * b),
                             load(t + (6 * i + 3) * b), load(t + (6 * i + 4) * b), load(t + (6 * i + 5) * b),
                             v + 6 * i * v_point, v_point)
            else:
                input_points(2, load(t + 6 * i * b), load(t + (6 * i + 1) * b), load(t + (6 * i + 2) * b),
                             load(t + (6 * i + 3) * b), zero(), zero(), v + 6 * i * v_point, v_point)


cdef inline void output_tile(int mr, int mc, const float* m, Py_ssize_t m_point, vec bias, bint relu, float* y,
                             Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row, Py_ssize_t col) noexcept nogil:
    """relu?(A' m A + bias) to the mr x mc outputs from (row, col) on, as far as they exist."""
    cdef float t[24 * b]
    cdef vec out[4]
    cdef int i, j
    for j in range(6):
        if has_point(mc, j):
            output_values(mr, m + j * m_point, 6 * m_point, out)
            for i in range(mr):
                store(t + (i * 6 + j) * b, out[i])
    for i in range(mr):
        if row + i < P:
            output_values(mc, t + 6 * i * b, b, out)
            for j in range(mc):
                if col + j < Q:
                    out[j] = out[j] + bias
                    store(y + ((row + i) * Q + col + j) * b, vrelu(out[j]) if relu else out[j])


cdef inline void gradient_tile(int mr, int mc, const float* dy, Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row,
                               Py_ssize_t col, float* d, Py_ssize_t d_point) noexcept nogil:
    """d = A dy A' of the mr x mc output gradients from (row, col) on."""
    cdef float zeros[4 * b]
    cdef float t[24 * b]
    cdef const float* rows[4]
    cdef int i, j
    for i in range(4):
        store(zeros + i * b, zero())
        rows[i] = dy + ((row + i) * Q + col) * b if i < mr and row + i < P else zeros
    for j in range(mc):
        if col + j < Q:
            gradient_points(mr, load(rows[0] + j * b), load(rows[1] + j * b), load(rows[2] + j * b),
                            load(rows[3] + j * b), t + j * b, 4 * b)
        else:
            for i in range(6):
                store(t + (i * 4 + j) * b, zero())
    for i in range(6):
        if has_point(mr, i):
            if mc == 4:
                gradient_points(4, load(t + 4 * i * b), load(t + (4 * i + 1) * b), load(t + (4 * i + 2) * b),
                                load(t + (4 * i + 3) * b), d + 6 * i * d_point, d_point)
            else:
                gradient_points(2, load(t + 4 * i * b), load(t + (4 * i + 1) * b), zero(), zero(),
                                d + 6 * i * d_point, d_point)


# --- batches of tiles -----------------------------------------------------------------------------------------------


cdef void split(Py_ssize_t size, Py_ssize_t* fours, Py_ssize_t* twos) noexcept nogil:
    """Cut `size` outputs: decision b."""
    fours[0] = (size + 1) // 4
    twos[0] = 1 if size > 4 * fours[0] else 0


cdef void start_batch(Winograd* g, Py_ssize_t i, Batch* batch) noexcept nogil:
    """Which tiles belong to batch i."""
    cdef Py_ssize_t counts[4]
    cdef int kind
    counts[0] = g.images * g.rows4 * g.cols2
    counts[1] = g.images * g.rows4 * g.cols4
    counts[2] = g.images * g.rows2 * g.cols4
    counts[3] = g.images * g.rows2 * g.cols2
    batch.start[0] = 0
    for kind in range(4):
        batch.first[kind] = counts[kind] * i // g.batches
        batch.start[kind + 1] = batch.start[kind] + counts[kind] * (i + 1) // g.batches - batch.first[kind]


cdef void point_range(Batch* batch, int point, Py_ssize_t* lo, Py_ssize_t* hi) noexcept nogil:
    """Positions of the tiles that use a point."""
    cdef bint row_of_four = not has_point(2, point // 6), col_of_four = not has_point(2, point % 6)
    lo[0] = batch.start[1 if col_of_four else 0]
    hi[0] = batch.start[2 if row_of_four else 3 if col_of_four else 4]


cdef void locate(Winograd* g, Batch* batch, int kind, Py_ssize_t position, Py_ssize_t* image, Py_ssize_t* row,
                 Py_ssize_t* col) noexcept nogil:
    """Image and first output of a tile."""
    cdef Py_ssize_t number = batch.first[kind] + position - batch.start[kind]
    cdef Py_ssize_t rows = g.rows4 if kind < 2 else g.rows2
    cdef Py_ssize_t cols = g.cols4 if kind == 1 or kind == 2 else g.cols2
    image[0] = number // (rows * cols)
    row[0] = 4 * (number // cols % rows) + (0 if kind < 2 else 4 * g.rows4)
    col[0] = 4 * (number % cols) + (0 if kind == 1 or kind == 2 else 4 * g.cols4)


cdef inline int kind_of(Batch* batch, Py_ssize_t position) noexcept nogil:
    return (position >= batch.start[1]) + (position >= batch.start[2]) + (position >= batch.start[3])


cdef void transform_inputs(Winograd* g, Batch* batch, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t t0,
                           Py_ssize_t t1) noexcept nogil:
    """V of channel blocks c0..c1 at positions t0..t1."""
    cdef Py_ssize_t t, c, n, row, col, plane = g.H * g.W * b
    cdef const float* x
    cdef float* v
    cdef int kind
    for t in range(t0, t1):
        kind = kind_of(batch, t)
        locate(g, batch, kind, t, &n, &row, &col)
        row -= g.pad_h
        col -= g.pad_w
        for c in range(c0, c1):
            x = g.x + (n * g.in_blocks + c) * plane
            v = g.v + t * g.v_tile + c * b
            if kind == 1:
                input_tile(4, 4, x, g.H, g.W, row, col, v, g.v_point)
            elif kind == 0:
                input_tile(4, 2, x, g.H, g.W, row, col, v, g.v_point)
            elif kind == 2:
                input_tile(2, 4, x, g.H, g.W, row, col, v, g.v_point)
            else:
                input_tile(2, 2, x, g.H, g.W, row, col, v, g.v_point)


cdef void transform_gradients(Winograd* g, Batch* batch, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                              Py_ssize_t t1) noexcept nogil:
    """Transformed dy of channel blocks k0..k1 at positions t0..t1."""
    cdef Py_ssize_t t, k, n, row, col, plane = g.P * g.Q * b
    cdef const float* dy
    cdef float* d
    cdef int kind
    for t in range(t0, t1):
        kind = kind_of(batch, t)
        locate(g, batch, kind, t, &n, &row, &col)
        for k in range(k0, k1):
            dy = g.y + (n * g.out_blocks + k) * plane
            d = g.m + t * g.m_tile + k * b
            if kind == 1:
                gradient_tile(4, 4, dy, g.P, g.Q, row, col, d, g.m_point)
            elif kind == 0:
                gradient_tile(4, 2, dy, g.P, g.Q, row, col, d, g.m_point)
            elif kind == 2:
                gradient_tile(2, 4, dy, g.P, g.Q, row, col, d, g.m_point)
            else:
                gradient_tile(2, 2, dy, g.P, g.Q, row, col, d, g.m_point)


cdef void transform_outputs(Winograd* g, Batch* batch, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                            Py_ssize_t t1) noexcept nogil:
    """y of channel blocks k0..k1, which lie from block `group` on in M, at positions t0..t1."""
    cdef Py_ssize_t t, k, n, row, col, plane = g.P * g.Q * b
    cdef const float* m
    cdef float* y
    cdef vec bias
    cdef int kind
    for t in range(t0, t1):
        kind = kind_of(batch, t)
        locate(g, batch, kind, t, &n, &row, &col)
        for k in range(k0, k1):
            bias = zero() if g.bias == NULL else load(g.bias + k * b)
            m = g.m + t * g.m_tile + (k - group) * b
            y = g.y + (n * g.out_blocks + k) * plane
            if kind == 1:
                output_tile(4, 4, m, g.m_point, bias, g.relu, y, g.P, g.Q, row, col)
            elif kind == 0:
                output_tile(4, 2, m, g.m_point, bias, g.relu, y, g.P, g.Q, row, col)
            elif kind == 2:
                output_tile(2, 4, m, g.m_point, bias, g.relu, y, g.P, g.Q, row, col)
            else:
                output_tile(2, 2, m, g.m_point, bias, g.relu, y, g.P, g.Q, row, col)


# --- products -------------------------------------------------------------------------------------------------------


cdef inline void product_tiles(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t group, Py_ssize_t k,
                               Py_ssize_t lo, Py_ssize_t hi, bint two) noexcept nogil:
    """M of a point, channel blocks k (and k + 1), tiles lo..hi: (+)= V times U over input channel blocks c0..c1."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over
    cdef Py_ssize_t channels = g.in_blocks * b, t
    cdef int i, width, parts = tiles_of(hi - lo)
    cdef const float* u = g.u + ((point * g.out_blocks + k) * channels + c0 * b) * b
    cdef const float* v = g.v + point * g.v_point + c0 * b
    cdef float* m = g.m + point * g.m_point + (k - group) * b
    over.n0, over.x0, over.w0 = (c1 - c0) * b, 1, b
    over.n1, over.x1, over.w1 = 1, 0, 0
    over.n2, over.x2, over.w2 = 1, 0, 0
    over.ahead = 0
    for i in range(parts):
        t = lo + tile_start(hi - lo, parts, i)
        width = <int>(lo + tile_start(hi - lo, parts, i + 1) - t)
        if c0 == 0:
            tile_fill(a0, a1, NULL, two)
        else:
            tile_load(a0, a1, width, m + t * g.m_tile, g.m_tile, b, two)
        run(0, width, a0, a1, v + t * g.v_tile, g.v_tile, u, channels * b, &over, two)
        tile_store(a0, a1, width, m + t * g.m_tile, g.m_tile, b, False, two)


cdef void product_tiles_two(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t group, Py_ssize_t k,
                            Py_ssize_t lo, Py_ssize_t hi) noexcept nogil:
    product_tiles(g, point, c0, c1, group, k, lo, hi, True)


cdef void product_tiles_one(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t group, Py_ssize_t k,
                            Py_ssize_t lo, Py_ssize_t hi) noexcept nogil:
    product_tiles(g, point, c0, c1, group, k, lo, hi, False)


cdef void multiply(Winograd* g, Batch* batch, int point, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1) noexcept nogil:
    """M of a point and channel blocks k0..k1, where `group` is the first block that M holds."""
    cdef Py_ssize_t lo, hi, c0, c1, k
    point_range(batch, point, &lo, &hi)
    c0 = 0
    while c0 < g.in_blocks and lo < hi:
        c1 = min(c0 + g.c_blocks, g.in_blocks)
        k = k0
        while k < k1:
            if k + 1 < k1:
                product_tiles_two(g, point, c0, c1, group, k, lo, hi)
            else:
                product_tiles_one(g, point, c0, c1, group, k, lo, hi)
            k += 2
        c0 = c1


cdef inline void gradient_steps(vec* a0, vec* a1, const float* v, Py_ssize_t v_tile, const float* d,
                                Py_ssize_t d_tile, Py_ssize_t tiles, bint two) noexcept nogil:
    """`accumulate` for TILE input channels, that asks for the next ones: rows far apart are not prefetched by themselves.

    The loop of one turn makes the innermost one unroll early (see simd.h).
    """
    cdef Py_ssize_t i
    cdef int p, once
    cdef float s
    cdef vec w0, w1
    for once in range(1):
        for i in range(tiles):
            prefetch(v + 2 * TILE - 1)
            w0 = load(d)
            if two:
                w1 = load(d + b)
            for p in range(TILE):
                s = v[p]
                a0[p] = a0[p] + w0 * s
                if two:
                    a1[p] = a1[p] + w1 * s
            v += v_tile
            d += d_tile


cdef inline void gradient_products(Winograd* g, int point, Py_ssize_t k, Py_ssize_t lo, Py_ssize_t hi, bint first,
                                   bint two) noexcept nogil:
    """dU of a point, channel blocks k (and k + 1): (+)= V' times transformed dy over tiles lo..hi."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over
    cdef Py_ssize_t channels = g.in_blocks * b, c
    cdef int i, width, parts = tiles_of(channels)
    cdef float* du = g.du + (point * g.out_blocks + k) * channels * b
    cdef const float* v = g.v + point * g.v_point + lo * g.v_tile
    cdef const float* d = g.m + point * g.m_point + lo * g.m_tile + k * b
    over.n0, over.x0, over.w0 = hi - lo, g.v_tile, g.m_tile
    over.n1, over.x1, over.w1 = 1, 0, 0
    over.n2, over.x2, over.w2 = 1, 0, 0
    over.ahead = 0
    for i in range(parts):
        c = tile_start(channels, parts, i)
        width = <int>(tile_start(channels, parts, i + 1) - c)
        if first:
            tile_fill(a0, a1, NULL, two)
        else:
            tile_load(a0, a1, width, du + c * b, b, channels * b, two)
        if width == TILE:
            gradient_steps(a0, a1, v + c, g.v_tile, d, g.m_tile, hi - lo, two)
        else:
            run(0, width, a0, a1, v + c, 1, d, b, &over, two)
        tile_store(a0, a1, width, du + c * b, b, channels * b, False, two)


cdef void gradient_products_two(Winograd* g, int point, Py_ssize_t k, Py_ssize_t lo, Py_ssize_t hi,
                                bint first) noexcept nogil:
    gradient_products(g, point, k, lo, hi, first, True)


cdef void gradient_products_one(Winograd* g, int point, Py_ssize_t k, Py_ssize_t lo, Py_ssize_t hi,
                                bint first) noexcept nogil:
    gradient_products(g, point, k, lo, hi, first, False)


cdef void multiply_gradients(Winograd* g, Batch* batch, bint first, int point, Py_ssize_t k0, Py_ssize_t k1) noexcept nogil:
    """dU of a point and channel blocks k0..k1; `first`: nothing is in it yet."""
    cdef Py_ssize_t lo, hi, t0, t1, k
    point_range(batch, point, &lo, &hi)
    t0 = lo
    while t0 < hi or (first and t0 == lo):
        t1 = min(t0 + STRIP, hi)
        k = k0
        while k < k1:
            if k + 1 < k1:
                gradient_products_two(g, point, k, t0, t1, first and t0 == lo)
            else:
                gradient_products_one(g, point, k, t0, t1, first and t0 == lo)
            k += 2
        t0 += STRIP


cdef enum:
    STRIP = 192              # tiles summed per visit of dU: two lines of each stay in L1
    CHUNK_TILES = 8          # tiles of a job of the transforms


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
    g.m = scratch + 36 * g.v_point


def winograd_scratch_size(Py_ssize_t in_blocks, Py_ssize_t out_blocks, Py_ssize_t tiles, Py_ssize_t batches):
    """Elements of V and M of batches of `tiles` tiles; `out_blocks` as many as M holds; `batches` at the same time."""
    return batches * 36 * (odd_lines(tiles * odd_lines(in_blocks * b)) + odd_lines(tiles * odd_lines(out_blocks * b)))


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
            for point in range(36):
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
    cdef Py_ssize_t pairs = (k1 - k + 1) // 2, parts = min(pairs, (2 * num_threads + 17) // 18), job
    cdef Py_ssize_t chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES, lines = (k1 - k + LINE - 1) // LINE
    for job in prange(36 * parts, num_threads=num_threads, schedule="static", chunksize=1):
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
        size = 36 * (g.v_point + g.m_point)
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
    cdef Py_ssize_t i, job, pairs = (g.out_blocks + 1) // 2, parts = min(pairs, (2 * num_threads + 17) // 18)
    for i in range(g.batches):
        start_batch(g, i, &batch)
        shared_inputs(g, &batch, num_threads)
        shared_gradients(g, &batch, num_threads)
        for job in prange(36 * parts, num_threads=num_threads, schedule="static", chunksize=1):
            multiply_gradients(g, &batch, i == 0, <int>(job // parts), 2 * (pairs * (job % parts) // parts),
                               min(2 * (pairs * (job % parts + 1) // parts), g.out_blocks))
    for job in prange(g.out_blocks * g.in_blocks, num_threads=num_threads, schedule="static"):
        restore_filters(g, job // g.in_blocks, job % g.in_blocks)


cdef void restore_filters(Winograd* g, Py_ssize_t k, Py_ssize_t c) noexcept nogil:
    """dweight of one block: G' dU G."""
    cdef float t[18 * b]
    cdef vec out[3]
    cdef Py_ssize_t du_point = g.out_blocks * g.in_blocks * b * b
    cdef const float* du = g.du + (k * g.in_blocks + c) * b * b
    cdef float* dw = g.dw + (k * g.in_blocks + c) * 9 * b * b
    cdef int lane, i, j
    for lane in range(b):
        for j in range(6):
            filter_values(du + j * du_point + lane * b, 6 * du_point, out)
            for i in range(3):
                store(t + (i * 6 + j) * b, out[i])
        for i in range(3):
            filter_values(t + 6 * i * b, b, out)
            for j in range(3):
                store(dw + ((i * 3 + j) * b + lane) * b, out[j])


cdef void transform_filter(const float* w, float* u, Py_ssize_t u_point, bint flip) noexcept nogil:
    """U of one block of filters (3, 3, b, b); with `flip` both rows and columns in reverse."""
    cdef float t[18 * b]
    cdef int lane, i, j
    cdef const float* f
    cdef Py_ssize_t tap
    tap = -b * b if flip else b * b
    for lane in range(b):
        f = w + lane * b + (8 * b * b if flip else 0)
        for j in range(3):
            filter_points(load(f + j * tap), load(f + (3 + j) * tap), load(f + (6 + j) * tap), t + j * b, 3 * b)
        for i in range(6):
            filter_points(load(t + 3 * i * b), load(t + (3 * i + 1) * b), load(t + (3 * i + 2) * b),
                          u + 6 * i * u_point + lane * b, u_point)


cdef void transform_filter_transposed(const float* w, float* u, Py_ssize_t u_point) noexcept nogil:
    cdef float t[36 * b * b]
    cdef int point
    transform_filter(w, t, b * b, True)
    for point in range(36):
        transpose(t + point * b * b, b, u + point * u_point)


cdef tuple shape_of(array):
    return tuple([array.shape[i] for i in range(array.ndim)])


def winograd_transform_filter(const float[:, :, :, :, :, ::1] weight,     # IN   (KB, CB, 3, 3, b, b)
                              float[:, :, :, ::1] u,                      # OUT  (36, KB, CB * b, b)
                              bint input_grad=False, int num_threads=1):
    """u = G w G' at the 36 points, for `winograd_forward`.

    With `input_grad` the filters are transposed and flipped, for `winograd_input_grad`: u is (36, CB, KB * b, b).
    """
    cdef Py_ssize_t KB = weight.shape[0], CB = weight.shape[1], job, size = KB * CB * b * b
    cdef const float* w
    cdef float* out
    checks.winograd_transform_filter(shape_of(weight), shape_of(u), input_grad, num_threads)
    checks.width("weight", weight.shape[5], b)
    if size == 0:
        return
    w = &weight[0, 0, 0, 0, 0, 0]
    out = &u[0, 0, 0, 0]
    for job in prange(KB * CB, nogil=True, num_threads=num_threads, schedule="static"):
        if input_grad:
            transform_filter_transposed(w + job * 9 * b * b, out + (job % CB * KB + job // CB) * b * b, size)
        else:
            transform_filter(w + job * 9 * b * b, out + job * b * b, size, False)


cdef int winograd_arrays(Winograd* g, tuple x, tuple y, tuple padding, blocking) except -1:
    """Extents of a pass from the shapes of its arrays; its blocking."""
    g.images, g.in_blocks, g.H, g.W, _ = x
    _, g.out_blocks, g.P, g.Q, _ = y
    g.pad_h, g.pad_w = padding
    split(g.P, &g.rows4, &g.rows2)
    split(g.Q, &g.cols4, &g.cols2)
    tiles = g.images * (g.rows4 + g.rows2) * (g.cols4 + g.cols2)
    most, g.k_blocks, g.c_blocks, _ = (tiles, g.out_blocks, g.in_blocks, False) if blocking is None else blocking
    g.batches = max(-(-tiles // max(most, 1)), 1)
    g.tiles = -(-tiles // g.batches) + 3      # each of the four kinds is rounded
    g.k_blocks = min(g.k_blocks, g.out_blocks)
    return 0


cdef float[::1] winograd_scratch(float[::1] scratch, Py_ssize_t wanted):
    if scratch is None:
        return array(shape=(max(wanted, 1),), itemsize=sizeof(float), format="f")
    if scratch.shape[0] < wanted:
        raise ValueError(f"scratch has {scratch.shape[0]} elements, wanted at least {wanted}")
    return scratch


cdef int winograd_run(const float[:, :, :, :, ::1] x, const float[:, :, :, ::1] u, bias, float[:, :, :, :, ::1] y,
                      tuple padding, bint relu, float[::1] scratch, blocking, int num_threads) except -1:
    cdef Winograd g
    cdef const float[::1] bias_view
    cdef bint private = blocking is not None and blocking[3]
    if x.shape[0] == 0 or y.shape[1] == 0 or y.shape[2] == 0 or y.shape[3] == 0:
        return 0
    winograd_arrays(&g, shape_of(x), shape_of(y), padding, blocking)
    g.bias = NULL
    if bias is not None:
        bias_view = bias
        g.bias = &bias_view[0]
    g.x, g.u, g.y = &x[0, 0, 0, 0, 0], &u[0, 0, 0, 0], &y[0, 0, 0, 0, 0]
    g.relu = relu
    scratch = winograd_scratch(scratch, winograd_scratch_size(g.in_blocks, g.k_blocks, g.tiles, num_threads if private else 1))
    with nogil:
        winograd_pass(&g, private, &scratch[0], num_threads)
    return 0


def winograd_forward(const float[:, :, :, :, ::1] x,         # IN   (N, CB, H, W, b)
                     const float[:, :, :, ::1] u,            # IN   (36, KB, CB * b, b), winograd_transform_filter
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
    checks.winograd_forward(shape_of(x), shape_of(u), None if bias is None else shape_of(bias), shape_of(y), padding, num_threads)
    checks.width("x", x.shape[4], b)
    winograd_run(x, u, bias, y, padding, relu, scratch, blocking, num_threads)


def winograd_input_grad(const float[:, :, :, :, ::1] dy,     # IN   (N, KB, P, Q, b)
                        const float[:, :, :, ::1] u,         # IN   (36, CB, KB * b, b), transposed and flipped
                        float[:, :, :, :, ::1] dx,           # OUT  (N, CB, H, W, b)
                        tuple padding,
                        float[::1] scratch=None,             # TMP  winograd_scratch_size(...)
                        blocking=None, int num_threads=1):
    """dx: gradient of winograd_forward with respect to x: the convolution of dy with padding 2 - padding."""
    checks.winograd_input_grad(shape_of(dy), shape_of(u), shape_of(dx), padding, num_threads)
    checks.width("dy", dy.shape[4], b)
    winograd_run(dy, u, None, dx, (2 - padding[0], 2 - padding[1]), False, scratch, blocking, num_threads)


def winograd_weight_grad(const float[:, :, :, :, ::1] x,     # IN   (N, CB, H, W, b)
                         const float[:, :, :, :, ::1] dy,    # IN   (N, KB, P, Q, b)
                         float[:, :, :, :, :, ::1] dweight,  # OUT  (KB, CB, 3, 3, b, b)
                         tuple padding,
                         float[::1] scratch=None,            # TMP  36 * KB * CB * b * b + winograd_scratch_size(...)
                         blocking=None, int num_threads=1):
    """dweight: gradient with respect to the filters, summed over the images (zeros when N = 0).

    Only the first entry of `blocking`, the tiles of a batch, is looked at: it sets the order of the sums.
    """
    cdef Winograd g
    cdef Py_ssize_t size
    checks.winograd_weight_grad(shape_of(x), shape_of(dy), shape_of(dweight), padding, num_threads)
    checks.width("x", x.shape[4], b)
    size = dweight.shape[0] * dweight.shape[1] * b * b
    if size == 0:
        return
    if x.shape[0] == 0:
        memset(&dweight[0, 0, 0, 0, 0, 0], 0, 9 * size * sizeof(float))
        return
    winograd_arrays(&g, shape_of(x), shape_of(dy), padding, blocking)
    g.x, g.y, g.dw = &x[0, 0, 0, 0, 0], <float*>&dy[0, 0, 0, 0, 0], &dweight[0, 0, 0, 0, 0, 0]
    scratch = winograd_scratch(scratch, 36 * size + winograd_scratch_size(g.in_blocks, g.out_blocks, g.tiles, 1))
    g.du = &scratch[0]
    layout_batch(&g, g.out_blocks, g.du + 36 * size)
    with nogil:
        weight_grad_pass_winograd(&g, num_threads)
