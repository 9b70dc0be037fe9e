"""The NumPy twin of every kernel: oracle of the tests, baseline of the benchmarks, last-resort target.

Same names and arguments as the compiled kernels, but
(a) the block width b is read from the arrays, not fixed, and
(b) the dtype is that of the arrays: called with float64 arrays it is the oracle for the float32 kernels.
(c) Convolution is im2col of one image + one BLAS product, the method of Caffe (Jia et al. 2014), so that it
    is an honest baseline; arguments that only steer speed (blocking, scratch, num_threads) are checked or
    ignored.

This file holds the matrix products and the layout changes; pooling and the element-wise kernels stand beside
it and are re-exported here. Layouts: activations (N, C/b, H, W, b), filters (K/b, C/b, R, S, b, b) with the
input channel before the output channel.
"""
import numpy as np

from pcldnn._kernels import checks, reference_pool
from pcldnn._kernels.reference_elementwise import (  # noqa: F401  (one import surface for a target)
    dropout,
    relu_forward,
    relu_input_grad,
    sgd_update,
    sigmoid_forward,
    sigmoid_input_grad,
    softmax_cross_entropy,
    sum_arrays,
    tanh_forward,
    tanh_input_grad,
)
from pcldnn._kernels.reference_pool import (  # noqa: F401
    avg_pool2d_forward,
    avg_pool2d_input_grad,
    conv2d_pool_output_grad,
    max_pool2d_forward,
    max_pool2d_input_grad,
)
from pcldnn._kernels.reference_winograd import (  # noqa: F401
    winograd_forward,
    winograd_input_grad,
    winograd_scratch_size,
    winograd_transform_filter,
    winograd_weight_grad,
)

SIMD_WIDTH = 8
TARGET = "reference"
_LINEAR_BLOCKS = 64  # channel blocks of a fully connected weight that are unpacked at a time: bounds the temporary


def _padded(image, padding):
    """One image (CB, H, W, b) in a frame of zeros."""
    ph, pw = padding
    cb, h, w, b = image.shape
    out = np.zeros((cb, h + 2 * ph, w + 2 * pw, b), image.dtype)
    out[:, ph:ph + h, pw:pw + w] = image
    return out


def _columns(image, taps, outputs, stride, padding):
    """im2col of one image (CB, H, W, b): matrix (P*Q, CB*R*S*b)."""
    (r, s), (p, q), (sh, sw) = taps, outputs, stride
    framed = _padded(image, padding)
    cb, h, w, b = framed.shape
    # The S pixels of a filter row and their lanes are adjacent in memory: one window of S*b floats.
    windows = np.lib.stride_tricks.sliding_window_view(framed.reshape(cb, h, w * b), (r, s * b), axis=(1, 2))
    windows = windows[:, :(p - 1) * sh + 1:sh, :(q - 1) * sw * b + 1:sw * b]
    return windows.transpose(1, 2, 0, 3, 4).reshape(p * q, cb * r * s * b)


def conv2d_forward(x, weight, bias, y, stride, padding, relu=False, blocking=None, num_threads=1, scratch=None):
    """y = weight * x (correlation) + bias, then optionally max(0, y)."""
    bias_shape = None if bias is None else bias.shape
    checks.conv2d_forward(x.shape, weight.shape, bias_shape, y.shape, stride, padding, num_threads)
    checks.blocking(blocking, None, checks.CONV_BLOCKING)
    kb, cb, r, s, bc, b = weight.shape
    n, _, p, q, _ = y.shape
    matrix = weight.transpose(1, 2, 3, 4, 0, 5).reshape(cb * r * s * bc, kb * b)
    for i in range(n):
        out = _columns(x[i], (r, s), (p, q), stride, padding) @ matrix
        if bias is not None:
            out += bias
        if relu:
            np.maximum(out, 0, out=out)
        y[i] = out.reshape(p, q, kb, b).transpose(2, 0, 1, 3)


def conv2d_pool_forward(x, weight, bias, y, places, stride, padding, num_threads=1):
    """y = max_pool2d(relu(conv2d(x, weight) + bias)), windows of 2x2; `places` (or None) those of the maxima."""
    bias_shape, places_shape = (None if array is None else array.shape for array in (bias, places))
    checks.conv2d_pool_forward(x.shape, weight.shape, bias_shape, y.shape, places_shape, stride, padding, num_threads)
    sizes = zip(x.shape[2:4], weight.shape[2:4], stride, padding)
    outputs = np.empty((*y.shape[:2], *(checks.output_size(*size) for size in sizes), y.shape[4]), y.dtype)
    conv2d_forward(x, weight, bias, outputs, stride, padding, relu=True)
    max_pool2d_forward(outputs, y, (2, 2), (2, 2), (0, 0))
    if places is not None:
        places[...] = reference_pool.pooled_places(outputs, y.shape)


def conv2d_transpose_filter(weight, weight_t, num_threads=1):
    """weight_t[c, k, R-1-r, S-1-s, ki, ci] = weight[k, c, r, s, ci, ki]: transposed and flipped."""
    checks.conv2d_transpose_filter(weight.shape, weight_t.shape, num_threads)
    weight_t[...] = weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3, 5, 4)


def conv2d_input_grad(dy, weight_t, dx, stride, padding, blocking=None, num_threads=1, scratch=None):
    """The adjoint of conv2d_forward in x; overwrites dx, input that no window touched gets exactly 0."""
    checks.conv2d_input_grad(dy.shape, weight_t.shape, dx.shape, stride, padding, num_threads)
    checks.blocking(blocking, None, checks.CONV_BLOCKING)
    cb, kb, r, s, b, bc = weight_t.shape
    n, _, p, q, _ = dy.shape
    (sh, sw), (ph, pw) = stride, padding
    h, w = dx.shape[2:4]
    matrix = weight_t[:, :, ::-1, ::-1].transpose(1, 4, 2, 3, 0, 5).reshape(kb * b, r * s * cb * bc)
    for i in range(n):
        columns = dy[i].transpose(1, 2, 0, 3).reshape(p * q, kb * b) @ matrix
        columns = columns.reshape(p, q, r, s, cb, bc)
        framed = np.zeros((h + 2 * ph, w + 2 * pw, cb, bc), dx.dtype)
        for k in range(r):
            for m in range(s):
                framed[k:k + (p - 1) * sh + 1:sh, m:m + (q - 1) * sw + 1:sw] += columns[:, :, k, m]
        dx[i] = framed[ph:ph + h, pw:pw + w].transpose(2, 0, 1, 3)


def conv2d_weight_grad(x, dy, dweight, stride, padding, scratch=None, blocking=None, num_threads=1):
    """The adjoint of conv2d_forward in weight, summed over the images; overwrites dweight (zeros when N = 0)."""
    checks.conv2d_weight_grad(x.shape, dy.shape, dweight.shape, stride, padding, num_threads)
    checks.blocking(blocking, None, checks.WEIGHT_GRAD_BLOCKING)
    kb, cb, r, s, bc, b = dweight.shape
    n, _, p, q, _ = dy.shape
    total = np.zeros((cb * r * s * bc, kb * b), dweight.dtype)
    for i in range(n):
        rows = dy[i].transpose(1, 2, 0, 3).reshape(p * q, kb * b)
        total += _columns(x[i], (r, s), (p, q), stride, padding).T @ rows
    dweight[...] = total.reshape(cb, r, s, bc, kb, b).transpose(4, 0, 1, 2, 3, 5)


def bias_grad(dy, dbias, num_threads=1):
    """dbias = sum of dy (N, KB, M, b) over images and pixels."""
    checks.bias_grad(dy.shape, dbias.shape, num_threads)
    # Made contiguous along the summed axis: only there does NumPy add pairwise.
    rows = np.ascontiguousarray(dy.transpose(1, 3, 0, 2)).reshape(dbias.size, dy.shape[0] * dy.shape[2])
    dbias[...] = rows.sum(axis=1)


def relu_bias_grad(y, dy, dbias, num_threads=1):
    """`relu_input_grad` in place and `bias_grad` of its result."""
    relu_input_grad(y, dy, dy, num_threads)
    bias_grad(dy, dbias, num_threads)


def linear_scratch_size(n, f, k):
    """Elements of scratch that the linear kernels need for x (n, f) and y (n, k); the twin needs none."""
    return 0


def _linear_blocks(kb):
    """The slices of channel blocks that are handled at a time."""
    return [slice(k, min(k + _LINEAR_BLOCKS, kb)) for k in range(0, kb, _LINEAR_BLOCKS)]


def _unpacked(weight):
    """(KB, F, b) -> (F, KB*b)."""
    kb, f, b = weight.shape
    return weight.transpose(1, 0, 2).reshape(f, kb * b)


def linear_forward(x, weight, bias, y, relu=False, scratch=None, blocking=None, num_threads=1):
    """y = x @ weight + bias, then optionally max(0, y)."""
    checks.linear(x.shape, weight.shape, None if bias is None else bias.shape, y.shape, num_threads)
    checks.blocking(blocking, None, checks.LINEAR_BLOCKING)
    b = weight.shape[2]
    for part in _linear_blocks(weight.shape[0]):
        y[:, part.start * b:part.stop * b] = x @ _unpacked(weight[part])
    if bias is not None:
        y += bias
    if relu:
        np.maximum(y, 0, out=y)


def linear_input_grad(dy, weight, dx, scratch=None, blocking=None, num_threads=1):
    """dx = dy @ weight^T."""
    checks.linear(dx.shape, weight.shape, None, dy.shape, num_threads, names=("dx", "weight", "dy"))
    checks.blocking(blocking, None, checks.LINEAR_BLOCKING)
    b = weight.shape[2]
    dx[...] = 0
    for part in _linear_blocks(weight.shape[0]):
        dx += dy[:, part.start * b:part.stop * b] @ _unpacked(weight[part]).T


def linear_weight_grad(x, dy, dweight, scratch=None, blocking=None, num_threads=1):
    """dweight = x^T @ dy; overwrites (zeros when N = 0)."""
    checks.linear(x.shape, dweight.shape, None, dy.shape, num_threads, names=("x", "dweight", "dy"))
    checks.blocking(blocking, None, checks.LINEAR_BLOCKING)
    kb, f, b = dweight.shape
    for part in _linear_blocks(kb):
        product = x.T @ dy[:, part.start * b:part.stop * b]
        dweight[part] = product.reshape(f, -1, b).transpose(1, 0, 2)


def block_activations(x, y, num_threads=1):
    """NCHW -> (N, CB, H, W, b); lanes beyond C become 0."""
    checks.blocked(x.shape, y.shape, num_threads, ("x", "y"))
    c, b = x.shape[1], y.shape[4]
    for k in range(y.shape[1]):
        lanes = min(b, c - k * b)
        y[:, k, :, :, :lanes] = x[:, k * b:k * b + lanes].transpose(0, 2, 3, 1)
        y[:, k, :, :, lanes:] = 0


def unblock_activations(x, y, num_threads=1):
    """(N, CB, H, W, b) -> NCHW; lanes beyond C are left out."""
    checks.blocked(y.shape, x.shape, num_threads, ("y", "x"))
    c, b = y.shape[1], x.shape[4]
    for k in range(x.shape[1]):
        lanes = min(b, c - k * b)
        y[:, k * b:k * b + lanes] = x[:, k, :, :, :lanes].transpose(0, 3, 1, 2)
