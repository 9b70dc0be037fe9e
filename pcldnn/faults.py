"""How an error on one rank ends the whole job: never a hang, one report, a non-zero exit code.

The paper's synchronous SGD waits for everybody in every step, so a rank that stops alone leaves all others
waiting for ever.  `AbortOnError` is the policy, `Channel` all that it needs of MPI:

1. A rank that fails asks whether another one has failed before it.  If so it stays silent and waits to be
   ended.
2. Otherwise it tells all others and listens for `ELECTION` seconds; of those that failed at the same time
   the lowest rank speaks.  It prints its traceback (of errors whose message says all, the message), then
   aborts the job.
3. An error that all ranks raise together (`raised_on_all_ranks`) needs no election: rank 0 speaks.
4. `sys.exit` is an orderly end when every rank leaves the block within `EXIT_GRACE` seconds, and an error
   otherwise.
5. Whatever goes wrong meanwhile, `DEADLINE` seconds after the failure the process is gone.
"""

import contextlib
import faulthandler
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import traceback

import numpy as np

ELECTION = 0.3  # [s] long against the latency of a message, short for a human
EXIT_GRACE = 3.0  # [s] how long a rank that called sys.exit waits for the others to do the same
SILENCE = 6.0  # [s] how long a silent rank waits to be ended by the one that speaks
DEADLINE = 15.0  # [s] after a failure, until the process is ended by force
_FAULT_TAG = 911
_FORWARDING = 0.1  # [s] for the launcher to forward the traceback before the abort makes it close the pipes

_failing = threading.Lock()  # held for good by the first thread of this process that fails


class CollectiveError(Exception):
    """Base of the errors that every rank raises together, for the same reason, with the same text.

    Raise it (or any exception whose `raised_on_all_ranks` is true) only after an exchange by which all
    ranks know: then one rank prints it and the job ends.
    """

    raised_on_all_ranks = True


class Refusal(SystemExit):
    """Ends the process with exit code 2 and a line in the place of a traceback; printed once where all ranks do it."""

    plain = True

    def __init__(self, text):
        super().__init__(2)
        self.text = text

    def __str__(self):
        return self.text


class DisagreementError(CollectiveError, ValueError):
    """Ranks that must hold equal values do not; raised on all of them with the same text.

    Attributes
    ----------
    item : str
        Name of the first item that differs.
    values : dict
        Maps each value (as text) to the list of the ranks that hold it.
    others : list of str
        Names of further items that differ.
    """

    def __init__(self, item, values, others=()):
        held = "; ".join(f"{_rank_list(ranks)}: {_short(text)}" for text, ranks in values.items())
        names = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
        more = f" (also different: {names})" if others else ""
        super().__init__(f"the ranks disagree about {item}: {held}{more}")
        self.item = item
        self.values = values
        self.others = list(others)


def wait(test, timeout=None):
    """Call `test` until it is true; give the core away between calls.

    Blocking MPI calls spin.  With more ranks than cores that is ruinous (measured: an allgather of 64 MB
    over 4 ranks on 2 cores took 2400 ms blocking and 30 ms this way), and no signal is handled meanwhile.

    Returns
    -------
    bool
        False when `timeout` seconds [s] have passed.
    """
    start = time.monotonic()
    while not test():
        waited = time.monotonic() - start
        if timeout is not None and waited > timeout:
            return False
        if waited < 1e-3:
            os.sched_yield()
        else:
            time.sleep(5e-5 if waited < 1.0 else 1e-3)
    return True


class Channel:
    """The way by which ranks hear of each other's failures; all that `AbortOnError` needs of MPI.

    Parameters
    ----------
    MPI : module
        mpi4py's, handed in so that this file need not import it.
    comm : mpi4py.MPI.Intracomm
        For this use alone; `comm.Free` is the caller's business.
    """

    def __init__(self, MPI, comm):
        self._MPI = MPI
        self._sent = []
        self._senders = set()
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        world = MPI.COMM_WORLD
        self._name = f"rank {self.rank} of {self.size}"
        if self.size != world.size or self.rank != world.rank:
            self._name += f" (rank {world.rank} of {world.size} in MPI.COMM_WORLD)"
        self._name += f" on {socket.gethostname()}"

    def describe(self):
        return self._name

    def usable(self):
        """May this thread send messages now?"""
        MPI = self._MPI
        if MPI.Is_finalized() or self.comm == MPI.COMM_NULL:
            return False
        if threading.current_thread() is threading.main_thread():
            return True
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def tell_all(self):
        token = np.zeros(1, np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._sent = [(self.comm.Isend(token, other, _FAULT_TAG), token) for other in others]

    def heard(self):
        """The ranks that have said that they failed."""
        status = self._MPI.Status()
        while self.comm.Iprobe(self._MPI.ANY_SOURCE, _FAULT_TAG, status):
            self.comm.Recv(np.empty(1, np.uint8), status.source, _FAULT_TAG)
            self._senders.add(status.source)
        return self._senders

    def start_leave(self, token):
        """Start telling all ranks that this one leaves; returns a test for completion and all tokens."""
        tokens = np.zeros(self.size, np.int64)
        tokens[self.rank] = token
        request = self.comm.Iallgather(self._MPI.IN_PLACE, tokens)
        return request.Test, tokens

    def abort(self, code):
        self._MPI.COMM_WORLD.Abort(code)


class AbortOnError:
    """Context manager of `Communicator.abort_on_error`; see the module's head for the rules.

    Parameters
    ----------
    channel : object or None
        The way to the other ranks; None when this process is alone.  Then errors simply propagate, and an
        error in another thread interrupts the main one.
    """

    def __init__(self, channel):
        self._channel = channel
        self._thread_error = None
        self._previous_hook = None
        self._hook = None

    def __enter__(self):
        self._previous_hook = threading.excepthook
        self._hook = self._thread_failed if self._channel is not None else self._thread_failed_alone
        threading.excepthook = self._hook
        return self

    def __exit__(self, kind, error, trace):
        try:
            if self._channel is not None:
                self._leave(error)
            elif self._thread_error is not None:
                name, cause = self._thread_error
                raise RuntimeError(f"thread {name!r} failed: {cause!r}") from cause
        finally:
            if threading.excepthook == self._hook:
                threading.excepthook = self._previous_hook
        return False

    def _leave(self, error):
        """Leave the block together with the other ranks, or end the job."""
        try:
            if error is None:
                self._all_leave(None, None)
                return
            if isinstance(error, SystemExit) and self._all_leave(error, EXIT_GRACE):
                return
        except BaseException as interrupt:  # noqa: BLE001  Ctrl-C, or a signal handler's sys.exit
            error = error or interrupt
        self._fail(error, None)

    def _all_leave(self, error, timeout):
        """Wait until every rank leaves the block; of equal exit messages let one be printed."""
        if not self._channel.usable():
            return False
        test, tokens = self._channel.start_leave(_exit_token(error))
        if not wait(test, timeout):
            return False
        if error is not None:
            own = tokens[self._channel.rank]
            repeated = any(token == own for token in tokens[: self._channel.rank])
            if isinstance(error, Refusal) and not repeated:
                print(f"error: {error}", file=sys.stderr, flush=True)
            if isinstance(error.code, str) and repeated:
                error.code = 1
        return True

    def _thread_failed(self, args):
        self._fail(_error_of(args), getattr(args.thread, "name", "unknown"))

    def _thread_failed_alone(self, args):
        """A thread failed in a job of one process: stop the main thread, which raises at the block's end."""
        if self._thread_error is not None:  # the main thread is on its way already
            return
        error, name = _error_of(args), getattr(args.thread, "name", "unknown")
        self._thread_error = (name, error)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if wait(lambda: threading.excepthook != self._hook, SILENCE):
                return
        _print_report(f"thread {name!r} failed", error)
        os._exit(exit_code(error))

    def _fail(self, error, thread):
        """Report `error` once in the whole job and end the job; does not return."""
        if not _failing.acquire(blocking=False):  # another thread of this process is at it already
            time.sleep(DEADLINE)
            os._exit(1)
        _end_at_deadline()
        try:
            if not self._speaks(error):
                time.sleep(SILENCE)  # the speaker ends the job meanwhile
            _print_report(self._channel.describe() + _circumstance(error, thread, self._channel.size), error)
            time.sleep(_FORWARDING)
            self._channel.abort(exit_code(error))
        finally:
            os._exit(exit_code(error))

    def _speaks(self, error):
        channel = self._channel
        if getattr(error, "raised_on_all_ranks", False):
            return channel.rank == 0
        if not channel.usable():
            return True
        if channel.heard():
            return False
        channel.tell_all()
        # A lower rank that failed at the same moment speaks in our place.
        return not wait(lambda: any(rank < channel.rank for rank in channel.heard()), ELECTION)


def exit_code(error):
    """Exit code of the job for the error that ended it; never 0, for the job did not reach its end."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _error_of(args):
    return args.exc_value if args.exc_value is not None else RuntimeError(args.exc_type.__name__)


def _exit_token(error):
    """A number that is 0 for a normal end and equal for equal exit codes or messages."""
    if error is None:
        return 0
    text = repr((error.code, str(error)))  # of a Refusal the code does not say why
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1


def is_plain(error):
    """Whether the message says all: input is at fault, and no code that a traceback would show."""
    return getattr(error, "plain", False)


def in_a_line(error):
    """Message and notes of an exception."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _circumstance(error, thread, size):
    if is_plain(error):
        return ""
    if getattr(error, "raised_on_all_ranks", False):
        return f": all {size} ranks stop with this error; the job ends"
    text = "" if thread is None else f", thread {thread!r}"
    if isinstance(error, SystemExit):
        return f"{text} called sys.exit({error.code!r}) while other ranks were still at work; the job ends"
    return f"{text} failed; the job ends"


def _end_at_deadline():
    """Have the process ended after DEADLINE, also when a thread keeps Python's lock meanwhile."""
    try:
        faulthandler.dump_traceback_later(DEADLINE, exit=True, file=sys.__stderr__)
    except (AttributeError, OSError, RuntimeError, ValueError):  # stderr without descriptor: a notebook
        timer = threading.Timer(DEADLINE, os._exit, (1,))
        timer.daemon = True
        timer.start()


def _print_report(headline, error):
    report = f"pcldnn: {headline}\n" + "".join(traceback.format_exception(error))
    if is_plain(error):
        report = f"error: {headline}: {in_a_line(error)}\n"
    unusable = (AttributeError, OSError, ValueError)  # None, broken or closed: the job must end all the same
    with contextlib.suppress(*unusable):
        sys.stdout.flush()
    with contextlib.suppress(*unusable):
        sys.stderr.write(report)  # one write, so that ranks do not mix within it
        sys.stderr.flush()


def _short(text, limit=500):
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _rank_list(ranks):
    """`ranks 0, 2-5` of an ascending list."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:16])
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{', ...' if len(runs) > 16 else ''}"
