"""Image files in one folder per class: DIR/CLASS/.../image.

Order (A26): classes in byte order of their folders' names, files in byte order of their paths within a
class, so `10` comes before `2`, and no directory listing, locale or machine changes a label.
"""

import os
import warnings

import numpy as np

from pcldnn.data import decode
from pcldnn.data.augment import Augment
from pcldnn.data.dataset import DataError, Dataset, digest


class FolderDataset(Dataset):
    """One folder per class, image files of any common format below it.

    A file's content decides how it is decoded, not its name. Files whose name begins with a dot are passed
    over; a file with an unusual ending is taken if it begins like an image and is listed in `ignored`
    otherwise.

    Parameters
    ----------
    root : path
        Holds the class folders, e.g. `DIR/train`.
    augment : Augment, optional
        Preparation; its size is the network's input. Default: `Augment.photos(224, channels)`.
    channels : int
        3 (RGB) or 1 (grey); every file is converted to it.

    Attributes
    ----------
    paths : list of str
        Relative to root, in the order of the samples.
    ignored : list of str
        Files below class folders that are no images.
    """

    def __init__(self, root, augment=None, channels=3):
        if channels not in (1, 3):
            raise ValueError(f"channels: got {channels}, wanted 3 (RGB) or 1 (grey)")
        self.root = os.fspath(root)
        self.augment = augment or Augment.photos(224, channels)
        self.channels = channels
        # Photographs much larger than the network's input are decoded reduced; still, never below what is
        # asked for.
        self.min_side = max(self.augment.scale) if self.augment.scale else None
        class_names = _class_folders(self.root)
        self.paths, self.sizes, self.ignored, labels = [], [], [], []
        for label, class_name in enumerate(class_names):
            found, ignored = _image_files(self.root, class_name)
            if not found:
                raise ValueError(
                    f"class folder {os.path.join(self.root, class_name)} has no image files; "
                    "remove it or fill it (classes are the folder's sub-folders)"
                )
            self.paths += [path for path, _ in found]
            self.sizes += [size for _, size in found]
            self.ignored += ignored
            labels += [label] * len(found)
        if self.ignored:
            warnings.warn(
                f"{self.root}: {len(self.ignored)} files are no images and are not used, "
                f"first {self.ignored[0]}",
                stacklevel=2,
            )
        if decode.simplejpeg is None:
            warnings.warn(
                "simplejpeg is not installed: JPEG files are decoded by Pillow, slower and with less "
                "checking for damage (pip install simplejpeg)",
                stacklevel=2,
            )
        super().__init__(
            np.array(labels), class_names, (channels, *self.augment.size), self.root, self.augment
        )

    def read(self, index):
        path = self.describe(index)
        try:
            with open(path, "rb") as file:
                data = file.read()
            return decode.decode_image(data, self.channels, self.min_side)
        except (OSError, ValueError) as error:
            raise DataError(error, path, int(index)) from None  # which says all that the cause says

    def describe(self, index):
        return os.path.join(self.root, self.paths[index])

    def content(self):
        """Digest of all relative paths and file sizes."""
        return digest(
            "\n".join(f"{p}\t{s}" for p, s in zip(self.paths, self.sizes, strict=True)).encode(
                "utf-8", "surrogateescape"
            )
        )


def _class_folders(root):
    try:
        with os.scandir(root) as entries:
            entries = [e for e in entries if not e.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"image folder {root}: {error.strerror}") from error
    names = sorted((e.name for e in entries if e.is_dir()), key=os.fsencode)
    if not names:
        raise ValueError(
            f"image folder {root}: wanted one sub-folder per class, got {len(entries)} files and no folder"
        )
    return names


def _image_files(root, class_name):
    """[(path relative to root, size in bytes)] in byte order, and the paths that are no images."""
    found, ignored, folders = [], [], [class_name]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}"
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        folders.append(path)
                    elif entry.name.lower().endswith(decode.ENDINGS) or _looks_like_image(entry.path):
                        found.append((path, _size(entry)))
                    else:
                        ignored.append(path)
        except OSError as error:
            raise ValueError(f"image folder {os.path.join(root, folder)}: {error.strerror}") from error
    found.sort(key=lambda item: os.fsencode(item[0]))
    return found, sorted(ignored, key=os.fsencode)


# A file that cannot even be opened stays in the list: reading it names it, and skip_damaged applies.
def _looks_like_image(path):
    try:
        with open(path, "rb") as file:
            return decode.image_format(file.read(16)) is not None
    except OSError:
        return True


def _size(entry):
    try:
        return entry.stat().st_size
    except OSError:
        return -1
