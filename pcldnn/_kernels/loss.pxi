# Softmax and cross entropy in one kernel: the loss of each sample and the gradient of the logits.
#
# a. The loss is log(sum exp(z - max)) - (z[label] - max) in double: it neither overflows nor saturates, as
#    the logarithm of a rounded softmax does (a loss of 60 stays 60).
# b. A row is touched three times while it lies in the cache: maximum; exp and sum, with exp kept in a row of the
#    thread's own; scaling. So dlogits is written once, past the caches when it is large, and may be the array of the
#    logits. A job is a row; rows of one class block each are very short, but static scheduling makes a job no more
#    than a loop turn.
# c. Computing exp leaves the memory idle: meanwhile the next row is fetched (for the last row that is a fetch of
#    whatever lies behind it, which does nothing).
# d. Lanes beyond num_classes are read as -inf, so that they add exp(-inf) = 0 and leave 0.
# e. Labels are checked, all of them, before any memory is touched. NaN or infinite logits give a NaN loss.

from libc.math cimport INFINITY, log

cdef extern from "simd_math.h" nogil:
    float largest "vec_largest"(vec a)
    vec vexp "vec_exp"(vec x)

cdef enum:
    LOSS_RUN = 16        # vectors of exp that are added in float32 before the sum goes on in double [vectors]


cdef inline vec load_class(const float* logits, Py_ssize_t i, Py_ssize_t classes) noexcept nogil:
    """Logits i..i+b-1, -inf where there is no class."""
    cdef vec z = load(logits + i)
    if i + b > classes:
        z = first_lanes(broadcast(-INFINITY), z, <int>(classes - i))
    return z


cdef inline float row_largest(const float* logits, Py_ssize_t classes) noexcept nogil:
    """Largest logit of a row; four chains of operations, for each waits for the one before."""
    cdef vec m0 = broadcast(-INFINITY), m1 = m0, m2 = m0, m3 = m0
    cdef Py_ssize_t i = 0
    while i + 4 * b <= classes:
        m0, m1 = vmax(m0, load(logits + i)), vmax(m1, load(logits + i + b))
        m2, m3 = vmax(m2, load(logits + i + 2 * b)), vmax(m3, load(logits + i + 3 * b))
        i += 4 * b
    while i < classes:
        m0 = vmax(m0, load_class(logits, i, classes))
        i += b
    return largest(vmax(vmax(m0, m1), vmax(m2, m3)))


cdef double loss_row(const float* logits, float* dlogits, float* exps, Py_ssize_t label, Py_ssize_t classes,
                     Py_ssize_t padded, float scale, bint past) noexcept nogil:
    """Loss of one sample; writes its gradient. `exps` has room for a row."""
    cdef double sums[b]
    cdef double total = 0, wanted = logits[label]
    cdef vec run, e, grad
    cdef float shift = row_largest(logits, classes), factor
    cdef Py_ssize_t i, start, own = label - label % b
    memset(sums, 0, sizeof(sums))
    for start from 0 <= start < classes by LOSS_RUN * b:
        run = zero()
        for i from start <= i < min(start + LOSS_RUN * b, classes) by b:
            prefetch(logits + padded + i)
            e = vexp(load_class(logits, i, classes) - shift)
            run = run + e
            store(exps + i, e)
        add_double(sums, run)
    for i in range(b):
        total += sums[i]
    factor = <float>(scale / total)
    for i from 0 <= i < padded by b:
        grad = load(exps + i) * factor if i < classes else zero()
        if i + b > classes:
            grad = first_lanes(zero(), grad, <int>max(classes - i, 0))     # also where there is 0 times a NaN
        if i == own:
            store(exps + i, grad)
            exps[label] -= scale
            grad = load(exps + i)
        put(dlogits + i, grad, past)
    if past:
        store_fence()
    return log(total) + (shift - wanted)


def softmax_cross_entropy(const float[:, ::1] logits,      # IN   (N, Kpad)
                          const long long[::1] labels,     # IN   (N,)
                          Py_ssize_t num_classes, float scale,
                          double[::1] losses,              # OUT  (N,)
                          float[:, ::1] dlogits,           # OUT  (N, Kpad), may be logits
                          int num_threads=1):
    """losses[n] = log(sum exp(logits[n])) - logits[n, labels[n]]; dlogits = scale (softmax - onehot)."""
    checks.softmax_cross_entropy(dims(logits), dims(labels), num_classes, dims(losses), dims(dlogits), num_threads)
    cdef Py_ssize_t n, count = logits.shape[0], padded = logits.shape[1]
    if padded % b:
        raise ValueError(f"logits has rows of {padded} floats, wanted a multiple of {b}, the SIMD width of this target")
    for n in range(count):
        if not 0 <= labels[n] < num_classes:
            checks.label_range(n, labels[n], num_classes)
    if count == 0:
        return
    cdef const float* z = &logits[0, 0]
    cdef float* dz = &dlogits[0, 0]
    cdef const long long* label = &labels[0]
    cdef double* loss = &losses[0]
    cdef bint past = goes_past(dz, count * padded)
    cdef float* exps = <float*>malloc(num_threads * padded * sizeof(float))
    if exps == NULL:
        raise MemoryError(f"softmax_cross_entropy: {num_threads * padded * sizeof(float)} bytes for rows of exp")
    for n in prange(count, nogil=True, num_threads=num_threads, schedule="static"):
        loss[n] = loss_row(z + n * padded, dz + n * padded, exps + threadid() * padded, label[n], num_classes, padded,
                           scale, past)
    free(exps)
