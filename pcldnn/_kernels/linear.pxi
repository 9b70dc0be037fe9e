# Fully connected layers: forward, input gradient, weight gradient.
#
# a. Weights live in one blocked layout for good, (KB, F, b): k innermost. Forward reads it in order. The input
#    gradient needs it transposed: small panels are transposed in registers just before all samples use them, which
#    costs 1/8 to 1/100 of the products and no second copy of the weights.
# b. The activations, a few per cent of the bytes, are packed once per call in the order in which register tiles read
#    them: TILE samples (or TILE features) innermost. Every stream of the micro-kernel is then contiguous, and rows of
#    4096 floats, a multiple of the cache's set span, cannot evict one another.
# c. Loops: chunk of the summed dimension (its filters in L1), block of samples (its packed values in L2), pair of
#    vectors of outputs, register tile. Partial sums go back to y (or dweight) once per chunk (or block of samples).
# d. A job is a group of at most `pairs` pairs of vectors; sums depend neither on how pairs are grouped nor on the blocking.

cdef enum:
    PANEL = 65536            # most elements of a transposed panel: it lies on a thread's stack [elements]


cdef struct LinearBlocks:    # how a pass is cut: `blocking` of its kernel
    Py_ssize_t depth         # what a visit sums: features (forward), outputs (input gradient), samples (weight gradient)
    int tiles                # register tiles of a visit: of samples; in the weight gradient of features
    Py_ssize_t pairs         # most pairs of vectors of outputs (input gradient: of features) that a job handles


cdef LinearBlocks linear_blocks(blocking, Py_ssize_t depth, Py_ssize_t count) except *:
    """Checked, and cut to the sizes of the pass: `depth` to be summed, `count` samples or features to be tiled."""
    cdef Py_ssize_t most = max(depth, 1), tiles = max(tiles_of(count), 1)
    got, wanted, pairs = checks.blocking(blocking, (most, tiles, 1), checks.LINEAR_BLOCKING)
    return LinearBlocks(depth=min(<Py_ssize_t>got, most), tiles=<int>min(<Py_ssize_t>wanted, tiles), pairs=pairs)


def linear_scratch_size(Py_ssize_t N, Py_ssize_t F, Py_ssize_t K):
    """Elements of the scratch array that every pass of a layer of F features and K outputs needs [elements]."""
    return tiles_of(N) * TILE * max(F, K) + N * (tiles_of(F) * TILE + K + 2 * b)


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


cdef inline Reduction contiguous(Py_ssize_t steps, Py_ssize_t w0) noexcept nogil:
    """The sum over `steps` places of a packed tile and as many vectors of w, w0 floats apart."""
    return Reduction(n0=steps, x0=TILE, w0=w0, n1=1, x1=0, w1=0, n2=1, x2=0, w2=0, ahead=0)


cdef inline void linear_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t f0, Py_ssize_t f1, int t0,
                              int t1, const float* w, Py_ssize_t wv, float* y, Py_ssize_t y_row, const float* bias,
                              bint first, bint relu, bint two) noexcept nogil:
    """Tiles t0..t1 of samples of y's pair of vectors += sum over f0..f1 of x w, or = bias + that when `first`."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over = contiguous(f1 - f0, b)
    cdef int t, width, tiles = tiles_of(N)
    cdef Py_ssize_t n
    for t in range(t0, t1):
        n = tile_start(N, tiles, t)
        width = <int>(tile_start(N, tiles, t + 1) - n)
        if first:
            tile_fill(a0, a1, bias, two)
        else:
            tile_load(a0, a1, width, y + n * y_row, y_row, b, two)
        run(0, width, a0, a1, packed + (t * F + f0) * TILE, 1, w, wv, &over, two)
        tile_store(a0, a1, width, y + n * y_row, y_row, b, relu, two)


cdef void linear_tiles_of(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t f0, Py_ssize_t f1, int t0,
                          int t1, const float* w, Py_ssize_t wv, float* y, Py_ssize_t y_row, const float* bias,
                          bint first, bint relu, bint two) noexcept nogil:
    if two:
        linear_tiles(packed, N, F, f0, f1, t0, t1, w, wv, y, y_row, bias, first, relu, True)
    else:
        linear_tiles(packed, N, F, f0, f1, t0, t1, w, wv, y, y_row, bias, first, relu, False)


cdef void forward_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB,
                        const float* bias, bint relu, float* y, Py_ssize_t k0, Py_ssize_t k1,
                        const LinearBlocks* cut) noexcept nogil:
    """Output blocks k0..k1 (k0 even) of all samples."""
    cdef Py_ssize_t f0 = 0, f1, k
    cdef int t, tiles = tiles_of(N)
    while f0 < F:
        f1 = min(f0 + cut.depth, F)
        t = 0
        while t < tiles:
            k = k0
            while k < k1:
                linear_tiles_of(packed, N, F, f0, f1, t, min(t + cut.tiles, tiles), w + (k * F + f0) * b, F * b,
                                y + k * b, KB * b, NULL if bias == NULL else bias + k * b, f0 == 0, relu and f1 == F,
                                k + 1 < k1)
                k += 2
            t += cut.tiles
        f0 = f1


cdef void input_grad_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB, float* dx,
                           Py_ssize_t c0, Py_ssize_t c1, const LinearBlocks* cut) noexcept nogil:
    """Feature blocks c0..c1 (at most 2 * pairs) of dx for all samples: see a. for the transposed panels."""
    cdef float wt[PANEL]
    cdef Py_ssize_t depth = cut.depth
    cdef Py_ssize_t k0 = 0, k1, c, kb
    cdef int t, tiles = tiles_of(N)
    while k0 < KB * b:
        k1 = min(k0 + depth, KB * b)
        for kb in range(k0 // b, k1 // b):
            for c in range(c0, c1):
                transpose(w + (kb * F + c * b) * b, b, wt + ((c - c0) * depth + kb * b - k0) * b)
        t = 0
        while t < tiles:
            c = c0
            while c < c1:
                linear_tiles_of(packed, N, KB * b, k0, k1, t, min(t + cut.tiles, tiles), wt + (c - c0) * depth * b,
                                depth * b, dx + c * b, F, NULL, k0 == 0, False, c + 1 < c1)
                c += 2
            t += cut.tiles
        k0 = k1


cdef inline void weight_grad_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t n0, Py_ssize_t n1,
                                   int t0, int t1, const float* dy, float* dw, Py_ssize_t wv, bint two) noexcept nogil:
    """Tiles t0..t1 of features of dweight's pair of vectors += sum over samples n0..n1; = when n0 is 0."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over = contiguous(n1 - n0, 2 * b)
    cdef int t, width, tiles = tiles_of(F)
    cdef Py_ssize_t f
    for t in range(t0, t1):
        f = tile_start(F, tiles, t)
        width = <int>(tile_start(F, tiles, t + 1) - f)
        if n0 == 0:
            tile_fill(a0, a1, NULL, two)
        else:
            tile_load(a0, a1, width, dw + f * b, b, wv, two)
        run(0, width, a0, a1, packed + (t * N + n0) * TILE, 1, dy + n0 * 2 * b, b, &over, two)
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
    cut = linear_blocks(blocking, F, N)
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
    """dx = dy weight. F must be a multiple of b.

    `blocking`: outputs summed per visit (a multiple of b), tiles of samples per visit, most pairs of vectors of
    features of a job. Default: as many outputs as a panel of one pair holds, all samples, 1.
    """
    cdef LinearBlocks cut
    cdef Py_ssize_t N = dx.shape[0], F = dx.shape[1], KB = weight.shape[0], size, job
    cdef float* packed
    checks.linear(dims(dx), dims(weight), None, dims(dy), num_threads, names=("dx", "weight", "dy"))
    checks.width("weight", weight.shape[2], b)
    if F % b:
        raise ValueError(f"dx: got rows of {F} features, wanted a multiple of the SIMD width {b}")
    cut = linear_blocks((min(max(KB, 1) * b, PANEL // (2 * b)), max(tiles_of(N), 1), 1) if blocking is None else blocking,
                        max(KB, 1) * b, N)
    checks.linear_panel(cut.depth, cut.pairs, b, PANEL)
    if N == 0 or F == 0:
        return
    scratch = scratch_of(scratch, linear_scratch_size(N, F, KB * b))
    packed = start_of(scratch)
    with nogil:
        pack_samples(&dy[0, 0], N, KB * b, packed, num_threads)
        size = group_size(F // b, cut.pairs, num_threads)
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
    cut = linear_blocks(blocking, N, F)
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
