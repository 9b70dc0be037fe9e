"""What the Loader asks of a data set, and the checks that all data sets share."""

import hashlib
import math

import numpy as np


class DataError(ValueError):
    """A sample that cannot be read.

    Attributes
    ----------
    path : str
        The file, or the name that the data set gives to the sample.
    index : int or None
        The sample's index in the data set.
    """

    def __init__(self, reason, path, index=None):
        self.reason, self.path, self.index = str(reason), str(path), index
        where = f"sample {index} ({path})" if index is not None else str(path)
        super().__init__(f"{where}: {self.reason}")

    @property
    def plain(self):
        """Whether the message says all (`faults.is_plain`): no unexpected exception is behind it."""
        return self.__cause__ is None or isinstance(self.__cause__, DataError)

    def __reduce__(self):  # exceptions travel between ranks pickled; args alone would lose path and index
        return type(self), (self.reason, self.path, self.index)


class Dataset:
    """Base class of all data sets: labelled images (or vectors) that can be read in any order.

    A subclass calls this constructor and implements `read`; everything else has a default.

    Parameters
    ----------
    labels : array of integers, shape (length,)
        Class of every sample; checked here, before any training, against the number of classes.
    class_names : sequence of str
        Their number is the number of classes.
    sample_shape : tuple of int
        (C, H, W) as the network sees a sample, after preparation. (F,) is read as (F, 1, 1).
    name : str
        For messages.
    augment : Augment, optional
        Default preparation of a sample; the Loader uses it when it is not given another.
    """

    def __init__(self, labels, class_names, sample_shape, name, augment=None):
        self.name = str(name)
        self.class_names = tuple(str(c) for c in class_names)
        self.sample_shape = check_shape(sample_shape)
        self.labels = check_labels(labels, len(self.class_names), self.name)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    @property
    def num_classes(self):
        return len(self.class_names)

    def read(self, index):
        """Sample `index` as a uint8 or float32 array (C, H, W); H and W may differ from sample to sample.

        Called from several threads at once. Raise DataError when the sample is damaged.
        """
        raise NotImplementedError

    def label(self, index):
        """Class of sample `index` as an int."""
        return int(self.labels[index])

    def describe(self, index):
        """Where sample `index` comes from, for messages: a path where there is one."""
        return f"{self.name}[{index}]"

    def content(self):
        """Cheap digest (hex) of what the samples are; the base class knows nothing more than their number."""
        return digest(str(len(self)))

    def identity(self):
        """What must be equal on every rank and after a resume: short values to compare item by item."""
        return {
            "samples": len(self),
            "sample shape": "x".join(str(n) for n in self.sample_shape),
            "classes": self.num_classes,
            "class names": _shortened(self.class_names),
            "labels": digest(self.labels.tobytes())[:16],
            "content": self.content()[:16],
        }

    def fingerprint(self):
        """One hex string for `identity`; does not depend on where the data lie."""
        return digest(repr(sorted(self.identity().items())))[:32]


def check_shape(shape):
    """(C, H, W) of positive ints; (F,) becomes (F, 1, 1)."""
    shape = tuple(int(n) for n in shape)
    if len(shape) == 1:
        shape += (1, 1)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"sample_shape: got {shape}, wanted (channels, height, width) or (features,), all >= 1"
        )
    return shape


def check_labels(labels, num_classes, name):
    """Labels as a new int64 array; ValueError naming the first bad sample, its label, the class count."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"labels of {name}: got {labels.dtype} of shape {labels.shape}, wanted integers of shape (N,)"
        )
    if len(labels) == 0:
        raise ValueError(f"{name} has no samples")
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        raise ValueError(
            f"labels of {name}: sample {bad[0]} has label {labels[bad[0]]}, wanted 0 to {num_classes - 1} "
            f"({num_classes} classes; {len(bad)} such samples)"
        )
    return labels.astype(np.int64)


def check_class_map(expected, found, what="validation against training"):
    """ValueError with the difference unless two tuples of class names are equal: same names, same order."""
    expected, found = tuple(expected), tuple(found)
    if expected == found:
        return
    parts = []
    if missing := sorted(set(expected) - set(found)):
        parts.append(f"missing {_shortened(missing)}")
    if extra := sorted(set(found) - set(expected)):
        parts.append(f"not expected {_shortened(extra)}")
    if not parts:
        i = next(i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1])
        parts.append(f"same names in another order: class {i} is {found[i]!r}, wanted {expected[i]!r}")
    raise ValueError(
        f"class names differ ({what}): {len(found)} classes, wanted {len(expected)}; " + "; ".join(parts)
    )


def mean_std(dataset, limit=5000):
    """Mean and standard deviation of each channel, over at most `limit` samples spread evenly over the data
    set.

    uint8 samples are summed in integers, so the result is exact and equal on every machine. Sums of float32
    samples are rounded to 6 digits, since NumPy may add in another order on another CPU. A constant channel
    gets 1.

    Returns
    -------
    mean, std : tuple of float, length C
    """
    count, total, squares = 0, 0, 0
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(limit, len(dataset))).round().astype(np.int64))
    for index in indices:
        image = dataset.read(index)
        wide = image.astype(np.int64 if image.dtype.kind in "iu" else np.float64)
        count += image.shape[1] * image.shape[2]
        total = total + wide.sum(axis=(1, 2))
        squares = squares + (wide * wide).sum(axis=(1, 2))
    mean, std = [], []
    for t, s in zip(total.tolist(), squares.tolist(), strict=True):
        variance = max(0.0, (s * count - t * t) / count**2)  # in Python integers for uint8: no cancellation
        mean.append(float(f"{t / count:.6g}"))
        std.append(float(f"{math.sqrt(variance):.6g}") or 1.0)
    return tuple(mean), tuple(std)


def digest(data):
    """SHA-256 (hex) of bytes or of a str."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _shortened(names, most=12):
    """A list of names as text; a long one is cut, with a digest so that unlike lists still look unlike."""
    names = tuple(names)
    if len(names) <= most:
        return ", ".join(repr(n) for n in names)
    return (
        ", ".join(repr(n) for n in names[:most]) + f", ... ({len(names)} in all, {digest(repr(names))[:12]})"
    )
