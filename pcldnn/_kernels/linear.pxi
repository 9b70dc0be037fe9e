# Fully connected layers: forward, input gradient, weight gradient.
#
# a. Weights live in one blocked layout for good, (KB, F, b): k innermost. Forward reads it in order. The input
#    gradient needs it transposed: small panels are transposed in registers just before all samples use them, which
#    costs 1/8 to 1/100 of the products and no second copy of the weights.
# b. The activations, a few per cent of the bytes, are packed once per call in panels of CHUNK features (`pack_panels`).
#    Rows of 4096 floats would lie exactly a multiple of the cache's set span apart and evict one another; the rows
#    of a panel are PANEL = CHUNK + 16 floats apart.
# c. Loops: chunk of the summed dimension (its filters in L1), block of SAMPLES (its panel in L2), pair of vectors of
#    outputs, register tile. Partial sums go back to y (or dweight) once per chunk (or block of samples).
# d. A job is a group of at most GROUP pairs of vectors; sums do not depend on how pairs are grouped.

cdef enum:
    CHUNK = 256              # features summed per visit [elements]
    PANEL = CHUNK + 16       # distance of the rows of a panel [elements]
    SAMPLES = 120            # samples per visit; a multiple of the common tiles
    GROUP = 4                # most pairs of vectors of outputs that a job handles


def linear_scratch_size(Py_ssize_t N, Py_ssize_t F, Py_ssize_t K):
    """Elements of the scratch array that every pass of a layer of F features and K outputs needs [elements]."""
    return N * PANEL * ((F + CHUNK - 1) // CHUNK + (K + 2 * b + CHUNK - 1) // CHUNK)


cdef inline Py_ssize_t panels_size(Py_ssize_t N, Py_ssize_t F) noexcept nogil:
    return N * PANEL * ((F + CHUNK - 1) // CHUNK)


cdef inline float* panel_row(float* panels, Py_ssize_t N, Py_ssize_t chunk, Py_ssize_t n) noexcept nogil:
    return panels + (chunk * N + n) * PANEL


cdef void pack_panels(const float* x, Py_ssize_t N, Py_ssize_t F, float* panels, int num_threads) noexcept nogil:
    """x (N, F) to panels (chunks, N, PANEL); the tail of a row is never read."""
    cdef Py_ssize_t job, chunks = (F + CHUNK - 1) // CHUNK
    cdef Py_ssize_t n, chunk
    for job in prange(chunks * N, num_threads=num_threads, schedule="static"):
        chunk = job // N
        n = job % N
        memcpy(panel_row(panels, N, chunk, n), x + n * F + chunk * CHUNK, min(CHUNK, F - chunk * CHUNK) * sizeof(float))


cdef inline void linear_tiles(const float* x, Py_ssize_t n0, Py_ssize_t n1, const float* w, Py_ssize_t wv,
                              Py_ssize_t steps, float* y, Py_ssize_t y_row, const float* bias, bint first, bint relu,
                              bint two) noexcept nogil:
    """Samples n0..n1 of y's pair of vectors += panel x times w, or = bias + that when `first`."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over
    cdef int t, width, tiles = tiles_of(n1 - n0)
    cdef Py_ssize_t n
    over.n0, over.x0, over.w0 = steps, 1, b
    over.n1, over.x1, over.w1 = 1, 0, 0
    over.n2, over.x2, over.w2 = 1, 0, 0
    over.ahead = 0
    for t in range(tiles):
        n = n0 + tile_start(n1 - n0, tiles, t)
        width = <int>(n0 + tile_start(n1 - n0, tiles, t + 1) - n)
        if first:
            tile_fill(a0, a1, bias, two)
        else:
            tile_load(a0, a1, width, y + n * y_row, y_row, b, two)
        run(0, width, a0, a1, x + n * PANEL, PANEL, w, wv, &over, two)
        tile_store(a0, a1, width, y + n * y_row, y_row, b, relu, two)


cdef void linear_tiles_of(const float* x, Py_ssize_t n0, Py_ssize_t n1, const float* w, Py_ssize_t wv,
                          Py_ssize_t steps, float* y, Py_ssize_t y_row, const float* bias, bint first, bint relu,
                          bint two) noexcept nogil:
    if two:
        linear_tiles(x, n0, n1, w, wv, steps, y, y_row, bias, first, relu, True)
    else:
        linear_tiles(x, n0, n1, w, wv, steps, y, y_row, bias, first, relu, False)


cdef void forward_group(float* panels, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB, const float* bias,
                        bint relu, float* y, Py_ssize_t k0, Py_ssize_t k1) noexcept nogil:
    """Output blocks k0..k1 (k0 even) of all samples."""
    cdef Py_ssize_t chunk, n, k, steps, chunks = (F + CHUNK - 1) // CHUNK
    for chunk in range(chunks):
        steps = min(CHUNK, F - chunk * CHUNK)
        n = 0
        while n < N:
            k = k0
            while k < k1:
                linear_tiles_of(panel_row(panels, N, chunk, 0), n, min(n + SAMPLES, N),
                                w + (k * F + chunk * CHUNK) * b, F * b, steps, y + k * b, KB * b,
                                NULL if bias == NULL else bias + k * b, chunk == 0, relu and chunk == chunks - 1,
                                k + 1 < k1)
                k += 2
            n += SAMPLES


cdef void input_grad_group(float* panels, Py_ssize_t N, Py_ssize_t F, const float* w, Py_ssize_t KB, float* dx,
                           Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Feature blocks c0..c1 (at most 2 * GROUP) of dx for all samples: see a. for the transposed panels."""
    cdef float wt[2 * GROUP * CHUNK * b]
    cdef Py_ssize_t chunk, n, c, k, kb, steps, chunks = (KB * b + CHUNK - 1) // CHUNK
    for chunk in range(chunks):
        steps = min(CHUNK, KB * b - chunk * CHUNK)
        for kb in range(steps // b):
            for c in range(c0, c1):
                transpose(w + ((chunk * (CHUNK // b) + kb) * F + c * b) * b, b, wt + ((c - c0) * CHUNK + kb * b) * b)
        n = 0
        while n < N:
            c = c0
            while c < c1:
                linear_tiles_of(panel_row(panels, N, chunk, 0), n, min(n + SAMPLES, N), wt + (c - c0) * CHUNK * b,
                                CHUNK * b, steps, dx + c * b, F, NULL, chunk == 0, False, c + 1 < c1)
                c += 2
            n += SAMPLES


cdef inline void weight_grad_tiles(const float* x, const float* dy, Py_ssize_t samples, Py_ssize_t steps, float* dw,
                                   Py_ssize_t wv, bint first, bint two) noexcept nogil:
    """`steps` rows of dweight's pair of vectors += sum over samples of panel x times dy; = when `first`."""
    cdef vec a0[TILE]
    cdef vec a1[TILE]
    cdef Reduction over
    cdef int t, width, tiles = tiles_of(steps)
    cdef Py_ssize_t c
    over.n0, over.x0, over.w0 = samples, PANEL, 2 * b
    over.n1, over.x1, over.w1 = 1, 0, 0
    over.n2, over.x2, over.w2 = 1, 0, 0
    over.ahead = 0
    for t in range(tiles):
        c = tile_start(steps, tiles, t)
        width = <int>(tile_start(steps, tiles, t + 1) - c)
        if first:
            tile_fill(a0, a1, NULL, two)
        else:
            tile_load(a0, a1, width, dw + c * b, b, wv, two)
        run(0, width, a0, a1, x + c, 1, dy, b, &over, two)
        tile_store(a0, a1, width, dw + c * b, b, wv, False, two)


cdef void weight_grad_group(float* panels, Py_ssize_t N, Py_ssize_t F, float* pairs, float* dw, Py_ssize_t k0,
                            Py_ssize_t k1) noexcept nogil:
    """Output blocks k0..k1 (k0 even) of dweight. `pairs` (KB/2, N, 2b) holds dy by pairs of blocks."""
    cdef Py_ssize_t chunk, n, k, steps
    for chunk in range((F + CHUNK - 1) // CHUNK):
        steps = min(CHUNK, F - chunk * CHUNK)
        n = 0
        while n < N:
            k = k0
            while k < k1:
                if k + 1 < k1:
                    weight_grad_tiles(panel_row(panels, N, chunk, n), pairs + (k // 2 * N + n) * 2 * b,
                                      min(SAMPLES, N - n), steps, dw + (k * F + chunk * CHUNK) * b, F * b, n == 0, True)
                else:
                    weight_grad_tiles(panel_row(panels, N, chunk, n), pairs + (k // 2 * N + n) * 2 * b,
                                      min(SAMPLES, N - n), steps, dw + (k * F + chunk * CHUNK) * b, F * b, n == 0, False)
                k += 2
            n += SAMPLES


cdef inline Py_ssize_t group_size(Py_ssize_t blocks, int num_threads) noexcept nogil:
    """Blocks of a job: even, at most 2 * GROUP, and small enough to give every thread several jobs."""
    return 2 * max(min(blocks // (8 * num_threads), GROUP), 1)


def linear_forward(const float[:, ::1] x,                    # IN   (N, F)
                   const float[:, :, ::1] weight,            # IN   (KB, F, b)
                   bias,                                     # IN   (KB * b) or None
                   float[:, ::1] y,                          # OUT  (N, KB * b)
                   bint relu=False,
                   float[::1] scratch=None,                  # TMP  linear_scratch_size(N, F, KB * b)
                   blocking=None, int num_threads=1):
    """y = relu?(x weight' + bias). `blocking` is unused: the chunks suit every size."""
    cdef Py_ssize_t N = x.shape[0], F = x.shape[1], KB = weight.shape[0], size, job
    cdef const float[::1] bias_view
    cdef const float* bias_ptr = NULL
    cdef float* panels
    check("weight", weight, (KB, F, b))
    check("y", y, (N, KB * b))
    if N == 0 or KB == 0:
        return
    if bias is not None:
        bias_view = bias
        check("bias", bias_view, (KB * b,))
        bias_ptr = &bias_view[0]
    scratch = linear_scratch(scratch, N, F, KB * b)
    panels = &scratch[0]
    with nogil:
        pack_panels(&x[0, 0], N, F, panels, num_threads)
        size = group_size(KB, num_threads)
        for job in prange((KB + size - 1) // size, num_threads=num_threads, schedule="static"):
            forward_group(panels, N, F, &weight[0, 0, 0], KB, bias_ptr, relu, &y[0, 0], job * size,
                          min((job + 1) * size, KB))


def linear_input_grad(const float[:, ::1] dy,                # IN   (N, KB * b)
                      const float[:, :, ::1] weight,         # IN   (KB, F, b)
                      float[:, ::1] dx,                      # OUT  (N, F)
                      float[::1] scratch=None,               # TMP  linear_scratch_size(N, F, KB * b)
                      blocking=None, int num_threads=1):
    """dx = dy weight. F must be a multiple of b."""
    cdef Py_ssize_t N = dx.shape[0], F = dx.shape[1], KB = weight.shape[0], size, job
    cdef float* panels
    check("weight", weight, (KB, F, b))
    check("dy", dy, (N, KB * b))
    if F % b:
        raise ValueError(f"dx: got rows of {F} features, wanted a multiple of the SIMD width {b}")
    if N == 0 or F == 0:
        return
    scratch = linear_scratch(scratch, N, F, KB * b)
    panels = &scratch[0]
    with nogil:
        pack_panels(&dy[0, 0], N, KB * b, panels, num_threads)
        size = group_size(F // b, num_threads)
        for job in prange((F // b + size - 1) // size, num_threads=num_threads, schedule="static"):
            input_grad_group(panels, N, F, &weight[0, 0, 0], KB, &dx[0, 0], job * size, min((job + 1) * size, F // b))


def linear_weight_grad(const float[:, ::1] x,                # IN   (N, F)
                       const float[:, ::1] dy,               # IN   (N, KB * b)
                       float[:, :, ::1] dweight,             # OUT  (KB, F, b)
                       float[::1] scratch=None,              # TMP  linear_scratch_size(N, F, KB * b)
                       blocking=None, int num_threads=1):
    """dweight[k, f] = sum over samples of dy[n, k] x[n, f]; zeros when N = 0."""
    cdef Py_ssize_t N = x.shape[0], F = x.shape[1], KB = dweight.shape[0], size, job, n, k
    cdef float* panels
    cdef float* pairs
    check("dweight", dweight, (KB, F, b))
    check("dy", dy, (N, KB * b))
    if KB == 0 or F == 0:
        return
    if N == 0:
        memset(&dweight[0, 0, 0], 0, KB * F * b * sizeof(float))
        return
    scratch = linear_scratch(scratch, N, F, KB * b)
    panels = &scratch[0]
    pairs = panels + panels_size(N, F)
    with nogil:
        pack_panels(&x[0, 0], N, F, panels, num_threads)
        for job in prange((KB + 1) // 2 * N, num_threads=num_threads, schedule="static"):
            k = job // N
            n = job % N
            memcpy(pairs + job * 2 * b, &dy[0, 0] + (n * KB + 2 * k) * b, min(2, KB - 2 * k) * b * sizeof(float))
        size = group_size(KB, num_threads)
        for job in prange((KB + size - 1) // size, num_threads=num_threads, schedule="static"):
            weight_grad_group(panels, N, F, pairs, &dweight[0, 0, 0], job * size, min((job + 1) * size, KB))


cdef float[::1] linear_scratch(float[::1] scratch, Py_ssize_t N, Py_ssize_t F, Py_ssize_t K):
    """The scratch array that was given, or a new one; refused when too small."""
    cdef Py_ssize_t wanted = linear_scratch_size(N, F, K)
    if scratch is None:
        return array(shape=(max(wanted, 1),), itemsize=sizeof(float), format="f")
    if scratch.shape[0] < wanted:
        raise ValueError(f"scratch: got {scratch.shape[0]} elements, wanted {wanted}")
    return scratch
