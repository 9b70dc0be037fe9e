"""What happened when: events of a run on all ranks, and a timeline for a trace viewer.

A `Trace` collects the events of one rank, on two tracks: *compute* (layer passes, and the waits in which compute stands
still) and *communication* (commands of the communication thread). At the end `write` gathers those of all ranks in one
file in the JSON of Chrome and Perfetto (https://ui.perfetto.dev). Memory is bounded: of a long run the last events
stay; sums over the whole run are kept beside them. What a timeline says of communication: traffic.py.
"""

import collections
import contextlib
import json
import os
import socket
import time
from typing import NamedTuple

LIMIT = 400_000  # events in a file, of all ranks together
COMPUTE, COMMUNICATION = "compute", "communication"
WAIT, STEP = "wait", "step"  # kinds of events on the compute track that are not work

clock = time.perf_counter  # one clock for all processes of a host


class Event(NamedTuple):
    track: str
    kind: str  # "forward", "reduce_scatter", ...
    layers: tuple  # names
    start: float  # [s] of `clock`
    stop: float
    bytes: tuple = ()  # moved or exchanged, of each layer [byte]
    flop: float = 0
    number: int = -1  # of a command that ranks execute together: the same on all of them


class Trace:
    """The events of this rank.

    Parameters
    ----------
    limit : int
        Events that are kept: the last ones.

    Attributes
    ----------
    events : deque of Event
    totals : dict
        (kind, layer) -> [calls, seconds, bytes, flop] of the compute track, since it was last emptied; waits inside of
        a call are not in its seconds.
    dropped : int
        Events no longer kept.
    """

    def __init__(self, limit=LIMIT):
        self.events = collections.deque(maxlen=limit)
        self.totals = {}
        self._added = self._commands = 0
        self._inner = []  # waits since the last call that was none: (start, stop)

    @property
    def dropped(self):
        return self._added - len(self.events)

    def compute(self, kind, layer, start, bytes=0, flop=0):
        """A call that began at `start` and has just ended on the thread that computes."""
        stop = clock()
        self._add(Event(COMPUTE, kind, (layer,), start, stop, (bytes,), flop))
        seconds = stop - start
        if kind == WAIT:
            self._inner.append((start, stop))
        elif kind != STEP:
            seconds -= sum(end - begin for begin, end in self._inner if begin >= start)
            self._inner.clear()
        total = self.totals.setdefault((kind, layer), [0, 0.0, 0, 0])
        for i, value in enumerate((1, seconds, bytes, flop)):
            total[i] += value

    def communicate(self, kind, layers, start, bytes=(), together=True):
        """A command that began at `start` and has just ended; `together`: with the other ranks."""
        number = self._commands if together else -1
        self._commands += together
        self._add(Event(COMMUNICATION, kind, tuple(layers), start, clock(), tuple(bytes), 0, number))

    def _add(self, event):
        self._added += 1
        self.events.append(event)


class RankTrace(NamedTuple):
    """What a rank hands over at the end."""

    rank: int
    host: str
    events: list
    dropped: int
    offset: float  # [s] to add to its clock for that of rank 0


def gather(trace, communicator):
    """On every rank the list of all ranks' RankTrace; collective."""
    communicator.barrier()
    now, boot = clock(), _boot_id()
    everyone = communicator.allgather_object((now, boot))
    # Processes of one host share a clock. Between hosts the moment after a barrier is the same, within its latency.
    offset = 0.0 if boot == everyone[0][1] else everyone[0][0] - now
    own = RankTrace(communicator.rank, socket.gethostname(), list(trace.events), trace.dropped, offset)
    return communicator.allgather_object(own)


def write(path, ranks, note=None, findings=None):
    """Write the timeline of the given RankTraces; the file is replaced as a whole, so it is always valid JSON.

    `note` and the dict `findings` go into its `otherData`.
    """
    origin = min((event.start + each.offset for each in ranks for event in each.events), default=0.0)
    tracks = {COMPUTE: 0, COMMUNICATION: 1}
    events = []
    for each in ranks:
        name = f"rank {each.rank} on {each.host}"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "tid": 0, "args": {"name": name}})
        for track, number in tracks.items():
            events.append({"ph": "M", "name": "thread_name", "pid": each.rank, "tid": number, "args": {"name": track}})
        for event in each.events:
            layers = ", ".join(event.layers)
            arguments = {"layer": layers, "bytes": sum(event.bytes)}
            if event.flop:
                arguments["flop"] = event.flop
            events.append({
                "ph": "X", "name": f"{event.kind} {layers}".rstrip(), "cat": event.kind, "pid": each.rank,
                "tid": tracks[event.track], "ts": round(1e6 * (event.start + each.offset - origin), 3),
                "dur": round(1e6 * (event.stop - event.start), 3), "args": arguments,
            })  # fmt: skip
    other = {"events_dropped": sum(each.dropped for each in ranks), **(findings or {})}
    if note:
        other["note"] = note
    _replace(path, json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}))


def write_own(path, trace, rank, note):
    """Write this rank's events alone: the other ranks cannot be asked any more."""
    write(path, [RankTrace(rank, socket.gethostname(), list(trace.events), trace.dropped, 0.0)], note)


def _replace(path, text):
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _boot_id():
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        return socket.gethostname()
