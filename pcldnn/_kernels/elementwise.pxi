# Kernels that treat every element alike: ReLU, sigmoid, tanh, dropout; and the bias gradient, one pass over
# the same data.
#
# a. All are bound by memory: one pass, whole vectors, in place where the caller wants it (x and y the same
#    array).
# b. Layout is irrelevant to ReLU, sigmoid and tanh, so they take arrays of any shape as one run of floats,
#    cut in jobs of RUN floats; a tail shorter than a vector goes through the same arithmetic (simd_math.h,
#    c).
# c. Padded lanes hold 0 and keep it: f(0) = 0 but for the sigmoid, which clears them afterwards.
# d. NaN passes through every function: a diverged network must stay visible.
# e. Dropout uses all four words of a Philox call: those of channels c, c+16, c+32, c+48, which lie in the
#    same lane of four vectors for every SIMD width up to 16. So the mask does not depend on b, and no word
#    moves between lanes.
# f. The bias gradient adds runs of at most 64 vectors in float32 (4 accumulators, 16 terms each) and
#    everything beyond in double, so its error does not grow with minibatch or image size. Image groups are
#    cut by size alone. Where dy has still to be masked by a ReLU, the same pass does that, in place.

cdef extern from "simd_math.h" nogil:
    vec load_some "vec_load_some"(const float* p, int count, float fill)
    void store_some "vec_store_some"(float* p, vec a, int count)
    vec first_lanes "vec_first_lanes"(vec a, vec b, int count)
    void add_double "vec_add_double"(double* sums, vec a)
    vec logistic "vec_logistic"(vec x)
    vec vtanh "vec_tanh"(vec x)
    void philox_below "vec_philox_below"(ivec* below, unsigned int start, unsigned int step, unsigned long long sample,
                                         unsigned int epoch, unsigned int seed, unsigned int layer,
                                         unsigned int threshold)
    ivec not_above_zero "vec_not_above_zero"(vec a)

cdef enum:
    RUN = 4096           # floats of an element-wise job [elements]
    BIAS_RUN = 64        # vectors that are added in float32 [vectors]
    BIAS_JOB = 8         # channel blocks of a bias-gradient job [blocks]
    WORD_RUN = 16        # adjacent channels that use the same word of their Philox calls [channels]
    BIAS_GROUP = 16384   # vectors of an image group of a bias-gradient job [vectors]

ctypedef vec (*unary)(vec x) noexcept nogil
ctypedef vec (*binary)(vec y, vec dy) noexcept nogil


cdef inline Py_ssize_t runs_of(Py_ssize_t size) noexcept nogil:
    return (size + RUN - 1) // RUN


cdef inline void map_run(unary f, Py_ssize_t job, Py_ssize_t size, const float* x, float* y) noexcept nogil:
    """y = f(x) on the floats of one job."""
    cdef Py_ssize_t i = job * RUN
    cdef Py_ssize_t stop = min(i + RUN, size)
    while i + b <= stop:
        store(y + i, f(load(x + i)))
        i += b
    if i < stop:
        store_some(y + i, f(load_some(x + i, <int>(stop - i), 0)), <int>(stop - i))


cdef inline void map_run2(binary f, Py_ssize_t job, Py_ssize_t size, const float* y, const float* dy,
                          float* dx) noexcept nogil:
    """dx = f(y, dy) on the floats of one job."""
    cdef Py_ssize_t i = job * RUN
    cdef Py_ssize_t stop = min(i + RUN, size)
    cdef int rest
    while i + b <= stop:
        store(dx + i, f(load(y + i), load(dy + i)))
        i += b
    if i < stop:
        rest = <int>(stop - i)
        store_some(dx + i, f(load_some(y + i, rest, 0), load_some(dy + i, rest, 0)), rest)


cdef inline vec relu_slope(vec y, vec dy) noexcept nogil:
    return select(not_above_zero(y), zero(), dy)


cdef inline vec sigmoid_slope(vec y, vec dy) noexcept nogil:
    return dy * (y * (1 - y))


cdef inline vec tanh_slope(vec y, vec dy) noexcept nogil:
    return dy * (1 - y * y)


cdef const float* source(str name, array) except? NULL:
    """Address of a float32 C-contiguous array of any shape that is only read."""
    cdef const float[::1] flat
    if not array.flags.c_contiguous or array.dtype != "float32":
        raise ValueError(f"{name} is {array.dtype} with strides {array.strides}, wanted C-contiguous float32")
    flat = array.reshape(-1)
    return &flat[0] if flat.shape[0] else NULL


cdef float* target(str name, array) except? NULL:
    """Address of a float32 C-contiguous array of any shape that is written."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, wanted a writable array")
    return <float*>source(name, array)


def relu_forward(x,                   # IN   any shape
                 y,                   # OUT  same shape, may be x
                 int num_threads=1):
    """y = max(0, x)."""
    checks.same(num_threads, x=x.shape, y=y.shape)
    cdef const float* px = source("x", x)
    cdef float* py = target("y", y)
    cdef Py_ssize_t size = x.size, job
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run(vrelu, job, size, px, py)


def relu_input_grad(y,                # IN   any shape
                    dy,               # IN   same shape
                    dx,               # OUT  same shape, may be dy
                    int num_threads=1):
    """dx = dy where y > 0, else 0 (a NaN in y lets dy through)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    cdef const float* py = source("y", y)
    cdef const float* pdy = source("dy", dy)
    cdef float* pdx = target("dx", dx)
    cdef Py_ssize_t size = y.size, job
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run2(relu_slope, job, size, py, pdy, pdx)


def sigmoid_forward(const float[:, :, :, ::1] x,   # IN   (N, CB, M, b)
                    float[:, :, :, ::1] y,         # OUT  (N, CB, M, b), may be x
                    Py_ssize_t channels, int num_threads=1):
    """y = 1 / (1 + exp(-x)); the lanes beyond `channels` become 0."""
    checks.same(num_threads, x=dims(x), y=dims(y))
    checks.channels(channels, dims(x))
    cdef Py_ssize_t count = x.shape[0], pixels = x.shape[2]
    cdef Py_ssize_t plane = x.shape[2] * b, image = x.shape[1] * plane, size = count * image, job
    cdef int lanes = <int>(channels - (x.shape[1] - 1) * b)
    if size == 0:
        return
    checks.width("x", x.shape[3], b)
    cdef const float* px = &x[0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0]
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run(logistic, job, size, px, py)
    if lanes < b:
        for job in prange(count, nogil=True, num_threads=num_threads, schedule="static"):
            clear_lanes(py + (job + 1) * image - plane, pixels, lanes)


cdef void clear_lanes(float* y, Py_ssize_t pixels, int lanes) noexcept nogil:
    """Zeros in the lanes from `lanes` on of one channel block."""
    cdef Py_ssize_t m
    for m in range(pixels):
        store(y + m * b, first_lanes(zero(), load(y + m * b), lanes))


def sigmoid_input_grad(y,             # IN   any shape
                       dy,            # IN   same shape
                       dx,            # OUT  same shape, may be dy
                       int num_threads=1):
    """dx = dy y (1 - y)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    cdef const float* py = source("y", y)
    cdef const float* pdy = source("dy", dy)
    cdef float* pdx = target("dx", dx)
    cdef Py_ssize_t size = y.size, job
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run2(sigmoid_slope, job, size, py, pdy, pdx)


def tanh_forward(x,                   # IN   any shape
                 y,                   # OUT  same shape, may be x
                 int num_threads=1):
    """y = tanh(x)."""
    checks.same(num_threads, x=x.shape, y=y.shape)
    cdef const float* px = source("x", x)
    cdef float* py = target("y", y)
    cdef Py_ssize_t size = x.size, job
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run(vtanh, job, size, px, py)


def tanh_input_grad(y,                # IN   any shape
                    dy,               # IN   same shape
                    dx,               # OUT  same shape, may be dy
                    int num_threads=1):
    """dx = dy (1 - y^2)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    cdef const float* py = source("y", y)
    cdef const float* pdy = source("dy", dy)
    cdef float* pdx = target("dx", dx)
    cdef Py_ssize_t size = y.size, job
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        map_run2(tanh_slope, job, size, py, pdy, pdx)


cdef struct Mask:
    unsigned int seed, layer, epoch, threshold
    float factor


cdef void dropout_group(const float* x, float* y, Py_ssize_t group, Py_ssize_t blocks, Py_ssize_t pixels,
                        long long sample, Mask mask) noexcept nogil:
    """One group of 4*WORD_RUN channels of one sample; x and y are the sample's."""
    cdef Py_ssize_t part, m, block, at
    cdef int word
    cdef ivec dropped[4]
    for part in range(WORD_RUN // b):
        for m in range(pixels):
            philox_below(dropped, <unsigned int>((group * WORD_RUN + part * b) * pixels + m), <unsigned int>pixels,
                         sample, mask.epoch, mask.seed, mask.layer, mask.threshold)
            for word in range(4):
                block = (group * 4 + word) * (WORD_RUN // b) + part
                if block < blocks:
                    at = (block * pixels + m) * b
                    store(y + at, select(dropped[word], zero(), load(x + at) * mask.factor))


def dropout(const float[:, :, :, ::1] x,         # IN   (N, CB, M, b)
            float[:, :, :, ::1] y,               # OUT  (N, CB, M, b), may be x
            double p, seed, layer, epoch,
            const long long[::1] sample_ids,     # IN   (N,)
            Py_ssize_t channels, int num_threads=1):
    """y = x / (1 - p) with probability 1 - p, else 0; the mask is that of the twin in reference_elementwise.py."""
    checks.dropout(dims(x), dims(y), p, seed, layer, epoch, dims(sample_ids), channels, num_threads)
    cdef Py_ssize_t blocks = x.shape[1], pixels = x.shape[2], image = blocks * pixels * b, job
    cdef Py_ssize_t groups = (channels + 4 * WORD_RUN - 1) // (4 * WORD_RUN), jobs = x.shape[0] * groups
    cdef Mask mask
    if jobs * pixels == 0:
        return
    checks.width("x", x.shape[3], b)
    mask.seed, mask.layer, mask.epoch = seed, layer, epoch
    mask.threshold = min(round(p * 2.0**32), 2**32 - 1)
    mask.factor = 1 / (1 - p)
    cdef const float* px = &x[0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0]
    cdef const long long* ids = &sample_ids[0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        dropout_group(px + job // groups * image, py + job // groups * image, job % groups, blocks, pixels,
                      ids[job // groups], mask)


cdef inline vec taken(const float* y, float* dy, bint relu) noexcept nogil:
    """A vector of dy, with `relu` masked by y in place."""
    cdef vec grad = load(dy)
    if relu:
        grad = relu_slope(load(y), grad)
        store(dy, grad)
    return grad


cdef inline vec sum_run(const float* y, float* dy, Py_ssize_t count, bint relu) noexcept nogil:
    """Sum of `count` <= BIAS_RUN adjacent vectors."""
    cdef vec s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero()
    cdef Py_ssize_t i = 0
    while i + 4 <= count:
        s0 = s0 + taken(y + i * b, dy + i * b, relu)
        s1 = s1 + taken(y + (i + 1) * b, dy + (i + 1) * b, relu)
        s2 = s2 + taken(y + (i + 2) * b, dy + (i + 2) * b, relu)
        s3 = s3 + taken(y + (i + 3) * b, dy + (i + 3) * b, relu)
        i += 4
    while i < count:
        s0 = s0 + taken(y + i * b, dy + i * b, relu)
        i += 1
    return (s0 + s1) + (s2 + s3)


cdef inline void bias_group(const float* y, float* dy, Py_ssize_t images, Py_ssize_t image, int blocks,
                            Py_ssize_t pixels, double* sums, bint relu) noexcept nogil:
    """sums[block*b + lane] of some images and some adjacent channel blocks."""
    cdef vec run[BIAS_JOB]
    cdef Py_ssize_t n, n0, m, at
    cdef Py_ssize_t together = max(1, BIAS_RUN // pixels)      # images whose pixels make up a run
    cdef int k
    memset(sums, 0, blocks * b * sizeof(double))
    for n0 from 0 <= n0 < images by together:
        for m from 0 <= m < pixels by BIAS_RUN:
            for k in range(blocks):
                run[k] = zero()
            for n in range(n0, min(n0 + together, images)):
                for k in range(blocks):
                    at = n * image + (k * pixels + m) * b
                    if pixels == 1:
                        run[k] = run[k] + taken(y + at, dy + at, relu)
                    else:
                        run[k] = run[k] + sum_run(y + at, dy + at, min(BIAS_RUN, pixels - m), relu)
            for k in range(blocks):
                add_double(sums + k * b, run[k])


cdef int sum_channels(const float* y, float* dy, tuple shape, float[::1] dbias, bint relu, int num_threads) except -1:
    """dbias from dy of `shape` (N, KB, M, b), which with `relu` is masked by y in place."""
    cdef Py_ssize_t count = shape[0], blocks = shape[1], pixels = shape[2], image = blocks * pixels * b
    # One channel block a job reads long runs of memory; where they are short, adjacent blocks are taken
    # together.
    cdef Py_ssize_t together = 1 if pixels >= BIAS_RUN else BIAS_JOB
    cdef Py_ssize_t per_group = max(1, BIAS_GROUP // max(1, pixels * together))
    cdef Py_ssize_t groups = (count + per_group - 1) // per_group, spans = (blocks + together - 1) // together
    cdef Py_ssize_t job, group, k, i, at, images
    cdef double total
    cdef double* sums = <double*>malloc(groups * blocks * b * sizeof(double))
    if sums == NULL:
        raise MemoryError(f"bias_grad: {groups * blocks * b * sizeof(double)} bytes of partial sums")
    for job in prange(groups * spans, nogil=True, num_threads=num_threads, schedule="static"):
        group = job // spans
        k = job % spans * together
        at = group * per_group * image + k * pixels * b
        images = min(per_group, count - group * per_group)
        if relu:
            bias_group(y + at, dy + at, images, image, <int>min(together, blocks - k), pixels,
                       sums + (group * blocks + k) * b, True)
        else:
            bias_group(NULL, dy + at, images, image, <int>min(together, blocks - k), pixels,
                       sums + (group * blocks + k) * b, False)
    for i in range(blocks * b):
        total = 0
        for group in range(groups):
            total += sums[group * blocks * b + i]
        dbias[i] = <float>total
    free(sums)
    return 0


def bias_grad(const float[:, :, :, ::1] dy,      # IN   (N, KB, M, b)
              float[::1] dbias,                  # OUT  (KB*b,)
              int num_threads=1):
    """dbias = sum of dy over images and pixels; overwrites (zeros when N = 0)."""
    checks.bias_grad(dims(dy), dims(dbias), num_threads)
    checks.width("dy", dy.shape[3], b)
    if dy.shape[0] * dy.shape[1] * dy.shape[2] == 0:
        dbias[:] = 0
        return
    sum_channels(NULL, <float*>&dy[0, 0, 0, 0], dims(dy), dbias, False, num_threads)


def relu_bias_grad(const float[:, :, :, ::1] y,  # IN      (N, KB, M, b)
                   float[:, :, :, ::1] dy,       # IN/OUT  (N, KB, M, b)
                   float[::1] dbias,             # OUT     (KB*b,)
                   int num_threads=1):
    """`relu_input_grad` in place and `bias_grad` of its result in one pass, with the same bits."""
    checks.same(num_threads, y=dims(y), dy=dims(dy))
    checks.bias_grad(dims(dy), dims(dbias), num_threads)
    checks.width("dy", dy.shape[3], b)
    if dy.shape[0] * dy.shape[1] * dy.shape[2] == 0:
        dbias[:] = 0
        return
    sum_channels(&y[0, 0, 0, 0], &dy[0, 0, 0, 0], dims(dy), dbias, True, num_threads)
