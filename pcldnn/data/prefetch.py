"""Threads that work ahead, and the memory they fill. Nothing here knows what a sample is.

Built so that it cannot hang: the consumer hands out work when it takes a result, so no thread ever waits
for a full queue; work is finite and bounded; the threads are daemons that are also told to stop at the
interpreter's exit.
"""

import queue
import threading
import time
import weakref
from collections import deque

import numpy as np


class Workers:
    """A few daemon threads that run callables in the order given; none with threads = 0."""

    def __init__(self, threads):
        self._queue = queue.SimpleQueue()
        self.stopped = threading.Event()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"pcldnn-data-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        # Runs at close(), when this object is collected, or at the interpreter's exit, whichever comes first.
        self.close = weakref.finalize(self, _stop, self.stopped, self._queue, self._threads)

    def submit(self, task):
        self._queue.put(task)


def _work(tasks):  # a function, not a method: a waiting thread must not keep its Workers alive
    while (task := tasks.get()) is not None:
        task()
        del task  # do not hold the last one's memory while waiting for the next


def _stop(stopped, tasks, threads, patience=2.0):
    """End the threads; wait for them, but not for ever: a read from a dead disk may not end."""
    stopped.set()  # what is still queued becomes a no-op
    for _ in threads:
        tasks.put(None)
    end = time.monotonic() + patience
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


class Pending:
    """A result in the making: parts that run on Workers (or, without them, when the result is asked for).

    Parameters
    ----------
    parts : list of callables without arguments
    workers : Workers or None
    """

    def __init__(self, parts, workers=None):
        self._left = len(parts)
        self._errors = {}
        self._cancelled = threading.Event()
        self._stopped = workers.stopped if workers else self._cancelled
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._parts = [] if workers else parts
        if not parts:
            self._done.set()
        if workers:
            for number, part in enumerate(parts):
                workers.submit(lambda number=number, part=part: self._run(number, part))

    def _run(self, number, part):
        try:
            if self._stopped.is_set():
                self._cancelled.set()
            if not self._cancelled.is_set():
                part()
        except BaseException as error:  # noqa: BLE001  even SystemExit: wait() raises it again
            self._errors[number] = error
        finally:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self._done.set()

    def wait(self):
        """Return when all parts have run; raise the error of the first part (in their order) that failed."""
        for number, part in enumerate(self._parts):
            self._run(number, part)
        self._done.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        if self._cancelled.is_set():
            raise RuntimeError("the Loader was closed while its batches were being read")

    def cancel(self):
        """Parts that have not begun will do nothing."""
        self._cancelled.set()


class BufferPool:
    """float32 memory for batches, used again only when no array refers to it any more.

    Parameters
    ----------
    shape : tuple of int
        Shape of the largest batch.
    """

    def __init__(self, shape):
        self._shape = shape
        self._free = deque()

    def take(self, count):
        """Uninitialised float32 array of shape (count, ...), count <= the largest."""
        if 0 in self._shape:
            return np.empty((count, *self._shape[1:]), dtype=np.float32)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._shape, dtype=np.float32)
        # NumPy lets a view of a view refer to the array that owns the memory. With a memoryview between,
        # that is the array made here, and it is collected when the last view of it is gone.
        array = np.frombuffer(memoryview(memory).cast("B"), dtype=np.float32).reshape(self._shape)
        weakref.finalize(array.base, self._free.append, memory).atexit = False
        return array[:count]
