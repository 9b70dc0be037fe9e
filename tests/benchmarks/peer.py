"""The peer: PyTorch on the same layers, and oneDNN's own primitives inside it.

PyTorch's rows are the best of what a user can have: contiguous and channels_last images for convolution and pooling
(the layout is converted beforehand, not in the measured call), MKL and oneDNN for fully connected layers. A single
pass of backward comes from `aten.convolution_backward` with an output mask.

oneDNN's rows count only what the library itself reports (ONEDNN_VERBOSE) for its convolution and inner-product
primitives, reorders before and after left out: the figure that its developers would quote.
"""

import contextlib
import ctypes
import os
import re
import statistics
import tempfile
import time

import torch
from torch import nn
from workloads import Row, layer_plan, outline

from pcldnn import layers as ours

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MASKS = {"input_grad": [True, False, False], "weight_grad": [False, True, False]}
ERRORS = (RuntimeError, AttributeError, NotImplementedError)  # an operation that this build does not have


def random(*shape):
    return torch.randn(*shape)


# --- one layer, one pass ------------------------------------------------------------------------------------------


def layer_variants(row: Row, threads: int) -> dict:
    """Calls that compute one pass of one layer, by the name of the way they go."""
    torch.set_num_threads(threads)
    plan = layer_plan(row, threads)
    if row.kind == "stage":
        return _stage(plan, row.pass_name)
    make = {"conv": _convolution, "fc": _linear, "pool": _pooling}[row.kind]
    return make(plan.layer, row.minibatch, plan.input.logical_shape, plan.output.logical_shape, row.pass_name)


def _convolution(layer, images, x_shape, y_shape, pass_name):
    w = random(layer.out_channels, layer.in_channels, *layer.kernel_size)
    x, dy, bias = random(images, *x_shape), random(images, *y_shape), random(layer.out_channels)
    geometry = [list(layer.stride), list(layer.padding), [1, 1], False, [0, 0], 1]

    def variant(memory_format):
        xf, wf, dyf = (t.contiguous(memory_format=memory_format) for t in (x, w, dy))
        if pass_name == "forward":
            return lambda: torch.ops.aten.convolution(xf, wf, bias, *geometry)
        return lambda: torch.ops.aten.convolution_backward(dyf, xf, wf, None, *geometry, MASKS[pass_name])

    return _both_layouts(variant)


def _linear(layer, images, x_shape, y_shape, pass_name):
    x, dy = random(images, *x_shape), random(images, *y_shape)
    w, bias = random(layer.out_features, layer.in_features), random(layer.out_features)
    out = torch.empty({"forward": dy, "input_grad": x, "weight_grad": w}[pass_name].shape)
    x_opaque, dy_opaque = x.to_mkldnn(), dy.to_mkldnn()
    return {
        "forward": {
            "mkl": lambda: torch.addmm(bias, x, w.t(), out=out),
            "onednn": lambda: torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], ""),
        },
        "input_grad": {
            "mkl": lambda: torch.mm(dy, w, out=out),
            "onednn": lambda: torch.ops.aten.mkldnn_linear_backward_input(x.shape, dy_opaque, w),
        },
        "weight_grad": {
            "mkl": lambda: torch.mm(dy.t(), x, out=out),
            "onednn": lambda: torch.ops.aten.mkldnn_linear_backward_weights(dy_opaque, x_opaque, w, False),
        },
    }[pass_name]


def _pooling(layer, images, x_shape, y_shape, pass_name):
    x, dy = random(images, *x_shape), random(images, *y_shape)
    window = [list(layer.kernel_size), list(layer.stride), list(layer.padding), [1, 1], layer.ceil_mode]

    def variant(memory_format):
        xf, dyf = (t.contiguous(memory_format=memory_format) for t in (x, dy))
        if pass_name == "forward":
            return lambda: torch.ops.aten.max_pool2d_with_indices(xf, *window)
        indices = torch.ops.aten.max_pool2d_with_indices(xf, *window)[1]
        return lambda: torch.ops.aten.max_pool2d_with_indices_backward(dyf, xf, *window, indices)

    return _both_layouts(variant)


def _stage(plan, pass_name):
    """Convolution, ReLU and pooling, as a network of modules has them; backward as autograd makes it."""
    images = random(plan.images, *plan.input.logical_shape)

    def variant(memory_format):
        stage = model((plan.layer, plan.fused, plan.pooled)).to(memory_format=memory_format)
        x = images.contiguous(memory_format=memory_format)
        if pass_name == "forward":
            return lambda: stage(x)
        with torch.enable_grad():
            y = stage(x)
        dy, parameters = torch.randn_like(y), list(stage.parameters())
        return lambda: torch.autograd.grad(y, parameters, dy, retain_graph=True)

    return _both_layouts(variant)


def _both_layouts(variant):
    return {name: variant(memory_format) for name, memory_format in LAYOUTS.items()}


def best(variants: dict, seconds_of=None, repeats: int = 3):
    """The quickest of some calls: (name, call). Ways that this build of PyTorch does not have are left out."""
    seconds_of = seconds_of or _seconds_of
    found, reasons = {}, []
    for name, call in variants.items():
        try:
            call()
            taken = statistics.median(seconds_of(call) for _ in range(repeats))
        except ERRORS as error:
            reasons.append(f"{name}: {error}")
            continue
        if taken > 0:  # 0: oneDNN was not asked at all
            found[name] = taken
    if not found:
        raise RuntimeError("; ".join(reasons) or f"no way among {', '.join(variants)} leads to oneDNN")
    name = min(found, key=found.get)
    return name, variants[name]


def _seconds_of(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def operation(row: Row, shape: tuple, threads: int):
    """A call that does what one of our element-wise kernels does, in place where PyTorch can."""
    torch.set_num_threads(threads)
    x, aten = random(*shape), torch.ops.aten
    if row.layer == "loss":
        labels = torch.arange(shape[0]) % shape[1]
        return lambda: _loss_and_gradient(x, labels)
    if row.layer == "sgd":
        weight = nn.Parameter(x)
        weight.grad = random(*shape)
        optimizer = torch.optim.SGD([weight], 1e-4, momentum=0.9, weight_decay=5e-4, fused=True)
        return optimizer.step
    if row.layer == "block":
        out = torch.empty_like(x, memory_format=torch.channels_last)
        return lambda: out.copy_(x)
    dy = torch.zeros(shape)  # as ours
    return {
        ("relu", "forward"): lambda: torch.relu_(x),
        ("relu", "input_grad"): lambda: aten.threshold_backward.grad_input(dy, x, 0, grad_input=dy),
        ("relu_bias", "input_grad"): lambda: aten.threshold_backward.grad_input(dy, x, 0, grad_input=dy).sum((0, 2, 3)),
        ("sigmoid", "forward"): lambda: torch.sigmoid_(x),
        ("sigmoid", "input_grad"): lambda: aten.sigmoid_backward.grad_input(dy, x, grad_input=dy),
        ("tanh", "forward"): lambda: torch.tanh_(x),
        ("tanh", "input_grad"): lambda: aten.tanh_backward.grad_input(dy, x, grad_input=dy),
        ("dropout", "forward"): lambda: nn.functional.dropout(x, 0.5, True, inplace=True),
    }[row.layer, row.pass_name]


def _loss_and_gradient(logits, labels):
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        nn.functional.cross_entropy(logits, labels).backward()


# --- the time that oneDNN's primitives report ---------------------------------------------------------------------


class _Verbose:
    """What oneDNN says on standard output, summed as it comes."""

    EXECUTED = re.compile(
        rb"^onednn_verbose,v1,primitive,exec,cpu,(?:convolution|inner_product),([^,]*),.*,([\d.]+)$", re.MULTILINE
    )

    def __init__(self):
        self.seconds, self.implementation, self.file = 0.0, "", None
        self.rest = b""

    def read(self) -> None:
        ctypes.CDLL(None).fflush(None)
        text = self.rest + self.file.read()
        text, _, self.rest = text.rpartition(b"\n")
        for implementation, milliseconds in self.EXECUTED.findall(text):
            self.seconds += float(milliseconds) / 1e3
            self.implementation = implementation.decode()


_verbose = _Verbose()


@contextlib.contextmanager
def listening():
    """Let oneDNN report every primitive, to us instead of standard output; gives the listener."""
    with tempfile.NamedTemporaryFile(buffering=0) as file, open(file.name, "rb") as _verbose.file:
        ctypes.CDLL(None).fflush(None)
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                yield _verbose
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            _verbose.rest = b""


def primitive_clock() -> float:
    """A timer for pytest-benchmark: seconds that oneDNN's primitives took so far, by their own account."""
    _verbose.read()
    return _verbose.seconds


def primitive_seconds(call) -> float:
    """Seconds that oneDNN's primitives report for a call."""
    start = primitive_clock()
    call()
    return primitive_clock() - start


# --- a training step ----------------------------------------------------------------------------------------------


MODULES = {
    ours.Conv2d: lambda la: nn.Conv2d(la.in_channels, la.out_channels, la.kernel_size, la.stride, la.padding),
    ours.Linear: lambda la: nn.Linear(la.in_features, la.out_features),
    ours.MaxPool2d: lambda la: nn.MaxPool2d(la.kernel_size, la.stride, la.padding, ceil_mode=la.ceil_mode),
    ours.ReLU: lambda la: nn.ReLU(inplace=True),
    ours.Sigmoid: lambda la: nn.Sigmoid(),
    ours.Dropout: lambda la: nn.Dropout(la.p),
    ours.Flatten: lambda la: nn.Flatten(),
}


def model(layers) -> nn.Sequential:
    """A PyTorch model of the same layers as ours."""
    return nn.Sequential(*(MODULES[type(layer)](layer) for layer in layers))


def step_layouts(row: Row) -> list[str]:
    """Layouts in which a network can be trained."""
    return list(LAYOUTS) if len(outline(row.net).input_shape) == 3 else ["contiguous"]


def step_call(row: Row, threads: int, layout: str):
    """A whole training step: forward, loss, backward, SGD with momentum and weight decay (PyTorch's fused kernel)."""
    torch.set_num_threads(threads)
    net = outline(row.net)
    images, labels = random(row.minibatch, *net.input_shape), torch.arange(row.minibatch) % net.num_classes
    twin = model(layer for _, layer in net.layers).train()
    if images.dim() == 4:
        images, twin = images.contiguous(memory_format=LAYOUTS[layout]), twin.to(memory_format=LAYOUTS[layout])
    optimizer = torch.optim.SGD(twin.parameters(), 1e-4, momentum=0.9, weight_decay=5e-4, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(twin(images), labels).backward()
        optimizer.step()

    return step


def step_seconds(row: Row, threads: int, layout: str) -> float:
    """Time of the second step in a layout."""
    step = step_call(row, threads, layout)
    step()
    return _seconds_of(step)
