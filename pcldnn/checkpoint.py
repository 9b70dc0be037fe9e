"""Checkpoints: safetensors files, written atomically, by rank 0 alone.

The format is the published safetensors one (8 bytes of header length, a JSON header, then the tensors), so a
checkpoint opens in any tool that knows it. It is read and written here, without the package of that name, because
that package wants every tensor in memory at once: a checkpoint of a distributed run is gathered and written layer
by layer instead.

(a) Tensors are in logical order under torchvision's names (``features.0.weight``, OIHW); the momentum of a
    parameter is ``momentum.<name>``. No padded count, blocked order or shard shows: any number of ranks and any ISA
    can resume. A plain state dict of PyTorch, saved as safetensors, is a checkpoint without momentum and metadata.
(b) Everything that is not an array is one JSON object, the string ``pcldnn`` of the header's ``__metadata__``.
(c) Atomic: the file is written under a temporary name in the same directory, synced, and renamed over the old one;
    then the directory is synced. A kill at any moment leaves the old file or the new one. What a killed writer left
    behind is removed by the next one, unless somebody still holds its lock.
(d) The collective functions never let one rank fail alone: an error of rank 0 (disk full, damaged file) is raised
    on every rank, and the collective calls of a save go on to their end even when writing has failed.
"""
import errno
import fcntl
import json
import math
import os
import secrets
import tempfile

import numpy as np

from pcldnn.faults import CollectiveError

MOMENTUM_PREFIX = "momentum."

_MAX_HEADER_BYTES = 100_000_000      # the format's own limit
_DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I64": np.dtype("<i8"),
           "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U64": np.dtype("<u8"),
           "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
           "BF16": np.dtype("<u2")}  # bfloat16 is read as its upper halves and widened: exact
_CODES = {dtype: code for code, dtype in _DTYPES.items() if code != "BF16"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or a file is no checkpoint that can be read."""


class CollectiveCheckpointError(CollectiveError, CheckpointError):
    """The same, raised on every rank together: no reason to end the job."""


class Reader:
    """An open safetensors file, of which tensors are read one by one.

    Parameters
    ----------
    path : str or path-like

    Attributes
    ----------
    shapes : dict of str to tuple of int
        Logical shape of each tensor, in the order of the file.
    metadata : dict
        What `save` was given; empty for a file that is not ours.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated, or not in safetensors format; the message names the path.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise CheckpointError(f"cannot open checkpoint {self.path!r}: {error.strerror}") from error
        try:
            self._parse()
        except BaseException:
            self._file.close()
            raise

    def _fail(self, reason):
        raise CheckpointError(f"{self.path!r} is not a usable checkpoint: {reason}")

    def _parse(self):
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            self._fail(f"not in safetensors format, or truncated ({size} bytes, header length {length})")
        try:
            header = json.loads(self._file.read(length))
            metadata = header.pop("__metadata__", {})
            self.metadata = json.loads(metadata["pcldnn"]) if "pcldnn" in metadata else {}
        except (ValueError, AttributeError, TypeError) as error:
            self._fail(f"its header is damaged ({error})")
        self._data_start = 8 + length
        self._entries = {}
        end = 0
        entries = [(name, *self._entry(name, entry)) for name, entry in header.items()]
        for name, code, shape, start, stop in sorted(entries, key=lambda entry: entry[3:]):
            if start != end or stop - start != math.prod(shape) * _DTYPES[code].itemsize:
                self._fail(f"tensor {name!r}: bytes {start}..{stop} do not fit dtype {code}, shape {list(shape)}")
            self._entries[name] = (code, shape, start)
            end = stop
        if self._data_start + end != size:
            self._fail(f"truncated: {self._data_start + end} bytes expected, {size} found")
        self.shapes = {name: shape for name, (_, shape, _) in self._entries.items()}

    def _entry(self, name, entry):
        try:
            code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            well_formed = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            well_formed = False
        if not well_formed:
            self._fail(f"tensor {name!r}: bad entry {entry!r}")
        if code not in _DTYPES:
            self._fail(f"tensor {name!r}: dtype {code} is not supported (supported: {', '.join(_DTYPES)})")
        return code, shape, start, stop

    def read(self, name):
        """Read one tensor.

        Returns
        -------
        ndarray
            In the dtype of the file (bfloat16 widened to float32, exactly).
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.path!r} has no tensor {name!r}")
        code, shape, start = self._entries[name]
        array = np.empty(shape, _DTYPES[code])
        self._file.seek(self._data_start + start)
        if self._file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:
            self._fail(f"truncated while reading tensor {name!r}")
        if code == "BF16":
            return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return array

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Writer:
    """Writes one checkpoint: all shapes are known first, then the arrays come in that order.

    Nothing is visible under `path` before `commit` has returned. Any OSError, and an exception in a ``with`` block,
    removes the temporary file and leaves what was at `path` untouched.

    Parameters
    ----------
    path : str or path-like
        A symbolic link is followed: the file that it names is replaced, not the link.
    shapes : dict of str to (dtype, shape)
    metadata : dict
        Anything that JSON can hold.
    """

    def __init__(self, path, shapes, metadata):
        self.path = os.path.realpath(path)
        self._expected = [(name, np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in shapes.items()]
        header = self._header(metadata)
        remove_leftovers(self.path)
        folder, base = os.path.split(self.path)
        self._temporary = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")
        self._file = None
        descriptor = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            self._file = open(descriptor, "wb")  # noqa: SIM115 (closed by commit or discard)
            _try_lock(descriptor)    # tells remove_leftovers of another process that this one is alive
            self._file.write(len(header).to_bytes(8, "little") + header)
        except BaseException:
            self.discard()
            raise

    def _header(self, metadata):
        header = {"__metadata__": {"pcldnn": json.dumps(metadata, allow_nan=False)}}
        offset = 0
        for name, dtype, shape in self._expected:
            if dtype not in _CODES:
                raise ValueError(f"tensor {name!r}: dtype {dtype} is not one that safetensors knows")
            stop = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)       # tensors start at a multiple of 8

    def write(self, name, array):
        """Append the next tensor."""
        array = np.asarray(array)
        got = (name, array.dtype, array.shape)
        if not self._expected or got != self._expected[0]:
            wanted = self._expected[0] if self._expected else "no further tensor"
            raise ValueError(f"tensor {got} written to {self.path!r}, wanted {wanted}")
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        del self._expected[0]

    def commit(self):
        """Make the file durable, then visible."""
        if self._expected:
            raise ValueError(f"tensor {self._expected[0][0]!r} was never written to {self.path!r}")
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        self._file.close()
        _sync_directory(os.path.dirname(self.path))

    def discard(self):
        """Remove the temporary file; the old checkpoint stays."""
        try:
            os.unlink(self._temporary)
        except FileNotFoundError:
            pass
        if self._file is not None:
            try:
                self._file.close()      # its buffer may still hold bytes that do not fit on the disk
            except OSError:
                pass

    def __enter__(self):
        return self

    def __exit__(self, exc_type, *exc):
        if exc_type is not None:
            self.discard()


def _try_lock(descriptor):
    """Lock an open file; False if another process holds the lock. File systems without locks count as unlocked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sync_directory(folder):
    """A rename survives a power cut only once its directory is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path):
    """Remove temporary files that killed writers of `path` left behind; those of living writers stay."""
    folder, base = os.path.split(os.path.realpath(path))
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if not (name.startswith(f".{base}.") and name.endswith(".tmp")):
            continue
        try:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_lock(descriptor):
                os.unlink(os.path.join(folder, name))
        except OSError:
            pass
        finally:
            os.close(descriptor)


def check_writable(path):
    """OSError, naming file and folder, when a checkpoint cannot be written to `path`; tried with a file that is removed.

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
