"""Checkpoints: what is in the file, and how all ranks write and read it together, rank 0 alone touching the disk.

The file itself, and that it appears whole or not at all, is the business of safetensors.py.

(a) Tensors are in logical order under torchvision's names (``features.0.weight``, OIHW); the momentum of a
    parameter is ``momentum.<name>``. No padded count, blocked order or shard shows: any number of ranks and any ISA
    can resume. A plain state dict of PyTorch, saved as safetensors, is a checkpoint without momentum and metadata.
(b) Everything that is not an array is one JSON object, the string ``pcldnn`` of the header's ``__metadata__``.
(c) The collective functions never let one rank fail alone: an error of rank 0 (disk full, damaged file) is raised
    on every rank, and the collective calls of a save go on to their end even when writing has failed.
"""
import errno
import os
import tempfile

import numpy as np

from pcldnn.faults import CollectiveError
from pcldnn.safetensors import CheckpointError, Reader, Writer

MOMENTUM_PREFIX = "momentum."


class CollectiveCheckpointError(CollectiveError, CheckpointError):
    """A CheckpointError that is raised on every rank together: no reason to end the job."""


def check_writable(path):
    """OSError, naming file and folder, when a checkpoint cannot be written to `path`; tried with a file, removed again.

    Permissions do not tell: root has them all, and /proc or a read-only disk takes no file all the same.
    """
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, f"no file can be made in {folder!r}: {error.strerror}", path) from None


def save(path, tensors, metadata=None):
    """Write a checkpoint from one process.

    Parameters
    ----------
    path : str or path-like
    tensors : dict of str to ndarray
        Logical arrays; momentum under ``momentum.<name>``.
    metadata : dict, optional
        Anything that JSON can hold.

    Raises
    ------
    CheckpointError
        If it cannot be written (disk full, no such directory, ...); an older file at `path` is then untouched.
    """
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    try:
        with Writer(path, shapes, metadata or {}) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
            writer.commit()
    except OSError as error:
        raise _write_error(path, error) from error


def load(path):
    """Read a whole checkpoint in one process.

    Returns
    -------
    tensors : dict of str to ndarray
    metadata : dict
        Empty for a file that pcldnn did not write.
    """
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.shapes}, reader.metadata


def _write_error(path, error):
    return CheckpointError(f"cannot write checkpoint {os.fspath(path)!r}: {error.strerror or error}")


def save_collective(path, shapes, batches, metadata, communicator):
    """Write a checkpoint that is gathered piece by piece; called by all ranks, written by rank 0.

    Parameters
    ----------
    path : str or path-like
        Only rank 0 needs to reach it.
    shapes : dict of str to (dtype, shape)
    batches : iterable of dict of str to ndarray
        Advanced by all ranks in step, so that producing an item may be collective; the arrays are looked at on rank
        0 only, and their order is that of `shapes`.
    metadata : dict
    communicator : Communicator

    Raises
    ------
    CheckpointError
        On every rank, if rank 0 could not write. The old file is untouched and training can go on.
    """
    writer, failure = None, None
    try:
        if communicator.rank == 0:
            try:
                writer = Writer(path, shapes, metadata)
            except OSError as error:
                failure = error
        for batch in batches:       # also after a failure: the other ranks are in here too
            if writer is None or failure is not None:
                continue
            try:
                for name, array in batch.items():
                    writer.write(name, array)
            except OSError as error:
                failure = error
        if writer is not None and failure is None:
            try:
                writer.commit()
            except OSError as error:
                failure = error
    except BaseException:
        failure = failure or RuntimeError("interrupted")
        raise
    finally:
        if writer is not None and failure is not None:
            writer.discard()
    message = communicator.broadcast(None if failure is None else str(_write_error(path, failure)))
    if message is not None:
        raise CollectiveCheckpointError(message) from failure


class CollectiveReader:
    """A `Reader` on rank 0 whose tensors reach all ranks; every method is collective.

    Only rank 0 needs to reach the file. An error there is raised on every rank.
    """

    def __init__(self, path, communicator):
        self._communicator = communicator
        self._reader = None
        self.shapes, self.metadata = self._on_root(self._open, path)

    def _open(self, path):
        self._reader = Reader(path)
        return self._reader.shapes, self._reader.metadata

    def _on_root(self, function, *arguments):
        value, error = None, None
        if self._communicator.rank == 0:
            try:
                value = function(*arguments)
            except (CheckpointError, OSError) as caught:
                error = str(caught)
        value, error = self._communicator.broadcast((value, error))
        if error is not None:
            raise CollectiveCheckpointError(error)
        return value

    def read(self, name):
        """The tensor `name`, on every rank."""
        return self._on_root(lambda: self._reader.read(name))

    def close(self):
        if self._reader is not None:
            self._reader.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
