"""What happened when: events of a run on all ranks, a timeline for a trace viewer, and what it says of communication.

A `Trace` collects the events of one rank, on two tracks: *compute* (layer passes, and the waits in which compute stands
still) and *communication* (commands of the communication thread). At the end `write` gathers those of all ranks in one
file in the JSON of Chrome and Perfetto (https://ui.perfetto.dev). Memory is bounded: of a long run the last events
stay; sums over the whole run are kept beside them.
"""

import bisect
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
        (kind, layer) -> [calls, seconds, bytes, flop] of the compute track, since it was last emptied.
    dropped : int
        Events no longer kept.
    """

    def __init__(self, limit=LIMIT):
        self.events = collections.deque(maxlen=limit)
        self.totals = {}
        self._added = self._commands = 0

    @property
    def dropped(self):
        return self._added - len(self.events)

    def compute(self, kind, layer, start, bytes=0, flop=0):
        """A call that began at `start` and has just ended on the thread that computes."""
        stop = clock()
        self._add(Event(COMPUTE, kind, (layer,), start, stop, (bytes,), flop))
        total = self.totals.setdefault((kind, layer), [0, 0.0, 0, 0])
        for i, value in enumerate((1, stop - start, bytes, flop)):
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


def write(path, ranks, note=None):
    """Write the timeline of the given RankTraces; the file is replaced as a whole, so it is always valid JSON."""
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
    other = {"events_dropped": sum(each.dropped for each in ranks)}
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


# --- what the timeline says of communication -----------------------------------------------------------------------


class Traffic(NamedTuple):
    """Communication of one layer, mean over ranks and sum over the events kept."""

    bytes: int
    seconds: float  # from the moment at which the last rank was there
    exposed: float  # part of it in which compute stood still [s]

    @property
    def hidden(self):
        return self.seconds - self.exposed


def traffic(ranks):
    """Traffic by layer, and how long the others waited for each rank [s].

    An exchange begins when the last rank begins it; what the others waited until then is that rank's doing, not the
    network's. It is exposed while the compute track of its rank is in a wait, and hidden otherwise.
    """
    commands = collections.defaultdict(dict)
    for each in ranks:
        for event in each.events:
            if event.number >= 0:
                commands[event.number][each.rank] = event.start + each.offset, event, each
    complete = [found for found in commands.values() if len(found) == len(ranks)]
    waits = {each.rank: _union(e for e in each.events if e.kind == WAIT) for each in ranks}
    layers, late = {}, collections.Counter()
    for found in complete:
        begin, last = max((start, rank) for rank, (start, _, _) in found.items())
        late[last] += sum(begin - start for start, _, _ in found.values()) / max(len(ranks) - 1, 1)
        for start, event, each in found.values():
            span = (max(begin - each.offset, event.start), event.stop)
            seconds, exposed = max(span[1] - span[0], 0.0), _overlap(span, waits[each.rank])
            for layer, size in zip(event.layers, event.bytes):
                part = size / max(sum(event.bytes), 1) / len(ranks)
                before = layers.get(layer, Traffic(0, 0.0, 0.0))
                layers[layer] = Traffic(before.bytes + size / len(ranks), before.seconds + seconds * part,
                                        before.exposed + exposed * part)  # fmt: skip
    return layers, late


def summary(ranks, order, steps):
    """Lines for the end of a run: communication by layer, hidden and exposed, and whom the others waited for.

    Parameters
    ----------
    order : sequence of str
        Layers, in the order in which they are to be listed.
    steps : int
        Steps of the run, for means.
    """
    layers, late = traffic(ranks)
    if not layers:
        return ["communication: none"]
    rows = [("layer", "MB/step", "ms/step", "hidden", "exposed")]
    listed = [name for name in order if name in layers] + [name for name in layers if name not in order]
    total = Traffic(*map(sum, zip(*layers.values())))
    for name, found in [*((name, layers[name]) for name in listed), ("all", total)]:
        share = 100 * found.hidden / found.seconds if found.seconds else 100.0
        exposed = 1e3 * found.exposed / max(steps, 1)
        rows.append((name, f"{found.bytes / 1e6 / max(steps, 1):,.2f}", f"{1e3 * found.seconds / max(steps, 1):,.2f}",
                     f"{share:.0f} %", f"{exposed:,.2f} ms"))  # fmt: skip
    lines = ["communication (mean over ranks, from when the last rank was there):", *_table(rows)]
    rank, seconds = late.most_common(1)[0]
    lines.append(f"the others waited most for rank {rank}: {1e3 * seconds / max(steps, 1):,.2f} ms a step")
    if dropped := sum(each.dropped for each in ranks):
        lines.append(f"({dropped:,} older events are not counted)")
    return lines


def _table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  " + "  ".join(cells)


def _union(events):
    """Disjoint (start, stop) in order."""
    spans = []
    for start, stop in sorted((event.start, event.stop) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    return spans


def _overlap(span, spans):
    """Time that `span` shares with the disjoint `spans`, which are in order."""
    first = max(bisect.bisect_right(spans, (span[0], 0.0)) - 1, 0)
    shared = 0.0
    for start, stop in spans[first:]:
        if start >= span[1]:
            break
        shared += max(0.0, min(stop, span[1]) - max(start, span[0]))
    return shared
