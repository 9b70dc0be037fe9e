# Winograd convolution, 3x3 and 5x5 filters: weight gradient. Batches of tiles: winograd.pxi.
#
# a. (B' x B)' (A dy A') summed over the tiles of all batches in the transformed domain, then G' . G.

cdef enum:
    STRIP = 192              # most tiles summed per visit of dU; planned batches are smaller


cdef inline const float* gradients_of(Winograd* g, Tile* tile, Py_ssize_t k) noexcept nogil:
    """The first output gradient of a tile."""
    return g.y + (((tile.image * g.out_blocks + k) * g.P + tile.row) * g.Q + tile.col) * b


cdef void transform_gradients(Winograd* g, Batch* batch, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t t0,
                              Py_ssize_t t1) noexcept nogil:
    """Transformed dy of channel blocks k0..k1 at positions t0..t1."""
    cdef Py_ssize_t t, k
    cdef Tile tile, after = locate(g, batch, t0)
    for t in range(t0, t1):
        tile = after
        after = locate(g, batch, min(t + 1, batch.start[4] - 1))
        for k in range(k0, k1):
            gradient_tile(tile.mr, tile.mc, g.taps, gradients_of(g, &tile, k), g.P, g.Q, tile.row, tile.col,
                          gradients_of(g, &after, k), g.m + t * g.m_tile + k * g.m_block, g.m_point, g.m_tile)


cdef void gradient_products(Winograd* g, int point, Py_ssize_t k, Py_ssize_t lo, Py_ssize_t hi, bint first,
                            Py_ssize_t vectors) noexcept nogil:
    """dU of a point, the panel from block k on: (+)= V' times transformed dy over tiles lo..hi."""
    cdef Py_ssize_t channels = g.in_blocks * b, c
    cdef int i, width, parts = tiles_of(channels)
    cdef float* du = g.du + (point * g.out_blocks + k) * channels * b
    cdef const float* v = g.v + point * g.v_point + lo * g.v_tile
    cdef const float* d = g.m + point * g.m_point + lo * g.m_tile + k * g.m_block
    cdef Ends ends = Ends(start=NULL, start_p=0, start_v=0, out=NULL, out_p=b, out_v=channels * b, add=not first,
                          relu=False, past=False)
    cdef Reduction over = one_loop(hi - lo, g.v_tile, g.m_tile)
    over.next_step = g.v_tile
    for i in range(parts):
        c = tile_start(channels, parts, i)
        width = <int>(tile_start(channels, parts, i + 1) - c)
        over.next = v + c + width + TILE - 1          # the next channels of the same tiles
        ends.out = du + c * b
        run(width, &ends, v + c, 1, d, g.m_block, &over, vectors)


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
            gradient_products(g, point, k, t0, t1, first and t0 == lo, min(VECTORS, k1 - k))
            k += VECTORS
        t0 += STRIP


cdef void all_gradients(Winograd* g, Batch* batch, int num_threads) noexcept nogil:
    cdef Py_ssize_t job, chunks = (batch.start[4] + CHUNK_TILES - 1) // CHUNK_TILES
    cdef Py_ssize_t lines = (g.out_blocks + LINE - 1) // LINE
    for job in prange(lines * chunks, num_threads=num_threads, schedule="static"):
        transform_gradients(g, batch, job // chunks * LINE, min((job // chunks + 1) * LINE, g.out_blocks),
                            job % chunks * CHUNK_TILES, min((job % chunks + 1) * CHUNK_TILES, batch.start[4]))


cdef void weight_grad_pass_winograd(Winograd* g, int num_threads) noexcept nogil:
    cdef Batch batch
    cdef Py_ssize_t i, job, panels = panels_of(g.out_blocks), parts = min(panels, (2 * num_threads + 31) // 32)
    for i in range(g.batches):
        start_batch(g, i, &batch)
        all_inputs(g, &batch, num_threads)
        all_gradients(g, &batch, num_threads)
        for job in prange(POINTS * parts, num_threads=num_threads, schedule="dynamic", chunksize=1):
            multiply_gradients(g, &batch, i == 0, <int>(job // parts), VECTORS * (panels * (job % parts) // parts),
                               min(VECTORS * (panels * (job % parts + 1) // parts), g.out_blocks))
    for job in prange(g.out_blocks * g.in_blocks, num_threads=num_threads, schedule="static"):
        restore_filters(g, job // g.in_blocks, job % g.in_blocks)


cdef void restore_filters(Winograd* g, Py_ssize_t k, Py_ssize_t c) noexcept nogil:
    """dweight of one block: G' dU G. The block is gathered first: points often lie a power of two apart."""
    cdef float du[POINTS * b * b]
    cdef float t[40 * b]
    cdef Py_ssize_t block = (k * g.in_blocks + c) * b * b, du_point = g.out_blocks * g.in_blocks * b * b
    cdef float* dw = g.dw + g.taps * g.taps * block
    cdef int lane, point, i, j, taps = g.taps
    for point in range(POINTS):
        memcpy(du + point * b * b, g.du + point * du_point + block, b * b * sizeof(float))
    for lane in range(b):
        for j in range(8):
            filter_values(taps, du + (j * b + lane) * b, 8 * b * b, t + j * b, 8 * b)
        for i in range(taps):
            filter_values(taps, t + 8 * i * b, b, dw + (taps * i * b + lane) * b, b * b)


def winograd_weight_grad(const float[:, :, :, :, ::1] x,     # IN   (N, CB, H, W, b)
                         const float[:, :, :, :, ::1] dy,    # IN   (N, KB, P, Q, b)
                         float[:, :, :, :, :, ::1] dweight,  # OUT  (KB, CB, r, r, b, b), r = 3 or 5
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
        memset(&dweight[0, 0, 0, 0, 0, 0], 0, dweight.shape[2] * dweight.shape[3] * size * sizeof(float))
        return
    winograd_arrays(&g, dims(x), dims(dy), padding, blocking, <int>dweight.shape[2])
    g.x, g.y, g.dw = &x[0, 0, 0, 0, 0], <float*>&dy[0, 0, 0, 0, 0], &dweight[0, 0, 0, 0, 0, 0]
    scratch = scratch_of(scratch, POINTS * size + winograd_scratch_size(g.in_blocks, g.out_blocks, g.tiles))
    g.du = &scratch[0]
    layout_batch(&g, g.out_blocks, False, g.du + POINTS * size)
    with nogil:
        weight_grad_pass_winograd(&g, num_threads)
