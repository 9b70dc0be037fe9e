# The SGD update of an owned shard.
#
# a. One pass over weight, gradient and momentum: five floats move for each element, whatever the
#    hyper-parameters are (momentum 0 or weight decay 0 cost no less: memory is the bound).
# b. PyTorch's rule, not Caffe's: the learning rate stays outside the momentum, so a schedule acts at once on
#    all of it.

cdef inline void sgd_step(float* w, const float* g, float* v, int count, float lr, float momentum,
                          float decay) noexcept nogil:
    """One vector, or the first `count` elements of one."""
    cdef vec weight, speed
    if count == b:
        weight = load(w)
        speed = load(v) * momentum + (load(g) + weight * decay)
        store(v, speed)
        store(w, weight - speed * lr)
    else:
        weight = load_some(w, count, 0)
        speed = load_some(v, count, 0) * momentum + (load_some(g, count, 0) + weight * decay)
        store_some(v, speed, count)
        store_some(w, weight - speed * lr, count)


cdef void sgd_run(float* w, const float* g, float* v, Py_ssize_t job, Py_ssize_t size, float lr, float momentum,
                  float decay) noexcept nogil:
    """The elements of one job."""
    cdef Py_ssize_t i = job * RUN
    cdef Py_ssize_t stop = min(i + RUN, size)
    while i + b <= stop:
        sgd_step(w + i, g + i, v + i, b, lr, momentum, decay)
        i += b
    if i < stop:
        sgd_step(w + i, g + i, v + i, <int>(stop - i), lr, momentum, decay)


def sgd_update(float[::1] weight,               # IN/OUT  (size,)
               const float[::1] grad,           # IN      (size,)
               float[::1] momentum_buffer,      # IN/OUT  (size,)
               float lr, float momentum, float weight_decay, int num_threads=1):
    """g = grad + weight_decay*weight; momentum_buffer = momentum*momentum_buffer + g; weight -= lr*momentum_buffer."""
    checks.sgd_update(dims(weight), dims(grad), dims(momentum_buffer), num_threads)
    cdef Py_ssize_t size = weight.shape[0], job
    if size == 0:
        return
    cdef float* w = &weight[0]
    cdef const float* g = &grad[0]
    cdef float* v = &momentum_buffer[0]
    for job in prange(runs_of(size), nogil=True, num_threads=num_threads, schedule="static"):
        sgd_run(w, g, v, job, size, lr, momentum, weight_decay)
