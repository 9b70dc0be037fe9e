# What the machine can do at best: what every kernel is measured against.
#
# a. `fma_loop`: a register-resident loop of 12 multiply-add chains on every thread; 12 cover latency times
#    throughput on every ISA of isa.py without spilling in any.
# b. `tile_loop`: the micro-kernel itself on operands that never leave L1. On a core of its own it is as quick as
#    `fma_loop`; where another hardware thread shares the core's decoders it is not, and no kernel can be quicker.
# c. `triad`: STREAM triad a = b + s * c on arrays beyond the caches, 3 * 4 bytes an element counted.

cdef float fma_chains(Py_ssize_t steps) noexcept nogil:
    cdef vec acc[12]
    cdef vec w = broadcast(<float>0.999), s = broadcast(<float>1e-3), total = zero()
    cdef Py_ssize_t i
    cdef int j
    cdef float result
    for j in range(12):
        acc[j] = broadcast(<float>j)
    for i in range(steps):
        for j in range(12):
            acc[j] = acc[j] * w + s
    for j in range(12):
        total = total + acc[j]
    store_first(total, &result)
    return result


cdef inline void store_first(vec a, float* p) noexcept nogil:
    cdef float lanes[b]
    store(lanes, a)
    p[0] = lanes[0]


def fma_loop(Py_ssize_t steps, int num_threads=1):
    """Run the loop of 12 multiply-add chains on every thread.

    Returns
    -------
    int
        Operations done [flop], a multiply-add counted as 2.
    """
    cdef int t
    cdef float sink = 0
    for t in prange(num_threads, nogil=True, num_threads=num_threads, schedule="static"):
        sink += fma_chains(steps)
    assert sink == sink
    return 2 * 12 * b * steps * num_threads


cdef float tile_steps_from_l1(Py_ssize_t steps) noexcept nogil:
    cdef float x[TILE * b]
    cdef float w[VECTORS * b * b]
    cdef float out[VECTORS * TILE * b]
    cdef Reduction over = one_loop(b, 1, b)
    cdef Ends ends = Ends(start=NULL, start_p=0, start_v=0, out=&out[0], out_p=b, out_v=TILE * b, add=False,
                          relu=False, past=False)
    memset(x, 0, sizeof(x))
    memset(w, 0, sizeof(w))
    over.n1 = steps
    run(TILE, &ends, x, b, w, b * b, &over, VECTORS)
    return out[0]


def tile_loop(Py_ssize_t steps, int num_threads=1):
    """Run the full register tile on every thread, SIMD width times `steps` steps on the same operands.

    Returns
    -------
    int
        Operations done [flop], a multiply-add counted as 2.
    """
    cdef int t
    cdef float sink = 0
    for t in prange(num_threads, nogil=True, num_threads=num_threads, schedule="static"):
        sink += tile_steps_from_l1(steps)
    assert sink == sink
    return 2 * VECTORS * TILE * b * b * steps * num_threads


def triad(const float[::1] x, const float[::1] y, float[::1] z, float scale, int num_threads=1):
    """z = x + scale * y. Moves 12 bytes an element, the read of z for ownership not counted (as STREAM counts)."""
    cdef Py_ssize_t n = z.shape[0], i, v
    checks.same(num_threads, z=dims(z), x=dims(x), y=dims(y))
    if n == 0:
        return
    for v in prange(n // b, nogil=True, num_threads=num_threads, schedule="static"):
        store(&z[0] + v * b, load(&x[0] + v * b) + broadcast(scale) * load(&y[0] + v * b))
    for i in range(n // b * b, n):
        z[i] = x[i] + scale * y[i]
