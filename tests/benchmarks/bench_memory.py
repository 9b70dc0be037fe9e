"""What is bound by memory: activations, dropout, loss, SGD update, and the layout change at a network's entrance.

On arrays as large as those of the networks; pooling is in bench_kernels.py. Bytes count every array once, as STREAM
counts them. `extra_info` is that of bench_kernels.py: here bytes_per_s and triad_share are what to look at.
"""

from fnmatch import fnmatch

import numpy as np
from measuring import blas_threads, measure, record
from on_target import running_on
from workloads import Row, filled, outline

from pcldnn.layout import aligned_zeros, blocks

# network, name, pass, minibatch (that of a training step, or less where the array is large)
OPERATIONS = [
    ("vgg_a", "relu", "forward", 8), ("vgg_a", "relu", "input_grad", 8),
    ("vgg_a", "relu_bias", "input_grad", 8),
    ("vgg_a", "sigmoid", "forward", 8), ("vgg_a", "sigmoid", "input_grad", 8),
    ("vgg_a", "tanh", "forward", 8), ("vgg_a", "tanh", "input_grad", 8),
    ("vgg_a", "dropout", "forward", 8),
    ("vgg_a", "block", "forward", 32),
    ("cd_dnn", "loss", "forward", 1024),
    ("vgg_a", "sgd", "update", 1),
    ("tiny", "relu", "input_grad", 2), ("tiny", "relu_bias", "input_grad", 2), ("tiny", "dropout", "forward", 2), ("tiny", "block", "forward", 2),
    ("tiny", "loss", "forward", 2), ("tiny", "sgd", "update", 1),
]  # fmt: skip


def rows(options):
    """Rows of the operations that the options ask for."""
    by = [*options.targets, *(["torch"] if options.peer else [])]
    return [
        Row(net, name, step, n, who)
        for net, name, step, minibatch in OPERATIONS
        if net in options.nets
        and any(fnmatch(name, pattern) for pattern in options.layers)
        and (step in options.passes or step == "update")
        for n in ((minibatch,) if name == "sgd" else options.minibatch or (minibatch,))
        for who in by
    ]


def test_operation(benchmark, row, options, rates, pytestconfig):
    """One element-wise kernel."""
    if row.by == "torch":
        import peer

        with peer.torch.no_grad():
            call = peer.operation(row, _shape(row), rates.threads)
            median = measure(benchmark, row, call, pytestconfig, rates)
    else:
        with running_on(row.by) as kernels, blas_threads(rates.threads):
            call = _ours(row, _shape(row), kernels, rates.threads)
            median = measure(benchmark, row, call, pytestconfig, rates)
    record(benchmark, rates, row, row.by, "direct", 0, _bytes(row), median)


def _shape(row):
    """The array's logical shape: (weights,), (images, classes), or (images, channels, height, width)."""
    plan = outline(row.net).plan(1)
    if row.layer == "sgd":  # the second largest layer, which is VGG-A's fc7: the largest says nothing more
        return (sorted(layer.parameter_count for layer in plan.layers)[-2],)
    if row.layer == "loss":
        return row.minibatch, plan.output.features
    return row.minibatch, *(plan.input if row.layer == "block" else plan.layers[0].computed).shape


def _bytes(row):
    """Bytes that a call must move [byte]."""
    arrays = {"sgd": 5}.get(row.layer, 2)
    return 4 * int(np.prod(_shape(row))) * (arrays + (row.pass_name == "input_grad"))


def _ours(row, shape, kernels, threads):
    """A call of our kernel, in place where a network calls it in place."""
    name, images = row.layer, shape[0]
    if name == "sgd":
        weight, grad, momentum = (filled(shape) for _ in range(3))
        return lambda: kernels.sgd_update(weight, grad, momentum, 1e-4, 0.9, 5e-4, threads)
    if name == "loss":
        classes = shape[1]
        logits = filled((images, blocks(classes, kernels.SIMD_WIDTH) * kernels.SIMD_WIDTH))
        gradient, losses, labels = aligned_zeros(logits.shape), np.zeros(images), np.arange(images) % classes
        return lambda: kernels.softmax_cross_entropy(logits, labels, classes, 1.0, losses, gradient, threads)
    if name == "block":
        plain, blocked = filled(shape), aligned_zeros((images, 1, *shape[2:], shape[1]))
        return lambda: kernels.block_activations(plain, blocked, threads)
    channels = shape[1]
    x = filled((images, blocks(channels, kernels.SIMD_WIDTH), shape[2] * shape[3], kernels.SIMD_WIDTH))
    if name == "dropout":
        ids = np.arange(images)
        return lambda: kernels.dropout(x, x, 0.5, 1, 1, 0, ids, channels, threads)
    if name == "relu_bias":
        dy, dbias = aligned_zeros(x.shape), np.zeros(x.shape[1] * x.shape[3], np.float32)
        return lambda: kernels.relu_bias_grad(x, dy, dbias, threads)
    kernel = getattr(kernels, f"{name}_{row.pass_name}")
    if row.pass_name == "input_grad":
        dy = aligned_zeros(x.shape)  # stays so: others would shrink with each call, to denormal numbers, which are slow
        return lambda: kernel(x, dy, dy, threads)
    if name == "sigmoid":
        return lambda: kernel(x, x, channels, threads)
    return lambda: kernel(x, x, threads)
