# Max and average pooling: windows, and the forward pass. Gradients: pool_input_grad.pxi.
#
# a. Bound by memory: each plane (one image, one channel block) is read once, in row order, whole vectors of
#    channels. A row of the image stays in the L1 cache while the windows that overlap on it are computed. A job is an
#    output row.
# b. Windows are clipped to the image by their loop bounds, so borders and the last window of the ceil rule
#    run the same code. checks.pool2d makes sure that no window is empty.
# c. Windows of 2x2 (apart) and 3x3 (overlapping) have their sizes compiled in (the window functions are always
#    inlined); others run the same code with sizes known at run time.

from libc.math cimport NAN

cdef extern from "simd_math.h" nogil:
    vec vmax "vec_max"(vec a, vec b)
    ivec isnan "vec_isnan"(vec a)

cdef struct Pool:
    Py_ssize_t h, w, p, q                 # image and output
    Py_ssize_t kh, kw, sh, sw, ph, pw     # kernel, stride, padding
    float whole_share                     # 1 / the area of a window that is not clipped
    bint include_pad                      # averages count the padding
    bint relu                             # the input is a ReLU's: its gradient is applied as well

cdef struct Window:
    Py_ssize_t h0, h1, w0, w1             # rows h0..h1-1 and columns w0..w1-1 of the image


cdef Pool pool_of(tuple x, tuple y, kernel, stride, padding, bint include_pad=False, bint relu=False):
    cdef Pool pool
    pool.h, pool.w, pool.p, pool.q = x[2], x[3], y[2], y[3]
    pool.kh, pool.kw = kernel
    pool.sh, pool.sw = stride
    pool.ph, pool.pw = padding
    pool.whole_share = 1 / <float>(pool.kh * pool.kw)
    pool.include_pad, pool.relu = include_pad, relu
    return pool


cdef inline Window window_of(Pool pool, Py_ssize_t p, Py_ssize_t q) noexcept nogil:
    """What the window of output (p, q) has inside the image."""
    cdef Window window
    cdef Py_ssize_t h = p * pool.sh - pool.ph, w = q * pool.sw - pool.pw
    window.h0, window.h1 = max(h, 0), min(h + pool.kh, pool.h)
    window.w0, window.w1 = max(w, 0), min(w + pool.kw, pool.w)
    return window


cdef inline float area_of(Pool pool, Py_ssize_t p, Py_ssize_t q) noexcept nogil:
    """Number of pixels that the average of output (p, q) divides by."""
    cdef Window window
    cdef Py_ssize_t h, w
    if pool.include_pad:
        h, w = p * pool.sh - pool.ph, q * pool.sw - pool.pw
        return <float>((min(h + pool.kh, pool.h + pool.ph) - h) * (min(w + pool.kw, pool.w + pool.pw) - w))
    window = window_of(pool, p, q)
    return <float>((window.h1 - window.h0) * (window.w1 - window.w0))


cdef inline float share_of(Pool pool, Window window, Py_ssize_t p, Py_ssize_t q) noexcept nogil:
    """1 / area_of."""
    if window.h1 - window.h0 == pool.kh and window.w1 - window.w0 == pool.kw:
        return pool.whole_share
    return 1 / area_of(pool, p, q)


cdef inline vec largest_of(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width,
                           ivec* bad) noexcept nogil:
    """Largest value of a window but for NaN, and where there is one; first pixel at x, `row` floats to the next row."""
    cdef Py_ssize_t h, w
    cdef vec value, best = load(x)
    bad[0] = isnan(best)
    for h in range(height):
        for w in range(width):
            value = load(x + h * row + w * b)
            best = vmax(best, value)
            bad[0] = bad[0] | isnan(value)
    return best


cdef inline vec window_max(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width) noexcept nogil:
    """Largest value of a window, NaN if there is one."""
    cdef ivec bad
    cdef vec best = largest_of(x, row, height, width, &bad)
    return select(bad, broadcast(NAN), best)


cdef inline vec window_sum(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width) noexcept nogil:
    """Sum of a window."""
    cdef Py_ssize_t h, w
    cdef vec total = zero()
    for h in range(height):
        for w in range(width):
            total = total + load(x + h * row + w * b)
    return total


cdef inline vec window_value(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width,
                             bint maximum) noexcept nogil:
    """Largest value of a window, or its sum."""
    return window_max(x, row, height, width) if maximum else window_sum(x, row, height, width)


cdef inline void pool_row(Pool pool, const float* x, float* y, Py_ssize_t p, bint maximum) noexcept nogil:
    """Output row p of one plane."""
    cdef Py_ssize_t q, height, width, row = pool.w * b
    cdef Window window
    cdef const float* first
    cdef vec value
    for q in range(pool.q):
        window = window_of(pool, p, q)
        first = x + window.h0 * row + window.w0 * b
        height, width = window.h1 - window.h0, window.w1 - window.w0
        if height == 2 and width == 2:
            value = window_value(first, row, 2, 2, maximum)
        elif height == 3 and width == 3:
            value = window_value(first, row, 3, 3, maximum)
        else:
            value = window_value(first, row, height, width, maximum)
        if not maximum:
            value = value * share_of(pool, window, p, q)
        store(y + (p * pool.q + q) * b, value)


cdef void any_row(Pool pool, const float* x, float* y, Py_ssize_t p, bint maximum) noexcept nogil:
    """The same, with `maximum` compiled in."""
    if maximum:
        pool_row(pool, x, y, p, True)
    else:
        pool_row(pool, x, y, p, False)


cdef int pool_forward(Pool pool, const float[:, :, :, :, ::1] x, float[:, :, :, :, ::1] y, bint maximum,
                      int num_threads) except -1:
    cdef Py_ssize_t job, plane, jobs = x.shape[0] * x.shape[1] * pool.p
    if jobs == 0:
        return 0
    cdef const float* px = &x[0, 0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        plane = job // pool.p
        any_row(pool, px + plane * pool.h * pool.w * b, py + plane * pool.p * pool.q * b, job % pool.p, maximum)
    return 0


def max_pool2d_forward(const float[:, :, :, :, ::1] x,        # IN   (N, CB, H, W, b)
                       float[:, :, :, :, ::1] y,              # OUT  (N, CB, P, Q, b)
                       kernel, stride, padding, int num_threads=1):
    """y = largest value of each window."""
    checks.pool2d(dims(x), dims(y), kernel, stride, padding, num_threads)
    checks.width("x", x.shape[4], b)
    cdef Pool pool = pool_of(dims(x), dims(y), kernel, stride, padding)
    pool_forward(pool, x, y, True, num_threads)


def avg_pool2d_forward(const float[:, :, :, :, ::1] x,        # IN   (N, CB, H, W, b)
                       float[:, :, :, :, ::1] y,              # OUT  (N, CB, P, Q, b)
                       kernel, stride, padding, bint count_include_pad, int num_threads=1):
    """y = mean of each window."""
    checks.pool2d(dims(x), dims(y), kernel, stride, padding, num_threads)
    checks.width("x", x.shape[4], b)
    cdef Pool pool = pool_of(dims(x), dims(y), kernel, stride, padding, count_include_pad)
    pool_forward(pool, x, y, False, num_threads)
