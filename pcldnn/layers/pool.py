"""Max and average pooling."""

from __future__ import annotations

from dataclasses import dataclass

from pcldnn import _kernels as kernels
from pcldnn.layers.base import Layer, pair
from pcldnn.layout import Layout


def pooled_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Output size along one dimension, PyTorch's rule.

    The floor rule counts whole windows. The ceil rule adds a last, clipped window for what is left over, unless that
    window would start beyond the input and its leading padding.
    """
    outputs = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (outputs - 1) * stride >= size + padding:
        outputs -= 1
    if outputs < 1:
        raise ValueError(
            f"the input of size {size} with padding {padding} is smaller than the kernel of size {kernel} "
            f"(stride {stride}): there is no output"
        )
    return outputs


@dataclass(frozen=True)
class _Pool2d(Layer):
    """Geometry that both kinds share."""

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: int | tuple[int, int] = 0
    ceil_mode: bool = False

    def __post_init__(self):
        kind = type(self).__name__
        stride = self.kernel_size if self.stride is None else self.stride
        object.__setattr__(self, "kernel_size", pair(self.kernel_size, f"{kind} kernel_size", 1))
        object.__setattr__(self, "stride", pair(stride, f"{kind} stride", 1))
        object.__setattr__(self, "padding", pair(self.padding, f"{kind} padding", 0))
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel_size)):
            raise ValueError(
                f"{kind}: got padding {self.padding} for kernel_size {self.kernel_size}, wanted at most half of it"
            )

    def output_layout(self, input: Layout, block: int) -> Layout:
        if input.flat:
            raise ValueError(f"the input is a vector of {input.features} features, wanted images (C, H, W)")
        channels, *size = input.shape
        geometry = zip(size, self.kernel_size, self.stride, self.padding)
        rows, columns = (pooled_size(*dimension, self.ceil_mode) for dimension in geometry)
        return Layout((channels, rows, columns), input.block)

    def __str__(self) -> str:
        ceil = " ceil" if self.ceil_mode else ""
        return f"{type(self).__name__} {self.kernel_size[0]}x{self.kernel_size[1]}/{self.stride[0]}{ceil}"


@dataclass(frozen=True)
class MaxPool2d(_Pool2d):
    """Largest value of each window; its gradient goes to the first maximum in row-major order, as in PyTorch.

    Parameters
    ----------
    kernel_size : int or (vertical, horizontal)
    stride : int or (vertical, horizontal), optional
        Default: kernel_size.
    padding : int or (vertical, horizontal)
        At most half of the kernel.
    ceil_mode : bool
        False: only whole windows (PyTorch's default). True: a clipped last window as well (Caffe's rule).
    """

    saves = frozenset({"input"})
    masks = True
    spread = 2.0  # measured on VGG-A at its starting weights: 1.8 to 2.7 for 2x2 windows

    def halves(self, image: Layout) -> bool:
        """Whether its windows are 2x2, apart and whole: `conv_pool.pxi` has their kernel."""
        _, height, width = image.shape
        apart = self.kernel_size == self.stride == (2, 2) and self.padding == (0, 0) and min(height, width) > 1
        return apart and self.output_layout(image, image.block).shape[1:] == (height // 2, width // 2)

    def compute_forward(self, unit, x, y, step):
        kernels.max_pool2d_forward(x, y, self.kernel_size, self.stride, self.padding, unit.num_threads)

    def compute_input_grad(self, unit, dy, dx):
        sums = None if unit.pixel_sums is None else unit.pixel_sums[: len(dy)]
        kernels.max_pool2d_input_grad(
            unit.x, dy, dx, self.kernel_size, self.stride, self.padding, unit.plan.relu_input, unit.num_threads, sums
        )


@dataclass(frozen=True)
class AvgPool2d(_Pool2d):
    """Mean of each window.

    Parameters
    ----------
    kernel_size, stride, padding, ceil_mode
        As in MaxPool2d.
    count_include_pad : bool
        Whether the zeros of the padding count in the mean.
    """

    count_include_pad: bool = True

    def compute_forward(self, unit, x, y, step):
        kernels.avg_pool2d_forward(
            x, y, self.kernel_size, self.stride, self.padding, self.count_include_pad, unit.num_threads
        )

    def compute_input_grad(self, unit, dy, dx):
        kernels.avg_pool2d_input_grad(
            dy, dx, self.kernel_size, self.stride, self.padding, self.count_include_pad, unit.num_threads
        )
