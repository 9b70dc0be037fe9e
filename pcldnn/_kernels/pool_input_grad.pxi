# Gradients of max and average pooling. Windows: pool.pxi.
#
# a. A job is a plane: windows may overlap in rows, and a plane is written by one thread in row order, so the sums do
#    not depend on the number of threads.
# b. The maximum's place is found again from x instead of being stored: x is there anyway, and an index array
#    would cost more memory traffic than it saves (where x is not: conv_pool.pxi). First maximum in row-major order, NaN wins, as in PyTorch.
# c. In a window without a NaN the place of the maximum is the first value that equals it: fewer operations than
#    carrying the place along.
# d. The gradient of a ReLU whose output was pooled costs nothing here: it is that of the maximum of each window.
# e. Windows that do not overlap are written to dx as they come; where they tile the rows, only the rest of the rows is
#    cleared. Windows that overlap add in a band of rows, a thread's own, that stays in its caches; rows that no later
#    window touches leave it for dx, and zeros in it. So dx is written once, and past the caches when it is large.
# f. Each dy goes to one place or, with the ReLU's gradient, nowhere: so the sums of dx over a plane, of which the bias
#    gradient of the layer before is made, are sums of what is in registers anyway. Runs of SUM_RUN windows are added in
#    float32, all beyond in double, as in bias_grad.

from cython.parallel cimport threadid
from libc.string cimport memmove

cdef extern from "simd_math.h" nogil:
    void argmax "vec_argmax"(vec* best, ivec* where, vec a, int tap)
    vec where_is "vec_where"(ivec where, int tap, vec a)
    ivec ibroadcast "ivec_set"(int s)
    bint any_lane "ivec_any"(ivec mask)
    vec take_where "vec_take_where"(vec x, vec best, vec* a)

cdef enum:
    SUM_RUN = 16         # windows whose gradients are added in float32 [vectors]
    BAND = 4096          # of a band whose rows are short, a third to a half of L1: rows seldom move in it [elements]


cdef inline void give(float* dx, vec grad, bint add, bint past) noexcept nogil:
    if add:
        store(dx, load(dx) + grad)
    else:
        put(dx, grad, past)


cdef inline vec window_max_grad(const float* x, float* dx, vec grad, Py_ssize_t row, Py_ssize_t height,
                                Py_ssize_t width, bint relu, bint add, bint past) noexcept nogil:
    """Puts grad (`add`: adds it) to dx at the place of the maximum of a window, 0 elsewhere; what it has put.

    With `relu` nowhere where the maximum is not positive.
    """
    cdef Py_ssize_t h, w
    cdef vec left
    cdef ivec bad, where
    cdef vec best = largest_of(x, row, height, width, &bad)
    if any_lane(bad):
        best, where = load(x), ibroadcast(0)
        for h in range(height):
            for w in range(width):
                argmax(&best, &where, load(x + h * row + w * b), <int>(h * width + w))
        if relu:
            grad = relu_slope(best, grad)
        for h in range(height):
            for w in range(width):
                give(dx + h * row + w * b, where_is(where, <int>(h * width + w), grad), add, past)
        return grad
    if relu:
        grad = relu_slope(best, grad)
    left = grad
    for h in range(height):
        for w in range(width):
            give(dx + h * row + w * b, take_where(load(x + h * row + w * b), best, &left), add, past)
    return grad


cdef inline void window_fill(float* dx, vec share, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width,
                             bint add, bint past) noexcept nogil:
    """Puts share (`add`: adds it) to dx all over a window."""
    cdef Py_ssize_t h, w
    for h in range(height):
        for w in range(width):
            give(dx + h * row + w * b, share, add, past)


cdef inline bint windows_overlap(Pool pool) noexcept nogil:
    """Whether a pixel may be in two windows."""
    return pool.kh > pool.sh or pool.kw > pool.sw


cdef inline Py_ssize_t clear_before(Pool pool, float* dx, Py_ssize_t row, Py_ssize_t p) noexcept nogil:
    """Zeros in the rows from `row` on to the end of the windows p, but for pixels that these overwrite anyway.

    Returns the first row that is not cleared.
    """
    cdef Window last = window_of(pool, p, pool.q - 1)
    cdef Py_ssize_t column = last.w1 if pool.kh == pool.sh and pool.kw == pool.sw else 0
    while row < last.h1:
        memset(dx + (row * pool.w + column) * b, 0, (pool.w - column) * b * sizeof(float))
        row += 1
    return row


cdef inline void clear_rest(Pool pool, float* dx, Py_ssize_t row) noexcept nogil:
    """Zeros from `row` to the end of the plane."""
    memset(dx + row * pool.w * b, 0, (pool.h - row) * pool.w * b * sizeof(float))


cdef inline vec window_grad(Pool pool, const float* x, float* dx, vec grad, Py_ssize_t height, Py_ssize_t width,
                            bint maximum, bint add, bint past) noexcept nogil:
    """The gradient of one window, whose first pixels are at x (of a maximum) and dx; of a maximum what it has put."""
    cdef Py_ssize_t row = pool.w * b
    if maximum:
        return window_max_grad(x, dx, grad, row, height, width, pool.relu, add, past)
    window_fill(dx, grad, row, height, width, add, past)
    return grad


cdef inline void row_grad(Pool pool, const float* x, const float* dy, float* dx, double* sums, Py_ssize_t p,
                          bint maximum, bint add, bint past) noexcept nogil:
    """The gradients of a row of windows; dx is the first row of dx that they touch, in a band or in place."""
    cdef Py_ssize_t q, q0, height, width, row = pool.w * b
    cdef Window window
    cdef const float* first
    cdef float* out
    cdef vec grad, run
    for q0 from 0 <= q0 < pool.q by SUM_RUN:
        run = zero()
        for q in range(q0, min(q0 + SUM_RUN, pool.q)):
            window = window_of(pool, p, q)
            first, out = x + window.h0 * row + window.w0 * b, dx + window.w0 * b
            height, width = window.h1 - window.h0, window.w1 - window.w0
            grad = load(dy + (p * pool.q + q) * b)
            if not maximum:
                grad = grad * share_of(pool, window, p, q)
            if add and height == 3 and width == 3:
                grad = window_grad(pool, first, out, grad, 3, 3, maximum, add, past)
            elif not add and height == 2 and width == 2:
                grad = window_grad(pool, first, out, grad, 2, 2, maximum, add, past)
            else:
                grad = window_grad(pool, first, out, grad, height, width, maximum, add, past)
            run = run + grad
        if maximum and sums != NULL:
            add_double(sums, run)


cdef inline void apart_grad(Pool pool, const float* x, const float* dy, float* dx, double* sums, bint maximum,
                            bint past) noexcept nogil:
    """dx of one plane whose windows do not overlap."""
    cdef Py_ssize_t p, cleared = 0
    for p in range(pool.p):
        cleared = clear_before(pool, dx, cleared, p)
        row_grad(pool, x, dy, dx + window_of(pool, p, 0).h0 * pool.w * b, sums, p, maximum, False, past)
    clear_rest(pool, dx, cleared)


cdef inline Py_ssize_t band_rows(Pool pool) noexcept nogil:
    """Rows of dx that a band has room for: those of a window, more where rows are short."""
    return max(min(pool.kh, pool.h), min(pool.h, BAND // (pool.w * b)))


cdef inline void leave_band(float* band, float* dx, Py_ssize_t count, bint past) noexcept nogil:
    """Vectors of a band to dx; zeros are left."""
    cdef Py_ssize_t i
    for i in range(count):
        put(dx + i * b, load(band + i * b), past)
        store(band + i * b, zero())


cdef inline void overlapping_grad(Pool pool, const float* x, const float* dy, float* dx, double* sums, float* band,
                                  bint maximum, bint past) noexcept nogil:
    """dx of one plane whose windows overlap.

    The band holds rows first .. first + held - 1 of dx, from its row `at` on, and zeros.
    """
    cdef Py_ssize_t p, done, first = 0, held = 0, at = 0, row = pool.w * b, rows = band_rows(pool)
    cdef Window window
    for p in range(pool.p):
        window = window_of(pool, p, 0)
        done = min(window.h0 - first, held)
        leave_band(band + at * row, dx + first * row, done * pool.w, past)
        memset(dx + (first + done) * row, 0, (window.h0 - first - done) * row * sizeof(float))
        first, held, at = window.h0, held - done, at + done
        if at + window.h1 - first > rows:
            memmove(band, band + at * row, held * row * sizeof(float))
            memset(band + max(held, at) * row, 0, (at + held - max(held, at)) * row * sizeof(float))
            at = 0
        held = window.h1 - first
        row_grad(pool, x, dy, band + at * row, sums, p, maximum, True, False)
    leave_band(band + at * row, dx + first * row, held * pool.w, past)
    clear_rest(pool, dx, first + held)


cdef void plane_grad(Pool pool, const float* x, const float* dy, float* dx, double* sums, float* band,
                     bint past) noexcept nogil:
    """dx of one plane; x is NULL for averages, band where windows do not overlap, sums where nobody wants them."""
    if sums != NULL:
        memset(sums, 0, b * sizeof(double))
    if band != NULL and x != NULL:
        overlapping_grad(pool, x, dy, dx, sums, band, True, past)
    elif band != NULL:
        overlapping_grad(pool, x, dy, dx, sums, band, False, past)
    elif x != NULL and past:
        apart_grad(pool, x, dy, dx, sums, True, True)
    elif x != NULL:
        apart_grad(pool, x, dy, dx, sums, True, False)
    elif past:
        apart_grad(pool, x, dy, dx, sums, False, True)
    else:
        apart_grad(pool, x, dy, dx, sums, False, False)
    if past:
        store_fence()


cdef int planes_grad(Pool pool, const float* x, const float* dy, float* dx, double* sums,
                     Py_ssize_t planes, int num_threads) except -1:
    """dx of all planes; x is NULL for averages, sums where nobody wants them."""
    cdef Py_ssize_t job, image = pool.h * pool.w * b, output = pool.p * pool.q * b
    cdef Py_ssize_t size = band_rows(pool) * pool.w * b
    cdef bint past = goes_past(dx, planes * image)
    cdef float* bands = NULL
    if windows_overlap(pool):
        bands = <float*>calloc(num_threads * size, sizeof(float))
        if bands == NULL:
            raise MemoryError(f"pooling gradient: {num_threads * size * sizeof(float)} bytes for rows of dx")
    for job in prange(planes, nogil=True, num_threads=num_threads, schedule="static"):
        plane_grad(pool, x + (0 if x == NULL else job * image), dy + job * output, dx + job * image,
                   NULL if sums == NULL else sums + job * b, NULL if bands == NULL else bands + threadid() * size, past)
    free(bands)
    return 0


def max_pool2d_input_grad(const float[:, :, :, :, ::1] x,     # IN   (N, CB, H, W, b)
                          const float[:, :, :, :, ::1] dy,    # IN   (N, CB, P, Q, b)
                          float[:, :, :, :, ::1] dx,          # OUT  (N, CB, H, W, b)
                          kernel, stride, padding, bint relu=False, int num_threads=1,
                          double[:, :, ::1] sums=None):       # OUT  (N, CB, b)
    """Each dy goes to the place of the maximum of its window in x; overwrites dx, and `sums` with those of its planes.

    With `relu` x is the output of a ReLU, and dx the gradient of its input.
    """
    checks.pool2d(dims(x), dims(dy), kernel, stride, padding, num_threads, names=("x", "dy"))
    checks.same(num_threads, x=dims(x), dx=dims(dx))
    checks.width("x", x.shape[4], b)
    if sums is not None:
        checks.shape("sums", dims(sums), (x.shape[0], x.shape[1], b))
    cdef Pool pool = pool_of(dims(x), dims(dy), kernel, stride, padding, False, relu)
    cdef Py_ssize_t planes = x.shape[0] * x.shape[1]
    cdef double* psums = NULL if sums is None or planes == 0 else &sums[0, 0, 0]
    if planes:
        planes_grad(pool, &x[0, 0, 0, 0, 0], &dy[0, 0, 0, 0, 0], &dx[0, 0, 0, 0, 0], psums, planes, num_threads)


def avg_pool2d_input_grad(const float[:, :, :, :, ::1] dy,    # IN   (N, CB, P, Q, b)
                          float[:, :, :, :, ::1] dx,          # OUT  (N, CB, H, W, b)
                          kernel, stride, padding, bint count_include_pad, int num_threads=1):
    """Spreads each dy evenly over its window; overwrites dx."""
    checks.pool2d(dims(dx), dims(dy), kernel, stride, padding, num_threads, names=("dx", "dy"))
    checks.width("dx", dx.shape[4], b)
    cdef Pool pool = pool_of(dims(dx), dims(dy), kernel, stride, padding, count_include_pad)
    cdef Py_ssize_t planes = dx.shape[0] * dx.shape[1]
    if planes:
        planes_grad(pool, NULL, &dy[0, 0, 0, 0, 0], &dx[0, 0, 0, 0, 0], NULL, planes, num_threads)
