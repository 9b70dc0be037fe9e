# Winograd convolution, 3x3 and 5x5 filters with stride 1: the transforms, of vectors, tiles and filters.
#
# a. A tile of 6x6 outputs is evaluated at 8x8 points: y = A' [(G w G') . (B' x B)] A with 64 products in the place of
#    324 (Lavin & Gray 2016). The points are 0, +-P, +-Q, +-R and infinity, P = 9/16, Q = 1, R = 13/8: their powers are
#    exact in float32, and the largest error is that of 4x4 outputs with the usual points 0, +-1, +-2 (found by trying
#    some, scripts/numerics_report.py; Barabasz et al. 2020 and Alam et al. 2022 choose points for the same reason).
# b. What remains of a size that 6 does not divide is computed by a tile of 2 (4 points: 0, +-Q, infinity), of 4 (6
#    points: 0, +-P, +-R, infinity) or, for 5, of 6. The transforms are separable, so a tile may have unlike sizes.
#    Each point has the scaling of the full tile: all tiles share the same transformed filters, and 14x14 outputs take
#    20x20 products.
# c. 5x5 filters have the same points and the same tiles of inputs, whose transform does not see the filter: a tile
#    gives two outputs fewer in each dimension, 4x4 for 64 products in the place of 400, or 2 for 6 points. `size` is
#    that of the tile for 3x3 filters, its inputs less 2; `taps` is 3 or 5, and outputs are size + 3 - taps.
# d. A tile asks for what the next one reads, and for the points that it writes. With 64 places at once, no prefetcher
#    of the hardware follows the rows of the image, and a store waits for its line: that was 2 to 25 % of a pass. The
#    requests are spread over the arithmetic, for there are few buffers for lines on their way.

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

cdef enum:
    POINTS = 64
    ROW = 8 * b              # floats between the rows of a tile
    LINE_ROOM = 16           # floats of a cache line
    STREAM = 8388608         # transformed filters of so many elements are written past the caches: they do not fit


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


cdef inline void gradient_points(int size, int taps, const float* y, Py_ssize_t in_step, float* out,
                                 Py_ssize_t step) noexcept nogil:
    """A y: the output gradients at the points."""
    cdef vec y0 = load(y), y1 = load(y + in_step), y2, y3, y4, y5
    store(out, y0)
    if taps == 5 and size == 6:
        y2, y3 = load(y + 2 * in_step), load(y + 3 * in_step)
        store_pair(y0 + P2 * y2, P1 * y1 + (P1 * P2) * y3, out + step, step)
        store_pair(y0 + y2, y1 + y3, out + 3 * step, step)
        store_pair(y0 + R2 * y2, R1 * y1 + (R1 * R2) * y3, out + 5 * step, step)
        store(out + 7 * step, y3)
    elif taps == 5:
        store_pair(y0, P1 * y1, out + step, step)
        store_pair(y0, R1 * y1, out + 5 * step, step)
        store(out + 7 * step, y1)
    elif size == 6:
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


cdef inline void filter_points(int taps, const float* w, Py_ssize_t in_step, float* out,
                               Py_ssize_t step) noexcept nogil:
    """G w: the taps at the points."""
    cdef vec w0 = load(w), w1 = load(w + in_step), w2 = load(w + 2 * in_step), w3, w4
    store(out, S0 * w0)
    if taps == 5:
        w3, w4 = load(w + 3 * in_step), load(w + 4 * in_step)
        store_pair(SP * w0 + (SP * P2) * w2 + (SP * P2 * P2) * w4, (SP * P1) * w1 + (SP * P1 * P2) * w3,
                   out + step, step)
        store_pair(SQ * w0 + SQ * w2 + SQ * w4, SQ * w1 + SQ * w3, out + 3 * step, step)
        store_pair(SR * w0 + (SR * R2) * w2 + (SR * R2 * R2) * w4, (SR * R1) * w1 + (SR * R1 * R2) * w3,
                   out + 5 * step, step)
        store(out + 7 * step, w4)
        return
    store_pair(SP * w0 + (SP * P2) * w2, (SP * P1) * w1, out + step, step)
    store_pair(SQ * w0 + SQ * w2, SQ * w1, out + 3 * step, step)
    store_pair(SR * w0 + (SR * R2) * w2, (SR * R1) * w1, out + 5 * step, step)
    store(out + 7 * step, w2)


cdef inline void output_values(int size, int taps, const float* m, Py_ssize_t in_step, float* out,
                               Py_ssize_t step) noexcept nogil:
    """A' m: the outputs."""
    cdef vec s, d, s2, d2, s3, d3
    if size == 6:
        s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
        s2, d2 = load(m + 3 * in_step) + load(m + 4 * in_step), load(m + 3 * in_step) - load(m + 4 * in_step)
        s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
        store(out, load(m) + s + s2 + s3)
        store(out + step, P1 * d + d2 + R1 * d3)
        store(out + 2 * step, P2 * s + s2 + R2 * s3)
        if taps == 5:
            store(out + 3 * step, (P1 * P2) * d + d2 + (R1 * R2) * d3 + load(m + 7 * in_step))
            return
        store(out + 3 * step, (P1 * P2) * d + d2 + (R1 * R2) * d3)
        store(out + 4 * step, (P2 * P2) * s + s2 + (R2 * R2) * s3)
        store(out + 5 * step, (P1 * P2 * P2) * d + d2 + (R1 * R2 * R2) * d3 + load(m + 7 * in_step))
    elif size == 4:
        s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
        s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
        store(out, load(m) + s + s3)
        if taps == 5:
            store(out + step, P1 * d + R1 * d3 + load(m + 7 * in_step))
            return
        store(out + step, P1 * d + R1 * d3)
        store(out + 2 * step, P2 * s + R2 * s3)
        store(out + 3 * step, (P1 * P2) * d + (R1 * R2) * d3 + load(m + 7 * in_step))
    else:
        store(out, load(m) + load(m + 3 * in_step) + load(m + 4 * in_step))
        store(out + step, load(m + 3 * in_step) - load(m + 4 * in_step) + load(m + 7 * in_step))


cdef inline void filter_values(int taps, const float* m, Py_ssize_t in_step, float* out,
                               Py_ssize_t step) noexcept nogil:
    """G' m: the taps."""
    cdef vec s, d, s2, d2, s3, d3
    s, d = load(m + in_step) + load(m + 2 * in_step), load(m + in_step) - load(m + 2 * in_step)
    s2, d2 = load(m + 3 * in_step) + load(m + 4 * in_step), load(m + 3 * in_step) - load(m + 4 * in_step)
    s3, d3 = load(m + 5 * in_step) + load(m + 6 * in_step), load(m + 5 * in_step) - load(m + 6 * in_step)
    store(out, S0 * load(m) + SP * s + SQ * s2 + SR * s3)
    store(out + step, (SP * P1) * d + SQ * d2 + (SR * R1) * d3)
    if taps == 3:
        store(out + 2 * step, (SP * P2) * s + SQ * s2 + (SR * R2) * s3 + load(m + 7 * in_step))
        return
    store(out + 2 * step, (SP * P2) * s + SQ * s2 + (SR * R2) * s3)
    store(out + 3 * step, (SP * P1 * P2) * d + SQ * d2 + (SR * R1 * R2) * d3)
    store(out + 4 * step, (SP * P2 * P2) * s + SQ * s2 + (SR * R2 * R2) * s3 + load(m + 7 * in_step))


# --- one tile, b channels -------------------------------------------------------------------------------------------


cdef inline float* at_line(float* space) noexcept nogil:
    """The first cache line in `space`, which is LINE_ROOM larger than what it holds: no vector lies in two lines."""
    return <float*>(<size_t>(space + LINE_ROOM - 1) & ~<size_t>63)


cdef void frame(const float* d, Py_ssize_t H, Py_ssize_t W, Py_ssize_t row, Py_ssize_t col, int rows, int cols,
                float* framed) noexcept nogil:
    """The rows x cols vectors from d, which is at (row, col), on, ROW apart; those outside of the image are zero."""
    cdef int i, j, left = <int>max(-col, 0), right = <int>min(cols, W - col), end
    for i in range(rows):
        end = right if 0 <= row + i and row + i < H else left
        for j in range(left):
            store(framed + i * ROW + j * b, zero())
        for j in range(left, end):
            store(framed + i * ROW + j * b, load(d + (i * W + j) * b))
        for j in range(end, cols):
            store(framed + i * ROW + j * b, zero())


cdef inline void ask_for_row(const float* d) noexcept nogil:
    """Six vectors of a row."""
    cdef int i
    for i in range(0, 6 * b, 16):
        prefetch(d + i)


cdef inline void ask_for_points(const float* v, Py_ssize_t v_point) noexcept nogil:
    """8 points: what will be read, or overwritten. (Prefetches that claim a line for writing are slower.)"""
    cdef int j
    for j in range(8):
        prefetch(v + j * v_point)


cdef void input_tile(int mr, int mc, const float* d, Py_ssize_t H, Py_ssize_t W, Py_ssize_t row, Py_ssize_t col,
                     const float* next, float* v, Py_ssize_t v_point, Py_ssize_t v_tile) noexcept nogil:
    """v = B' d B of the (mr + 2) x (mc + 2) inputs from d, at (row, col), on; those outside of the image are zero."""
    cdef float space[16 * ROW + LINE_ROOM]
    cdef float* t = at_line(space)
    cdef float* framed = t + 8 * ROW
    cdef Py_ssize_t in_row = W * b
    cdef int i, j
    if row < 0 or col < 0 or row + mr + 2 > H or col + mc + 2 > W:
        frame(d, H, W, row, col, mr + 2, mc + 2, framed)
        d = framed
        in_row = ROW
    for j in range(mc + 2):                    # also a row of the next tile, whose first columns this one reads
        ask_for_row(next + (j * W + 2) * b)
        input_points(mr, d + j * b, in_row, t + j * b, ROW)
    for i in range(8):
        if has_point(mr, i):
            ask_for_points(v + 8 * i * v_point + v_tile, v_point)
            input_points(mc, t + i * ROW, b, v + 8 * i * v_point, v_point)


cdef void output_tile(int mr, int mc, int taps, const float* m, Py_ssize_t m_point, Py_ssize_t m_tile, vec bias,
                      bint relu, bint past, float* y, Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row,
                      Py_ssize_t col) noexcept nogil:
    """relu?(A' m A + bias) to the outputs of a tile from (row, col) on, as far as they exist."""
    cdef float space[6 * ROW + LINE_ROOM]
    cdef float* t = at_line(space)
    cdef float values[6 * b]
    cdef vec value
    cdef int i, j, rows = <int>min(mr + 3 - taps, P - row), cols = <int>min(mc + 3 - taps, Q - col)
    y += (row * Q + col) * b
    for j in range(8):
        if has_point(mc, j):
            ask_for_points(m + j * m_point + m_tile, 8 * m_point)
            output_values(mr, taps, m + j * m_point, 8 * m_point, t + j * b, ROW)
    for i in range(rows):
        output_values(mc, taps, t + i * ROW, b, values, b)
        for j in range(cols):
            value = load(values + j * b) + bias
            put(y + (i * Q + j) * b, vrelu(value) if relu else value, past)


cdef void gradient_tile(int mr, int mc, int taps, const float* dy, Py_ssize_t P, Py_ssize_t Q, Py_ssize_t row,
                        Py_ssize_t col, const float* next, float* d, Py_ssize_t d_point,
                        Py_ssize_t d_tile) noexcept nogil:
    """d = A dy A' of the output gradients of a tile from dy, at (row, col), on."""
    cdef float space[14 * ROW + LINE_ROOM]
    cdef float* t = at_line(space)
    cdef float* framed = t + 8 * ROW
    cdef Py_ssize_t in_row = Q * b
    cdef int i, j, rows = mr + 3 - taps, cols = mc + 3 - taps
    if row + rows > P or col + cols > Q:
        frame(dy, P, Q, row, col, rows, cols, framed)
        dy = framed
        in_row = ROW
    for j in range(cols):                      # also a row of the next tile
        ask_for_row(next + j * Q * b)
        gradient_points(mr, taps, dy + j * b, in_row, t + j * b, ROW)
    for i in range(8):
        if has_point(mr, i):
            ask_for_points(d + 8 * i * d_point + d_tile, d_point)
            gradient_points(mc, taps, t + i * ROW, b, d + 8 * i * d_point, d_point)


# --- all filters -----------------------------------------------------------------------------------------------------


cdef void transform_filter(int taps, const float* w, float* u, Py_ssize_t u_point, bint input_grad,
                           bint stream) noexcept nogil:
    """U of one block of filters (taps, taps, b, b); with `input_grad` flipped, channels transposed."""
    cdef float buffer[POINTS * b * b]
    cdef float t[40 * b]
    cdef float square[b * b]
    cdef const float* f
    cdef Py_ssize_t tap = -b * b if input_grad else b * b
    cdef int lane, point, i, j
    for lane in range(b):
        f = w + lane * b + ((taps * taps - 1) * b * b if input_grad else 0)
        for j in range(taps):
            filter_points(taps, f + j * tap, taps * tap, t + j * b, taps * b)
        for i in range(8):
            filter_points(taps, t + taps * i * b, b, buffer + (8 * i * b + lane) * b, b * b)
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


cdef void transform_filters(int taps, const float* w, float* u, Py_ssize_t KB, Py_ssize_t CB, Py_ssize_t k,
                            bint input_grad, bint stream) noexcept nogil:
    """U of the filters of one block of output channels."""
    cdef Py_ssize_t c, block
    for c in range(CB):
        block = c * KB + k if input_grad else k * CB + c
        transform_filter(taps, w + (k * CB + c) * taps * taps * b * b, u + block * b * b, KB * CB * b * b, input_grad,
                         stream)
    if stream:
        store_fence()


def winograd_transform_filter(const float[:, :, :, :, :, ::1] weight,     # IN   (KB, CB, r, r, b, b), r = 3 or 5
                              float[:, :, :, ::1] u,                      # OUT  (64, KB, CB * b, b)
                              bint input_grad=False, int num_threads=1):
    """u = G w G' at the 64 points, for `winograd_forward`.

    With `input_grad` the filters are transposed and flipped, for `winograd_input_grad`: u is (64, CB, KB * b, b).
    """
    cdef Py_ssize_t KB = weight.shape[0], CB = weight.shape[1], job, size = KB * CB * b * b
    cdef int taps = <int>weight.shape[2]
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
        transform_filters(taps, w, out, KB, CB, job, input_grad, stream)
