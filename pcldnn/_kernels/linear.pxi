# Fully connected layers: forward, input gradient, weight gradient.
#
# a. Weights live in one blocked layout for good, (KB, F, b): k innermost. Forward reads them in order, as vectors.
# b. The input gradient sums over k, so weights are what it broadcasts, and its vectors run over samples: no weight is
#    ever transposed, only dy before and dx after, which are small.
# c. The activations, a few per cent of the bytes, are packed once per call in the order in which register tiles read
#    them: the samples (or features) of a tile innermost. Every stream of the micro-kernel is then contiguous, and rows
#    of 4096 floats, a multiple of the cache's set span, cannot evict one another.
# d. Loops: chunk of the summed dimension, block of samples (what a visit of the two needs stays in L2), panel of
#    vectors of outputs, register tile. Partial sums go back to y (or dweight) once per chunk.
# e. While a tile is computed, the micro-kernel asks for the weights that come next (`Ahead` in tile.pxi).
# f. A job is a group of at most `panels` panels, in the input gradient of that many blocks of features. Sums
#    depend neither on how these are grouped nor on the blocking.

cdef enum:
    PACK_TILES = 8           # tiles of features that a job packs: their cache lines of a row are read once
    SUMS = 65536             # most sums of a job of the input gradient: they lie on a thread's stack [elements]

cdef extern from *:
    """
    #define PCL_PANEL (PCL_VECTORS * PCL_WIDTH)
    """
    const int PANEL "PCL_PANEL"     # outputs of a panel


cdef struct LinearBlocks:    # how a pass is cut, its `blocking`: pcldnn.blocking.LinearBlocking explains the fields
    Py_ssize_t depth
    int tiles
    Py_ssize_t panels


cdef LinearBlocks linear_blocks(blocking, Py_ssize_t depth, Py_ssize_t tiles) except *:
    """Checked, and cut to the sizes of the pass: `depth` to be summed, `tiles` at most. Default: all, and 1 panel."""
    cdef Py_ssize_t most = max(depth, 1)
    got, wanted, panels = checks.blocking(blocking, (most, max(tiles, 1), 1), checks.LINEAR_BLOCKING)
    return LinearBlocks(depth=min(<Py_ssize_t>got, most), tiles=<int>min(<Py_ssize_t>wanted, max(tiles, 1)),
                        panels=panels)


def linear_scratch_size(Py_ssize_t N, Py_ssize_t F, Py_ssize_t K):
    """Elements of the scratch array that any pass of a layer of F features and K outputs needs [elements]."""
    forward, input_grad = packed_size(N, F), (N + b - 1) // b * b * K
    weight_grad = packed_size(F, N) + panels_of(K // b) * PANEL * N
    return max(forward, input_grad, weight_grad)


cdef void pack_features(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int num_threads) noexcept nogil:
    """x (N, F) to (tiles of features, N, tile_pitch(F)); a narrower tile leaves its last place unread."""
    cdef int job, tiles = tiles_of(F), size = max(min(tiles // num_threads, PACK_TILES), 1)
    for job in prange((tiles + size - 1) // size, num_threads=num_threads, schedule="static"):
        pack_feature_tiles(x, N, F, packed, job * size, min((job + 1) * size, tiles))


cdef void pack_feature_tiles(const float* x, Py_ssize_t N, Py_ssize_t F, float* packed, int t0, int t1) noexcept nogil:
    """Tiles t0..t1. Whole vectors are copied where the surplus stays within row and tile: later samples overwrite it."""
    cdef Py_ssize_t starts[PACK_TILES]
    cdef Py_ssize_t n, p, pitch = tile_pitch(F)
    cdef const float* row
    cdef float* out
    cdef int t
    for t in range(t0, t1):
        starts[t - t0] = tile_start(F, tiles_of(F), t)
    for n in range(N):
        for t in range(t0, t1):
            row = x + n * F + starts[t - t0]
            out = packed + (t * N + n) * pitch
            if pitch <= b and starts[t - t0] + b <= F and (N - n) * pitch >= b:
                store(out, load(row))
            else:
                for p in range(min(pitch, F - starts[t - t0])):
                    out[p] = row[p]


cdef void linear_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t f0, Py_ssize_t f1, int t0, int t1,
                       const float* w, Py_ssize_t wv, float* y, Py_ssize_t y_row, const float* bias, bint first,
                       bint relu, Ahead* ahead, Py_ssize_t vectors) noexcept nogil:
    """Tiles t0..t1 of samples of y's panel += sum over f0..f1 of x w, or = bias + that when `first`."""
    cdef Py_ssize_t n, pitch = tile_pitch(N)
    cdef Reduction over = one_loop(f1 - f0, pitch, b)
    cdef Ends ends = Ends(start=bias, start_p=0, start_v=b, out=NULL, out_p=y_row, out_v=b, add=False, relu=relu,
                          past=False)
    cdef int t, width, tiles = tiles_of(N)
    for t in range(t0, t1):
        n = tile_start(N, tiles, t)
        width = <int>(tile_start(N, tiles, t + 1) - n)
        fetch_part(ahead, t, &over)
        ends.out = y + n * y_row
        if not first:
            ends.start, ends.start_p = ends.out, y_row
        run(width, &ends, packed + (t * F + f0) * pitch, 1, w, wv, &over, vectors)


cdef void forward_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB,
                        const float* bias, bint relu, float* y, Py_ssize_t k0, Py_ssize_t k1,
                        const LinearBlocks* cut) noexcept nogil:
    """Output blocks k0..k1 (k0 the start of a panel) of all samples."""
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
                linear_tiles(packed, N, F, f0, f1, t, min(t + cut.tiles, tiles), w + (k * F + f0) * b, F * b,
                             y + k * b, KB * b, NULL if bias == NULL else bias + k * b, f0 == 0, relu and f1 == F,
                             &ahead, min(VECTORS, k1 - k))
                k += VECTORS
            t += cut.tiles
        f0 = f1


cdef inline Ahead weights_after(const float* w, Py_ssize_t F, Py_ssize_t KB, Py_ssize_t f0, Py_ssize_t f1,
                                Py_ssize_t k, Py_ssize_t k0, Py_ssize_t k1, Py_ssize_t depth) noexcept nogil:
    """The weights that follow features f0..f1 of the panel k: the next panel, chunk, or group."""
    cdef Py_ssize_t f = f0
    k += VECTORS
    if k >= k1 and f1 < F:
        f = f1
        k = k0
    elif k >= k1:
        f = 0
    if k >= KB:
        k = k0
    return Ahead(start=w + (k * F + f) * b, distance=F * b, rows=min(VECTORS, KB - k), size=min(depth, F - f) * b,
                 calls=1)


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


cdef void input_grad_tiles(const float* packed, Py_ssize_t K, const float* w, Py_ssize_t blocks, Py_ssize_t F,
                           Py_ssize_t count, Py_ssize_t vectors, float* sums, bint first) noexcept nogil:
    """sums (vectors, count, b) of `vectors` vectors of samples += (= when `first`) w dy over `blocks` output blocks."""
    cdef int t, width, tiles = tiles_of(count)
    cdef Py_ssize_t f, v, panel, panels = panels_of(vectors)
    cdef Ends ends = Ends(start=NULL, start_p=b, start_v=count * b, out=NULL, out_p=b, out_v=count * b, add=False,
                          relu=False, past=False)
    cdef Reduction over = one_loop(b, 1, b)
    over.n1, over.x1, over.w1, over.next1 = blocks, F * b, b * b, F * b
    for t in range(tiles):
        f = tile_start(count, tiles, t)
        width = <int>(tile_start(count, tiles, t + 1) - f)
        over.next_step = (width + panels - 1) // panels
        for panel in range(panels):
            v = panel * VECTORS
            over.next = w + (f + width) * b + panel * width * b // panels
            ends.out = sums + (v * count + f) * b
            ends.start = NULL if first else ends.out
            run(width, &ends, w + f * b, b, packed + v * K * b, K * b, &over, min(VECTORS, vectors - v))


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


cdef void weight_grad_tiles(const float* packed, Py_ssize_t N, Py_ssize_t F, Py_ssize_t n0, Py_ssize_t n1, int t0,
                            int t1, const float* dy, float* dw, Py_ssize_t wv, Py_ssize_t vectors) noexcept nogil:
    """Tiles t0..t1 of features of dweight's panel += sum over samples n0..n1; = when n0 is 0."""
    cdef Py_ssize_t f, pitch = tile_pitch(F)
    cdef Reduction over = one_loop(n1 - n0, pitch, PANEL)
    cdef Ends ends = Ends(start=NULL, start_p=b, start_v=wv, out=NULL, out_p=b, out_v=wv, add=False, relu=False,
                          past=False)
    cdef int t, width, tiles = tiles_of(F)
    for t in range(t0, t1):
        f = tile_start(F, tiles, t)
        width = <int>(tile_start(F, tiles, t + 1) - f)
        ends.out = dw + f * b
        ends.start = NULL if n0 == 0 else ends.out
        run(width, &ends, packed + (t * N + n0) * pitch, 1, dy + n0 * PANEL, b, &over, vectors)


cdef void weight_grad_group(const float* packed, Py_ssize_t N, Py_ssize_t F, const float* dy, float* dw,
                            Py_ssize_t k0, Py_ssize_t k1, const LinearBlocks* cut) noexcept nogil:
    """Output blocks k0..k1 (k0 the start of a panel) of dweight. dy lies by panels, (panels, N, PANEL)."""
    cdef Py_ssize_t n, n1, k
    cdef int t = 0, t1, tiles = tiles_of(F)
    while t < tiles:
        t1 = min(t + cut.tiles, tiles)
        n = 0
        while n < N:
            n1 = min(n + cut.depth, N)
            k = k0
            while k < k1:
                weight_grad_tiles(packed, N, F, n, n1, t, t1, dy + k * N * b, dw + k * F * b, F * b,
                                  min(VECTORS, k1 - k))
                k += VECTORS
            n = n1
        t = t1


cdef inline Py_ssize_t group_size(Py_ssize_t blocks, Py_ssize_t panels, int num_threads) noexcept nogil:
    """Blocks of a job: whole panels, at most `panels`, and few enough to give every thread several jobs."""
    return VECTORS * max(min(blocks // (4 * VECTORS * num_threads), panels), 1)


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
        Features summed per visit, tiles of samples per visit, most panels of output vectors of a job;
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
        size = group_size(KB, cut.panels, num_threads)
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
    checks.linear_input_grad(cut.depth, cut.tiles, cut.panels, b, SUMS)
    if N == 0 or F == 0:
        return
    if KB == 0:
        memset(&dx[0, 0], 0, N * F * sizeof(float))
        return
    scratch = scratch_of(scratch, linear_scratch_size(N, F, KB * b))
    packed = start_of(scratch)
    with nogil:
        pack_vectors(&dy[0, 0], N, KB * b, packed, num_threads)
        size = cut.panels
        for job in prange((F // b + size - 1) // size, num_threads=num_threads, schedule="static"):
            input_grad_group(packed, N, F, &weight[0, 0, 0], KB, &dx[0, 0], job * size, min((job + 1) * size, F // b),
                             &cut)


def linear_weight_grad(const float[:, ::1] x,                # IN   (N, F)
                       const float[:, ::1] dy,               # IN   (N, KB * b)
                       float[:, :, ::1] dweight,             # OUT  (KB, F, b)
                       float[::1] scratch=None,              # TMP  linear_scratch_size(N, F, KB * b)
                       blocking=None, int num_threads=1):
    """dweight[k, f] = sum over samples of dy[n, k] x[n, f]; zeros when N = 0.

    `blocking`: samples summed per visit, tiles of features per visit, most panels of output vectors of a job.
    Default: all, all, 1.
    """
    cdef LinearBlocks cut
    cdef Py_ssize_t N = x.shape[0], F = x.shape[1], KB = dweight.shape[0], size, job, n, k
    cdef float* packed
    cdef float* panels
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
    panels = packed + packed_size(F, N)
    with nogil:
        pack_features(&x[0, 0], N, F, packed, num_threads)
        for job in prange(panels_of(KB) * N, num_threads=num_threads, schedule="static"):
            k = job // N * VECTORS
            n = job % N
            memcpy(panels + job * PANEL, &dy[0, 0] + (n * KB + k) * b, min(VECTORS, KB - k) * b * sizeof(float))
        size = group_size(KB, cut.panels, num_threads)
        for job in prange((KB + size - 1) // size, num_threads=num_threads, schedule="static"):
            weight_grad_group(packed, N, F, panels, &dweight[0, 0, 0], job * size, min((job + 1) * size, KB),
                              &cut)
