# The micro-kernel: a register tile that accumulates a sum of outer products.
#
# a. One idea for everything heavy: acc[v][p] += w[v][i] * x[p][i] over i, w[v][i] a vector of output channels, x[p][i]
#    one broadcast float. Strides decide what it is: p runs over pixels of a row, over images or over samples
#    (forward, input gradient, fully connected), or over filter taps and input channels (weight gradient).
# b. The tile is VECTORS vectors x TILE pixels; isa.py chooses both. The vectors of a tile are called a panel.
# c. Width and vectors are compile-time constants (PCL_WIDTHS in tile.h). Where taps fall in the padding, the sum is cut
#    in `Segment`s in which only pixels lo <= p < hi take part. These are constants too (PCL_RANGES), so such taps cost
#    nothing, and the accumulators stay in registers from one segment to the next.
# d. The distance between pixels, xp, is a constant as well where it is 1 or the SIMD width (in C, of cut sums
#    only the latter): the pixels then lie at fixed offsets from one pointer. Any other works, with more registers.
# e. The sum runs over three nested loops inside the micro-kernel (a batch-reduce product), so that accumulators stay in
#    registers over filter rows and input channel blocks, or over rows and images. `Ends` says where they come from and
#    go to. `run` is not inlined: each width is compiled once.
# f. While it computes, the micro-kernel can ask for what later calls read, a cache line or less at a step: products
#    that take as long as their weights take to arrive then do both at once.
# g. On x86-64 Linux with multiply-adds the sums are computed by functions in assembler (`tile_x86.py`, which says why);
#    `accumulate` is for all others, and says what those do.

cdef enum Kind:
    WHOLE                      # every pixel takes part in every step
    FETCHING                   # likewise, and later reads are asked for
    CUT                        # the sum is cut in segments, or xp is neither 1 nor b

cdef enum:
    PACK_RUN = 256             # features that a job of pack_samples takes [elements]


cdef extern from "tile.h" nogil:
    ctypedef struct Segment:       # a part of the sum that pixels lo <= p < hi of a tile have
        Py_ssize_t lo, hi          # lo < the tile's width; hi may be above it
        Py_ssize_t steps           # of the innermost loop
        Py_ssize_t x, w            # its place in what the tile reads [float]

    ctypedef struct Reduction:
        Py_ssize_t n0, x0, w0      # innermost loop: steps, and what x and w advance each step [float]
        Py_ssize_t n1, x1, w1      # the loop around it
        Py_ssize_t n2, x2, w2      # the outermost one
        Py_ssize_t ahead           # distance in x of what the next tile reads, prefetched; 0: nothing is [float]
        const float* next          # what a later call reads, asked for a bit at every innermost step; NULL: nothing
        Py_ssize_t next_step, next1    # what it advances each innermost step, and each of the loop around it [float]
        const Segment* segments    # NULL: one, of all pixels and n0 steps
        Py_ssize_t n_segments

    ctypedef struct Ends:
        const float* start         # where the sums begin; NULL: at zero
        Py_ssize_t start_p, start_v    # its distances between pixels and vectors [float]; start_p of a bias is 0
        float* out                 # where they are stored
        Py_ssize_t out_p, out_v
        Py_ssize_t add, relu       # whether they are added to what is there; whether max(., 0) is taken
        Py_ssize_t past            # whether they are written past the caches (`goes_past`); the caller fences

    const bint ASSEMBLED "PCL_ASSEMBLED"
    void assembled_tile(int kind, int width, int vectors, const Ends* ends, const float* x, Py_ssize_t xp,
                        const float* w, Py_ssize_t wv, const Reduction* over)
    void prefetch_row(const float* p)
    void prefetch(const float* p)
    void tile_begin(int width, int vectors, vec* acc, const float* start, Py_ssize_t p, Py_ssize_t v)
    void tile_step(int lo, int hi, int vectors, vec* acc, const float* x, Py_ssize_t xp, const float* w, Py_ssize_t wv)
    void tile_end(int width, int vectors, vec* acc, float* out, Py_ssize_t p, Py_ssize_t v, bint add, bint relu,
                  bint past)
    void for_range "PCL_RANGES"(void (*f)(int, int, int, Py_ssize_t, Kind, vec*, const float*, const float*,
                                          Py_ssize_t, Py_ssize_t, const Reduction*) noexcept nogil,
                                int width, int lo, int hi, int vectors, Py_ssize_t xp, Kind kind, vec* acc,
                                const float* x, const float* w, Py_ssize_t wv, Py_ssize_t n0, const Reduction* over)
    void for_width "PCL_WIDTHS"(void (*f)(int, int, Py_ssize_t, Kind, const Ends*, const float*, const float*,
                                          Py_ssize_t, const Reduction*) noexcept nogil,
                                int width, int vectors, Py_ssize_t xp, Kind kind, const Ends* ends, const float* x,
                                const float* w, Py_ssize_t wv, const Reduction* over)


cdef inline void sum_range(int lo, int hi, int vectors, Py_ssize_t xp, Kind kind, vec* acc, const float* x,
                           const float* w, Py_ssize_t wv, Py_ssize_t n0, const Reduction* over) noexcept nogil:
    """acc[v][p] += w[v*wv + i] * x[p*xp + j], lo <= p < hi, with i and j walking the three loops of `over`."""
    cdef Py_ssize_t i0, i1, i2, x0 = over.x0, w0 = over.w0, next_step = over.next_step
    cdef const float* xq
    cdef const float* wq
    cdef const float* next = NULL
    for i2 in range(over.n2):
        for i1 in range(over.n1):
            xq = x + i2 * over.x2 + i1 * over.x1
            wq = w + i2 * over.w2 + i1 * over.w1
            if kind == FETCHING:
                next = over.next + i1 * over.next1
            if over.ahead != 0:
                prefetch_row(xq + over.ahead)
            for i0 in range(n0):
                tile_step(lo, hi, vectors, acc, xq, xp, wq, wv)
                if kind == FETCHING:
                    prefetch(next)
                    next += next_step
                xq += x0
                wq += w0


cdef inline void accumulate(int width, int vectors, Py_ssize_t xp, Kind kind, const Ends* ends, const float* x,
                            const float* w, Py_ssize_t wv, const Reduction* over) noexcept nogil:
    """A register tile from its start to its end."""
    cdef vec acc[VECTORS * TILE]
    cdef const Segment* part
    cdef int s
    tile_begin(width, vectors, acc, ends.start, ends.start_p, ends.start_v)
    if kind == CUT:
        for s in range(over.n_segments):
            part = over.segments + s
            for_range(sum_range, width, <int>part.lo, <int>min(part.hi, width), vectors, xp, kind, acc, x + part.x,
                      w + part.w, wv, part.steps, over)
    else:
        sum_range(0, width, vectors, xp, kind, acc, x, w, wv, over.n0, over)
    tile_end(width, vectors, acc, ends.out, ends.out_p, ends.out_v, ends.add, ends.relu, ends.past)


cdef inline void run_panel(int width, int vectors, const Ends* ends, const float* x, Py_ssize_t xp,
                           const float* w, Py_ssize_t wv, const Reduction* over) noexcept nogil:
    """`accumulate` with run-time width and xp. What asks for later reads has a constant xp."""
    if over.segments != NULL and xp == b:
        for_width(accumulate, width, vectors, b, CUT, ends, x, w, wv, over)
    elif over.segments != NULL:
        for_width(accumulate, width, vectors, xp, CUT, ends, x, w, wv, over)
    elif over.next != NULL and xp == b:
        for_width(accumulate, width, vectors, b, FETCHING, ends, x, w, wv, over)
    elif over.next != NULL:
        for_width(accumulate, width, vectors, 1, FETCHING, ends, x, w, wv, over)
    elif xp == b:
        for_width(accumulate, width, vectors, b, WHOLE, ends, x, w, wv, over)
    else:
        for_width(accumulate, width, vectors, 1, WHOLE, ends, x, w, wv, over)


cdef inline int assembled_kind(Py_ssize_t xp, const Reduction* over) noexcept nogil:
    """The number among the `kinds` of tile_x86.py."""
    if over.segments != NULL:
        return 8 if xp == 1 else 9 if xp == b else 10
    return 4 * (xp == b) + 2 * (over.next != NULL) + (over.w0 == b)


cdef void run(int width, const Ends* ends, const float* x, Py_ssize_t xp, const float* w, Py_ssize_t wv,
              Reduction* over, Py_ssize_t vectors) noexcept nogil:
    """One register tile of `vectors` vectors: out = (out +)? (start + the sum), relu'd if asked for.

    Where sums are cut, w0 is b; where xp is neither 1 nor b, x0 is 1.
    """
    cdef Segment all
    cdef bint alone = over.segments == NULL and xp != 1 and xp != b
    if alone:                  # as one segment, so that the code for any xp exists once
        all = Segment(lo=0, hi=width, steps=over.n0, x=0, w=0)
        over.segments, over.n_segments = &all, 1
    if ASSEMBLED:
        assembled_tile(assembled_kind(xp, over), width, <int>vectors, ends, x, xp, w, wv, over)
    elif vectors == VECTORS:
        run_panel(width, VECTORS, ends, x, xp, w, wv, over)
    elif vectors == 1:
        run_panel(width, 1, ends, x, xp, w, wv, over)
    elif VECTORS > 2 and vectors == 2:
        run_panel(width, 2, ends, x, xp, w, wv, over)
    elif VECTORS > 3 and vectors == 3:
        run_panel(width, 3, ends, x, xp, w, wv, over)
    if alone:
        over.segments = NULL


cdef inline Reduction one_loop(Py_ssize_t steps, Py_ssize_t x0, Py_ssize_t w0) noexcept nogil:
    """The sum over `steps` places that lie x0 floats apart in x and w0 in w; nothing is asked for."""
    return Reduction(n0=steps, x0=x0, w0=w0, n1=1, x1=0, w1=0, n2=1, x2=0, w2=0, segments=NULL, n_segments=0,
                     ahead=0, next=NULL, next_step=0, next1=0)


cdef inline Py_ssize_t panels_of(Py_ssize_t vectors) noexcept nogil:
    """Number of panels that `vectors` vectors make."""
    return (vectors + VECTORS - 1) // VECTORS


cdef struct Ahead:
    const float* start         # rows that are read next, for calls of the micro-kernel to ask for (decision f)
    Py_ssize_t distance        # from row to row [float]
    Py_ssize_t rows, size      # how many, and their length [float]
    int calls                  # calls of the micro-kernel that share them


cdef inline void fetch_part(Ahead* ahead, int call, Reduction* over) noexcept nogil:
    """What a call of the micro-kernel asks for: its part of the rows, one row at most, spread over its steps."""
    cdef Py_ssize_t steps = over.n0 * over.n1
    cdef Py_ssize_t place = ahead.rows * ahead.size * call // ahead.calls
    cdef Py_ssize_t part = max(ahead.rows * ahead.size // ahead.calls, 1)
    over.next = ahead.start + place // ahead.size * ahead.distance + place % ahead.size
    over.next_step = (min(part, ahead.size) + steps - 1) // steps
    over.next1 = over.n0 * over.next_step


cdef inline int tiles_of(Py_ssize_t count) noexcept nogil:
    """Number of tiles that `count` pixels are cut into; their widths differ by at most one (see `tile_start`)."""
    return <int>((count + TILE - 1) // TILE)


cdef inline Py_ssize_t tile_start(Py_ssize_t count, int tiles, int tile) noexcept nogil:
    return count * tile // tiles


cdef inline Py_ssize_t tile_pitch(Py_ssize_t count) noexcept nogil:
    """Width of the widest tile: the distance between the rows of packed arrays [float]."""
    cdef Py_ssize_t tiles = tiles_of(count)
    return (count + tiles - 1) // tiles if tiles > 0 else 0


cdef inline Py_ssize_t packed_size(Py_ssize_t count, Py_ssize_t size) noexcept nogil:
    """Elements of `count` rows of `size` packed by tiles of rows."""
    return tiles_of(count) * tile_pitch(count) * size


cdef void pack_samples(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int num_threads) noexcept nogil:
    """x (N, F) to (tiles of samples, F, tile_pitch(N)); a narrower tile leaves its last place unread."""
    cdef int tiles = tiles_of(N)
    cdef Py_ssize_t job, chunks = (F + PACK_RUN - 1) // PACK_RUN
    for job in prange(tiles * chunks, num_threads=num_threads, schedule="static"):
        pack_tile(x, N, F, packed, tiles, <int>(job // chunks), job % chunks * PACK_RUN)


cdef void pack_tile(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int tiles, int tile,
                    Py_ssize_t f0) noexcept nogil:
    cdef Py_ssize_t first = tile_start(N, tiles, tile), width = tile_start(N, tiles, tile + 1) - first
    cdef Py_ssize_t f, p, f1 = min(f0 + PACK_RUN, F), pitch = tile_pitch(N)
    cdef float* out = packed + tile * F * pitch
    for p in range(width):
        for f in range(f0, f1):
            out[f * pitch + p] = x[(first + p) * F + f]
