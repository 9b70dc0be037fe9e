# Weight gradient of the direct convolution.
#
# a. A register tile is a panel of k times positions of the flattened (filter column, input channel) run, which is
#    contiguous in x and in dweight alike: dweight[k, c, r, j] += sum over pixels of dy[k, pixel] x[pixel, j]. What the
#    sum runs over, pixels of a row, rows and images, is inside the micro-kernel.
# b. Positions that a pixel's padding cuts off are left out: columns with the same range of positions make one call.
#    Tiles take whole filter columns or lie within one: few tiles are cut off in part, none where lanes fill a vector.
# c. Rows are taken in bands that stay in cache while all filter rows and positions pass over them.
# d. Where images are small the innermost sum runs across images (`across_images`): x and dy are copied to (CB, H, W, N,
#    b) and (KB, P, Q, N, b). A row then is N times as long, and every stream is contiguous again; tiles lie within one
#    filter column, whose channels alone are contiguous in x.
# e. A job owns a block of dweight. Where there are fewer blocks than parallel work needs, `copies` private ones, each
#    over its share of the images, are added up in a fixed order.
# f. Which columns of dy meet which positions of a tile is found once (`plan_run`): at each visit it took up to
#    three quarters as long as the sums. While tiles compute they ask for the rows of dy of the next visit, a channel block each.

cdef struct Columns:       # of dy, in which the same positions of a tile meet pixels
    Py_ssize_t first, count
    int lo, hi             # positions lo..hi of the tile


cdef struct RunTile:       # positions of a (filter column, input channel) run
    Py_ssize_t x           # where its position 0 is for column 0 of dy; may be in the padding [float]
    Py_ssize_t w           # and in a filter row [float]
    Py_ssize_t spans       # number of Columns


cdef struct WeightGradPass:
    const float* x
    const float* dy
    float* dw
    float* copies                                            # private copies 1.. of dw; copy 0 is dw itself
    Py_ssize_t images, in_blocks, out_blocks, lanes, R, S, P, Q, H, W
    Py_ssize_t x_image, x_block, x_row, x_column             # distances [float]
    Py_ssize_t dy_image, dy_block, dy_row, dy_column, dw_size
    Py_ssize_t stride_h, stride_w, pad_h, pad_w
    Py_ssize_t band, c_blocks, n_copies                      # rows of dy per visit; input channel blocks of a job
    bint across_images
    RunTile* tiles
    Columns* spans                                           # those of tile t from t * Q on
    Py_ssize_t n_tiles


cdef inline void tap_range(WeightGradPass* g, Py_ssize_t q, Py_ssize_t j0, int width, int* lo, int* hi) noexcept nogil:
    """Positions j0 + lo .. j0 + hi of the (filter column, channel) run whose pixel exists for output column q."""
    cdef Py_ssize_t start = q * g.stride_w - g.pad_w
    cdef Py_ssize_t first = -start * g.lanes if start < 0 else 0
    cdef Py_ssize_t last = min(g.W - start, g.S) * g.lanes
    lo[0] = <int>min(max(first - j0, 0), width)
    hi[0] = <int>min(max(last - j0, 0), width)


cdef void plan_run(WeightGradPass* g) noexcept nogil:
    """The tiles of a (filter column, channel) run, and which of their positions meet pixels in which columns of dy."""
    cdef Py_ssize_t t, q, j0
    cdef int lo, hi, width
    cdef RunTile* tile
    cdef Columns* spans
    cdef Columns* last = NULL
    for t in range(g.n_tiles):
        j0 = run_start(g, t)
        width = <int>(run_start(g, t + 1) - j0)
        tile = g.tiles + t
        tile.x, tile.w, tile.spans = j0 // g.lanes * g.x_column + j0 % g.lanes - g.pad_w * g.x_column, j0 * b, 0
        spans = g.spans + t * g.Q
        for q in range(g.Q):
            tap_range(g, q, j0, width, &lo, &hi)
            if tile.spans > 0 and q == last.first + last.count and lo == last.lo and hi == last.hi:
                last.count += 1
            elif lo < hi:
                last = spans + tile.spans
                last[0] = Columns(first=q, count=1, lo=lo, hi=hi)
                tile.spans += 1


cdef void weight_grad_tile(WeightGradPass* g, const float* x, const float* dy, float* dw, Py_ssize_t images,
                           Py_ssize_t rows, Py_ssize_t t, Py_ssize_t vectors, Py_ssize_t ahead) noexcept nogil:
    """Add to tile t of a row of dw what `rows` rows of `images` images give, the first of which x and dy point to.

    `ahead`: distance from dy of what is asked for, if columns make one loop; 0: nothing.
    """
    cdef RunTile* tile = g.tiles + t
    cdef Columns* span = g.spans + t * g.Q
    cdef Reduction over = one_loop(0, g.lanes if g.across_images else g.stride_w * g.x_column, b)
    cdef Py_ssize_t step = g.stride_w * g.x_column, x_row = g.stride_h * g.x_row, i
    cdef Py_ssize_t dw_block = g.in_blocks * g.R * g.S * g.lanes * b
    cdef Ends ends = Ends(start=NULL, start_p=b, start_v=dw_block, out=NULL, out_p=b, out_v=dw_block, add=False,
                          relu=False, past=False)
    for i in range(tile.spans):
        if step == images * over.x0:  # nothing lies between columns: one loop
            over.n0, over.n1, over.x1, over.w1 = images * span.count, rows, x_row, g.dy_row
            if ahead != 0:
                over.next, over.next_step, over.next1 = dy + span.first * g.dy_column + ahead, b, g.dy_row
        else:
            over.n0, over.n1, over.x1, over.w1 = images, span.count, step, g.dy_column
            over.n2, over.x2, over.w2 = rows, x_row, g.dy_row
        ends.start = ends.out = dw + tile.w + span.lo * b
        run(span.hi - span.lo, &ends, x + tile.x + span.first * step + span.lo, 1, dy + span.first * g.dy_column,
            g.dy_block, &over, vectors)
        span += 1


cdef inline Py_ssize_t run_tiles(WeightGradPass* g) noexcept nogil:
    """Number of tiles of a (filter column, channel) run: decision b."""
    if g.lanes < TILE and not g.across_images:
        return (g.S + TILE // g.lanes - 1) // (TILE // g.lanes)
    return g.S * tiles_of(g.lanes)


cdef inline Py_ssize_t run_start(WeightGradPass* g, Py_ssize_t t) noexcept nogil:
    """First position of tile t of a run."""
    cdef int parts = tiles_of(g.lanes)
    if g.lanes < TILE and not g.across_images:
        return tile_start(g.S, <int>g.n_tiles, <int>t) * g.lanes
    return t // parts * g.lanes + tile_start(g.lanes, parts, <int>(t % parts))


cdef void weight_grad_rows(WeightGradPass* g, float* dw, Py_ssize_t n, Py_ssize_t images, Py_ssize_t k, Py_ssize_t c0,
                           Py_ssize_t c1, Py_ssize_t p0, Py_ssize_t p1) noexcept nogil:
    """Rows p0..p1 of `images` images from n on, into the panel from block k on and blocks c0..c1 of dw.

    The first tiles ask for the rows of dy that come next: what all tiles read would else have to arrive while one
    computes.
    """
    cdef Py_ssize_t t, c, r, row0, row1, ahead, call = 0, vectors = min(VECTORS, g.out_blocks - k)
    cdef Py_ssize_t next = (p1 - p0) * g.dy_row if p1 < g.P else 0 if g.across_images else g.dy_image - p0 * g.dy_row
    cdef const float* dy = g.dy + n * g.dy_image + k * g.dy_block
    cdef const float* x
    cdef float* dw_row
    for c in range(c0, c1):
        for r in range(g.R):
            # rows p with 0 <= p * stride_h - pad_h + r < H
            row0 = max(p0, (g.pad_h - r + g.stride_h - 1) // g.stride_h if g.pad_h > r else 0)
            row1 = min(p1, (g.H - 1 + g.pad_h - r) // g.stride_h + 1 if g.H - 1 + g.pad_h >= r else 0)
            if row0 >= row1:
                continue
            x = g.x + n * g.x_image + c * g.x_block + (row0 * g.stride_h - g.pad_h + r) * g.x_row
            dw_row = dw + ((k * g.in_blocks + c) * g.R + r) * g.S * g.lanes * b
            for t in range(g.n_tiles):
                ahead = call * g.dy_block + next if next != 0 and call < vectors else 0
                weight_grad_tile(g, x, dy + row0 * g.dy_row, dw_row, images, row1 - row0, t, vectors, ahead)
                call += 1


cdef void weight_grad_job(WeightGradPass* g, Py_ssize_t copy, Py_ssize_t k, Py_ssize_t c0,
                          Py_ssize_t c1) noexcept nogil:
    """One block of dw (or of a private copy) over its share of the images."""
    cdef float* dw = g.dw if copy == 0 else g.copies + (copy - 1) * g.dw_size
    cdef Py_ssize_t block = g.R * g.S * g.lanes * b
    cdef Py_ssize_t n0 = g.images * copy // g.n_copies, n1 = g.images * (copy + 1) // g.n_copies
    cdef Py_ssize_t n, p, kk, images
    for kk in range(k, min(k + VECTORS, g.out_blocks)):
        memset(dw + (kk * g.in_blocks + c0) * block, 0, (c1 - c0) * block * sizeof(float))
    n = n0
    while n < n1:
        images = n1 - n0 if g.across_images else 1
        p = 0
        while p < g.P:
            weight_grad_rows(g, dw, n, images, k, c0, c1, p, min(p + g.band, g.P))
            p += g.band
        n += images


cdef void weight_grad_pass(WeightGradPass* g, int num_threads) noexcept nogil:
    cdef Py_ssize_t panels = panels_of(g.out_blocks), groups = (g.in_blocks + g.c_blocks - 1) // g.c_blocks
    cdef Py_ssize_t job, chunks = (g.dw_size + 4095) // 4096
    for job in prange(g.n_copies * panels * groups, num_threads=num_threads, schedule="static"):
        weight_grad_job(g, job // (panels * groups), VECTORS * (job // groups % panels), job % groups * g.c_blocks,
                        min((job % groups + 1) * g.c_blocks, g.in_blocks))
    if g.n_copies > 1:
        for job in prange(chunks, num_threads=num_threads, schedule="static"):
            add_copies(g, job * 4096, min((job + 1) * 4096, g.dw_size))


cdef void add_copies(WeightGradPass* g, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """dw[start:stop] += the private copies, in the order of their images; both are multiples of the SIMD width."""
    cdef Py_ssize_t i, copy
    for copy in range(g.n_copies - 1):
        i = start
        while i < stop:
            store(g.dw + i, load(g.dw + i) + load(g.copies + copy * g.dw_size + i))
            i += b


def conv2d_weight_grad(const float[:, :, :, :, ::1] x,       # IN   (N, CB, H, W, b), or (N, 1, H, W, C) with C <= 4
                       const float[:, :, :, :, ::1] dy,      # IN   (N, KB, P, Q, b)
                       float[:, :, :, :, :, ::1] dweight,    # OUT  (KB, CB, R, S, b or C, b)
                       tuple stride, tuple padding,
                       float[::1] scratch=None,              # TMP  (copies - 1) * dweight.size, and x.size + dy.size
                                                             #      when the innermost sum runs across images
                       blocking=None, int num_threads=1):
    """dweight: gradient of conv2d_forward with respect to the filters, summed over the images (zeros when N = 0).

    Parameters
    ----------
    blocking : (int, int, int, bool), optional
        Rows of dy per visit of a block of dweight, input channel blocks of a job, copies of dweight, whether the
        innermost sum runs across images; `pcldnn.blocking` solves for all four. Default: (1, 1, 1, False).
    """
    cdef WeightGradPass g
    cdef Py_ssize_t N = x.shape[0], size = x.size + dy.size
    checks.conv2d_weight_grad(dims(x), dims(dy), dims(dweight), stride, padding, num_threads)
    checks.width("dy", dy.shape[4], b)
    g.band, g.c_blocks, g.n_copies, g.across_images = checks.blocking(blocking, (1, 1, 1, False),
                                                                      checks.WEIGHT_GRAD_BLOCKING)
    g.n_copies = max(min(g.n_copies, N), 1)
    g.images, g.in_blocks, g.out_blocks, g.lanes = N, x.shape[1], dy.shape[1], x.shape[4]
    g.R, g.S, g.P, g.Q, g.H, g.W = dweight.shape[2], dweight.shape[3], dy.shape[2], dy.shape[3], x.shape[2], x.shape[3]
    g.dw_size = g.out_blocks * g.in_blocks * g.R * g.S * g.lanes * b
    g.stride_h, g.stride_w = stride
    g.pad_h, g.pad_w = padding
    if g.dw_size == 0:
        return
    g.dw = &dweight[0, 0, 0, 0, 0, 0]
    if N == 0:
        memset(g.dw, 0, g.dw_size * sizeof(float))
        return
    scratch = scratch_of(scratch, (g.n_copies - 1) * g.dw_size + (size if g.across_images else 0))
    g.copies = start_of(scratch)
    g.n_tiles = run_tiles(&g)
    g.tiles = <RunTile*>malloc(g.n_tiles * sizeof(RunTile))
    g.spans = <Columns*>malloc(g.n_tiles * g.Q * sizeof(Columns))
    if g.tiles == NULL or g.spans == NULL:
        free(g.tiles)
        free(g.spans)
        raise MemoryError("conv2d: no memory for the table of tiles")
    with nogil:
        weight_grad_arrays(&g, &x[0, 0, 0, 0, 0], &dy[0, 0, 0, 0, 0], g.copies + (g.n_copies - 1) * g.dw_size,
                           num_threads)
        plan_run(&g)
        weight_grad_pass(&g, num_threads)
    free(g.tiles)
    free(g.spans)


cdef void weight_grad_arrays(WeightGradPass* g, const float* x, const float* dy, float* room,
                             int num_threads) noexcept nogil:
    """Pointers and distances of x and dy, which are first put in order in `room` if the sum runs across images."""
    cdef Py_ssize_t N = g.images, inputs = g.in_blocks * g.H * g.W * g.lanes, outputs = g.out_blocks * g.P * g.Q
    g.x, g.dy, g.x_column, g.dy_column = x, dy, g.lanes, b
    if g.across_images:
        gather_images(x, N, inputs, g.lanes, room, num_threads)
        gather_images(dy, N, outputs * b, b, room + N * inputs, num_threads)
        g.x, g.dy, g.x_column, g.dy_column = room, room + N * inputs, N * g.lanes, N * b
    g.x_row = g.W * g.x_column
    g.x_block = g.H * g.x_row
    g.dy_row = g.Q * g.dy_column
    g.dy_block = g.P * g.dy_row
    g.x_image = g.lanes if g.across_images else g.in_blocks * g.x_block
    g.dy_image = b if g.across_images else g.out_blocks * g.dy_block


cdef void gather_images(const float* x, Py_ssize_t N, Py_ssize_t size, Py_ssize_t run, float* out,
                        int num_threads) noexcept nogil:
    """x (N, size / run, run) to (size / run, N, run)."""
    cdef Py_ssize_t job, n
    for job in prange(size // run, num_threads=num_threads, schedule="static"):
        for n in range(N):
            if run == b:
                store(out + (job * N + n) * b, load(x + n * size + job * b))
            else:
                memcpy(out + (job * N + n) * run, x + n * size + job * run, run * sizeof(float))
