# Direct convolution: forward, input gradient, weight gradient.
#
# a. Forward and input gradient are one loop nest (`ConvPass`): the input gradient is a convolution of dy with the
#    transposed, flipped filters, one per residue of the stride (Das et al. 2016 share the nest between passes in the
#    same way). For every output row and column an `Axis` says which filter taps meet real pixels.
# b. Nothing is padded in memory and no tap that falls in the padding is computed: a column tile carries its
#    `Segment`s, runs of filter taps that meet the same pixels lo..hi of the tile. Within a segment taps and input
#    channels are contiguous in both arrays, so that one innermost loop runs over them (a 3x3 filter inside the image:
#    one segment).
# c. The pixels of a tile are neighbours in a row, or the same pixel of several images (`across_images`). The latter
#    packs the input by tiles of images, (tiles, CB, H, W, b, tile_pitch(N)), in one pass over it (`pack_samples`); then
#    every tile is full however small the images, and no tap in the padding is ever computed: 2x2 images cost 4/9.
# d. A job is (image or tile of images, panel of output channels, band of rows). It runs over `c_blocks` input
#    channel blocks at a time, so that their filters stay in cache while all pixels pass, and adds to y in between.
# e. Weight gradient: conv_weight_grad.pxi. Pooling on the way: conv_pool.pxi.

cdef struct Axis:
    Py_ssize_t count       # outputs
    Py_ssize_t out0        # position of the first one in y
    Py_ssize_t out_step    # distance in y
    Py_ssize_t taps        # filter taps
    Py_ssize_t w0          # index of the first tap in the filter
    Py_ssize_t w_step      # distance in the filter
    Py_ssize_t in_step     # advance of the input position per output
    Py_ssize_t in0         # input position of output 0, tap 0; may be negative: padding
    Py_ssize_t in_size     # input positions


cdef struct ColumnTile:
    Py_ssize_t x, y        # where its pixel 0 is in rows of x (filter tap 0) and y [float]
    int width              # pixels; in across_images mode set by the tile of images
    int segments           # number of segments; they begin at tap slot `tile index * taps`


cdef struct TileRow:       # what the tiles of an output row have in common
    const float* x
    const float* w
    Reduction over
    Ends ends
    Py_ssize_t vectors
    bint adds              # to what is in y


cdef struct ConvPass:
    float* x               # never written by the pass
    const float* w
    const float* bias
    float* y
    Py_ssize_t images, in_blocks, out_blocks, lanes          # lanes of an input channel block
    Py_ssize_t x_image, x_block, x_row, x_column, x_lane     # distances [float]; x_image of tiles of images if packed
    Py_ssize_t y_image, y_block, y_row
    Py_ssize_t w_out, w_in, w_row                            # filter distances [float]
    Py_ssize_t xp, yp, yv                                    # between pixels, and channel blocks, of a tile [float]
    Axis rows, cols
    bint relu, across_images
    bint past                                                # whether y is written past the caches
    bint pooled                                              # y is that of conv_pool.pxi
    signed char* places                                      # if pooled: where maxima were, or NULL
    Py_ssize_t c_blocks, band                                # band: most rows of a job
    ColumnTile* tiles
    Segment* segments
    int n_tiles


cdef inline Py_ssize_t first_tap(Axis* axis, Py_ssize_t out) noexcept nogil:
    """First filter tap of output `out` that meets the input."""
    cdef Py_ssize_t start = out * axis.in_step + axis.in0
    return -start if start < 0 else 0


cdef inline Py_ssize_t last_tap(Axis* axis, Py_ssize_t out) noexcept nogil:
    """One past the last filter tap of output `out` that meets the input; may be below first_tap: none does."""
    cdef Py_ssize_t room = axis.in_size - (out * axis.in_step + axis.in0)
    return room if room < axis.taps else axis.taps


cdef void plan_columns(ConvPass* c) noexcept nogil:
    """Cut the output columns in tiles and find the segments of each (decisions b and c)."""
    cdef Axis* cols = &c.cols
    cdef Segment* seg
    cdef int t, p, lo, hi, width
    cdef Py_ssize_t tap, first, last
    for t in range(c.n_tiles):
        last = -1
        first = t if c.across_images else tile_start(cols.count, c.n_tiles, t)
        width = 1 if c.across_images else <int>(tile_start(cols.count, c.n_tiles, t + 1) - first)
        c.tiles[t].x = (first * cols.in_step + cols.in0) * c.x_column
        c.tiles[t].y = (cols.out0 + first * cols.out_step) * b
        c.tiles[t].width = width
        c.tiles[t].segments = 0
        for tap in range(cols.taps):
            lo = width
            hi = 0
            for p in range(width):
                if first_tap(cols, first + p) <= tap and tap < last_tap(cols, first + p):
                    lo = min(lo, p)
                    hi = TILE if c.across_images else p + 1
            if lo >= hi:
                continue
            seg = c.segments + t * cols.taps + c.tiles[t].segments
            if last == tap and cols.w_step == 1 and (seg - 1).lo == lo and (seg - 1).hi == hi:
                (seg - 1).steps += c.lanes
            else:
                seg[0] = Segment(lo=lo, hi=hi, steps=c.lanes, x=tap * c.x_column, w=tap * cols.w_step * c.lanes * b)
                c.tiles[t].segments += 1
            last = tap + 1


cdef inline void begin_row(ConvPass* c, TileRow* r, Py_ssize_t cb0, Py_ssize_t cb1, Py_ssize_t k, Py_ssize_t image,
                           Py_ssize_t row) noexcept nogil:
    """Output row `row` of an image, the panel of output channels from block k on, input channel blocks cb0..cb1."""
    cdef Py_ssize_t r0 = first_tap(&c.rows, row), r1 = last_tap(&c.rows, row)
    cdef bint last = cb1 == c.in_blocks
    r.vectors = min(VECTORS, c.out_blocks - k)
    r.x = c.x + image * c.x_image + cb0 * c.x_block + (row * c.rows.in_step + c.rows.in0 + r0) * c.x_row
    r.w = c.w + k * c.w_out + cb0 * c.w_in + (c.rows.w0 + r0 * c.rows.w_step) * c.w_row + c.cols.w0 * c.lanes * b
    r.over = one_loop(0, c.x_lane, b)
    r.over.n1, r.over.x1, r.over.w1 = max(r1 - r0, 0), c.x_row, c.rows.w_step * c.w_row
    r.over.n2, r.over.x2, r.over.w2 = cb1 - cb0, c.x_block, c.w_in
    r.adds = cb0 > 0
    r.ends = Ends(start=NULL, start_p=0, start_v=b, out=NULL, out_p=c.yp, out_v=c.yv, add=False, relu=c.relu and last,
                  past=c.past and last and not c.pooled)
    if r.adds:
        r.ends.start_p, r.ends.start_v = c.yp, c.yv
    elif c.bias != NULL:
        r.ends.start = c.bias + k * b


cdef inline void conv_tile(ConvPass* c, TileRow* r, int t, int width, float* y) noexcept nogil:
    """One register tile of the row, of `width` pixels: the sums go to y."""
    cdef ColumnTile* tile = c.tiles + t
    cdef Segment* seg = c.segments + t * c.cols.taps
    cdef const float* x = r.x + tile.x
    cdef const float* w = r.w
    if tile.segments == 1 and seg.lo == 0 and seg.hi >= width:
        r.over.segments, r.over.n0 = NULL, seg.steps
        x += seg.x
        w += seg.w
    else:
        r.over.segments, r.over.n_segments = seg, tile.segments
    r.over.ahead = 0 if c.across_images else width * c.xp
    r.ends.out = y
    if r.adds:
        r.ends.start = y
    run(width, &r.ends, x, c.xp, w, c.w_out, &r.over, r.vectors)


cdef void conv_job(ConvPass* c, Py_ssize_t image, Py_ssize_t n, int width, Py_ssize_t k, Py_ssize_t row0,
                   Py_ssize_t row1) noexcept nogil:
    """The panel from block k on, rows row0..row1 of image n, or of the tile `image` of `width` images from n on."""
    cdef Py_ssize_t cb0 = 0, cb1, row
    cdef float* panel = c.y + n * c.y_image + k * c.y_block
    cdef float* y
    cdef TileRow tiles
    cdef int t
    while cb0 < c.in_blocks:
        cb1 = min(cb0 + c.c_blocks, c.in_blocks)
        for row in range(row0, row1):
            begin_row(c, &tiles, cb0, cb1, k, image, row)
            y = panel + (c.rows.out0 + row * c.rows.out_step) * c.y_row
            for t in range(c.n_tiles):
                conv_tile(c, &tiles, t, width if c.across_images else c.tiles[t].width, y + c.tiles[t].y)
        cb0 = cb1
    if c.past:
        store_fence()


cdef int conv_pass(ConvPass* c, int num_threads) except -1 nogil:
    """All jobs of a pass. Bands of rows keep a job's outputs in L2 and add parallelism; they change no sum."""
    cdef int image_tiles = tiles_of(c.images) if c.across_images else <int>c.images
    cdef Py_ssize_t panels = panels_of(c.out_blocks), rows = c.rows.count // 2 if c.pooled else c.rows.count
    cdef Py_ssize_t bands = min(max((4 * num_threads + image_tiles * panels - 1) // (image_tiles * panels),
                                    (rows - 1) // c.band + 1), rows)
    cdef Py_ssize_t job, jobs = image_tiles * panels * bands
    cdef Py_ssize_t image, band, panel, n
    c.xp = 1 if c.across_images else c.cols.in_step * c.x_column
    c.yp, c.yv = c.y_image if c.across_images else c.cols.out_step * b, c.y_block
    if c.pooled:
        c.yp, c.yv = b, (TILE + 1) * b     # as `pooled_job` has them
    c.n_tiles = <int>c.cols.count if c.across_images else tiles_of(c.cols.count)
    c.tiles = <ColumnTile*>malloc(c.n_tiles * sizeof(ColumnTile))
    c.segments = <Segment*>malloc(c.n_tiles * c.cols.taps * sizeof(Segment) + 1)
    if c.tiles == NULL or c.segments == NULL:
        free(c.tiles)
        free(c.segments)
        with gil:
            raise MemoryError("conv2d: no memory for the table of column tiles")
    plan_columns(c)
    for job in prange(jobs, num_threads=num_threads, schedule="static"):
        image = job // (panels * bands)
        panel = job // bands % panels
        band = job % bands
        if c.pooled:
            pooled_job(c, image, VECTORS * panel, rows * band // bands, rows * (band + 1) // bands)
            continue
        n = tile_start(c.images, image_tiles, <int>image) if c.across_images else image
        conv_job(c, image, n, <int>(tile_start(c.images, image_tiles, <int>image + 1) - n) if c.across_images else 1,
                 VECTORS * panel, rows * band // bands, rows * (band + 1) // bands)
    free(c.tiles)
    free(c.segments)
    return 0


cdef inline Axis forward_axis(Py_ssize_t outputs, Py_ssize_t taps, Py_ssize_t stride, Py_ssize_t padding,
                              Py_ssize_t inputs) noexcept nogil:
    return Axis(count=outputs, out0=0, out_step=1, taps=taps, w0=0, w_step=1, in_step=stride, in0=-padding,
                in_size=inputs)


cdef inline Axis input_grad_axis(Py_ssize_t residue, Py_ssize_t inputs, Py_ssize_t taps, Py_ssize_t stride,
                                 Py_ssize_t padding, Py_ssize_t outputs) noexcept nogil:
    """Positions i of dx with (i + padding) % stride == residue: taps residue, residue + stride, ... reach them.

    dx[i] = sum over j of dy[(i + padding - residue) / stride - j] * w[residue + j * stride]; in the flipped filter
    the taps are walked backwards so that positions in dy and in the filter both rise.
    """
    cdef Py_ssize_t reach = (taps - residue + stride - 1) // stride if residue < taps else 0
    cdef Py_ssize_t first = (residue - padding % stride + stride) % stride
    cdef Py_ssize_t count = (inputs - first + stride - 1) // stride if first < inputs else 0
    return Axis(count=count, out0=first, out_step=stride, taps=reach,
                w0=taps - 1 - residue - stride * (reach - 1), w_step=stride,
                in_step=1, in0=(first + padding - residue) // stride - (reach - 1), in_size=outputs)


def conv2d_forward(const float[:, :, :, :, ::1] x,           # IN   (N, CB, H, W, b), or (N, 1, H, W, C) with C <= 4
                   const float[:, :, :, :, :, ::1] weight,   # IN   (KB, CB, R, S, b or C, b)
                   bias,                                     # IN   (KB * b) or None
                   float[:, :, :, :, ::1] y,                 # OUT  (N, KB, P, Q, b)
                   tuple stride, tuple padding, bint relu=False, blocking=None, int num_threads=1,
                   float[::1] scratch=None):                 # TMP  packed_size(N, x.size / N), if across images
    """y = relu?(conv2d(x, weight) + bias), direct convolution.

    Parameters
    ----------
    stride, padding : (int, int)
        Rows, columns.
    relu : bool
        Whether max(., 0) is applied before y is stored.
    blocking : (int, bool, int), optional
        Input channel blocks per pass over the pixels, whether a tile runs across images, most output rows of a job;
        `pcldnn.blocking` solves for all three. Default: all blocks, along rows, all rows.
    """
    cdef ConvPass c
    cdef Py_ssize_t N = x.shape[0], size = x.size
    checks.conv2d_forward(dims(x), dims(weight), None if bias is None else bias.shape, dims(y), stride, padding,
                          num_threads)
    checks.width("weight", weight.shape[5], b)
    if N == 0 or y.shape[1] == 0:
        return
    forward_pass(&c, x.shape, weight.shape, bias, stride, padding)
    c.relu = relu
    c.c_blocks, c.across_images, c.band = checks.blocking(blocking, (x.shape[1], False, y.shape[2]),
                                                          checks.CONV_BLOCKING)
    scratch = scratch_of(scratch, packed_size(N, size // N) if c.across_images else 0)
    conv_arrays(&c, &x[0, 0, 0, 0, 0], x.shape, &weight[0, 0, 0, 0, 0, 0], weight.shape, &y[0, 0, 0, 0, 0], y.shape,
                start_of(scratch))
    with nogil:
        if c.across_images:
            pack_samples(&x[0, 0, 0, 0, 0], N, size // N, c.x, num_threads)
        conv_pass(&c, num_threads)


cdef int forward_pass(ConvPass* c, const Py_ssize_t* xs, const Py_ssize_t* ws, bias, tuple stride,
                      tuple padding) except -1:
    """Bias and axes of a forward pass over x of shape xs with filters of shape ws."""
    cdef const float[::1] bias_view
    c.bias = NULL
    if bias is not None:
        bias_view = bias
        c.bias = &bias_view[0]
    c.rows = forward_axis(checks.output_size(xs[2], ws[2], stride[0], padding[0]), ws[2], stride[0], padding[0], xs[2])
    c.cols = forward_axis(checks.output_size(xs[3], ws[3], stride[1], padding[1]), ws[3], stride[1], padding[1], xs[3])
    return 0


cdef void conv_arrays(ConvPass* c, const float* x, const Py_ssize_t* xs, const float* w, const Py_ssize_t* ws,
                      float* y, const Py_ssize_t* ys, float* packed) noexcept:
    """Pointers, extents and distances of a pass; `packed` has room for x if the pass runs across images."""
    c.x, c.w, c.y = <float*>x, w, y
    c.images, c.in_blocks, c.out_blocks, c.lanes = xs[0], xs[1], ys[1], xs[4]
    c.x_lane = 1
    if c.across_images:
        c.x, c.x_lane = packed, tile_pitch(xs[0])
    c.x_column = xs[4] * c.x_lane
    c.x_row = xs[3] * c.x_column
    c.x_block = xs[2] * c.x_row
    c.x_image = xs[1] * c.x_block
    c.y_row = ys[3] * b
    c.y_block = ys[2] * c.y_row
    c.y_image = ys[1] * c.y_block
    c.w_row = ws[3] * ws[4] * b
    c.w_in = ws[2] * c.w_row
    c.w_out = ws[1] * c.w_in
    c.past = goes_past(y, ys[0] * ys[1] * c.y_block)
    c.pooled, c.places = False, NULL


def conv2d_transpose_filter(const float[:, :, :, :, :, ::1] weight,   # IN   (KB, CB, R, S, b, b)
                            float[:, :, :, :, :, ::1] weight_t,       # OUT  (CB, KB, R, S, b, b)
                            int num_threads=1):
    """weight_t[c, k, R-1-r, S-1-s, ki, ci] = weight[k, c, r, s, ci, ki]: the filter of the input gradient."""
    cdef Py_ssize_t KB = weight.shape[0], CB = weight.shape[1], taps = weight.shape[2] * weight.shape[3]
    cdef Py_ssize_t job, k, c, t
    cdef const float* w
    cdef float* wt
    checks.conv2d_transpose_filter(dims(weight), dims(weight_t), num_threads)
    checks.width("weight", weight.shape[4], b)
    checks.width("weight", weight.shape[5], b)
    if KB * CB == 0:
        return
    w = &weight[0, 0, 0, 0, 0, 0]
    wt = &weight_t[0, 0, 0, 0, 0, 0]
    for job in prange(KB * CB, nogil=True, num_threads=num_threads, schedule="static"):
        c = job // KB
        k = job % KB
        for t in range(taps):
            transpose(w + ((k * CB + c) * taps + t) * b * b, b, wt + (job * taps + taps - 1 - t) * b * b)


def conv2d_input_grad(const float[:, :, :, :, ::1] dy,               # IN   (N, KB, P, Q, b)
                      const float[:, :, :, :, :, ::1] weight_t,      # IN   (CB, KB, R, S, b, b): see above
                      float[:, :, :, :, ::1] dx,                     # OUT  (N, CB, H, W, b)
                      tuple stride, tuple padding, blocking=None, int num_threads=1,
                      float[::1] scratch=None):                      # TMP  dy.size likewise, if across images
    """dx: gradient of conv2d_forward with respect to x. Pixels that no filter tap meets become exactly 0.

    `blocking` as in `conv2d_forward`, with the blocks of K in the place of those of C.
    """
    cdef ConvPass c
    cdef Py_ssize_t N = dy.shape[0], R = weight_t.shape[2], S = weight_t.shape[3]
    cdef Py_ssize_t i, j, rows = stride[0], cols = stride[1], size = dy.size
    checks.conv2d_input_grad(dims(dy), dims(weight_t), dims(dx), stride, padding, num_threads)
    checks.width("dx", dx.shape[4], b)
    checks.width("dy", dy.shape[4], b)
    if N == 0 or dx.shape[1] == 0:
        return
    c.bias = NULL
    c.relu = False
    c.c_blocks, c.across_images, c.band = checks.blocking(blocking, (dy.shape[1], False, dx.shape[2]),
                                                          checks.CONV_BLOCKING)
    scratch = scratch_of(scratch, packed_size(N, size // N) if c.across_images else 0)
    conv_arrays(&c, &dy[0, 0, 0, 0, 0], dy.shape, &weight_t[0, 0, 0, 0, 0, 0], weight_t.shape, &dx[0, 0, 0, 0, 0],
                dx.shape, start_of(scratch))
    if c.across_images:
        pack_samples(&dy[0, 0, 0, 0, 0], N, size // N, c.x, num_threads)
    for i in range(rows):
        for j in range(cols):
            c.rows = input_grad_axis(i, dx.shape[2], R, rows, padding[0], dy.shape[2])
            c.cols = input_grad_axis(j, dx.shape[3], S, cols, padding[1], dy.shape[3])
            if c.rows.count > 0 and c.cols.count > 0:
                with nogil:
                    conv_pass(&c, num_threads)
