"""Errors of Winograd and direct convolution by layer and pass, against float64: the table of docs/numerics.md.

    python scripts/numerics_report.py [--images 1] [--rows 14]

Inputs are as after a ReLU (normal, clipped at zero), weights as He et al. initialise them, output gradients normal.
The error is the largest one as a share of the largest output. Whole images take long in float64, so the layers are
computed on the first rows only, at full width.
"""

import argparse

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn._kernels import checks, reference

LAYERS = {
    "VGG-A conv2": (64, 128, 112), "VGG-A conv3": (128, 256, 56), "VGG-A conv4": (256, 256, 56),
    "VGG-A conv5": (256, 512, 28), "VGG-A conv6": (512, 512, 28), "VGG-A conv7, conv8": (512, 512, 14),
    "OverFeat conv2, 5x5": (96, 256, 28), "OverFeat conv3": (256, 512, 12), "OverFeat conv4": (512, 1024, 12),
    "OverFeat conv5": (1024, 1024, 12),
}  # fmt: skip


def passes(module, x, weight, dy, winograd):
    """y, dx, dweight of a convolution with stride 1, in the arrays' own precision."""
    y, dx, dweight = np.empty_like(dy), np.empty_like(x), np.empty_like(weight)
    out_blocks, in_blocks, size, _, _, b = weight.shape
    padding = ((dy.shape[2] - x.shape[2] + size - 1) // 2,) * 2
    if winograd:
        u = np.empty((checks.WINOGRAD_POINTS, out_blocks, in_blocks * b, b), x.dtype)
        module.winograd_transform_filter(weight, u)
        module.winograd_forward(x, u, None, y, padding, kernel=size)
        u = np.empty((checks.WINOGRAD_POINTS, in_blocks, out_blocks * b, b), x.dtype)
        module.winograd_transform_filter(weight, u, True)
        module.winograd_input_grad(dy, u, dx, padding, kernel=size)
        module.winograd_weight_grad(x, dy, dweight, padding)
    else:
        transposed = np.empty((in_blocks, out_blocks, size, size, b, b), x.dtype)
        module.conv2d_forward(x, weight, None, y, (1, 1), padding)
        module.conv2d_transpose_filter(weight, transposed)
        module.conv2d_input_grad(dy, transposed, dx, (1, 1), padding)
        module.conv2d_weight_grad(x, dy, dweight, (1, 1), padding)
    return y, dx, dweight


def errors(name, images, rows):
    """[(winograd, direct) of each pass]."""
    channels, filters, width = LAYERS[name]
    random, b = np.random.default_rng(0), kernels.SIMD_WIDTH
    rows, size, smaller = min(rows, width), 5 if "5x5" in name else 3, 4 if "5x5" in name else 0  # padding 0 or 1
    x = np.maximum(random.standard_normal((images, channels // b, rows, width, b), np.float32), 0)
    weight = random.standard_normal((filters // b, channels // b, size, size, b, b), np.float32)
    weight *= np.float32(np.sqrt(2 / (size * size * channels)))
    dy = random.standard_normal((images, filters // b, rows - smaller, width - smaller, b), np.float32)
    exact = passes(reference, *(array.astype(np.float64) for array in (x, weight, dy)), winograd=False)
    results = [passes(kernels, x, weight, dy, winograd) for winograd in (True, False)]
    return [
        tuple(np.abs(got[i] - wanted).max() / np.abs(wanted).max() for got in results) for i, wanted in enumerate(exact)
    ]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--rows", type=int, default=14)
    args = parser.parse_args()
    print(f"Largest error / largest output, Winograd / direct float32 ({kernels.TARGET}, {args.images} images)\n")
    print("| layer | forward | input gradient | weight gradient |")
    print("|---|---|---|---|")
    for name in LAYERS:
        cells = [f"{winograd:.1e} / {direct:.1e}" for winograd, direct in errors(name, args.images, args.rows)]
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
