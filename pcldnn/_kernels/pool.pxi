# Max and average pooling.
#
# a. Bound by memory: each plane (one image, one channel block) is read once, in row order, whole vectors of
#    channels. A row of the image stays in the L1 cache while the windows that overlap on it are computed.
# b. Windows are clipped to the image by their loop bounds, so borders and the last window of the ceil rule
#    run the same code. checks.pool2d makes sure that no window is empty.
# c. Forward jobs are output rows. Backward jobs are planes: windows may overlap in rows, and a plane is
#    written by one thread in row order, so the sums do not depend on the number of threads.
# d. The maximum's place is found again from x instead of being stored: x is there anyway, and an index array
#    would cost more memory traffic than it saves. First maximum in row-major order, NaN wins, as in PyTorch.
# e. Windows of 2x2 (apart) and 3x3 (overlapping) have their sizes compiled in (the window functions are always
#    inlined); others run the same code with sizes known at run time.
# f. The gradient of a ReLU whose output was pooled costs nothing here: it is that of the maximum of each window.
# g. Backward clears a row of dx just before its first window adds to it, not the whole plane beforehand. Windows that
#    do not overlap are written, not added; where they tile the rows, only the rest of the rows is cleared.

from libc.math cimport NAN

cdef extern from "simd_math.h" nogil:
    vec vmax "vec_max"(vec a, vec b)
    ivec isnan "vec_isnan"(vec a)
    void argmax "vec_argmax"(vec* best, ivec* where, vec a, int tap)
    vec where_is "vec_where"(ivec where, int tap, vec a)
    ivec ibroadcast "ivec_set"(int s)

cdef struct Pool:
    Py_ssize_t h, w, p, q                 # image and output
    Py_ssize_t kh, kw, sh, sw, ph, pw     # kernel, stride, padding
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


cdef inline vec window_max(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width) noexcept nogil:
    """Largest value of a window whose first pixel is at x; `row` floats from one row to the next."""
    cdef Py_ssize_t h, w
    cdef vec value, best = load(x)
    cdef ivec bad = isnan(best)
    for h in range(height):
        for w in range(width):
            value = load(x + h * row + w * b)
            best = vmax(best, value)
            bad = bad | isnan(value)
    return select(bad, broadcast(NAN), best)


cdef inline vec window_sum(const float* x, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width) noexcept nogil:
    """Sum of a window."""
    cdef Py_ssize_t h, w
    cdef vec total = zero()
    for h in range(height):
        for w in range(width):
            total = total + load(x + h * row + w * b)
    return total


cdef inline void window_max_grad(const float* x, float* dx, vec grad, Py_ssize_t row, Py_ssize_t height,
                                 Py_ssize_t width, bint relu, bint add) noexcept nogil:
    """Puts grad (`add`: adds it) to dx at the place of the maximum of a window, 0 elsewhere.

    With `relu` nowhere where the maximum is not positive.
    """
    cdef Py_ssize_t h, w, at
    cdef vec best = load(x)
    cdef ivec where = ibroadcast(0)
    for h in range(height):
        for w in range(width):
            argmax(&best, &where, load(x + h * row + w * b), <int>(h * width + w))
    if relu:
        grad = relu_slope(best, grad)
    for h in range(height):
        for w in range(width):
            at = h * row + w * b
            if add:
                store(dx + at, load(dx + at) + where_is(where, <int>(h * width + w), grad))
            else:
                store(dx + at, where_is(where, <int>(h * width + w), grad))


cdef inline void window_fill(float* dx, vec share, Py_ssize_t row, Py_ssize_t height, Py_ssize_t width,
                             bint add) noexcept nogil:
    """Puts share (`add`: adds it) to dx all over a window."""
    cdef Py_ssize_t h, w, at
    for h in range(height):
        for w in range(width):
            at = h * row + w * b
            if add:
                store(dx + at, load(dx + at) + share)
            else:
                store(dx + at, share)


cdef void max_row(Pool pool, const float* x, float* y, Py_ssize_t p) noexcept nogil:
    """Output row p of one plane."""
    cdef Py_ssize_t q, height, width, row = pool.w * b
    cdef Window window
    cdef const float* first
    cdef vec best
    for q in range(pool.q):
        window = window_of(pool, p, q)
        first = x + window.h0 * row + window.w0 * b
        height, width = window.h1 - window.h0, window.w1 - window.w0
        if height == 2 and width == 2:
            best = window_max(first, row, 2, 2)
        elif height == 3 and width == 3:
            best = window_max(first, row, 3, 3)
        else:
            best = window_max(first, row, height, width)
        store(y + (p * pool.q + q) * b, best)


cdef void average_row(Pool pool, const float* x, float* y, Py_ssize_t p) noexcept nogil:
    """Output row p of one plane."""
    cdef Py_ssize_t q, height, width, row = pool.w * b
    cdef Window window
    cdef const float* first
    cdef vec total
    for q in range(pool.q):
        window = window_of(pool, p, q)
        first = x + window.h0 * row + window.w0 * b
        height, width = window.h1 - window.h0, window.w1 - window.w0
        if height == 2 and width == 2:
            total = window_sum(first, row, 2, 2)
        elif height == 3 and width == 3:
            total = window_sum(first, row, 3, 3)
        else:
            total = window_sum(first, row, height, width)
        store(y + (p * pool.q + q) * b, total / broadcast(area_of(pool, p, q)))


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


cdef void max_plane_grad(Pool pool, const float* x, const float* dy, float* dx) noexcept nogil:
    """dx of one plane."""
    cdef Py_ssize_t p, q, first, height, width, row = pool.w * b, cleared = 0
    cdef Window window
    cdef vec grad
    cdef bint add = windows_overlap(pool)
    for p in range(pool.p):
        cleared = clear_before(pool, dx, cleared, p)
        for q in range(pool.q):
            window = window_of(pool, p, q)
            first = window.h0 * row + window.w0 * b
            height, width = window.h1 - window.h0, window.w1 - window.w0
            grad = load(dy + (p * pool.q + q) * b)
            if add and height == 3 and width == 3:
                window_max_grad(x + first, dx + first, grad, row, 3, 3, pool.relu, True)
            elif add:
                window_max_grad(x + first, dx + first, grad, row, height, width, pool.relu, True)
            elif height == 2 and width == 2:
                window_max_grad(x + first, dx + first, grad, row, 2, 2, pool.relu, False)
            else:
                window_max_grad(x + first, dx + first, grad, row, height, width, pool.relu, False)
    clear_rest(pool, dx, cleared)


cdef void average_plane_grad(Pool pool, const float* dy, float* dx) noexcept nogil:
    """dx of one plane."""
    cdef Py_ssize_t p, q, first, height, width, row = pool.w * b, cleared = 0
    cdef Window window
    cdef vec share
    cdef bint add = windows_overlap(pool)
    for p in range(pool.p):
        cleared = clear_before(pool, dx, cleared, p)
        for q in range(pool.q):
            window = window_of(pool, p, q)
            first = window.h0 * row + window.w0 * b
            height, width = window.h1 - window.h0, window.w1 - window.w0
            share = load(dy + (p * pool.q + q) * b) / broadcast(area_of(pool, p, q))
            if add and height == 3 and width == 3:
                window_fill(dx + first, share, row, 3, 3, True)
            elif add:
                window_fill(dx + first, share, row, height, width, True)
            elif height == 2 and width == 2:
                window_fill(dx + first, share, row, 2, 2, False)
            else:
                window_fill(dx + first, share, row, height, width, False)
    clear_rest(pool, dx, cleared)


def max_pool2d_forward(const float[:, :, :, :, ::1] x,        # IN   (N, CB, H, W, b)
                       float[:, :, :, :, ::1] y,              # OUT  (N, CB, P, Q, b)
                       kernel, stride, padding, int num_threads=1):
    """y = largest value of each window."""
    checks.pool2d(dims(x), dims(y), kernel, stride, padding, num_threads)
    checks.width("x", x.shape[4], b)
    cdef Pool pool = pool_of(dims(x), dims(y), kernel, stride, padding)
    cdef Py_ssize_t job, plane, jobs = x.shape[0] * x.shape[1] * pool.p
    if jobs == 0:
        return
    cdef const float* px = &x[0, 0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        plane = job // pool.p
        max_row(pool, px + plane * pool.h * pool.w * b, py + plane * pool.p * pool.q * b, job % pool.p)


def max_pool2d_input_grad(const float[:, :, :, :, ::1] x,     # IN   (N, CB, H, W, b)
                          const float[:, :, :, :, ::1] dy,    # IN   (N, CB, P, Q, b)
                          float[:, :, :, :, ::1] dx,          # OUT  (N, CB, H, W, b)
                          kernel, stride, padding, bint relu=False, int num_threads=1):
    """Each dy goes to the place of the maximum of its window in x; overwrites dx.

    With `relu` x is the output of a ReLU, and dx the gradient of its input.
    """
    checks.pool2d(dims(x), dims(dy), kernel, stride, padding, num_threads, names=("x", "dy"))
    checks.same(num_threads, x=dims(x), dx=dims(dx))
    checks.width("x", x.shape[4], b)
    cdef Pool pool = pool_of(dims(x), dims(dy), kernel, stride, padding, False, relu)
    cdef Py_ssize_t job, image = pool.h * pool.w * b, output = pool.p * pool.q * b, jobs = x.shape[0] * x.shape[1]
    if jobs == 0:
        return
    cdef const float* px = &x[0, 0, 0, 0, 0]
    cdef const float* pdy = &dy[0, 0, 0, 0, 0]
    cdef float* pdx = &dx[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        max_plane_grad(pool, px + job * image, pdy + job * output, pdx + job * image)


def avg_pool2d_forward(const float[:, :, :, :, ::1] x,        # IN   (N, CB, H, W, b)
                       float[:, :, :, :, ::1] y,              # OUT  (N, CB, P, Q, b)
                       kernel, stride, padding, bint count_include_pad, int num_threads=1):
    """y = mean of each window."""
    checks.pool2d(dims(x), dims(y), kernel, stride, padding, num_threads)
    checks.width("x", x.shape[4], b)
    cdef Pool pool = pool_of(dims(x), dims(y), kernel, stride, padding, count_include_pad)
    cdef Py_ssize_t job, plane, jobs = x.shape[0] * x.shape[1] * pool.p
    if jobs == 0:
        return
    cdef const float* px = &x[0, 0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        plane = job // pool.p
        average_row(pool, px + plane * pool.h * pool.w * b, py + plane * pool.p * pool.q * b, job % pool.p)


def avg_pool2d_input_grad(const float[:, :, :, :, ::1] dy,    # IN   (N, CB, P, Q, b)
                          float[:, :, :, :, ::1] dx,          # OUT  (N, CB, H, W, b)
                          kernel, stride, padding, bint count_include_pad, int num_threads=1):
    """Spreads each dy evenly over its window; overwrites dx."""
    checks.pool2d(dims(dx), dims(dy), kernel, stride, padding, num_threads, names=("dx", "dy"))
    checks.width("dx", dx.shape[4], b)
    cdef Pool pool = pool_of(dims(dx), dims(dy), kernel, stride, padding, count_include_pad)
    cdef Py_ssize_t job, jobs = dx.shape[0] * dx.shape[1]
    if jobs == 0:
        return
    cdef const float* pdy = &dy[0, 0, 0, 0, 0]
    cdef float* pdx = &dx[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        average_plane_grad(pool, pdy + job * pool.p * pool.q * b, pdx + job * pool.h * pool.w * b)
