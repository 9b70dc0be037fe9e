"""Preparation of a sample: resize, crop, mirror, normalise.

In training the size, the window and the mirror image are drawn at random, each from its own slot of the
stream (seed, epoch, sample), so switching one off leaves the others as they were. In evaluation the same
preparation takes the smallest size and the middle window.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pcldnn.data.random import AUGMENT, uniforms

# Per-channel statistics of ImageNet's training set in units of a pixel (0..255): torchvision's 0.485,
# 0.456, 0.406 and 0.229, 0.224, 0.225 times 255, so that weights trained there see what they are used to.
# Grey: their averages.
IMAGENET = {
    1: ((114.495,), (57.63,)),
    3: ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
}


@dataclass(frozen=True)
class Augment:
    """How a sample of any size becomes the network's input.

    Parameters
    ----------
    size : tuple of int
        (H, W) of the result.
    scale : tuple of int, optional
        (low, high): the shorter side is resized to an integer drawn from this range (training) or to `low`
        (evaluation). None keeps the sample's own size; smaller ones are then padded, larger ones cropped.
    shift : int
        In training the window may move by up to this many pixels past the edge of the sample (or, for a
        smaller sample, off its middle); what lies outside is `fill`. For samples that keep their size:
        needs scale None.
    mirror : bool
        In training every other sample, at random, is flipped left to right.
    mean, std : tuple of float
        One value or one for each channel, in the units of the sample. Result = (sample - mean) / std.
    fill : float
        Value of pixels outside the sample, before normalisation.
    """

    size: tuple
    scale: tuple | None = None
    shift: int = 0
    mirror: bool = False
    mean: tuple = (0.0,)
    std: tuple = (1.0,)
    fill: float = 0.0

    def __post_init__(self):
        for field in ("size", "scale"):
            pair = getattr(self, field)
            if pair is not None:
                object.__setattr__(self, field, check_pair(field, pair))
        for field in ("mean", "std"):
            values = tuple(float(v) for v in np.atleast_1d(getattr(self, field)))
            object.__setattr__(self, field, values)
            if not values or not np.isfinite(values).all() or (field == "std" and min(values) <= 0):
                raise ValueError(
                    f"{field}: got {values}, wanted finite numbers" + (" > 0" if field == "std" else "")
                )
        if self.shift < 0:
            raise ValueError(f"shift: got {self.shift}, wanted >= 0")
        if self.scale is not None:
            low, high = self.scale
            if low > high or low < max(self.size):
                raise ValueError(
                    f"scale: got {self.scale}, wanted low <= high and low >= {max(self.size)}, "
                    f"the larger side of the input {self.size}"
                )
            if self.shift:
                raise ValueError(
                    "shift: wanted 0 together with scale, whose random crop already moves the window"
                )

    @classmethod
    def photos(cls, size, channels=3, **changes):
        """The usual preparation of photographs: shorter side from 8/7 to 12/7 of the input, random crop,
        mirror.

        For a 224x224 input that is 256 to 384, the scale jitter of VGG (Simonyan and Zisserman 2014,
        section 3.1) with a smaller upper end; ImageNet's mean and deviation.
        """
        size = check_pair("size", size)
        mean, std = IMAGENET.get(channels, ((127.5,), (60.0,)))
        scale = (round(max(size) * 8 / 7), round(max(size) * 12 / 7))
        return cls(**{"size": size, "scale": scale, "mirror": True, "mean": mean, "std": std, **changes})

    def apply(self, image, out, training=False, seed=0, epoch=0, sample=0):
        """Prepare one sample.

        Parameters
        ----------
        image : uint8 or float32 array (C, h, w)           # IN
        out : float32 array (C, H, W)                      # OUT
        training : bool
            Draw at random from the stream (seed, epoch, sample); otherwise smallest size and middle window.
        """
        self._check(image, out)
        u_scale, u_y, u_x, u_mirror = (
            uniforms(seed, AUGMENT, epoch, sample, 4) if training else (0.0, None, None, 1.0)
        )
        if self.scale is None:
            h, w = image.shape[1:]
            y, x = _place(h, self.size[0], self.shift, u_y), _place(w, self.size[1], self.shift, u_x)
            window = _crop(image, y, x, self.size, self.fill)
        else:
            low, high = self.scale
            shorter = low + int(u_scale * (high - low + 1))
            window = self._resize_crop(image, shorter, u_y, u_x)
        if self.mirror and u_mirror < 0.5:
            window = window[:, :, ::-1]
        np.subtract(window, self._mean, out=out)
        np.multiply(out, self._inverse_std, out=out)

    @cached_property
    def _mean(self):
        return np.array(self.mean, dtype=np.float32).reshape(-1, 1, 1)

    @cached_property
    def _inverse_std(self):
        return (1.0 / np.array(self.std)).astype(np.float32).reshape(-1, 1, 1)

    def _check(self, image, out):
        if image.ndim != 3 or image.dtype not in (np.uint8, np.float32) or 0 in image.shape:
            raise ValueError(
                f"got a sample of {image.dtype} and shape {image.shape}, wanted uint8 or float32 (C, H, W)"
            )
        if out.shape != (image.shape[0], *self.size):
            raise ValueError(f"got a sample of shape {image.shape}, wanted {out.shape[0]} channels")
        for field in ("mean", "std"):
            if len(getattr(self, field)) not in (1, len(image)):
                raise ValueError(
                    f"{field}: got {len(getattr(self, field))} values, wanted 1 or {len(image)} (channels)"
                )

    def _resize_crop(self, image, shorter, u_y, u_x):
        """Window of the image resized to `shorter` on its shorter side; only the window is computed."""
        h, w = image.shape[1:]
        new_h, new_w = (
            max(shorter, round(h * shorter / min(h, w))),
            max(shorter, round(w * shorter / min(h, w))),
        )
        y, x = _place(new_h, self.size[0], 0, u_y), _place(new_w, self.size[1], 0, u_x)
        if (new_h, new_w) == (h, w):
            return _crop(image, y, x, self.size, self.fill)
        box = (
            x * w / new_w,
            y * h / new_h,
            min(w, (x + self.size[1]) * w / new_w),
            min(h, (y + self.size[0]) * h / new_h),
        )
        return _resample(image, box, self.size)


def check_pair(name, value):
    """(a, b) of positive ints from an int or a pair of ints."""
    pair = (value, value) if np.ndim(value) == 0 else tuple(value)
    if len(pair) != 2 or any(int(v) != v or v < 1 for v in pair):
        raise ValueError(f"{name}: got {value!r}, wanted one integer or two, each >= 1")
    return int(pair[0]), int(pair[1])


def _place(length, size, shift, u):
    """First pixel of a window of `size` on `length` pixels: the middle, or drawn by u in [0, 1)."""
    middle = (length - size) // 2
    if u is None:
        return middle
    low, high = (0, length - size) if length >= size else (middle, middle)
    return low - shift + int(u * (high - low + 2 * shift + 1))


def _crop(image, y, x, size, fill):
    """Window of the image at (y, x), a view where it lies inside, else a copy with `fill` around."""
    h, w = image.shape[1:]
    if y >= 0 and x >= 0 and y + size[0] <= h and x + size[1] <= w:
        return image[:, y : y + size[0], x : x + size[1]]
    window = np.full((len(image), *size), fill, dtype=np.float32)
    top, left, bottom, right = max(y, 0), max(x, 0), min(y + size[0], h), min(x + size[1], w)
    if top < bottom and left < right:
        window[:, top - y : bottom - y, left - x : right - x] = image[:, top:bottom, left:right]
    return window


def _resample(image, box, size):
    """Part `box` (x0, y0, x1, y1) of the image on `size` pixels: bilinear, averaging when it shrinks."""
    from PIL import Image

    def resize(pixels):
        resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
        return np.asarray(resized)

    if image.dtype == np.uint8 and len(image) == 3:
        return resize(np.ascontiguousarray(image.transpose(1, 2, 0))).transpose(2, 0, 1)
    return np.stack([resize(np.ascontiguousarray(plane)) for plane in image])
