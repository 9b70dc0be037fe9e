# Fully connected layers: forward, input gradient, weight gradient.
#
# a. Weights live in one blocked layout for good, (KB, F, b): k innermost. Forward reads them in order, as vectors.
# b. The input gradient sums over k, so weights are what it broadcasts, and its vectors run over samples: no weight is
#    ever transposed, only dy before and dx after, which are small.
# c. The activations, a few per cent of the bytes, are packed once per call in the order in which register tiles read
#    them: TILE samples (or TILE features) innermost. Every stream of the micro-kernel is then contiguous, and rows of
#    4096 floats, a multiple of the cache's set span, cannot evict one another.
# d. Loops: chunk of the summed dimension, block of samples (what a visit of the two needs stays in L2), pair of
#    vectors of outputs, register tile. Partial sums go back to y (or dweight) once per chunk.
# e. While a tile is computed, the micro-kernel asks for the weights that come next (`Ahead` in tile.pxi).
# f. A job is a group of at most `pairs` pairs of vectors, in the input gradient of that many blocks of features. Sums
#    depend neither on how these are grouped nor on the blocking.

cdef enum:
    SUMS = 65536             # most sums of a job of the input gradient: they lie on a thread's stack [elements]


cdef struct LinearBlocks:    # how a pass is cut, its `blocking`: pcldnn.blocking.LinearBlocking explains the fields
    Py_ssize_t depth
    int tiles
    Py_ssize_t pairs


cdef LinearBlocks linear_blocks(blocking, Py_ssize_t depth, Py_ssize_t tiles) except *:
    """Checked, and cut to the sizes of the pass: `depth` to be summed, `tiles` at most. Default: all, and 1 pair."""
    cdef Py_ssize_t most = max(depth, 1)
    got, wanted, pairs = checks.blocking(blocking, (most, max(tiles, 1), 1), checks.LINEAR_BLOCKING)
    return LinearBlocks(depth=min(<Py_ssize_t>got, most), tiles=<int>min(<Py_ssize_t>wanted, max(tiles, 1)),
                        pairs=pairs)


def linear_scratch_size(Py_ssize_t N, Py_ssize_t F, Py_ssize_t K):
    """Elements of the scratch array that any pass of a layer of F features and K outputs needs [elements]."""
    forward, input_grad = tiles_of(N) * TILE * F, (N + b - 1) // b * b * K
    weight_grad = N * (tiles_of(F) * TILE + K + b)  # K: pairs of blocks, the last one perhaps with one block
    return max(forward, input_grad, weight_grad)


cdef void pack_features(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int num_threads) noexcept nogil:
    """x (N, F) to (tiles of features, N, TILE)."""
    cdef int t, tiles = tiles_of(F)
    cdef Py_ssize_t n, p, first, width
    for t in prange(tiles, num_threads=num_threads, schedule="static"):
        first = tile_start(F, tiles, t)
        width = tile_start(F, tiles, t + 1) - first
        for n in range(N):
            for p in range(width):
                packed[(t * N + n) * TILE + p] = x[n * F + first + p]


cdef inline void linear_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t f0, Py_ssize_t f1, int t0,
                              int t1, const float* w, Py_ssize_t wv, float* y, Py_ssize_t y_row, const float* bias,
                              bint first, bint relu, Ahead* ahead, bint two) noexcept nogil:
    """Tiles t0..t1 of samples of y's pair of vectors += sum over f0..f1 of x w, or = bias + that when `first`."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over = one_loop(f1 - f0, TILE, b)
    cdef int t, width, tiles = tiles_of(N)
    cdef Py_ssize_t n
    for t in range(t0, t1):
        n = tile_start(N, tiles, t)
        width = <int>(tile_start(N, tiles, t + 1) - n)
        fetch_part(ahead, t, &over)
        if first:
            tile_fill(a0, a1, bias, two)
        else:
            tile_load(a0, a1, width, y + n * y_row, y_row, b, two)
        run(0, width, a0, a1, packed + (t * F + f0) * TILE, 1, w, wv, &over, two, True)
        tile_store(a0, a1, width, y + n * y_row, y_row, b, relu, two)


cdef void linear_tiles_of(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t f0, Py_ssize_t f1, int t0,
                          int t1, const float* w, Py_ssize_t wv, float* y, Py_ssize_t y_row, const float* bias,
                          bint first, bint relu, Ahead* ahead, bint two) noexcept nogil:
    if two:
        linear_tiles(packed, N, F, f0, f1, t0, t1, w, wv, y, y_row, bias, first, relu, ahead, True)
    else:
        linear_tiles(packed, N, F, f0, f1, t0, t1, w, wv, y, y_row, bias, first, relu, ahead, False)


cdef void forward_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB,
                        const float* bias, bint relu, float* y, Py_ssize_t k0, Py_ssize_t k1,
                        const LinearBlocks* cut) noexcept nogil:
    """Output blocks k0..k1 (k0 even) of all samples."""
    cdef Py_ssize_t f0 = 0, f1, k
    cdef int t, tiles = tiles_of(N)
    cdef Ahead ahead
    while f0 < F:
        f1 = min(f0 + cut.depth, F)
        t = 0
        while t < tiles:
            k = k0
            while k < k1:
                ahead = weights_after(w, F, KB, f0, f1, k, k0, k1, cut.depth)
                ahead.calls = tiles
                linear_tiles_of(packed, N, F, f0, f1, t, min(t + cut.tiles, tiles), w + (k * F + f0) * b, F * b,
                                y + k * b, KB * b, NULL if bias == NULL else bias + k * b, f0 == 0, relu and f1 == F,
                                &ahead, k + 1 < k1)
                k += 2
            t += cut.tiles
        f0 = f1


cdef inline Ahead weights_after(const float* w, Py_ssize_t F, Py_ssize_t KB, Py_ssize_t f0, Py_ssize_t f1,
                                Py_ssize_t k, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t depth) noexcept nogil:
    """The weights that follow features f0..f1 of the pair k: the next pair, chunk, or group."""
    cdef Py_ssize_t f = f0
    k += 2
    if k >= k1 and f1 < F:
        f = f1
        k = k0
    elif k >= k1:
        f = 0
    if k >= KB:
        k = k0
    return Ahead(start=w + (k * F + f) * b, distance=F * b, rows=min(2, KB - k), size=min(depth, F - f) * b, calls=1)


cdef void pack_vectors(const float* dy, Py_ssize_t N, Py_ssize_t K, float* packed, int num_threads) noexcept nogil:
    """dy (N, K) to (vectors of b samples, K, b), with zeros for the samples that the last vector lacks."""
    cdef Py_ssize_t job, v, k
    for job in prange((N + b - 1) // b * (K // b), num_threads=num_threads, schedule="static"):
        v = job // (K // b)
        k = job % (K // b) * b
        pack_block(dy + v * b * K + k, K, min(N - v * b, b), packed + (v * K + k) * b)


cdef inline void pack_block(const float* dy, Py_ssize_t row, Py_ssize_t samples, float* packed) noexcept nogil:
    cdef float block[b * b]
    cdef Py_ssize_t n
    if samples == b:
        transpose(dy, row, packed)
        return
    memset(block, 0, sizeof(block))
    for n in range(samples):
        store(block + n * b, load(dy + n * row))
    transpose(block, b, packed)


cdef inline void input_grad_tile(const float* packed, Py_ssize_t wv, const float* w, Py_ssize_t blocks, Py_ssize_t F,
                                 int width, const float* next, Py_ssize_t next_step, float* sums, Py_ssize_t sums_v,
                                 bint first, bint two) noexcept nogil:
    """`width` features of two vectors of samples += sum over `blocks` blocks of outputs of w dy; = when `first`."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over = Reduction(n0=b, x0=1, w0=b, n1=blocks, x1=F * b, w1=b * b, n2=1, x2=0, w2=0, ahead=0,
                                    next=next, next_step=next_step, next1=F * b)
    if first:
        tile_fill(a0, a1, NULL, two)
    else:
        tile_load(a0, a1, width, sums, b, sums_v, two)
    run(0, width, a0, a1, w, b, packed, wv, &over, two, True)
    tile_store(a0, a1, width, sums, b, sums_v, False, two)


cdef void input_grad_tiles(const float* packed, Py_ssize_t K, const float* w, Py_ssize_t blocks, Py_ssize_t F,
                           Py_ssize_t count, Py_ssize_t vectors, float* sums, bint first) noexcept nogil:
    """All tiles of `count` features and pairs of `vectors` vectors of samples, over `blocks` blocks of outputs."""
    cdef int t, width, tiles = tiles_of(count)
    cdef Py_ssize_t f, v, pairs = (vectors + 1) // 2, ahead
    for t in range(tiles):
        f = tile_start(count, tiles, t)
        width = <int>(tile_start(count, tiles, t + 1) - f)
        for v in range(0, vectors, 2):
            ahead = (f + width) * b + v // 2 * width * b // pairs
            if v + 1 < vectors:
                input_grad_tile(packed + v * K * b, K * b, w + f * b, blocks, F, width, w + ahead,
                                (width + pairs - 1) // pairs, sums + (v * count + f) * b, count * b, first, True)
            else:
                input_grad_tile(packed + v * K * b, K * b, w + f * b, blocks, F, width, w + ahead,
                                (width + pairs - 1) // pairs, sums + (v * count + f) * b, count * b, first, False)


cdef void input_grad_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB, float* dx,
                           Py_ssize_t c0, Py_ssize_t c1, const LinearBlocks* cut) noexcept nogil:
    """Feature blocks c0..c1 of dx for all samples: see b."""
    cdef float sums[SUMS]
    cdef Py_ssize_t count = (c1 - c0) * b, depth = cut.depth // b, kb, v = 0, vectors
    while v * b < N:
        vectors = min(cut.tiles, (N + b - 1) // b - v)
        kb = 0
        while kb < KB:
            input_grad_tiles(packed + (v * KB + kb) * b * b, KB * b, w + (kb * F + c0 * b) * b, min(depth, KB - kb), F,
                             count, vectors, sums, kb == 0)
            kb += depth
        unpack_vectors(sums, count, vectors, min(N - v * b, vectors * b), F, dx + v * b * F + c0 * b)
        v += cut.tiles


cdef void unpack_vectors(const float* sums, Py_ssize_t count, Py_ssize_t vectors, Py_ssize_t samples, Py_ssize_t F,
                         float* dx) noexcept nogil:
    """sums (vectors of samples, count, b) to the first `samples` rows of dx, F features apart."""
    cdef float block[b * b]
    cdef Py_ssize_t v, f, n
    for v in range(vectors):
        for f in range(count // b):
            transpose(sums + (v * count + f * b) * b, b, block)
            for n in range(min(b, samples - v * b)):
                store(dx + (v * b + n) * F + f * b, load(block + n * b))


cdef inline void weight_grad_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t n0, Py_ssize_t n1,
                                   int t0, int t1, const float* dy, float* dw, Py_ssize_t wv, bint two) noexcept nogil:
    """Tiles t0..t1 of features of dweight's pair of vectors += sum over samples n0..n1; = when n0 is 0."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over = one_loop(n1 - n0, TILE, 2 * b)
    cdef int t, width, tiles = tiles_of(F)
    cdef Py_ssize_t f
    for t in range(t0, t1):
        f = tile_start(F, tiles, t)
        width = <int>(tile_start(F, tiles, t + 1) - f)
        if n0 == 0:
            tile_fill(a0, a1, NULL, two)
        else:
            tile_load(a0, a1, width, dw + f * b, b, wv, two)
        run(0, width, a0, a1, packed + (t * N + n0) * TILE, 1, dy + n0 * 2 * b, b, &over, two, False)
        tile_store(a0, a1, width, dw + f * b, b, wv, False, two)


cdef void weight_grad_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* pairs, float* dw,
                            Py_ssize_t k0, Py_ssize_t k1, const LinearBlocks* cut) noexcept nogil:
    """Output blocks k0..k1 (k0 even) of dweight. `pairs` (KB/2, N, 2b) holds dy by pairs of blocks."""
    cdef Py_ssize_t n, n1, k
    cdef int t = 0, t1, tiles = tiles_of(F)
    while t < tiles:
        t1 = min(t + cut.tiles, tiles)
        n = 0
        while n < N:
            n1 = min(n + cut.depth, N)
            k = k0
            while k < k1:
                if k + 1 < k1:
                    weight_grad_tiles(packed, N, F, n, n1, t, t1, pairs + k * N * b, dw + k * F * b, F * b, True)
                else:
                    weight_grad_tiles(packed, N, F, n, n1, t, t1, pairs + k * N * b, dw + k * F * b, F * b, False)
                k += 2
            n = n1
        t = t1


cdef inline Py_ssize_t group_size(Py_ssize_t blocks, Py_ssize_t pairs, int num_threads) noexcept nogil:
    """Blocks of a job: even, at most 2 * pairs, and small enough to give every thread several jobs."""
    return 2 * max(min(blocks // (8 * num_threads), pairs), 1)


def linear_forward(const float[:, ::1] x,                    # IN   (N, F)
                   const float[:, :, ::1] weight,            # IN   (KB, F, b)
                   bias,                                     # IN   (KB * b) or None
                   float[:, ::1] y,                          # OUT  (N, KB * b)
                   bint relu=False,
                   float[::1] scratch=None,                  # TMP  linear_scratch_size(N, F, KB * b)
                   blocking=None, int num_threads=1):
    """y = relu?(x weight' + bias).

    Parameters
    ----------
    blocking : (int, int, int), optional
        Features summed per visit, tiles of samples per visit, most pairs of output vectors of a job;
        `pcldnn.blocking` solves for all three. Default: all, all, 1.
    """
    cdef LinearBlocks cut
    cdef Py_ssize_t N = x.shape[0], F = x.shape[1], KB = weight.shape[0], size, job
    cdef const float[::1] bias_view
    cdef const float* bias_ptr = NULL
    cdef float* packed
    checks.linear(dims(x), dims(weight), None if bias is None else bias.shape, dims(y), num_threads)
    checks.width("weight", weight.shape[2], b)
    cut = linear_blocks(blocking, F, tiles_of(N))
    if N == 0 or KB == 0:
        return
    if bias is not None:
        bias_view = bias
        bias_ptr = &bias_view[0]
    scratch = scratch_of(scratch, linear_scratch_size(N, F, KB * b))
    packed = start_of(scratch)
    with nogil:
        pack_samples(&x[0, 0], N, F, packed, num_threads)
        size = group_size(KB, cut.pairs, num_threads)
        for job in prange((KB + size - 1) // size, num_threads=num_threads, schedule="static"):
            forward_group(packed, N, F, &weight[0, 0, 0], KB, bias_ptr, relu, &y[0, 0], job * size,
                          min((job + 1) * size, KB), &cut)


def linear_input_grad(const float[:, ::1] dy,                # IN   (N, KB * b)
                      const float[:, :, ::1] weight,         # IN   (KB, F, b)
                      float[:, ::1] dx,                      # OUT  (N, F)
                      float[::1] scratch=None,               # TMP  linear_scratch_size(N, F, KB * b)
                      blocking=None, int num_threads=1):
    """dx = dy weight; zeros when KB = 0. F must be a multiple of b.

    `blocking`: outputs summed per visit (a multiple of b), vectors of b samples per visit, most blocks of b features
    of a job. Default: all outputs, one vector, 1.
    """
    cdef LinearBlocks cut
    cdef Py_ssize_t N = dx.shape[0], F = dx.shape[1], KB = weight.shape[0], size, job
    cdef float* packed
    checks.linear(dims(dx), dims(weight), None, dims(dy), num_threads, names=("dx", "weight", "dy"))
    checks.width("weight", weight.shape[2], b)
    if F % b:
        raise ValueError(f"dx: got rows of {F} features, wanted a multiple of the SIMD width {b}")
    cut = linear_blocks((max(KB, 1) * b, 1, 1) if blocking is None else blocking, max(KB, 1) * b, (N + b - 1) // b)
    checks.linear_input_grad(cut.depth, cut.tiles, cut.pairs, b, SUMS)
    if N == 0 or F == 0:
        return
    if KB == 0:
        memset(&dx[0, 0], 0, N * F * sizeof(float))
        return
    scratch = scratch_of(scratch, linear_scratch_size(N, F, KB * b))
    packed = start_of(scratch)
    with nogil:
        pack_vectors(&dy[0, 0], N, KB * b, packed, num_threads)
        size = cut.pairs
        for job in prange((F // b + size - 1) // size, num_threads=num_threads, schedule="static"):
            input_grad_group(packed, N, F, &weight[0, 0, 0], KB, &dx[0, 0], job * size, min((job + 1) * size, F // b),
                             &cut)


def linear_weight_grad(const float[:, ::1] x,                # IN   (N, F)
                       const float[:, ::1] dy,               # IN   (N, KB * b)
                       float[:, :, ::1] dweight,             # OUT  (KB, F, b)
                       float[::1] scratch=None,              # TMP  linear_scratch_size(N, F, KB * b)
                       blocking=None, int num_threads=1):
    """dweight[k, f] = sum over samples of dy[n, k] x[n, f]; zeros when N = 0.

    `blocking`: samples summed per visit, tiles of features per visit, most pairs of output vectors of a job.
    Default: all, all, 1.
    """
    cdef LinearBlocks cut
    cdef Py_ssize_t N = x.shape[0], F = x.shape[1], KB = dweight.shape[0], size, job, n, k
    cdef float* packed
    cdef float* pairs
    checks.linear(dims(x), dims(dweight), None, dims(dy), num_threads, names=("x", "dweight", "dy"))
    checks.width("dweight", dweight.shape[2], b)
    cut = linear_blocks(blocking, N, tiles_of(F))
    if KB == 0 or F == 0:
        return
    if N == 0:
        memset(&dweight[0, 0, 0], 0, KB * F * b * sizeof(float))
        return
    scratch = scratch_of(scratch, linear_scratch_size(N, F, KB * b))
    packed = start_of(scratch)
    pairs = packed + tiles_of(F) * TILE * N
    with nogil:
        pack_features(&x[0, 0], N, F, packed, num_threads)
        for job in prange((KB + 1) // 2 * N, num_threads=num_threads, schedule="static"):
            k = job // N
            n = job % N
            memcpy(pairs + job * 2 * b, &dy[0, 0] + (n * KB + 2 * k) * b, min(2, KB - 2 * k) * b * sizeof(float))
        size = group_size(KB, cut.pairs, num_threads)
        for job in prange((KB + size - 1) // size, num_threads=num_threads, schedule="static"):
            weight_grad_group(packed, N, F, pairs, &dweight[0, 0, 0], job * size, min((job + 1) * size, KB),
                              &cut)
