"""Data sets of two arrays, images and labels, from memory or from NumPy's files."""

import os
import warnings
import zipfile

import numpy as np

from pcldnn.data.augment import Augment
from pcldnn.data.dataset import Dataset, digest, mean_std


class ArrayDataset(Dataset):
    """Images in one array, labels in another.

    Parameters
    ----------
    images : uint8 or float32 array (N, C, H, W), (N, H, W) or (N, F)
        Any strides, memory-mapped or not; not copied. Other types are refused, not converted: a silent
        float64 or int32 is more often a mistake than a wish, and `astype` says what is meant.
    labels : array of integers, shape (N,)
    num_classes : int, optional
        Default: largest label + 1.
    class_names : sequence of str, optional
        Default: "0", "1", ...
    augment : Augment, optional
        Default: the images' own size; uint8 images are normalised with the mean and deviation of the data set
        (see `mean_std`), float32 ones are taken as they are.
    name : str
        For messages.
    """

    def __init__(self, images, labels, num_classes=None, class_names=None, augment=None, name="images"):
        self.images = _four_dimensions(images, name)
        labels = np.asarray(labels)
        if labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels of {name}: got shape {labels.shape}, wanted ({len(images)},), one for each image"
            )
        if class_names is None:
            if num_classes is None:
                num_classes = int(labels.max(initial=0)) + 1 if labels.dtype.kind in "iu" else 1
            class_names = [str(i) for i in range(num_classes)]
        super().__init__(labels, class_names, self.images.shape[1:], name)
        if augment is None:
            augment = Augment(self.images.shape[2:])
            if self.images.dtype == np.uint8:
                mean, std = mean_std(self)
                augment = Augment(self.images.shape[2:], mean=mean, std=std)
        self.augment = augment
        self.sample_shape = (self.images.shape[1], *augment.size)

    def read(self, index):
        return self.images[index]

    def content(self):
        """Digest of shape, type and 16 samples spread evenly: cheap for a memory-mapped file of any size."""
        indices = np.unique(np.linspace(0, len(self) - 1, 16).round().astype(np.int64))
        some = b"".join(np.ascontiguousarray(self.images[i]).tobytes() for i in indices)
        return digest(f"{self.images.dtype} {self.images.shape} ".encode() + some)


def open_arrays(path, num_classes=None):
    """(train, validation) from a file; validation is None when there is none.

    `x.npz` holds the arrays `images` and `labels` and, if wanted, `val_images` and `val_labels`; it is read
    into memory. A `.npy` file of images is memory-mapped. Its labels lie beside it, in the file with
    `labels` in place of `images` in its name (`images.npy`, `labels.npy`), or with `_labels` appended when
    the name has no `images` (`x.npy`, `x_labels.npy`). Validation images lie beside it too, in the file
    with `val` in place of `train` (`train_images.npy`, `val_images.npy`), or with `val_` before a name that
    has no `train`; their labels likewise.
    """
    path = os.fspath(path)
    if path.endswith(".npz"):
        arrays = _load(path)
        missing = [key for key in ("images", "labels") if key not in arrays]
        if missing:
            raise ValueError(f"{path}: wanted arrays images and labels, got {', '.join(arrays) or 'none'}")
        pairs = [(arrays["images"], arrays["labels"], path)]
        if "val_images" in arrays:
            if "val_labels" not in arrays:
                raise ValueError(f"{path}: has val_images but no val_labels")
            pairs.append((arrays["val_images"], arrays["val_labels"], f"{path}:val_images"))
    elif path.endswith(".npy"):
        pairs = [_npy_pair(path)]
        if os.path.exists(validation := _validation_path(path)):
            pairs.append(_npy_pair(validation))
    else:
        raise ValueError(
            f"{path}: got a file that is neither .npy nor .npz; wanted one of these, or a folder"
        )
    images, labels, name = pairs[0]
    train = ArrayDataset(images, labels, num_classes, name=name)
    if len(pairs) == 1:
        return train, None
    images, labels, name = pairs[1]
    validation = ArrayDataset(images, labels, class_names=train.class_names, augment=train.augment, name=name)
    if validation.images.shape[1:] != train.images.shape[1:] or validation.images.dtype != train.images.dtype:
        raise ValueError(
            f"{name}: got images of {validation.images.dtype} {validation.images.shape[1:]}, wanted "
            f"{train.images.dtype} {train.images.shape[1:]} as in {train.name}"
        )
    return train, validation


def _npy_pair(path):
    folder, file = os.path.split(path)
    if "images" in file:
        labels = file.replace("images", "labels")
    else:
        labels = file.removesuffix(".npy") + "_labels.npy"
    labels = os.path.join(folder, labels)
    if not os.path.exists(labels):
        raise ValueError(f"{path}: its labels were not found, wanted {labels}")
    return _load(path, mmap_mode="r"), _load(labels), path


def _validation_path(path):
    folder, file = os.path.split(path)
    return os.path.join(folder, file.replace("train", "val") if "train" in file else "val_" + file)


def _load(path, mmap_mode=None):
    try:
        loaded = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {error}") from error


def _four_dimensions(images, name):
    """A view (N, C, H, W) of the images, which keeps memory-mapping and strides."""
    images = images if isinstance(images, np.ndarray) else np.asarray(images)
    if images.dtype not in (np.uint8, np.float32):
        raise ValueError(
            f"{name}: got images of {images.dtype}, wanted uint8 or float32 (convert with astype)"
        )
    shape = images.shape
    if images.ndim == 2:
        images = images[:, :, None, None]
    elif images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(
            f"{name}: got images of shape {shape}, wanted (N, C, H, W), (N, H, W) or (N, features)"
        )
    if len(shape) == 4 and shape[3] in (3, 4) and shape[1] == shape[2] > 4:
        warnings.warn(
            f"{name}: shape {shape} is read as {shape[1]} channels of {shape[2]} x {shape[3]} pixels; "
            "for N, H, W, C images use images.transpose(0, 3, 1, 2)",
            stacklevel=3,
        )
    return images
