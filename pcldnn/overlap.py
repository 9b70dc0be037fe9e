"""The exchanges of a training step, beside its compute: executes a `Schedule` for a Network.

Network tells how far its step is; here the commands are submitted, and waited for where compute needs what they bring.
Without a communication thread a command runs at once, so the schedule, and every bit of the result, is the same.
"""

from __future__ import annotations

import collections
import functools

import numpy as np

from pcldnn.exchange import reduce_trees
from pcldnn.schedule import schedule, travelling
from pcldnn.trace import WAIT, clock
from pcldnn.transfer import piece_spans

SEEN = 1024  # the most exchanges whose pace counts
FIRST, AGAIN = 3, 10  # after so many steps, and then every so many, the schedule follows the pace that was measured


def never():
    """Of a step that nobody may refuse."""
    return False


class Pace:
    """Measures the compute behind each layer's weight gradient, up to the next one's, waits left out, and exchanges.

    Beside compute an exchange takes longer than alone, because the thread that carries it gets less of the cores: a
    schedule made for the bandwidth of an idle network has it carry too much, and early layers' gradients queue up.
    `carried` is called by that thread, everything else by the one that computes.

    Attributes
    ----------
    steps : int
        Measured in all, the first one left out of the means: it touches memory for the first time. One that was
        refused, so without an update, does not count.
    """

    def __init__(self):
        self.steps = 0
        self._seconds, self._counted = {}, 0
        self._rates = collections.deque(maxlen=SEEN)  # (byte/s, byte) of exchanges
        self.begin()

    def begin(self):
        """Backward begins."""
        self._layer, self._since, self._pass = None, 0.0, {}

    def mark(self, layer):
        """The weight gradient of a layer is there; None: backward has ended."""
        now = clock()
        if self._layer is not None:
            self._pass[self._layer] = now - self._since
        self._layer, self._since = layer, now
        if layer is None:
            if self.steps > 0:
                self._counted += 1
                for name, seconds in self._pass.items():
                    self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self.steps += 1

    def waited(self, seconds):
        """Compute has stood still."""
        self._since += seconds

    def carried(self, size, seconds):
        """An exchange has moved `size` bytes from and to this rank."""
        if size > 0:
            self._rates.append((size / max(seconds, 1e-9), size))

    def take(self):
        """layer -> mean [s] since this was last called, and the rate of the last exchanges [byte/s]; None: of none.

        The rate is the median, each exchange weighted by its bytes, of at most SEEN since this was last called: one
        that began before all ranks were there says nothing of the network.
        """
        means = {layer: seconds / max(self._counted, 1) for layer, seconds in self._seconds.items()}
        self._seconds, self._counted = {}, 0
        seen, self._rates = self._rates, collections.deque(maxlen=SEEN)  # the other thread may be about to append
        if not seen:
            return means, None
        rates, sizes = np.array(sorted(seen)).T
        return means, float(rates[np.searchsorted(np.cumsum(sizes), sizes.sum() / 2)])


class Overlap:
    """State of one prepared network's exchanges.

    Parameters
    ----------
    plan : Plan
    units : list of Unit
    placements : dict of str to Placement
        Of the layers that learn.
    communicator : Communicator
    bandwidth : float
        See `schedule.schedule`.
    trace : Trace, optional
        Gets an event for each command and each wait.
    """

    def __init__(self, plan, units, placements, communicator, bandwidth=float("inf"), trace=None):
        self._plan, self._bandwidth, self._seconds = plan, bandwidth, None
        self._travels = travelling(plan)
        self.trace = trace
        self._change = None  # updates a layer in this backward pass; None: no layer yet
        self._refused = self._pending = never  # whether a step is: this one, and the one whose backward comes next
        self._make_schedule()
        self._pace = Pace()
        self._measured = None  # Request for the pace by which the next schedule is made
        self._communicator = communicator
        self._units = {unit.name: unit for unit in units}
        self._placements = placements
        self._exact = bool(plan.pieces)
        self._gradients = {}  # layer -> the last Request that needs its gradients
        self._weights = {}  # layer -> the last Request that brings its weights
        self._held = set()  # bundles of gradients not submitted yet
        self._arrivals = np.empty(0, np.float32)  # exact mode: others' partial sums of an exchange
        for name, placement in placements.items():
            placement.travel = functools.partial(self._travel, name)

    @property
    def layers(self):
        """Names of the layers whose weights are exchanged."""
        return set(self.schedule.backward)

    def begin_backward(self, change=None):
        """A new backward pass begins, in which `change(layer)` may update the shard that this rank owns."""
        new = (self._change is None) != (change is None)
        self._change = change
        # A step that was refused has no update: what is left of it ends here.
        self._refused, self._pending = self._pending, never
        self._pace.begin()
        if self._measured is not None:
            self._seconds, rate = self._wait(self._measured, "control")
            self._bandwidth = rate or self._bandwidth
            self._measured, new = None, True
        if new:
            self._make_schedule()
        self._held = {bundle for stage in self.schedule.update for bundle in stage.gradients}

    def gradients_ready(self, layer):
        """The weight gradient of a layer is there: submit what the schedule has for this point."""
        if layer not in self.schedule.backward:
            return
        awaited = layer in self.schedule.awaited
        if not awaited:
            self._pace.mark(layer)
        stage = self.schedule.backward[layer]
        for bundle in stage.gradients:
            self._reduce(bundle)
        self._renew(stage, self._change)
        if awaited:
            self.wait_gradients(layer)

    def update(self, change):
        """Submit the update of all layers: `change(layer)` updates the shard that this rank owns."""
        self._pace.mark(None)
        for stage in self.schedule.update:
            for bundle in stage.gradients:
                self._reduce_held(bundle)
            self._renew(stage, change)
        self._refused = never
        self._follow_pace()

    def _renew(self, stage, change):
        """Update shards and send new weights, unless the step is refused by then: all ranks know that alike."""
        refused = self._refused
        for layer in stage.layers:
            run = functools.partial(lambda name: refused() or change(name), layer)
            self._weights[layer] = self._start("update", (layer,), (0,), False, run)
        for bundle in stage.weights:
            request = self._start_parts("allgather", bundle)
            self._weights.update((part.layer, request) for part in bundle)
            self._gradients.update((part.layer, request) for part in bundle)

    def _make_schedule(self):
        self.schedule = schedule(self._plan, self._bandwidth, self._seconds, self._change is not None)

    def _follow_pace(self):
        """From time to time: have rank 0 tell its pace, by which all ranks will make the same schedule."""
        held_back = self._communicator.has_thread and self._bandwidth < float("inf")
        if held_back and (self._pace.steps == FIRST or self._pace.steps % AGAIN == 0):
            pace, function = self._pace.take(), self._communicator.broadcast
            self._measured = self._start("broadcast", ("control",), (8 * len(pace[0]) + 8,), True, function, pace)

    def start_sum(self, array, refuses=None):
        """Begin to add a small array over the ranks; returns a function that waits for it and gives it.

        `refuses(sum)`: whether no weight is to be changed by the step whose backward pass comes next.
        """
        function = self._communicator.allreduce_sum
        request = self._start("allreduce", ("control",), (array.nbytes,), True, function, array)
        if refuses is not None:
            # Looked at by commands behind this one, so its result is there.
            self._pending = lambda: refuses(request.wait())
        return lambda: self._wait(request, "control")

    def before(self, pass_name, layer):
        """Wait for what a pass of a layer needs: its weights, or that nobody reads its last gradients any more."""
        if pass_name == "weight_grad":
            self.wait_gradients(layer)
        else:
            self.wait_weights(layer)

    def wait_gradients(self, layer):
        """Wait until this layer's last gradients are exchanged."""
        self._wait(self._gradients.pop(layer, None), layer)

    def wait_weights(self, layer):
        """Wait until this layer's weights are updated and here."""
        self._wait(self._weights.pop(layer, None), layer)

    def finish_gradients(self):
        """Complete the gradients of the shards that this rank owns; collective between backward and update."""
        for stage in self.schedule.update:
            for bundle in stage.gradients:
                self._reduce_held(bundle)
        for layer in list(self._gradients):
            self.wait_gradients(layer)

    def finish(self):
        """Wait until all weights are there."""
        for layer in list(self._weights):
            self.wait_weights(layer)

    def _travel(self, layer, kind, size, function, *arguments):
        """An exchange of activations, which the pass that asks for it waits for."""
        self._wait(self._start(kind, (layer,), (size,), True, function, *arguments), layer)

    def _reduce_held(self, bundle):
        if bundle in self._held:
            self._held.remove(bundle)
            self._reduce(bundle)

    def _reduce(self, bundle):
        request = self._start_parts("reduce_scatter", bundle)
        self._gradients.update((part.layer, request) for part in bundle)

    def _start_parts(self, kind, bundle):
        exchanges = {}  # by the communicator of the layers: those of unlike Partition have unlike ones
        for part in bundle:
            unit, placement = self._units[part.layer], self._placements[part.layer]
            spans = piece_spans(placement.shards, part.index, part.count)
            if kind == "allgather":
                exchanged = unit.parameters, spans
            else:
                exchanged = unit.tree(placement, spans) if self._exact else (unit.gradients, spans)
            exchanges.setdefault(placement.data, []).append(exchanged)

        moved = sum(part.bytes * self._travels[part.layer] for part in bundle)

        def run():
            start = clock()
            for data, parts in exchanges.items():
                if kind == "allgather":
                    data.part_broadcast(parts)
                elif self._exact:
                    self._reduce_trees(data, parts)
                else:
                    data.part_reduce(parts)
            self._pace.carried(moved, clock() - start)

        layers, sizes = tuple(part.layer for part in bundle), tuple(part.bytes for part in bundle)
        return self._start(kind, layers, sizes, True, run)

    def _reduce_trees(self, data, trees):
        needed = sum(tree.arriving(data.rank) for tree in trees)
        if needed > self._arrivals.size:
            self._arrivals = np.empty(needed, np.float32)  # commands run one after the other: they share it
        reduce_trees(data, trees, self._arrivals)

    def _start(self, kind, layers, sizes, together, function, *arguments):
        """Submit a command that leaves an event in the trace."""

        def command():
            start = clock()
            result = function(*arguments)
            if self.trace is not None:
                self.trace.communicate(kind, layers, start, sizes, together)
            return result

        start = clock()
        request = self._communicator.start(f"{kind} of {', '.join(layers)}", command)
        if request.done and not self._communicator.has_thread:
            self._waited(layers[0], start)
        return request

    def _wait(self, request, layer):
        if request is None:
            return None
        ready, start = request.done, clock()
        result = request.wait()  # raises what the command raised
        if not ready:
            self._waited(layer, start)
        return result

    def _waited(self, layer, start):
        self._pace.waited(clock() - start)
        if self.trace is not None:
            self.trace.compute(WAIT, layer, start)
