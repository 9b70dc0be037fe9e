"""The Loader: order, shares, resume, reading ahead, errors, and that it always ends."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from pcldnn.data import Augment, DataError, Dataset, Loader, Synthetic
from pcldnn.data.prefetch import BufferPool


class Numbers(Dataset):
    """Sample i is an image of the value i; `hook(i)` runs before it is read."""

    def __init__(self, length, hook=None):
        super().__init__(np.arange(length) % 5, "abcde", (1, 2, 2), "numbers")
        self.hook = hook

    def read(self, index):
        if self.hook:
            self.hook(index)
        return np.full((1, 2, 2), index, np.float32)


def gather(dataset, minibatch, size, epoch=0, start=0, **options):
    """Global minibatches of one epoch, put together from all ranks: lists of (sample ids, images, labels)."""
    ranks = [Loader(dataset, minibatch, rank=r, size=size, **options) for r in range(size)]
    result = []
    for batches in zip(*(loader.epoch(epoch, start) for loader in ranks), strict=True):
        assert len({(b.global_count, b.epoch, b.step_in_epoch) for b in batches}) == 1
        assert sum(len(b) for b in batches) == batches[0].global_count
        assert [b.offset for b in batches] == np.cumsum([0] + [len(b) for b in batches[:-1]]).tolist()
        for loader, b in zip(ranks, batches, strict=True):
            assert (
                b.images.dtype == np.float32
                and b.images.flags.c_contiguous
                and b.images.shape[1:] == (1, 2, 2)
            )
            assert b.labels.dtype == b.sample_ids.dtype == np.int64 and len(b) <= loader.max_local
        parts = [np.concatenate([getattr(b, n) for b in batches]) for n in ("sample_ids", "images", "labels")]
        result.append(parts)
    for loader in ranks:
        loader.close()
    return result


def equal(first, second):
    return len(first) == len(second) and all(
        (a == b).all() for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


# ---- order and shares


def test_epochs_differ_and_repeat():
    """A22: orders differ between epochs, repeat for the same seed; the ranks' union is each sample once."""
    dataset = Numbers(22)
    orders = {}
    for seed in (0, 1):
        for epoch in range(3):
            batches = gather(dataset, 5, 2, epoch, seed=seed)
            assert [len(ids) for ids, _, _ in batches] == [5, 5, 5, 5, 2]
            order = np.concatenate([ids for ids, _, _ in batches])
            assert sorted(order) == list(range(22))
            orders[seed, epoch] = tuple(order)
            assert equal(batches, gather(dataset, 5, 2, epoch, seed=seed))
    assert len(set(orders.values())) == 6


@pytest.mark.parametrize("size", [2, 3, 4, 7, 25])
@pytest.mark.parametrize(("length", "minibatch"), [(10, 4), (22, 5), (3, 64), (16, 8)])
def test_same_minibatches_on_any_number_of_ranks(size, length, minibatch):
    """A14 too: the last minibatch is smaller than the number of ranks, some shares are empty."""
    dataset = Numbers(length)
    dataset.augment = Augment((2, 2), shift=1, mirror=True, fill=-1)
    one = gather(dataset, minibatch, 1, epoch=3, seed=9)
    assert equal(one, gather(dataset, minibatch, size, epoch=3, seed=9, threads=1))
    assert len(one) == -(-length // minibatch)


def test_images_and_labels_belong_to_the_ids():
    for ids, images, labels in gather(Numbers(50), 16, 3):
        assert (images == ids[:, None, None, None]).all() and (labels == ids % 5).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_sees_each_sample_once(size):
    """A21: 10 samples, one right: 1/10 on any number of ranks."""
    batches = gather(Numbers(10), 4, size, training=False)
    ids = np.concatenate([ids for ids, _, _ in batches])
    assert ids.tolist() == list(range(10))
    assert (np.sum(ids == 0), len(ids)) == (1, 10)


def test_threads_and_prefetch_do_not_matter():
    dataset = Synthetic((1, 2, 2), 3, 40, seed=1)
    dataset.augment = Augment((2, 2), shift=1, mirror=True)
    runs = [gather(dataset, 7, 2, threads=t, prefetch=p, seed=4) for t, p in ((0, 1), (1, 1), (2, 3), (5, 9))]
    assert all(equal(runs[0], run) for run in runs[1:])


def test_resume_in_mid_epoch():
    dataset = Numbers(22)
    whole = gather(dataset, 5, 2, epoch=4)
    for start in range(6):
        assert equal(whole[start:], gather(dataset, 5, 2, epoch=4, start=start))


def test_batches_cross_epochs():
    with Loader(Numbers(22), 5) as loader:
        stream = list(loader.batches(epoch=1, step=3, steps=9))
        assert [(b.epoch, b.step_in_epoch) for b in stream] == [(e, s) for e in (1, 2, 3) for s in range(5)][
            3:12
        ]
        second = list(loader.epoch(2))
        assert all((a.sample_ids == b.sample_ids).all() for a, b in zip(stream[2:7], second, strict=True))
        endless = loader.batches()
        assert [next(endless).epoch for _ in range(12)] == [0] * 5 + [1] * 5 + [2] * 2
        assert next(loader.batches(0, 5)).epoch == 1  # a checkpoint at the very end of an epoch
        assert list(loader.batches(steps=0)) == list(loader.epoch(0, 5)) == []


def test_bad_arguments():
    dataset = Numbers(5)
    for options, message in (
        ({"minibatch": 0}, "minibatch: got 0"),
        ({"rank": 2, "size": 2}, "rank: got 2, wanted less than size, 2"),
        ({"rank": -1}, "rank: got -1"),
        ({"threads": -1}, "threads: got -1"),
        ({"prefetch": 0}, "prefetch: got 0"),
        ({"seed": -3}, "seed: got -3"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(dataset, **{"minibatch": 2, **options})
    loader = Loader(dataset, 2)
    for epoch, step in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(ValueError, match="epoch, step: got"):
            loader.batches(epoch, step)


# ---- memory


def test_batches_may_be_kept():
    with Loader(Numbers(60), 4, training=False) as loader:
        kept = list(loader.epoch(0))
        slices = [batch.images[1:, 0] for batch in loader.epoch(0)]
    assert all((batch.images[:, 0, 0, 0] == batch.sample_ids).all() for batch in kept)
    assert all((s[:, 0, 0] == np.arange(4 * i + 1, 4 * i + 4)).all() for i, s in enumerate(slices))


def test_buffers_are_reused():
    with Loader(Numbers(400), 4, threads=1, prefetch=2) as loader:
        addresses = {batch.images.ctypes.data for batch in loader.epoch(0)}
    assert len(addresses) <= 5  # two ahead, one in use, one or two on the way


def test_buffer_pool():
    pool = BufferPool((3, 2))
    first = pool.take(3)
    view = first[1:][0].reshape(2, 1)
    place = first.ctypes.data
    del first
    assert pool.take(2).ctypes.data != place  # `view` is still alive
    del view
    assert place in {array.ctypes.data for array in [pool.take(3) for _ in range(3)]}
    assert BufferPool((0, 2)).take(0).shape == (0, 2)


# ---- errors and ends


class Stop(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [DataError("no disk", "x.jpg"), KeyError("bug"), SystemExit(3), Stop("stop")]
)
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_errors_surface(error, threads):
    def hook(index):
        if index in (13, 14, 37):
            raise error

    loader = Loader(Numbers(40, hook), 4, threads=threads, training=False)
    batches = loader.epoch(0)
    assert [next(batches).step_in_epoch for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"sample 13 \((numbers\[13\]|x\.jpg)\): ") as caught:
        next(batches)
    assert caught.value.index == 13 and caught.value.__cause__ is error
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("--skip-damaged" in notes) == isinstance(error, DataError), "only damaged data can be skipped"
    assert list(batches) == []  # ended, not stuck
    with pytest.raises(DataError):
        list(loader.epoch(0))  # and the Loader can still be used
    loader.close()


def test_wrong_shape_surfaces():
    dataset = Numbers(4)
    dataset.read = lambda index: np.zeros((3, 2, 2), np.float32)
    with pytest.raises(DataError, match=r"sample \d \(numbers\[\d\]\): .*wanted 1 channels"):
        list(Loader(dataset, 2).epoch(0))


def data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("pcldnn-data")]


def wait_for_no_threads():
    gc.collect()
    end = time.monotonic() + 5
    while data_threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not data_threads()


def test_consumer_may_stop_early():
    assert wait_for_no_threads()
    slow = Numbers(1000, lambda index: time.sleep(0.002))
    loader = Loader(slow, 100, threads=2)
    for batch in loader.epoch(0):
        break
    began = time.monotonic()
    for batch in loader.epoch(1):  # the abandoned batches of epoch 0 are not read first
        assert batch.epoch == 1
        break
    assert time.monotonic() - began < 1
    assert len(data_threads()) == 2
    del loader, batch
    assert wait_for_no_threads()


def test_close():
    slow = Numbers(1000, lambda index: time.sleep(0.01))
    loader = Loader(slow, 100, threads=2)
    batches = loader.epoch(0)
    next(batches)
    began = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - began < 1
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        next(loader.epoch(0))


def test_reading_ahead_is_bounded():
    read = []
    loader = Loader(Numbers(1000, read.append), 10, threads=2, prefetch=3)
    batches = loader.epoch(0)
    next(batches)
    time.sleep(0.2)
    assert 30 <= len(read) <= 40
    loader.close()


def test_reads_overlap():
    loader = Loader(Numbers(64, lambda index: time.sleep(0.01)), 8, threads=4)
    began = time.monotonic()
    for _ in loader.epoch(0):
        pass
    assert time.monotonic() - began < 0.5  # 0.64 s one after the other
    assert 0.05 < loader.waited < 0.5
    loader.close()


PROGRAM = """
import sys, time
import numpy as np
from pcldnn.data import Loader, Synthetic
class Slow(Synthetic):
    def read(self, index):
        time.sleep({delay})
        return super().read(index)
loader = Loader(Slow((3, 8, 8), 3, 10_000), 16, threads=3)
batches = loader.batches()
next(batches)
{end}
"""


@pytest.mark.parametrize("delay", [0.001, 0.05])
@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise KeyError('x')", 1), ("keep = next(batches); loader.close()", 0)],
)
def test_interpreter_ends(delay, end, code):
    program = PROGRAM.format(delay=delay, end=textwrap.dedent(end))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == code, done.stderr
    assert "pcldnn-data" not in done.stderr and "Fatal" not in done.stderr


def test_interpreter_ends_although_a_read_never_does():
    program = PROGRAM.format(delay="0 if index % 5 else 1000", end="").replace("next(batches)\n", "", 1)
    program += textwrap.dedent("""
        import threading
        threading.Thread(target=lambda: next(batches), daemon=True).start()
        time.sleep(0.2)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
