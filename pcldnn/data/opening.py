"""One entry for all data sets: `open_dataset`."""

import os
from dataclasses import replace

from pcldnn.data.arrays import open_arrays
from pcldnn.data.augment import Augment, check_pair
from pcldnn.data.dataset import check_class_map
from pcldnn.data.digits import Digits
from pcldnn.data.folder import FolderDataset


def open_dataset(
    path=None,
    *,
    image_size=None,
    channels=None,
    num_classes=None,
    scale=None,
    mirror=None,
    shift=None,
    mean=None,
    std=None,
):
    """Open the data to train on and the data to validate on.

    Parameters
    ----------
    path : path, optional
        None: the embedded digits. A folder: images in `PATH/train/CLASS/` and, if there, `PATH/val/CLASS/`
        (see FolderDataset). A file: arrays, `.npy` or `.npz` (see `open_arrays`).
    image_size : int or (H, W), optional
        Size of the network's input. Default: 224 for folders, the images' own size otherwise (digits: 32).
        Digits and arrays of another size are resized.
    channels : int, optional
        Folders: 3 (default) converts all to RGB, 1 to grey. Elsewhere it must be what the data have.
    num_classes : int, optional
        Arrays: default largest label + 1. Elsewhere it must be what the data have.
    scale, mirror, shift, mean, std : optional
        Override the data set's own preparation, see `Augment`.

    Returns
    -------
    train, validation : Dataset
        validation is None when there is none. Both have the training set's classes and normalisation.

    Raises
    ------
    ValueError
        For data that cannot work: no images, labels out of range, classes of val/ unlike those of train/.
    """
    changes = {"scale": scale, "mirror": mirror, "shift": shift, "mean": mean, "std": std}
    changes = {name: value for name, value in changes.items() if value is not None}
    if path is not None and os.path.isdir(path):
        return _open_folders(os.fspath(path), image_size, channels or 3, num_classes, changes)
    if path is None:
        train, validation = Digits("train"), Digits("test")
    elif os.path.exists(path):
        train, validation = open_arrays(path, num_classes)
    else:
        raise ValueError(
            f"data: {path} does not exist; wanted a folder with train/ and val/, or a .npy or .npz file"
        )
    _check_given(train, channels, num_classes)
    augment = _resized(train.augment, train.sample_shape[1:], image_size, changes)
    for dataset in filter(None, (train, validation)):
        dataset.augment, dataset.sample_shape = augment, (dataset.sample_shape[0], *augment.size)
    return train, validation


def _resized(augment, own_size, image_size, changes):
    """The data set's preparation for another input size and with the user's changes."""
    size = check_pair("image_size", image_size) if image_size is not None else own_size
    if size != own_size:
        # A shift is in pixels of images that keep their size; once they are resized, a random crop does its
        # work.
        margin = augment.shift / min(own_size)
        high = round(max(size) * (1 + 2 * margin))
        augment = replace(augment, size=size, scale=(max(size), high), shift=0)
    if "scale" in changes and "shift" not in changes:
        changes = {**changes, "shift": 0}
    return replace(augment, **changes)


def _open_folders(path, image_size, channels, num_classes, changes):
    folders = [os.path.join(path, name) for name in ("train", "val")]
    if not os.path.isdir(folders[0]):
        found = sorted(os.listdir(path))
        raise ValueError(
            f"data: {path} has no folder train/; wanted train/CLASS/images and val/CLASS/images, got "
            f"{', '.join(found[:8]) or 'an empty folder'}{', ...' if len(found) > 8 else ''}"
        )
    if changes.get("shift") and "scale" not in changes:
        changes = {"scale": None, **changes}
    augment = Augment.photos(image_size if image_size is not None else 224, channels, **changes)
    train = FolderDataset(folders[0], augment, channels)
    _check_given(train, None, num_classes)
    if not os.path.isdir(folders[1]):
        return train, None
    validation = FolderDataset(folders[1], augment, channels)
    check_class_map(train.class_names, validation.class_names, f"{folders[1]} against {folders[0]}")
    return train, validation


def _check_given(dataset, channels, num_classes):
    if channels is not None and channels != dataset.sample_shape[0]:
        raise ValueError(f"channels: got {channels}, but {dataset.name} has {dataset.sample_shape[0]}")
    if num_classes is not None and num_classes != dataset.num_classes:
        raise ValueError(f"num_classes: got {num_classes}, but {dataset.name} has {dataset.num_classes}")
