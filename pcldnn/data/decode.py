"""Image files: from bytes to pixels, whatever the file's name says.

JPEG content goes to simplejpeg (libjpeg-turbo without the detour through an image object), the rest to
Pillow. Both release the GIL while they decode. Orientation tags are ignored and transparency is dropped, as
torchvision does.
"""

import io

import numpy as np

try:
    import simplejpeg
except ImportError:
    simplejpeg = None
try:
    from PIL import Image

    Image.preinit()  # load the common formats once, here, not from several threads at a time
except ImportError:
    Image = None

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"P5\n": "PGM",
    b"P6\n": "PPM",
}
# What libjpeg says when pixels are missing or wrong. Its other complaints (junk between markers, a
# subsampling that simplejpeg does not know) leave the picture whole: Pillow may try those.
_DAMAGE = ("remature end", "bad Huffman code", "bad arithmetic code", "instead of RST")


def image_format(head):
    """Format by the first 16 bytes of a file, or None."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def decode_image(data, channels=3, min_side=None):
    """Decode an image file.

    Parameters
    ----------
    data : bytes
        Whole content of the file.
    channels : int
        3 gives RGB, 1 grey; the file's own colour space is converted.
    min_side : int, optional
        A JPEG at least twice too large may come back reduced (by libjpeg's n/8 scaling, much faster), but
        with no side under this many pixels. [pixel]

    Returns
    -------
    ndarray of uint8, shape (channels, H, W), often a view of H, W, channels in memory

    Raises
    ------
    ValueError
        The reason, without the path, which the caller knows.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels: got {channels}, wanted 1 or 3")
    if not data:
        raise ValueError("the file is empty")
    problem = None
    if simplejpeg is not None and image_format(data[:16]) == "JPEG":
        try:
            # Four-colour JPEG: Pillow knows Adobe's inverted inks.
            if simplejpeg.decode_jpeg_header(data)[2] not in ("CMYK", "YCCK"):
                reduce = {"min_height": min_side, "min_width": min_side, "min_factor": 2} if min_side else {}
                pixels = simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY", **reduce)
                return pixels.transpose(2, 0, 1)
        except ValueError as error:
            problem = str(error)
            if any(word in problem for word in _DAMAGE):
                raise ValueError(f"damaged JPEG: {problem}") from error
    return _decode_with_pillow(data, channels, problem)


def _decode_with_pillow(data, channels, problem):
    tried = f"; simplejpeg: {problem}" if problem else ""
    if Image is None:
        raise ValueError(f"Pillow is needed to decode this file (pip install pillow){tried}")
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(_convert(image, channels))
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and more for a damaged file
        kind = image_format(data[:16])
        what = f"damaged {kind} file" if kind else f"not a known image file (starts with {data[:8]!r})"
        raise ValueError(f"{what}: {error}{tried}") from error
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _convert(image, channels):
    """A Pillow image as mode RGB or L."""
    if image.mode.startswith("I;16"):  # Pillow would clip at 255 instead of scaling
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no known range: convert the file to 8 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB" if channels == 3 else "L")
