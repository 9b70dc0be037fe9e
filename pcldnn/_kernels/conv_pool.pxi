# Convolution, bias, ReLU and 2x2 max pooling in one pass, and the gradient of the latter two.
#
# a. The convolution of a few channels is bound by its outputs, and pooling reads them all again. Here they never leave
#    L1: a register tile of two output rows each lies in a `pair` until the windows on it are pooled.
# b. Tiles may end within a window. The last column then waits at the beginning of the pair for the next tile.
# c. Backward has no outputs to find the maxima in. Their places are kept, a byte each: the pixel of the window in
#    row-major order, or -1 where nothing passes the ReLU.

cdef extern from "simd_math.h" nogil:
    ivec load_bytes "vec_load_bytes"(const signed char* p)
    void store_bytes "vec_store_bytes"(signed char* p, ivec a)
    ivec place "vec_place"(ivec where, vec x, vec best, int tap)


cdef inline ivec place_of_largest(const float* x, Py_ssize_t row, vec* best) noexcept nogil:
    """Largest value of a 2x2 window of numbers from 0 on, and its place: the first in row-major order, NaN wins."""
    cdef ivec where = ibroadcast(3)
    cdef vec x0 = load(x), x1 = load(x + b), x2 = load(x + row), x3 = load(x + row + b)
    if any_lane(isnan((x0 + x1) + (x2 + x3))):
        best[0], where = x0, ibroadcast(0)
        argmax(best, &where, x0, 0)
        argmax(best, &where, x1, 1)
        argmax(best, &where, x2, 2)
        argmax(best, &where, x3, 3)
        return where
    best[0] = vmax(vmax(x0, x1), vmax(x2, x3))
    return place(place(place(where, x2, best[0], 2), x1, best[0], 1), x0, best[0], 0)


cdef inline void pool_pair(const float* pair, Py_ssize_t row, Py_ssize_t windows, float* y, signed char* places,
                           bint past) noexcept nogil:
    """The windows on one channel block of a pair, whose rows lie `row` floats apart."""
    cdef Py_ssize_t q
    cdef ivec where
    cdef vec best
    for q in range(windows):
        where = place_of_largest(pair + 2 * q * b, row, &best)
        put(y + q * b, best, past)
        if places != NULL:
            store_bytes(places + q * b, where | not_above_zero(best))


cdef void pooled_job(ConvPass* c, Py_ssize_t image, Py_ssize_t k, Py_ssize_t row0, Py_ssize_t row1) noexcept nogil:
    """Rows row0..row1 of an image's pooled outputs, the panel from block k on."""
    cdef float memory[2 * VECTORS * (TILE + 1) * b + 16]
    cdef float* pair = <float*>((<size_t>memory + 63) // 64 * 64)
    cdef Py_ssize_t p, v, i, q, windows, held, out, row = VECTORS * c.yv
    cdef TileRow tiles[2]
    cdef int t
    for p in range(row0, row1):
        for i in range(2):
            begin_row(c, &tiles[i], 0, c.in_blocks, k, image, 2 * p + i)
        held = q = 0
        for t in range(c.n_tiles):
            for i in range(2):
                conv_tile(c, &tiles[i], t, c.tiles[t].width, pair + i * row + held * b)
            held += c.tiles[t].width
            windows = held // 2
            for v in range(tiles[0].vectors):
                out = image * c.y_image + (k + v) * c.y_block + p * c.y_row + q * b
                pool_pair(pair + v * c.yv, row, windows, c.y + out, NULL if c.places == NULL else c.places + out,
                          c.past)
            q += windows
            held %= 2
            if held:
                for i in range(2):
                    for v in range(tiles[0].vectors):
                        out = i * row + v * c.yv
                        store(pair + out, load(pair + out + 2 * windows * b))
    if c.past:
        store_fence()


def conv2d_pool_forward(const float[:, :, :, :, ::1] x,           # IN   as conv2d_forward
                        const float[:, :, :, :, :, ::1] weight,
                        bias,
                        float[:, :, :, :, ::1] y,                 # OUT  (N, KB, P // 2, Q // 2, b)
                        signed char[:, :, :, :, ::1] places,      # OUT  likewise, or None
                        tuple stride, tuple padding, int num_threads=1):
    """y = max_pool2d(relu(conv2d(x, weight) + bias)) with windows of 2x2, apart; a last odd row or column is left out.

    `places`, int8, become those of the maxima in their windows, row by row 0 to 3, and -1 where a maximum is not above
    zero: what `conv2d_pool_output_grad` takes. All input channels are summed at once, along rows.
    """
    cdef ConvPass c
    checks.conv2d_pool_forward(dims(x), dims(weight), None if bias is None else bias.shape, dims(y),
                               None if places is None else dims(places), stride, padding, num_threads)
    checks.width("weight", weight.shape[5], b)
    if x.shape[0] == 0 or y.shape[1] == 0:
        return
    forward_pass(&c, x.shape, weight.shape, bias, stride, padding)
    c.relu, c.c_blocks, c.across_images, c.band = True, x.shape[1], False, y.shape[2]
    conv_arrays(&c, &x[0, 0, 0, 0, 0], x.shape, &weight[0, 0, 0, 0, 0, 0], weight.shape, &y[0, 0, 0, 0, 0], y.shape,
                NULL)
    c.pooled = True
    if places is not None:
        c.places = &places[0, 0, 0, 0, 0]
    with nogil:
        conv_pass(&c, num_threads)


cdef inline void unpool_plane(const float* dy, const signed char* places, float* dx, double* sums, Py_ssize_t height,
                              Py_ssize_t width, bint past) noexcept nogil:
    """dx of one plane of height x width pixels, and its sums, as in pool_input_grad.pxi (decision f)."""
    cdef Py_ssize_t p, q, q0, outputs = width // 2, row = width * b
    cdef int tap
    cdef float* window
    cdef ivec where
    cdef vec grad, run
    memset(sums, 0, b * sizeof(double))
    for p in range(height // 2):
        for q0 from 0 <= q0 < outputs by SUM_RUN:
            run = zero()
            for q in range(q0, min(q0 + SUM_RUN, outputs)):
                where = load_bytes(places + (p * outputs + q) * b)
                grad = load(dy + (p * outputs + q) * b)
                window = dx + 2 * (p * row + q * b)
                for tap in range(4):
                    put(window + tap // 2 * row + tap % 2 * b, where_is(where, tap, grad), past)
                run = run + select(where >> 31, zero(), grad)
            add_double(sums, run)
        if width % 2:
            put(dx + 2 * p * row + (width - 1) * b, zero(), past)
            put(dx + (2 * p + 1) * row + (width - 1) * b, zero(), past)
    if height % 2:
        memset(dx + (height - 1) * row, 0, row * sizeof(float))
    if past:
        store_fence()


def conv2d_pool_output_grad(const float[:, :, :, :, ::1] dy,              # IN   (N, KB, P // 2, Q // 2, b)
                            const signed char[:, :, :, :, ::1] places,    # IN   likewise
                            float[:, :, :, :, ::1] dx,                    # OUT  (N, KB, P, Q, b)
                            double[:, :, ::1] sums,                       # OUT  (N, KB, b)
                            int num_threads=1):
    """dx: gradient of the convolution's output, before ReLU and pooling: each dy at its place, else 0; `sums` of dx."""
    cdef Py_ssize_t job, height = dx.shape[2], width = dx.shape[3], planes = dx.shape[0] * dx.shape[1]
    cdef Py_ssize_t image = height * width * b, output = (height // 2) * (width // 2) * b
    cdef const float* pdy
    cdef const signed char* pplaces
    cdef float* pdx
    cdef double* psums
    cdef bint past
    checks.conv2d_pool_output_grad(dims(dy), dims(places), dims(dx), dims(sums), num_threads)
    checks.width("dx", dx.shape[4], b)
    if planes == 0:
        return
    pdy, pplaces, pdx, psums = &dy[0, 0, 0, 0, 0], &places[0, 0, 0, 0, 0], &dx[0, 0, 0, 0, 0], &sums[0, 0, 0]
    past = goes_past(pdx, planes * image)
    for job in prange(planes, nogil=True, num_threads=num_threads, schedule="static"):
        if past:
            unpool_plane(pdy + job * output, pplaces + job * output, pdx + job * image, psums + job * b, height, width,
                         True)
        else:
            unpool_plane(pdy + job * output, pplaces + job * output, pdx + job * image, psums + job * b, height, width,
                         False)
