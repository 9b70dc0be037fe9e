# Sums of several ranks' arrays: the arithmetic of a part-reduce.
#
# a. Every element is added in the order of the arrays, whatever the cut in runs: the same bits in every schedule.
# b. `out` may be one of the arrays: each element is read before it is written.

ctypedef const float* floats


def sum_arrays(arrays,                # IN   sequence of (size,)
               float[::1] out,        # OUT  (size,)
               int num_threads=1):
    """out = arrays[0] + arrays[1] + ..., in this order."""
    checks.sum_arrays([array.shape for array in arrays], dims(out), num_threads)
    cdef Py_ssize_t size = out.shape[0], count = len(arrays), job, i
    if size == 0:
        return
    cdef const float[::1] view
    cdef floats* sources = <floats*>malloc(count * sizeof(floats))
    if sources == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            view = arrays[i]
            sources[i] = &view[0]
        for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
            add_run(sources, count, &out[0], job * RUN, min((job + 1) * RUN, size))
    finally:
        free(sources)


cdef void add_run(floats* sources, Py_ssize_t count, float* out, Py_ssize_t i, Py_ssize_t stop) noexcept nogil:
    """The elements of one job."""
    cdef Py_ssize_t k
    cdef vec total
    cdef float rest
    while i + b <= stop:
        total = load(sources[0] + i)
        for k in range(1, count):
            total = total + load(sources[k] + i)
        store(out + i, total)
        i += b
    while i < stop:
        rest = sources[0][i]
        for k in range(1, count):
            rest = rest + sources[k][i]
        out[i] = rest
        i += 1
