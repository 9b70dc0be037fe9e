"""Data: data sets, their preparation, and the Loader that turns them into minibatches.

`open_dataset(path)` opens whatever a path names; `Loader(dataset, minibatch, ...)` iterates. Neither needs
MPI.
"""

from pcldnn.data.arrays import ArrayDataset, open_arrays
from pcldnn.data.augment import Augment
from pcldnn.data.dataset import DataError, Dataset, check_class_map, mean_std
from pcldnn.data.digits import Digits
from pcldnn.data.folder import FolderDataset
from pcldnn.data.loader import Batch, Loader
from pcldnn.data.opening import open_dataset
from pcldnn.data.synthetic import Synthetic, open_synthetic

__all__ = [
    "ArrayDataset",
    "Augment",
    "Batch",
    "DataError",
    "Dataset",
    "Digits",
    "FolderDataset",
    "Loader",
    "Synthetic",
    "check_class_map",
    "mean_std",
    "open_arrays",
    "open_dataset",
    "open_synthetic",
]
