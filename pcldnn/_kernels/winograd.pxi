# Winograd convolution, 3x3 and 5x5 filters: forward and input gradient. Transforms: winograd_transforms.pxi.
#
# a. Arrays in the transformed domain are (point, channel block, tile, b): register tiles take neighbouring tiles as
#    pixels. Only V of the weight gradient is (point, tile, channel), for its register tiles take neighbouring channels;
#    the vectors of transformed dy then follow each other in the order of the sum. Point (i, j) is number 8 i + j. Tiles
#    are ordered full x rest, full x full, rest x full, rest x rest (rows x columns): every point has its tiles in one
#    range.
# b. A batch is some tiles of all images, as many of each kind in every batch. Per batch: transform the inputs, multiply
#    point by point with the register tile of tile.pxi (pixels are tiles), transform the outputs. `tiles` and `k_blocks`
#    bound the memory of a batch. Each sum has one order, which depends on shapes and blocking only.
# c. All threads share a batch: filters, the largest array of wide layers, are read once for all of them. They take
#    products as they come, for a batch ends when the last of them does; who computes a product changes no bit.
# d. The sum over input channels is the largest source of error (docs/numerics.md). It is made in blocks: the products
#    of `c_blocks` channel blocks are added up from zero, and then to the sum of those before.

cdef enum:
    CHUNK_TILES = 8          # tiles of a job of the transforms


cdef struct Winograd:
    const float* x                            # input of forward and weight gradient; dy in the input gradient
    const float* u
    const float* bias
    float* y                                  # output of forward and input gradient; dy in the weight gradient
    float* v                                  # transformed input, laid out as decision a says
    float* m                                  # products, likewise; transformed dy in the weight gradient
    float* du                                 # sum of products of the weight gradient
    float* dw
    Py_ssize_t images, in_blocks, out_blocks, H, W, P, Q, pad_h, pad_w
    Py_ssize_t rows, cols                     # full tiles of an image
    int row_rest, col_rest                    # size of the one tile behind them: 0 (there is none), 2 or 4
    int taps                                  # 3 or 5
    Py_ssize_t v_tile, v_block, v_point, m_tile, m_block, m_point      # distances [float]
    Py_ssize_t tiles, k_blocks, c_blocks      # of a batch; of a group of output channels; of a visit of the products
    Py_ssize_t batches
    bint relu, past                           # past: y is written past the caches


cdef struct Batch:
    Py_ssize_t first[4]                       # number among its kind of the first tile of each kind (decision a)
    Py_ssize_t start[5]                       # its position in the batch


# --- batches of tiles -----------------------------------------------------------------------------------------------


cdef void split(Py_ssize_t outputs, int taps, Py_ssize_t* full, int* rest) noexcept nogil:
    """Cut a dimension of `outputs`: decisions b and c of winograd_transforms.pxi."""
    cdef int step = 9 - taps
    full[0] = (outputs + 1) // step
    rest[0] = <int>((outputs - step * full[0] + 1) // 2 * 2 + taps - 3) if outputs > step * full[0] else 0


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
    int mr, mc                                # sizes


cdef Tile locate(Winograd* g, Batch* batch, Py_ssize_t position) noexcept nogil:
    """The tile at a position of a batch."""
    cdef int kind = (position >= batch.start[1]) + (position >= batch.start[2]) + (position >= batch.start[3])
    cdef Py_ssize_t number = batch.first[kind] + position - batch.start[kind]
    cdef bint full_row = kind < 2, full_col = kind == 1 or kind == 2
    cdef Py_ssize_t rows = g.rows if full_row else 1, cols = g.cols if full_col else 1, step = 9 - g.taps
    return Tile(image=number // (rows * cols),
                row=step * (number // cols % rows if full_row else g.rows),
                col=step * (number % cols if full_col else g.cols),
                mr=6 if full_row else g.row_rest, mc=6 if full_col else g.col_rest)


cdef inline const float* inputs_of(Winograd* g, Tile* tile, Py_ssize_t c) noexcept nogil:
    """The first input of a tile, which may lie outside of the image."""
    return g.x + (((tile.image * g.in_blocks + c) * g.H + tile.row - g.pad_h) * g.W + tile.col - g.pad_w) * b


cdef void transform_inputs(Winograd* g, Batch* batch, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t t0,
                           Py_ssize_t t1) noexcept nogil:
    """V of channel blocks c0..c1 at positions t0..t1."""
    cdef Py_ssize_t t, c
    cdef Tile tile, after = locate(g, batch, t0)
    for t in range(t0, t1):
        tile = after
        after = locate(g, batch, min(t + 1, batch.start[4] - 1))
        for c in range(c0, c1):
            input_tile(tile.mr, tile.mc, inputs_of(g, &tile, c), g.H, g.W, tile.row - g.pad_h, tile.col - g.pad_w,
                       inputs_of(g, &after, c), g.v + t * g.v_tile + c * g.v_block, g.v_point, g.v_tile)


cdef void transform_outputs(Winograd* g, Batch* batch, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                            Py_ssize_t t1) noexcept nogil:
    """y of channel blocks k0..k1, which lie from block `group` on in M, at positions t0..t1."""
    cdef Py_ssize_t t, k
    cdef Tile tile
    for t in range(t0, t1):
        tile = locate(g, batch, t)
        for k in range(k0, k1):
            output_tile(tile.mr, tile.mc, g.taps, g.m + t * g.m_tile + (k - group) * g.m_block, g.m_point,
                        g.m_tile, zero() if g.bias == NULL else load(g.bias + k * b), g.relu,
                        g.past, g.y + (tile.image * g.out_blocks + k) * g.P * g.Q * b, g.P, g.Q, tile.row, tile.col)
    if g.past:
        store_fence()


# --- products -------------------------------------------------------------------------------------------------------


cdef void product_tiles(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t group, Py_ssize_t k,
                        Py_ssize_t lo, Py_ssize_t hi, Ahead* ahead, Py_ssize_t vectors) noexcept nogil:
    """M of a point, the panel from block k on, tiles lo..hi: (+)= V times U over input channel blocks c0..c1."""
    cdef Py_ssize_t channels = g.in_blocks * b, t
    cdef int i, width, parts = tiles_of(hi - lo)
    cdef const float* u = g.u + ((point * g.out_blocks + k) * channels + c0 * b) * b
    cdef const float* v = g.v + point * g.v_point + c0 * g.v_block
    cdef float* m = g.m + point * g.m_point + (k - group) * g.m_block
    cdef Ends ends = Ends(start=NULL, start_p=0, start_v=0, out=NULL, out_p=g.m_tile, out_v=g.m_block, add=c0 > 0,
                          relu=False, past=False)
    cdef Reduction over = one_loop(b, 1, b)
    over.n1, over.x1, over.w1 = c1 - c0, g.v_block, b * b
    ahead.calls = parts
    for i in range(parts):
        t = lo + tile_start(hi - lo, parts, i)
        width = <int>(lo + tile_start(hi - lo, parts, i + 1) - t)
        fetch_part(ahead, i, &over)
        ends.out = m + t * g.m_tile
        run(width, &ends, v + t * g.v_tile, g.v_tile, u, channels * b, &over, vectors)


cdef inline Ahead filters_after(Winograd* g, int point, Py_ssize_t c0, Py_ssize_t c1, Py_ssize_t k, Py_ssize_t k0,
                                Py_ssize_t k1) noexcept nogil:
    """The filters that follow those of panel k and input channel blocks c0..c1: next panel, channels, or point."""
    cdef Py_ssize_t row = g.in_blocks * b * b
    k += VECTORS
    if k >= k1:
        k = k0
        c0 = c1
    if c0 == g.in_blocks:
        c0 = 0
        point = min(point + 1, POINTS - 1)
    return Ahead(start=g.u + (point * g.out_blocks + k) * row + c0 * b * b, distance=row, rows=min(VECTORS, k1 - k),
                 size=min(g.c_blocks, g.in_blocks - c0) * b * b, calls=1)


cdef void multiply(Winograd* g, Batch* batch, int point, Py_ssize_t group, Py_ssize_t k0, Py_ssize_t k1) noexcept nogil:
    """M of a point and channel blocks k0..k1, where `group` is the first block that M holds."""
    cdef Py_ssize_t lo, hi, c0, c1, k
    cdef Ahead ahead
    point_range(g, batch, point, &lo, &hi)
    c0 = 0
    while c0 < g.in_blocks and lo < hi:
        c1 = min(c0 + g.c_blocks, g.in_blocks)
        k = k0
        while k < k1:
            ahead = filters_after(g, point, c0, c1, k, k0, k1)
            product_tiles(g, point, c0, c1, group, k, lo, hi, &ahead, min(VECTORS, k1 - k))
            k += VECTORS
        c0 = c1


# --- passes ---------------------------------------------------------------------------------------------------------


cdef Py_ssize_t odd_lines(Py_ssize_t size) noexcept nogil:
    """At least `size` floats, an odd number of cache lines: equal places of successive rows fall in different sets."""
    return ((size + 15) // 16 | 1) * 16


cdef void layout_batch(Winograd* g, Py_ssize_t m_blocks, bint blocked, float* scratch) noexcept nogil:
    """Strides and places of V and M for batches of g.tiles; `blocked`: V by channel blocks (decision a)."""
    if blocked:
        g.v_tile, g.v_block = b, g.tiles * b
    else:
        g.v_tile, g.v_block = odd_lines(g.in_blocks * b), b
    g.m_tile, g.m_block = b, g.tiles * b
    g.v_point = odd_lines(g.tiles * odd_lines(g.in_blocks * b))
    g.m_point = odd_lines(g.tiles * m_blocks * b)
    g.v = scratch
    g.m = scratch + POINTS * g.v_point


def winograd_scratch_size(Py_ssize_t in_blocks, Py_ssize_t out_blocks, Py_ssize_t tiles):
    """Elements of V and M of a batch of `tiles` tiles; `out_blocks` as many as M holds."""
    return POINTS * (odd_lines(tiles * odd_lines(in_blocks * b)) + odd_lines(tiles * out_blocks * b))


cdef void all_inputs(Winograd* g, Batch* batch, int num_threads) noexcept nogil:
    cdef Py_ssize_t job, chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES
    cdef Py_ssize_t lines = (g.in_blocks + LINE - 1) // LINE
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_inputs(g, batch, job // chunks * LINE, min((job // chunks + 1) * LINE, g.in_blocks),
                         job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void all_products(Winograd* g, Batch* batch, Py_ssize_t k, Py_ssize_t k1, int num_threads) noexcept nogil:
    """The products and outputs of channel blocks k..k1."""
    cdef Py_ssize_t panels = panels_of(k1 - k), parts = min(panels, (2 * num_threads + 31) // 32), job
    cdef Py_ssize_t chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES, lines = (k1 - k + LINE - 1) // LINE
    for job in prange(POINTS * parts, num_threads=num_threads, schedule="dynamic", chunksize=1):
        multiply(g, batch, <int>(job // parts), k, k + VECTORS * (panels * (job % parts) // parts),
                 min(k + VECTORS * (panels * (job % parts + 1) // parts), k1))
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_outputs(g, batch, k, k + job // chunks * LINE, min(k + (job // chunks + 1) * LINE, k1),
                          job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void winograd_pass(Winograd* g, float* scratch, int num_threads) noexcept nogil:
    """Forward or input gradient."""
    cdef Batch batch
    cdef Py_ssize_t i, k
    layout_batch(g, g.k_blocks, True, scratch)
    for i in range(g.batches):
        start_batch(g, i, &batch)
        all_inputs(g, &batch, num_threads)
        k = 0
        while k < g.out_blocks:
            all_products(g, &batch, k, min(k + g.k_blocks, g.out_blocks), num_threads)
            k += g.k_blocks


cdef int winograd_arrays(Winograd* g, tuple x, tuple y, tuple padding, blocking, int taps) except -1:
    """Extents of a pass from the shapes of its arrays; its blocking."""
    g.images, g.in_blocks, g.H, g.W, _ = x
    _, g.out_blocks, g.P, g.Q, _ = y
    g.pad_h, g.pad_w = padding
    g.taps = taps
    split(g.P, taps, &g.rows, &g.row_rest)
    split(g.Q, taps, &g.cols, &g.col_rest)
    tiles = g.images * (g.rows + (g.row_rest > 0)) * (g.cols + (g.col_rest > 0))
    default = (tiles, g.out_blocks, checks.WINOGRAD_SUM_CHANNELS // b)
    most, g.k_blocks, g.c_blocks = checks.blocking(blocking, default, checks.WINOGRAD_BLOCKING)
    g.batches = max(-(-tiles // max(most, 1)), 1)
    g.tiles = -(-tiles // g.batches) + 3      # each of the four kinds is rounded
    g.k_blocks = min(g.k_blocks, g.out_blocks)
    return 0


cdef int winograd_run(const float[:, :, :, :, ::1] x, const float[:, :, :, ::1] u, bias, float[:, :, :, :, ::1] y,
                      tuple padding, bint relu, float[::1] scratch, blocking, int num_threads, int taps) except -1:
    cdef Winograd g
    cdef const float[::1] bias_view
    if x.shape[0] == 0 or y.shape[1] == 0 or y.shape[2] == 0 or y.shape[3] == 0:
        return 0
    winograd_arrays(&g, dims(x), dims(y), padding, blocking, taps)
    g.bias = NULL
    if bias is not None:
        bias_view = bias
        g.bias = &bias_view[0]
    g.x, g.u, g.y = &x[0, 0, 0, 0, 0], &u[0, 0, 0, 0], &y[0, 0, 0, 0, 0]
    g.relu = relu
    g.past = goes_past(g.y, y.size)
    scratch = scratch_of(scratch, winograd_scratch_size(g.in_blocks, g.k_blocks, g.tiles))
    with nogil:
        winograd_pass(&g, &scratch[0], num_threads)
    return 0


def winograd_forward(const float[:, :, :, :, ::1] x,         # IN   (N, CB, H, W, b)
                     const float[:, :, :, ::1] u,            # IN   (64, KB, CB * b, b), winograd_transform_filter
                     bias,                                   # IN   (KB * b) or None
                     float[:, :, :, :, ::1] y,               # OUT  (N, KB, P, Q, b)
                     tuple padding, bint relu=False,
                     float[::1] scratch=None,                # TMP  winograd_scratch_size(...)
                     blocking=None, int num_threads=1, int kernel=3):
    """y = relu?(conv2d(x, weight) + bias) for filters of kernel x kernel, 3 or 5, and stride 1.

    Parameters
    ----------
    padding : (int, int)
    blocking : (int, int, int), optional
        Tiles of a batch, blocks of K whose products are held at a time, blocks of C per visit of the products;
        `pcldnn.winograd_blocking.forward` solves for all three.
    """
    checks.winograd_forward(dims(x), dims(u), None if bias is None else dims(bias), dims(y), padding, num_threads,
                            kernel)
    checks.width("x", x.shape[4], b)
    winograd_run(x, u, bias, y, padding, relu, scratch, blocking, num_threads, kernel)


def winograd_input_grad(const float[:, :, :, :, ::1] dy,     # IN   (N, KB, P, Q, b)
                        const float[:, :, :, ::1] u,         # IN   (64, CB, KB * b, b), transposed and flipped
                        float[:, :, :, :, ::1] dx,           # OUT  (N, CB, H, W, b)
                        tuple padding,
                        float[::1] scratch=None,             # TMP  winograd_scratch_size(...)
                        blocking=None, int num_threads=1, int kernel=3):
    """dx: gradient of winograd_forward with respect to x: the convolution of dy with padding kernel - 1 - padding."""
    checks.winograd_input_grad(dims(dy), dims(u), dims(dx), padding, num_threads, kernel)
    checks.width("dy", dy.shape[4], b)
    winograd_run(dy, u, None, dx, (kernel - 1 - padding[0], kernel - 1 - padding[1]), False, scratch, blocking,
                 num_threads, kernel)
