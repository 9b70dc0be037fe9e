# The two edges of a network: plain NCHW arrays to channel blocks and back.
#
# a. The plain array may have any strides (a transposed, reversed or broadcast view): its strides are
#    followed, nothing is assumed of them.
# b. A job is one row of one channel block, lane by lane: the blocked row (W*b floats) stays in the L1 cache
#    meanwhile.
# c. Lanes beyond the last channel become 0 and are never read back.

cdef inline void block_lane(const char* x, Py_ssize_t stride, float* y, Py_ssize_t width,
                            Py_ssize_t block) noexcept nogil:
    cdef Py_ssize_t w
    for w in range(width):
        y[w * block] = (<const float*>(x + w * stride))[0]


cdef void block_row(const char* x, Py_ssize_t channel_stride, Py_ssize_t stride, float* y, Py_ssize_t width,
                    Py_ssize_t lanes, Py_ssize_t block) noexcept nogil:
    """One row of `lanes` channels, strides in bytes, to a row of blocks."""
    cdef Py_ssize_t lane, w
    for lane in range(lanes):
        if stride == sizeof(float) and block == 3:  # photographs: distances that the compiler knows
            block_lane(x + lane * channel_stride, sizeof(float), y + lane, width, 3)
        else:
            block_lane(x + lane * channel_stride, stride, y + lane, width, block)
    for lane in range(lanes, block):
        for w in range(width):
            y[w * block + lane] = 0


cdef void unblock_row(const float* x, char* y, Py_ssize_t channel_stride, Py_ssize_t stride, Py_ssize_t width,
                      Py_ssize_t lanes, Py_ssize_t block) noexcept nogil:
    """A row of blocks to one row of `lanes` channels, strides in bytes."""
    cdef Py_ssize_t lane, w
    for lane in range(lanes):
        for w in range(width):
            (<float*>(y + lane * channel_stride + w * stride))[0] = x[w * block + lane]


def block_activations(const float[:, :, :, :] x,       # IN   (N, C, H, W), any strides
                      float[:, :, :, :, ::1] y,        # OUT  (N, CB, H, W, bc)
                      int num_threads=1):
    """NCHW -> (N, CB, H, W, bc)."""
    checks.blocked(dims(x), dims(y), num_threads, ("x", "y"))
    cdef Py_ssize_t blocks = y.shape[1], height = y.shape[2], width = y.shape[3], block = y.shape[4]
    cdef Py_ssize_t channels = x.shape[1], jobs = x.shape[0] * blocks * height, job, k
    cdef Py_ssize_t s0 = x.strides[0], s1 = x.strides[1], s2 = x.strides[2], s3 = x.strides[3]
    if jobs * width == 0:
        return
    cdef const char* px = <const char*>&x[0, 0, 0, 0]
    cdef float* py = &y[0, 0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        k = job // height % blocks * block
        block_row(px + job // height // blocks * s0 + k * s1 + job % height * s2, s1, s3, py + job * width * block,
                  width, min(block, channels - k), block)


def unblock_activations(const float[:, :, :, :, ::1] x,    # IN   (N, CB, H, W, bc)
                        float[:, :, :, :] y,               # OUT  (N, C, H, W), any strides
                        int num_threads=1):
    """(N, CB, H, W, bc) -> NCHW."""
    checks.blocked(dims(y), dims(x), num_threads, ("y", "x"))
    cdef Py_ssize_t blocks = x.shape[1], height = x.shape[2], width = x.shape[3], block = x.shape[4]
    cdef Py_ssize_t channels = y.shape[1], jobs = y.shape[0] * blocks * height, job, k
    cdef Py_ssize_t s0 = y.strides[0], s1 = y.strides[1], s2 = y.strides[2], s3 = y.strides[3]
    if jobs * width == 0:
        return
    cdef const float* px = &x[0, 0, 0, 0, 0]
    cdef char* py = <char*>&y[0, 0, 0, 0]
    for job in prange(jobs, nogil=True, num_threads=num_threads, schedule="static"):
        k = job // height % blocks * block
        unblock_row(px + job * width * block, py + job // height // blocks * s0 + k * s1 + job % height * s2, s1, s3,
                    width, min(block, channels - k), block)
