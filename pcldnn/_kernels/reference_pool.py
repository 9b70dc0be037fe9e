"""NumPy twins of the pooling kernels (see reference.py): plain sums over the taps of the window, PyTorch's semantics.

Windows are clipped at the borders, so the ceil rule is only a matter of the P and Q that the caller asks for.
"""
import numpy as np

from pcldnn._kernels import checks
from pcldnn._kernels.reference_elementwise import relu_input_grad


def _taps(size, outputs, kernel, stride, padding):
    """For each tap of a 1-D window: (outputs that have it inside the image, their inputs), as two slices."""
    taps = []
    for tap in range(kernel):
        # Output o reads input o*stride + tap - padding: first and one past the last o for which that is
        # inside.
        first = max(0, -((tap - padding) // stride))
        last = min(outputs, (size - 1 - tap + padding) // stride + 1)
        if first < last:
            start = first * stride + tap - padding
            taps.append((slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)))
    return taps


def _windows(image, output, kernel, stride, padding):
    """All taps in row-major order: (index of the tap, slices of the output, slices of the image)."""
    rows = _taps(image[0], output[0], kernel[0], stride[0], padding[0])
    columns = _taps(image[1], output[1], kernel[1], stride[1], padding[1])
    pairs = ((r, c) for r in rows for c in columns)
    for tap, ((out_rows, in_rows), (out_columns, in_columns)) in enumerate(pairs):
        yield tap, np.s_[:, :, out_rows, out_columns], np.s_[:, :, in_rows, in_columns]


def _maximum(x, output, kernel, stride, padding):
    """Largest value of each window and the tap it came from: first one in row-major order, NaN wins."""
    best = np.full(output, -np.inf, x.dtype)
    winner = np.full(output, -1)
    for tap, out, image in _windows(x.shape[2:4], output[2:4], kernel, stride, padding):
        value = x[image]
        better = (winner[out] < 0) | (value > best[out]) | np.isnan(value)
        best[out] = np.where(better, value, best[out])
        winner[out] = np.where(better, tap, winner[out])
    return best, winner


def pooled_places(x, output):
    """Place of the maximum in each window of 2x2, row by row 0 to 3; -1 where the maximum is not above zero."""
    best, winner = _maximum(x, output, (2, 2), (2, 2), (0, 0))
    return np.where(best <= 0, -1, winner)


def max_pool2d_forward(x, y, kernel, stride, padding, num_threads=1):
    """y = largest value of each window."""
    checks.pool2d(x.shape, y.shape, kernel, stride, padding, num_threads)
    y[...] = -np.inf
    for _, out, image in _windows(x.shape[2:4], y.shape[2:4], kernel, stride, padding):
        y[out] = np.maximum(y[out], x[image])


def max_pool2d_input_grad(x, dy, dx, kernel, stride, padding, relu=False, num_threads=1, sums=None):
    """Each dy goes to the place of the maximum of its window in x; overwrites dx. `relu`: x is a ReLU's output.

    `sums` (N, CB, b), float64, become those of dx over the pixels.
    """
    checks.pool2d(x.shape, dy.shape, kernel, stride, padding, num_threads, names=("x", "dy"))
    checks.same(num_threads, x=x.shape, dx=dx.shape)
    _, winner = _maximum(x, dy.shape, kernel, stride, padding)
    dx[...] = 0
    for tap, out, image in _windows(x.shape[2:4], dy.shape[2:4], kernel, stride, padding):
        dx[image] += np.where(winner[out] == tap, dy[out], 0)
    if relu:
        relu_input_grad(x, dx, dx)
    if sums is not None:
        checks.shape("sums", sums.shape, (*x.shape[:2], x.shape[4]))
        sums[...] = dx.sum(axis=(2, 3), dtype=np.float64)


def conv2d_pool_output_grad(dy, places, dx, sums, num_threads=1):
    """Each dy goes to its place in a window of 2x2 (see `conv2d_pool_forward`); overwrites dx and sums."""
    checks.conv2d_pool_output_grad(dy.shape, places.shape, dx.shape, sums.shape, num_threads)
    dx[...] = 0
    for tap, out, image in _windows(dx.shape[2:4], dy.shape[2:4], (2, 2), (2, 2), (0, 0)):
        dx[image] = np.where(places[out] == tap, dy[out], 0)
    sums[...] = dx.sum(axis=(2, 3), dtype=np.float64)


def _counts(size, outputs, kernel, stride, padding, count_include_pad):
    """1-D window lengths that averages divide by.

    With count_include_pad the padding counts, but not what the last window of the ceil rule has beyond it.
    """
    start = np.arange(outputs) * stride - padding
    stop = np.minimum(start + kernel, size + padding)
    if count_include_pad:
        return stop - start
    return np.minimum(stop, size) - np.maximum(start, 0)


def _areas(image, output, kernel, stride, padding, count_include_pad, dtype):
    """Number of pixels each window is divided by, (P, Q, 1)."""
    rows, columns = (_counts(*args, count_include_pad) for args in zip(image, output, kernel, stride, padding))
    return np.outer(rows, columns).astype(dtype)[:, :, None]


def avg_pool2d_forward(x, y, kernel, stride, padding, count_include_pad, num_threads=1):
    """y = mean of each window."""
    checks.pool2d(x.shape, y.shape, kernel, stride, padding, num_threads)
    y[...] = 0
    for _, out, image in _windows(x.shape[2:4], y.shape[2:4], kernel, stride, padding):
        y[out] += x[image]
    y /= _areas(x.shape[2:4], y.shape[2:4], kernel, stride, padding, count_include_pad, y.dtype)


def avg_pool2d_input_grad(dy, dx, kernel, stride, padding, count_include_pad, num_threads=1):
    """Spreads each dy evenly over its window; overwrites dx."""
    checks.pool2d(dx.shape, dy.shape, kernel, stride, padding, num_threads, names=("dx", "dy"))
    share = dy / _areas(dx.shape[2:4], dy.shape[2:4], kernel, stride, padding, count_include_pad, dy.dtype)
    dx[...] = 0
    for _, out, image in _windows(dx.shape[2:4], dy.shape[2:4], kernel, stride, padding):
        dx[image] += share[out]
