"""The Loader: minibatches of a data set, this rank's share of each, read ahead by threads.

Which samples make a minibatch, and what preparation does to them, is decided by (seed, epoch, sample) alone:

- the order of an epoch is a Philox permutation of (seed, epoch) in training, plain in evaluation;
- a minibatch is the next slice of that order, the last one may be smaller;
- a rank takes a contiguous share of the minibatch (sizes differ by at most one, may be 0; or whole `pieces`).

So every number of ranks sees the same minibatches, and step k of an epoch is the same whether reached or
resumed at.
"""

import operator
import time
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from pcldnn.data.augment import Augment
from pcldnn.data.dataset import DataError
from pcldnn.data.prefetch import BufferPool, Pending, Workers
from pcldnn.data.random import check_seed, permutation
from pcldnn.partition import block_shares, bounds


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's share of one minibatch. It may be kept: its memory is used again only when nothing refers
    to it.

    Attributes
    ----------
    images : float32 array (n, C, H, W), C-contiguous
        n may be 0.
    labels : int64 array (n,)
    sample_ids : int64 array (n,)
        Index of each sample in the data set; key of its random draws.
    global_count : int
        Samples of the whole minibatch, over all ranks.
    offset : int
        Position of this rank's first sample in the minibatch.
    epoch, step_in_epoch : int
    """

    images: np.ndarray
    labels: np.ndarray
    sample_ids: np.ndarray
    global_count: int
    offset: int
    epoch: int
    step_in_epoch: int

    def __len__(self):
        return len(self.labels)


class Loader:
    """Iterates a data set in minibatches.

    Parameters
    ----------
    dataset : Dataset
    minibatch : int
        Samples of a minibatch over all ranks.
    seed : int
        Of order and augmentation; evaluation uses none.
    rank, size : int
        Which share of each minibatch; every rank gets the same number of batches.
    pieces : int, optional
        Cut each minibatch in so many pieces first and give ranks whole pieces (exact mode); default: one a rank.
    training : bool
        Shuffle and augment; otherwise index order and the plain preparation.
    augment : Augment, optional
        Default: the data set's own, or none but the size.
    threads : int
        Read ahead with so many threads; 0 reads in the calling thread, when a batch is asked for.
    prefetch : int
        Batches read ahead at most.
    skip_damaged : bool
        False: a sample that cannot be read raises DataError with its path and index. True: it is counted in
        `damaged` and, in training, replaced by the next readable sample of its class (by index,
        cyclically), the same on any number of ranks, with its own sample id; in evaluation it is left out
        of the batch, which is then shorter.

    Attributes
    ----------
    steps_per_epoch : int
    sample_shape : tuple of int
        (C, H, W) of a prepared sample.
    max_local : int
        Most samples that this rank gets in one batch.
    damaged : dict of int to str
        Index and message of each sample of this rank that was replaced or left out so far.
    waited : float
        Time that the consumer has waited for data so far. [s]
    """

    def __init__(
        self,
        dataset,
        minibatch,
        *,
        seed=0,
        rank=0,
        size=1,
        pieces=None,
        training=True,
        augment=None,
        threads=2,
        prefetch=2,
        skip_damaged=False,
    ):
        for name, value, least in (
            ("minibatch", minibatch, 1),
            ("size", size, 1),
            ("pieces", pieces or size, 1),
            ("rank", rank, 0),
            ("threads", threads, 0),
            ("prefetch", prefetch, 1),
        ):
            if operator.index(value) < least:
                raise ValueError(f"{name}: got {value}, wanted >= {least}")
        if rank >= size:
            raise ValueError(f"rank: got {rank}, wanted less than size, {size}")
        if len(dataset) == 0:
            raise ValueError(f"{dataset.describe(0)}: the data set has no samples")
        self.dataset, self.minibatch, self.seed = dataset, minibatch, check_seed(seed)
        self.rank, self.size, self.training, self.skip_damaged = rank, size, training, skip_damaged
        self.augment = augment or dataset.augment or Augment(dataset.sample_shape[1:])
        self.sample_shape = (dataset.sample_shape[0], *self.augment.size)
        self.steps_per_epoch = -(-len(dataset) // minibatch)
        self._pieces = pieces or size
        start, stop = self._own_share(min(minibatch, len(dataset)))
        self.max_local = stop - start
        self.prefetch = prefetch if threads else 0
        self.damaged, self.waited = {}, 0.0
        self._reported = set()
        self._workers = Workers(threads) if threads else None
        self._threads = threads
        self._buffers = BufferPool((self.max_local, *self.sample_shape))
        self._order = (None, None)
        self._closed = False

    def epoch(self, number, start=0):
        """The batches of epoch `number` from step `start` on."""
        return self.batches(number, start, max(0, self.steps_per_epoch - start))

    def batches(self, epoch=0, step=0, steps=None):
        """Batches from step `step` of epoch `epoch` on, across the ends of epochs: `steps`, or for ever.

        Reading ahead goes across the end of an epoch as well, but not past `steps`.
        """
        if epoch < 0 or not 0 <= step <= self.steps_per_epoch:
            raise ValueError(
                f"epoch, step: got {epoch}, {step}, wanted epoch >= 0 and step from 0 to "
                f"{self.steps_per_epoch} (steps of an epoch)"
            )
        return self._stream(epoch * self.steps_per_epoch + step, steps)

    def sample_ids(self, epoch, step):
        """Indices of the whole minibatch of one step, over all ranks, in order (int64)."""
        start = step * self.minibatch
        stop = min(start + self.minibatch, len(self.dataset))
        if not self.training:
            return np.arange(start, stop, dtype=np.int64)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self.dataset), self.seed, epoch))
        return self._order[1][start:stop]

    def close(self):
        """Stop the threads now. Not needed for the program to end, nor to abandon an iterator."""
        self._closed = True
        if self._workers:
            self._workers.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _stream(self, position, steps):
        end = None if steps is None else position + steps
        ahead = deque()
        try:
            while True:
                while len(ahead) <= self.prefetch and (end is None or position < end):
                    ahead.append(self._start(*divmod(position, self.steps_per_epoch)))
                    position += 1
                if not ahead:
                    return
                yield self._finish(*ahead.popleft())
        finally:
            for pending, *_ in ahead:
                pending.cancel()

    def _own_share(self, count):
        """Start and stop of this rank's part of a minibatch of `count` samples."""
        return bounds(block_shares(count, self._pieces, self.size), self.rank)

    def _start(self, epoch, step):
        """Set the threads to one batch."""
        if self._closed:
            raise RuntimeError("the Loader is closed")
        minibatch = self.sample_ids(epoch, step)
        start, stop = self._own_share(len(minibatch))
        ids = minibatch[start:stop].copy()
        batch = Batch(
            self._buffers.take(len(ids)), self.dataset.labels[ids], ids, len(minibatch), start, epoch, step
        )
        kept = np.ones(len(ids), dtype=bool)
        # A few samples a part: single tiny images cost too much, a thread's whole share balances badly.
        part = max(1, min(16, len(ids) // (4 * max(1, self._threads))))
        parts = [
            partial(self._fill, batch, kept, range(i, min(i + part, len(ids))))
            for i in range(0, len(ids), part)
        ]
        return Pending(parts, self._workers), batch, kept

    def _finish(self, pending, batch, kept):
        began = time.perf_counter()
        try:
            pending.wait()
        except BaseException:
            pending.cancel()
            raise
        self.waited += time.perf_counter() - began
        self._report_damaged()
        if kept.all():
            return batch
        return Batch(
            batch.images[kept],
            batch.labels[kept],
            batch.sample_ids[kept],
            batch.global_count,
            batch.offset,
            batch.epoch,
            batch.step_in_epoch,
        )

    def _report_damaged(self):
        """Warn once of each damaged sample, from the consumer's thread."""
        for index in sorted(self.damaged.keys() - self._reported):
            self._reported.add(index)
            what = "another sample of its class is used instead" if self.training else "it is left out"
            warnings.warn(f"{self.damaged[index]}; {what}", RuntimeWarning, stacklevel=4)

    def _fill(self, batch, kept, positions):
        """Read and prepare some samples of a batch (in a thread)."""
        for i in positions:
            index = int(batch.sample_ids[i])
            try:
                image = self._read(index)
                if image is None:
                    kept[i] = False
                else:
                    self.augment.apply(image, batch.images[i], self.training, self.seed, batch.epoch, index)
            except DataError as error:
                named = error if error.index is not None else DataError(error.reason, error.path, index)
                if not self.skip_damaged:
                    named.add_note("skip_damaged=True (--skip-damaged) goes on without it")
                if named is error:
                    raise
                raise named from error
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise DataError(
                    f"{type(error).__name__}: {error}", self.dataset.describe(index), index
                ) from error

    def _read(self, index):
        try:
            return self.dataset.read(index)
        except DataError as error:
            if not self.skip_damaged:
                raise
            self.damaged[index] = str(error)
            return self._substitute(index, error) if self.training else None

    def _substitute(self, index, error):
        """The next readable sample of the same class: decided by the data alone, so alike on every rank."""
        same = np.flatnonzero(self.dataset.labels == self.dataset.labels[index])
        place = int(np.searchsorted(same, index))
        for other in np.roll(same, -place)[1:]:
            try:
                return self.dataset.read(int(other))
            except DataError:
                continue
        raise DataError(
            f"{error.reason}; and no other sample of its class can be read", error.path, index
        ) from error
