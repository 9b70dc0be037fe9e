# The micro-kernel: a register tile that accumulates a sum of outer products.
#
# a. One idea for everything heavy: acc[v][p] += w[v][i] * x[p][i] over i, w[v][i] a vector of output channels, x[p][i]
#    one broadcast float. Strides decide what it is: p runs over pixels of a row, over images or over samples
#    (forward, input gradient, fully connected), or over filter taps and input channels (weight gradient).
# b. The tile is 2 vectors x TILE pixels (isa.py chooses TILE): one broadcast feeds two multiply-adds.
# c. Only pixels lo <= p < hi take part: lo and hi are compile-time constants (PCL_RANGES in simd.h), so taps that fall
#    in the padding cost nothing and edge tiles run the same code.
# d. The sum runs over three nested loops inside the micro-kernel (a batch-reduce product), so that accumulators stay in
#    registers over filter rows and input channel blocks, or over rows and images, and a call is rare.
# e. `two` is a compile-time constant as well: the odd last block of output channels uses one vector.
# f. While it computes, the micro-kernel can ask for what later calls read, a cache line or less at a step: products
#    that take as long as their weights take to arrive then do both at once. `fetching` is a compile-time constant.

cdef enum:
    PACK_RUN = 256             # features that a job of pack_samples takes [elements]


cdef struct Reduction:
    Py_ssize_t n0, x0, w0      # innermost loop: steps, and what x and w advance each step [float]
    Py_ssize_t n1, x1, w1      # the loop around it
    Py_ssize_t n2, x2, w2      # the outermost one
    Py_ssize_t ahead           # distance in x of what the next tile reads, prefetched; 0: nothing is [float]
    const float* next          # if `fetching`: what a later call reads, asked for a bit at every innermost step
    Py_ssize_t next_step, next1    # what it advances each innermost step, and each step of the loop around it [float]


cdef extern from "simd.h" nogil:
    void prefetch_row(const float* p)
    void prefetch(const float* p)
    void tile_load(vec* a0, vec* a1, int width, const float* y, Py_ssize_t yp, Py_ssize_t yv, bint two)
    void tile_fill(vec* a0, vec* a1, const float* bias, bint two)
    void tile_store(const vec* a0, const vec* a1, int width, float* y, Py_ssize_t yp, Py_ssize_t yv, bint relu,
                    bint two)
    void dispatch "PCL_RANGES"(void (*f)(int, int, vec*, vec*, const float*, Py_ssize_t, const float*, Py_ssize_t,
                                         Reduction*, bint, bint) noexcept nogil,
                               int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, const float* w,
                               Py_ssize_t wv, Reduction* over, bint two, bint fetching)


cdef inline void accumulate(int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, const float* w,
                            Py_ssize_t wv, Reduction* over, bint two, bint fetching) noexcept nogil:
    """acc[v][p] += w[v*wv + i] * x[p*xp + j], lo <= p < hi, with i and j walking the three loops of `over`."""
    cdef Py_ssize_t i0, i1, i2
    cdef const float* xq
    cdef const float* wq
    cdef const float* next
    cdef int p
    cdef float s
    cdef vec w0, w1
    for i2 in range(over.n2):
        for i1 in range(over.n1):
            xq = x + i2 * over.x2 + i1 * over.x1
            wq = w + i2 * over.w2 + i1 * over.w1
            if fetching:
                next = over.next + i1 * over.next1
            if over.ahead != 0:
                prefetch_row(xq + over.ahead)
            for i0 in range(over.n0):
                w0 = load(wq)
                if two:
                    w1 = load(wq + wv)
                for p in range(TILE):
                    if lo <= p and p < hi:
                        s = xq[p * xp]
                        a0[p] = a0[p] + w0 * s
                        if two:
                            a1[p] = a1[p] + w1 * s
                if fetching:
                    prefetch(next)
                    next += over.next_step
                xq += over.x0
                wq += over.w0


cdef inline void run(int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, const float* w, Py_ssize_t wv,
                     Reduction* over, bint two, bint fetching) noexcept nogil:
    """`accumulate` with run-time lo and hi; the full tile is the case to be fast in."""
    if lo == 0 and hi == TILE:
        accumulate(0, TILE, a0, a1, x, xp, w, wv, over, two, fetching)
    else:
        dispatch(accumulate, lo, hi, a0, a1, x, xp, w, wv, over, two, fetching)


cdef inline Reduction one_loop(Py_ssize_t steps, Py_ssize_t x0, Py_ssize_t w0) noexcept nogil:
    """The sum over `steps` places that lie x0 floats apart in x and w0 in w; nothing is asked for."""
    return Reduction(n0=steps, x0=x0, w0=w0, n1=1, x1=0, w1=0, n2=1, x2=0, w2=0, ahead=0, next=NULL, next_step=0,
                     next1=0)


cdef struct Ahead:
    const float* start         # rows that are read next, for calls of the micro-kernel to ask for (decision f)
    Py_ssize_t distance        # from row to row [float]
    Py_ssize_t rows, size      # how many, and their length [float]
    int calls                  # calls of the micro-kernel that share them


cdef inline void fetch_part(Ahead* ahead, int call, Reduction* over) noexcept nogil:
    """What a call of the micro-kernel asks for: its part of the rows, spread over its steps."""
    cdef Py_ssize_t place = ahead.rows * ahead.size * call // ahead.calls
    cdef Py_ssize_t part = max(ahead.rows * ahead.size // ahead.calls, 1)
    over.next = ahead.start + place // ahead.size * ahead.distance + place % ahead.size
    over.next_step = (min(part, ahead.size) + over.n0 - 1) // over.n0


cdef inline int tiles_of(Py_ssize_t count) noexcept nogil:
    """Number of tiles that `count` pixels are cut into; their widths differ by at most one (see `tile_start`)."""
    return <int>((count + TILE - 1) // TILE)


cdef inline Py_ssize_t tile_start(Py_ssize_t count, int tiles, int tile) noexcept nogil:
    return count * tile // tiles


cdef void pack_samples(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int num_threads) noexcept nogil:
    """x (N, F) to (tiles of samples, F, TILE); a tile of fewer than TILE samples leaves its last places unread."""
    cdef int tiles = tiles_of(N)
    cdef Py_ssize_t job, n, f, first, chunks = (F + PACK_RUN - 1) // PACK_RUN
    for job in prange(tiles * chunks, num_threads=num_threads, schedule="static"):
        pack_tile(x, N, F, packed, tiles, <int>(job // chunks), job % chunks * PACK_RUN)


cdef void pack_tile(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int tiles, int tile,
                    Py_ssize_t f0) noexcept nogil:
    cdef Py_ssize_t first = tile_start(N, tiles, tile), width = tile_start(N, tiles, tile + 1) - first
    cdef Py_ssize_t f, p, f1 = min(f0 + PACK_RUN, F)
    cdef float* out = packed + tile * F * TILE
    for p in range(width):
        for f in range(f0, f1):
            out[f * TILE + p] = x[(first + p) * F + f]
