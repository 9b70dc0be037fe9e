# The micro-kernel: a register tile that accumulates a sum of outer products.
#
# a. One idea for everything heavy: acc[v][p] += w[v][i] * x[p][i] over i, w[v][i] a vector of output channels, x[p][i]
#    one broadcast float. Strides decide what it is: p runs over pixels of a row, over images or over samples
#    (forward, input gradient, fully connected), or over filter taps and input channels (weight gradient).
# b. The tile is 2 vectors x TILE pixels (isa.py chooses TILE): one broadcast feeds two multiply-adds.
# c. Only pixels lo <= p < hi take part: lo and hi are compile-time constants (PCL_RANGES in simd.h), so taps that fall
#    in the padding cost nothing and edge tiles run the same code.
# d. `two` is a compile-time constant as well: the odd last block of output channels uses one vector.

cdef extern from "simd.h" nogil:
    void dispatch "PCL_RANGES"(void (*f)(int, int, vec*, vec*, const float*, Py_ssize_t, Py_ssize_t, const float*,
                                         Py_ssize_t, Py_ssize_t, Py_ssize_t, bint) noexcept nogil,
                               int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, Py_ssize_t xi,
                               const float* w, Py_ssize_t wi, Py_ssize_t wv, Py_ssize_t length, bint two)


cdef inline void accumulate(int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, Py_ssize_t xi,
                            const float* w, Py_ssize_t wi, Py_ssize_t wv, Py_ssize_t length, bint two) noexcept nogil:
    """acc[v][p] += w[v*wv + i*wi] * x[p*xp + i*xi], lo <= p < hi, i < length."""
    cdef Py_ssize_t i
    cdef int p
    cdef float s
    cdef vec w0, w1
    for i in range(length):
        w0 = load(w)
        if two:
            w1 = load(w + wv)
        for p in range(TILE):
            if lo <= p and p < hi:
                s = x[p * xp]
                a0[p] = a0[p] + w0 * s
                if two:
                    a1[p] = a1[p] + w1 * s
        x += xi
        w += wi


cdef inline void run(int lo, int hi, vec* a0, vec* a1, const float* x, Py_ssize_t xp, Py_ssize_t xi,
                     const float* w, Py_ssize_t wi, Py_ssize_t wv, Py_ssize_t length, bint two) noexcept nogil:
    """`accumulate` with run-time lo and hi; the full tile is the case to be fast in."""
    if lo == 0 and hi == TILE:
        accumulate(0, TILE, a0, a1, x, xp, xi, w, wi, wv, length, two)
    else:
        dispatch(accumulate, lo, hi, a0, a1, x, xp, xi, w, wi, wv, length, two)


cdef inline void tile_load(vec* a0, vec* a1, int width, const float* y, Py_ssize_t yp, Py_ssize_t yv,
                           bint two) noexcept nogil:
    cdef int p
    for p in range(TILE):
        if p < width:
            a0[p] = load(y + p * yp)
            if two:
                a1[p] = load(y + yv + p * yp)


cdef inline void tile_fill(vec* a0, vec* a1, const float* bias, bint two) noexcept nogil:
    """Start every pixel of the tile from the bias of its channels, or from zero when there is none."""
    cdef int p
    cdef vec b0 = zero(), b1 = zero()
    if bias != NULL:
        b0 = load(bias)
        if two:
            b1 = load(bias + b)
    for p in range(TILE):
        a0[p] = b0
        a1[p] = b1


cdef inline void tile_store(vec* a0, vec* a1, int width, float* y, Py_ssize_t yp, Py_ssize_t yv, bint relu,
                            bint two) noexcept nogil:
    cdef int p
    for p in range(TILE):
        if p < width:
            if relu:
                a0[p] = vrelu(a0[p])
                if two:
                    a1[p] = vrelu(a1[p])
            store(y + p * yp, a0[p])
            if two:
                store(y + yv + p * yp, a1[p])


cdef inline int tiles_of(Py_ssize_t count) noexcept nogil:
    """Number of tiles that `count` pixels are cut into; their widths differ by at most one (see `tile_start`)."""
    return <int>((count + TILE - 1) // TILE)


cdef inline Py_ssize_t tile_start(Py_ssize_t count, int tiles, int tile) noexcept nogil:
    return count * tile // tiles
