"""The communication thread: commands run on it one after the other, beside compute.

MPI moves nothing while a rank computes, so a posted exchange needs somebody who looks after it. Each rank has one
such thread with a queue of commands. All ranks submit the same commands in the same order (the Plan's, by way of
`schedule`), so commands that wait for other ranks always meet.

Design notes
------------
a. A command is any function. What it does with MPI is the communicator's business; commands wait with `Idle`, which
   gives the core away, because compute needs it: a sleep of 50 to 200 us between two looks. Only on a core that is
   reserved for this thread does it spin.
b. An error of a command is raised where its `Request` is waited for, in the thread that computes, and there
   `abort_on_error` ends the job. Commands behind a failed one are not run: they fail with the same error.
c. Blocking calls of a communicator whose thread runs go through the queue, too (`on_thread`): one order for all.
d. The thread is joined by `close`, or at the exit of the process, before MPI is finalised. There it has `EXIT_GRACE`
   seconds to end what is queued: a process that is to end does end.
"""

import atexit
import functools
import os
import queue
import sys
import threading
import time

SHORTEST, LONGEST = 50e-6, 200e-6  # [s] sleep between two tests
LONG_WAIT, LAZY = 1.0, 1e-3  # [s] after so long a wait, sleep so long
EXIT_GRACE = 15.0  # [s]


class Idle:
    """How a command waits: `idle(test)` returns once `test()` is true.

    Parameters
    ----------
    spin : bool
        Look all the time. For a core of its own only.
    """

    def __init__(self, spin=False):
        self.spin = spin

    def __call__(self, test):
        start, pause = time.monotonic(), SHORTEST
        while not test():
            if self.spin:
                time.sleep(0)  # lets other threads have Python's lock
                continue
            time.sleep(pause)
            pause = min(pause * 1.25, LONGEST)
            if pause == LONGEST and time.monotonic() - start > LONG_WAIT:
                pause = LAZY


class Request:
    """A command on its way."""

    def __init__(self, label):
        self.label = label
        self._done = threading.Event()
        self._result = self.error = None

    def __repr__(self):
        return f"Request({self.label}, {'done' if self.done else 'under way'})"

    @property
    def done(self):
        return self._done.is_set()

    def wait(self):
        """Return what the command returned, or raise what it raised; signals are handled meanwhile."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._result

    def run(self, function, arguments):
        """Call the function, now and here; what it gives or raises is for `wait`."""
        try:
            self._result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  whatever it is, who waits must hear of it
            error.add_note(f"in {self.label}, on thread {threading.current_thread().name!r}")
            self.fail(error)
        self._done.set()

    def fail(self, error):
        self.error = error
        self._done.set()


class CommunicationThread:
    """A thread with a queue of commands.

    Parameters
    ----------
    cores : set of int
        Cores reserved for this thread; it runs there only, and spins. Empty: it shares compute's cores and sleeps.
    """

    def __init__(self, cores=()):
        self.cores = frozenset(cores)
        self.idle = Idle(spin=bool(cores))
        self._queue = queue.SimpleQueue()
        self._failed = None
        self._thread = threading.Thread(target=self._serve, name="communication", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    @property
    def is_current(self):
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, label, function, *arguments, awaited=False):
        """Queue a call of `function`; returns its Request.

        `awaited`: the caller waits at once, so an error is known and the commands behind may run.
        """
        request = Request(label)
        if not self._thread.is_alive():
            raise RuntimeError(f"{label}: the communication thread has been closed")
        self._queue.put((request, function, arguments, awaited))
        return request

    def close(self):
        """Wait until all commands have run and end the thread; raise the first error that a command had."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join()
        atexit.unregister(self._close_at_exit)
        if self._failed is not None:
            raise self._failed

    def _serve(self):
        if self.cores:
            os.sched_setaffinity(0, self.cores)  # of this thread alone
        while (command := self._queue.get()) is not None:
            request, function, arguments, awaited = command
            if self._failed is not None:
                request.fail(self._failed)
                continue
            request.run(function, arguments)
            if not awaited:
                self._failed = request.error
            del command, request, function, arguments  # else they would keep arrays alive until the next command

    def _close_at_exit(self):
        self._queue.put(None)
        self._thread.join(EXIT_GRACE)
        if self._thread.is_alive():
            sys.stderr.write(f"pcldnn: an exchange is still under way {EXIT_GRACE:.0f} s after the program's end\n")
            sys.stderr.flush()
            os._exit(1)


class Commands:
    """What a communicator has of the communication thread.

    Attributes
    ----------
    parent : communicator or None
        The one of which this one is a part. They share a thread, and so one order of commands.
    """

    parent = None
    _thread = None

    @property
    def thread(self):
        """The CommunicationThread; None: commands run at once, in the thread that starts them."""
        return self._thread if self.parent is None else self.parent.thread

    def stop_thread(self):
        """Wait for all commands and end the thread, if this communicator has started one."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.close()

    @property
    def has_thread(self):
        return self.thread is not None

    def start(self, label, function, *arguments):
        """Have a command run on the communication thread; returns its Request.

        All ranks start the same commands in the same order. Without such a thread it runs now.
        """
        if self.thread is not None and not self.thread.is_current:
            return self.thread.submit(label, function, *arguments)
        request = Request(label)
        request.run(function, arguments)
        request.wait()  # raises at once
        return request


def on_thread(method):
    """A method of Commands that runs on the communication thread, where there is one, and is waited for."""

    @functools.wraps(method)
    def call(self, *arguments, **options):
        if self.thread is None or self.thread.is_current:
            return method(self, *arguments, **options)
        function = functools.partial(method, self, *arguments, **options)
        return self.thread.submit(method.__name__, function, awaited=True).wait()

    return call
