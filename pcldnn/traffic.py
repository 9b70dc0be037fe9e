"""What a timeline says of communication: how much of it was hidden behind compute, and how much could have been.

An exchange begins when the last rank begins it; what the others waited until then is that rank's doing, not the
network's. It is *exposed* while the compute track of its rank is in a wait, and *hidden* otherwise.

How much *could* be hidden follows from what needs what, whatever the schedule. The exchange of a layer, gradients and
new weights, fits between the end of its weight gradient and the start of its next forward pass. The compute in
between, waits left out, is the layer's window. Backward goes through the layers in reverse order, so the windows of a
step lie in one another. From the first layer, the innermost, outwards, with exchanges of c and windows of w seconds,

    h[l] = min(h[l - 1] + c[l], w[l])

and the last h is the most that one network can carry behind compute (derived: the bound of preemptive scheduling with
nested windows; the paper's bubble is what remains). Activations of layers on a grid and the loss have no window: what
comes next needs them, so they count as communication, but not as what could be hidden.
"""

import bisect
import collections
from typing import NamedTuple

from pcldnn.text import align
from pcldnn.trace import COMPUTE, WAIT

WITH_WINDOW = ("reduce_scatter", "allgather")  # of gradients and of weights


class Traffic(NamedTuple):
    """Communication of one layer, mean over ranks and sum over the events kept."""

    bytes: int
    seconds: float  # from the moment at which the last rank was there
    exposed: float  # part of it in which compute stood still [s]

    @property
    def hidden(self):
        return self.seconds - self.exposed


class Overlapped(NamedTuple):
    """Of the exchanges that have a window, mean over ranks and sum over the events kept [s]."""

    seconds: float
    hidden: float
    hideable: float

    @property
    def share(self):
        """Hidden, of what could be hidden."""
        return self.hidden / self.hideable if self.hideable else 1.0


def traffic(ranks):
    """Traffic by layer, and how long the others waited for each rank [s].

    Parameters
    ----------
    ranks : list of RankTrace
        Of all ranks.
    """
    waits = {each.rank: _union(e for e in each.events if e.kind == WAIT) for each in ranks}
    layers, late = {}, collections.Counter()
    for found in _exchanges(ranks):
        begin, last = max((start, rank) for rank, (start, _, _) in found.items())
        late[last] += sum(begin - start for start, _, _ in found.values()) / max(len(ranks) - 1, 1)
        for each, event, span in _spans(found):
            seconds, exposed = span[1] - span[0], _overlap(span, waits[each.rank])
            for layer, size in zip(event.layers, event.bytes):
                part = size / max(sum(event.bytes), 1) / len(ranks)
                before = layers.get(layer, Traffic(0, 0.0, 0.0))
                layers[layer] = Traffic(before.bytes + size / len(ranks), before.seconds + seconds * part,
                                        before.exposed + exposed * part)  # fmt: skip
    return layers, late


def overlapped(ranks):
    """How much of the exchanges of gradients and weights was hidden, and how much could have been: an Overlapped."""
    waits = {each.rank: _union(e for e in each.events if e.kind == WAIT) for each in ranks}
    windows = {each.rank: _windows(each.events) for each in ranks}
    carried = collections.defaultdict(float)  # (rank, window) -> seconds of exchanges in it
    hidden = 0.0
    for found in _exchanges(ranks):
        for each, event, span in _spans(found):
            for layer, size in zip(event.layers, event.bytes) if event.kind in WITH_WINDOW else ():
                own = windows[each.rank].get(layer, [])
                place = bisect.bisect_right(own, (event.start, float("inf"))) - 1
                if place >= 0 and event.start < own[place][1]:
                    part = size / max(sum(event.bytes), 1)
                    carried[each.rank, own[place]] += part * (span[1] - span[0])
                    hidden += part * (span[1] - span[0] - _overlap(span, waits[each.rank]))
    could = sum(_hideable(
        [(window, seconds) for (rank, window), seconds in carried.items() if rank == each.rank], waits[each.rank]
    ) for each in ranks)  # fmt: skip
    return Overlapped(*(value / len(ranks) for value in (sum(carried.values()), hidden, could)))


def _hideable(exchanges, waits):
    """The most that could be hidden of one rank's exchanges: ((start, stop) of the window, seconds) of each."""
    outer = []  # of each step the widest window so far: its start, and what fits in it
    for (start, stop), seconds in sorted(exchanges, key=lambda each: (each[0][1], -each[0][0])):
        inside = 0.0
        while outer and outer[-1][0] >= start:
            inside += outer.pop()[1]
        outer.append((start, min(inside + seconds, stop - start - _overlap((start, stop), waits))))
    return sum(fits for _, fits in outer)


def _windows(events):
    """layer -> (start, stop) in order: from the end of a weight gradient to the layer's next forward pass."""
    found, open_since = collections.defaultdict(list), {}
    for event in events:
        if event.track == COMPUTE and event.kind == "weight_grad":
            open_since[event.layers[0]] = event.stop
        elif event.track == COMPUTE and event.kind == "forward" and event.layers[0] in open_since:
            found[event.layers[0]].append((open_since.pop(event.layers[0]), event.start))
    end = max((event.stop for event in events), default=0.0)
    for layer, start in open_since.items():
        found[layer].append((start, end))
    return found


def findings(ranks):
    """The numbers of the summary, for the file of the timeline [s, mean over ranks]."""
    layers, _ = traffic(ranks)
    found = overlapped(ranks)
    return {"communication": {
        "seconds": sum(each.seconds for each in layers.values()),
        "exposed": sum(each.exposed for each in layers.values()),
        "gradients_and_weights": found.seconds, "hideable": found.hideable, "hidden": found.hidden,
        "hidden_of_hideable": found.share,
    }}  # fmt: skip


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
    a_step = 1e3 / max(steps, 1)
    rows = [("layer", "MB/step", "ms/step", "hidden", "exposed")]
    listed = [name for name in order if name in layers] + [name for name in layers if name not in order]
    total = Traffic(*map(sum, zip(*layers.values())))
    for name, found in [*((name, layers[name]) for name in listed), ("all", total)]:
        share = 100 * found.hidden / found.seconds if found.seconds else 100.0
        rows.append((name, f"{found.bytes / 1e6 / max(steps, 1):,.2f}", f"{a_step * found.seconds:,.2f}",
                     f"{share:.0f} %", f"{a_step * found.exposed:,.2f} ms"))  # fmt: skip
    lines = ["communication (mean over ranks, from when the last rank was there):"]
    lines += [f"  {line}" for line in align(rows, 1)]
    found = overlapped(ranks)
    lines.append(f"gradients and weights: {a_step * found.seconds:,.2f} ms a step, of which compute could hide "
                 f"{a_step * found.hideable:,.2f} ms and hid {a_step * found.hidden:,.2f} ms: "
                 f"{100 * found.share:.0f} %")
    rank, seconds = late.most_common(1)[0]
    lines.append(f"the others waited most for rank {rank}: {a_step * seconds:,.2f} ms a step")
    if dropped := sum(each.dropped for each in ranks):
        lines.append(f"({dropped:,} older events are not counted)")
    return lines


def _exchanges(ranks):
    """For each exchange of which all ranks have the event: rank -> (start on rank 0's clock, event, RankTrace)."""
    commands = collections.defaultdict(dict)
    for each in ranks:
        for event in each.events:
            if event.number >= 0:
                commands[event.number][each.rank] = event.start + each.offset, event, each
    return [found for found in commands.values() if len(found) == len(ranks)]


def _spans(found):
    """(RankTrace, event, (start, stop)) of an exchange on each rank: from when the last one was there, on its clock."""
    begin = max(start for start, _, _ in found.values())
    for _, event, each in found.values():
        yield each, event, (min(max(begin - each.offset, event.start), event.stop), event.stop)


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
