"""NumPy twins of the Winograd kernels: the same transforms by matrices, without tiles of two sizes or batches.

Every size is cut in tiles of 6 outputs (4 for 5x5 filters), whatever is left over is computed and dropped. The oracle
of the tests is not this but direct convolution in float64 (`reference.conv2d_forward` and its kin).
"""

import numpy as np

from pcldnn._kernels import checks

_POINTS = np.array([0, 9 / 16, -9 / 16, 1, -1, 13 / 8, -13 / 8])  # and infinity


def _matrices(taps):
    """B' (8x8), G (8 x taps) and A (8 x (9 - taps)): derived from Lavin & Gray 2016."""
    inputs, filters, outputs = np.zeros((8, 8)), np.zeros((8, taps)), np.zeros((8, 9 - taps))
    for i, point in enumerate(_POINTS):
        others = np.delete(_POINTS, i)
        inputs[i, :7] = np.poly(others)[::-1]
        filters[i] = point ** np.arange(taps) / np.prod(point - others)
        outputs[i] = point ** np.arange(9 - taps)
    inputs[7] = np.poly(_POINTS)[::-1]
    filters[7, -1] = outputs[7, -1] = 1
    return inputs, filters, outputs


_MATRICES = {taps: _matrices(taps) for taps in checks.WINOGRAD_KERNELS}


def _both(matrix, tiles):
    """matrix X matrix' for the last two axes."""
    matrix = matrix.astype(tiles.dtype)
    return matrix @ tiles @ matrix.T


def _tiles(image, size, step, count, first):
    """The tiles (C, rows, cols, size, size) of an image (CB, H, W, b), `step` apart from `first` on; zeros outside."""
    (ph, pw), (rows, cols) = first, count
    cb, h, w, b = image.shape
    framed = np.zeros((cb * b, step * (rows - 1) + size, step * (cols - 1) + size), image.dtype)
    plain = image.transpose(0, 3, 1, 2).reshape(cb * b, h, w)
    plain = plain[:, max(-ph, 0):, max(-pw, 0):]
    ph, pw = max(ph, 0), max(pw, 0)
    part = plain[:, :framed.shape[1] - ph, :framed.shape[2] - pw]
    framed[:, ph:ph + part.shape[1], pw:pw + part.shape[2]] = part
    windows = np.lib.stride_tricks.sliding_window_view(framed, (size, size), axis=(1, 2))
    return windows[:, ::step, ::step][:, :rows, :cols]


def _points(tiles):
    """(C, rows, cols, 8, 8) to (64, C, tiles)."""
    c, rows, cols = tiles.shape[:3]
    return tiles.transpose(3, 4, 0, 1, 2).reshape(64, c, rows * cols)


def winograd_scratch_size(in_blocks, out_blocks, tiles):
    """The twins need no scratch."""
    return 0


def winograd_transform_filter(weight, u, input_grad=False, num_threads=1):
    """u = G w G' at 64 points; with `input_grad` of the transposed, flipped filters."""
    checks.winograd_transform_filter(weight.shape, u.shape, input_grad, num_threads)
    if input_grad:
        weight = weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3, 5, 4)
    at_points = _both(_MATRICES[weight.shape[2]][1], weight.transpose(0, 1, 4, 5, 2, 3))
    u[...] = at_points.transpose(4, 5, 0, 1, 2, 3).reshape(u.shape)


def _convolve(x, u, bias, y, padding, relu, taps):
    n, kb, p, q, b = y.shape
    step, (to_points, _, from_points) = 9 - taps, _MATRICES[taps]
    count = -(-p // step), -(-q // step)
    matrices = u.transpose(0, 1, 3, 2).reshape(64, kb * b, u.shape[2])
    for i in range(n):
        v = _points(_both(to_points, _tiles(x[i], 8, step, count, padding)))
        m = (matrices @ v).reshape(8, 8, kb * b, *count).transpose(2, 3, 4, 0, 1)
        out = _both(from_points.T, m).transpose(0, 1, 3, 2, 4).reshape(kb, b, step * count[0], step * count[1])
        y[i] = out[:, :, :p, :q].transpose(0, 2, 3, 1)
        if bias is not None:
            y[i] += bias.reshape(kb, 1, 1, b)
        if relu:
            np.maximum(y[i], 0, out=y[i])


def winograd_forward(x, u, bias, y, padding, relu=False, scratch=None, blocking=None, num_threads=1, kernel=3):
    """y = relu?(conv2d(x, weight) + bias) for filters of kernel x kernel, 3 or 5, and stride 1."""
    bias_shape = None if bias is None else bias.shape
    checks.winograd_forward(x.shape, u.shape, bias_shape, y.shape, padding, num_threads, kernel)
    checks.blocking(blocking, None, checks.WINOGRAD_BLOCKING)
    _convolve(x, u, bias, y, padding, relu, kernel)


def winograd_input_grad(dy, u, dx, padding, scratch=None, blocking=None, num_threads=1, kernel=3):
    """The adjoint of winograd_forward in x: convolution of dy with padding kernel - 1 - padding."""
    checks.winograd_input_grad(dy.shape, u.shape, dx.shape, padding, num_threads, kernel)
    checks.blocking(blocking, None, checks.WINOGRAD_BLOCKING)
    _convolve(dy, u, None, dx, (kernel - 1 - padding[0], kernel - 1 - padding[1]), False, kernel)


def winograd_weight_grad(x, dy, dweight, padding, scratch=None, blocking=None, num_threads=1):
    """The adjoint in weight: products summed over all tiles in the transformed domain, then G' . G."""
    checks.winograd_weight_grad(x.shape, dy.shape, dweight.shape, padding, num_threads)
    checks.blocking(blocking, None, checks.WINOGRAD_BLOCKING)
    kb, cb, taps, _, _, b = dweight.shape
    n, _, p, q, _ = dy.shape
    step, (to_points, filters, outputs) = 9 - taps, _MATRICES[taps]
    count = -(-p // step), -(-q // step)
    total = np.zeros((64, cb * b, kb * b), dweight.dtype)
    for i in range(n):
        v = _points(_both(to_points, _tiles(x[i], 8, step, count, padding)))
        d = _points(_both(outputs, _tiles(dy[i], step, step, count, (0, 0))))
        total += v @ d.transpose(0, 2, 1)
    taps = _both(filters.T, total.reshape(8, 8, cb, b, kb, b).transpose(4, 2, 3, 5, 0, 1))
    dweight[...] = taps.transpose(0, 1, 4, 5, 2, 3)
