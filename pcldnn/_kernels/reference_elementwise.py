"""NumPy twins of the kernels that touch each element on its own or each row on its own (see reference.py)."""
import numpy as np

from pcldnn._kernels import checks


def relu_forward(x, y, num_threads=1):
    """y = max(0, x); NaN stays NaN."""
    checks.same(num_threads, x=x.shape, y=y.shape)
    np.maximum(x, 0, out=y)


def relu_input_grad(y, dy, dx, num_threads=1):
    """dx = dy where y > 0, else 0 (a NaN in y lets dy through, as in PyTorch)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    dx[...] = np.where(y <= 0, 0, dy)


def sigmoid_forward(x, y, channels, num_threads=1):
    """y = 1 / (1 + exp(-x)) on (N, CB, M, b); the lanes beyond `channels` become 0, because sigmoid(0) is not."""
    checks.same(num_threads, x=x.shape, y=y.shape)
    checks.channels(channels, x.shape)
    with np.errstate(over="ignore"):      # exp(-x) = inf gives the right answer, 0
        y[...] = 1 / (1 + np.exp(-x))
    y[:, -1, :, y.shape[3] - (y.shape[1] * y.shape[3] - channels):] = 0


def sigmoid_input_grad(y, dy, dx, num_threads=1):
    """dx = dy y (1 - y)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    dx[...] = dy * (y * (1 - y))


def tanh_forward(x, y, num_threads=1):
    """y = tanh(x)."""
    checks.same(num_threads, x=x.shape, y=y.shape)
    np.tanh(x, out=y)


def tanh_input_grad(y, dy, dx, num_threads=1):
    """dx = dy (1 - y^2)."""
    checks.same(num_threads, y=y.shape, dy=dy.shape, dx=dx.shape)
    dx[...] = dy * (1 - y * y)


def philox(counter, key):
    """Philox4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Parameters
    ----------
    counter : four uint32 arrays (or ints) that broadcast together
    key : two uint32 ints

    Returns
    -------
    tuple of four uint32 arrays
    """
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & low,
                          (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & low)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def dropout(x, y, p, seed, layer, epoch, sample_ids, channels, num_threads=1):
    """y = x / (1 - p) with probability 1 - p, else 0, for x (N, CB, M, b); the same call makes the gradient from dy.

    Pixel m of channel c is dropped when word (c // 16) % 4 of Philox(key = (seed, layer), counter = (unit,
    low and high half of the sample id, epoch)) is under p * 2^32, with unit = (c // 64 * 16 + c % 16) * M +
    m. The mask depends on nothing else, the SIMD width least of all: channels 16 apart share a call, because
    they share a lane of vectors.
    """
    checks.dropout(x.shape, y.shape, p, seed, layer, epoch, sample_ids.shape, channels, num_threads)
    n, cb, m, b = x.shape
    channel = np.arange(cb)[:, None, None] * b + np.arange(b)             # (CB, 1, b)
    unit = (channel // 64 * 16 + channel % 16) * m + np.arange(m)[:, None]  # (CB, M, b)
    threshold = np.uint32(min(round(p * 2**32), 2**32 - 1))
    factor = x.dtype.type(1 / (1 - p))
    for i in range(n):
        sample = int(sample_ids[i]) & (2**64 - 1)
        words = philox((unit, sample & 0xFFFFFFFF, sample >> 32, epoch), (seed, layer))
        word = np.choose(channel // 16 % 4, words)
        y[i] = np.where(word >= threshold, x[i] * factor, 0)


def softmax_cross_entropy(logits, labels, num_classes, scale, losses, dlogits, num_threads=1):
    """losses[n] = log(sum exp(logits[n])) - logits[n, labels[n]]; dlogits = scale (softmax - onehot), padded lanes 0.

    The largest logit is subtracted first, so that nothing overflows and no loss saturates.
    """
    checks.softmax_cross_entropy(logits.shape, labels.shape, num_classes, losses.shape, dlogits.shape, num_threads)
    for sample in np.flatnonzero((labels < 0) | (labels >= num_classes)):
        checks.label_range(sample, labels[sample], num_classes)
    rows = np.arange(len(labels))
    with np.errstate(invalid="ignore", over="ignore"):   # an infinite logit gives a NaN loss
        shifted = logits[:, :num_classes] - logits[:, :num_classes].max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, dtype=np.float64)
    losses[...] = np.log(sums) - shifted[rows, labels]
    dlogits[:, num_classes:] = 0
    dlogits[:, :num_classes] = exponentials / sums[:, None]
    dlogits[rows, labels] -= 1
    dlogits *= scale


def sgd_update(weight, grad, momentum_buffer, lr, momentum, weight_decay, num_threads=1):
    """SGD with momentum and weight decay on 1-D shards, PyTorch's rule: g += wd w; v = momentum v + g; w -= lr v."""
    checks.sgd_update(weight.shape, grad.shape, momentum_buffer.shape, num_threads)
    dtype = weight.dtype.type
    momentum_buffer *= dtype(momentum)
    momentum_buffer += grad + dtype(weight_decay) * weight
    weight -= dtype(lr) * momentum_buffer


def sum_arrays(arrays, out, num_threads=1):
    """out = arrays[0] + arrays[1] + ..., in this order; `out` may be one of them."""
    checks.sum_arrays([array.shape for array in arrays], out.shape, num_threads)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    out[...] = total
