"""Which part of which exchange is submitted at which point of a step: a pure value of Plan and rates.

All ranks come to the same. The communication thread executes commands in the order in which they come, so this order is
all there is to decide:

(a) A layer's gradients start to travel right after its weight gradient, behind which the rest of backward hides them.
(b) Large arrays go in pieces of `PIECE`. When the network is slower than compute, pieces of a large layer at the end
    of the network (FC6) are held back, so that those of an early layer, which the next forward pass needs first, are
    not stuck behind them: at each point no more is submitted than the network is expected to carry until the next.
    How long that is, and what the network carries beside compute, comes from the first steps, on rank 0; before, from
    what the CPU can do at best and the network alone.
(c) In the update, from the first layer to the last: what was held back of a layer's gradients, the update of its
    shard, its new weights. The next forward pass runs meanwhile, and waits for a layer only where it comes to it.
    What the network can carry beyond that are updates and new weights, of layers behind the one that computes: nobody
    reads their old weights any more in this step.
(d) Small layers that follow each other are fused into one exchange of at least `FUSE`: latency is paid once.
(e) Exact mode's partial sums that lie in memory of the arena (`grid.sums_stay`) are exchanged before backward goes on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pcldnn.grid import sums_stay
from pcldnn.plan import Plan

PIECE = 4 << 20  # [byte] of a whole array
FUSE = 256 << 10  # [byte]
FLOP_A_LANE = 12e9  # [flop/s] two multiply-adds a cycle at 3 GHz: what a core is taken for if it was not measured


@dataclass(frozen=True)
class Part:
    """Piece `index` of `count` of each rank's share of a layer's array."""

    layer: str
    index: int
    count: int
    bytes: int


Bundle = tuple[Part, ...]  # parts that travel in one exchange


@dataclass(frozen=True)
class Stage:
    """A stretch of a step: exchanges of gradients, then updates of the layers' shards, then exchanges of weights."""

    gradients: tuple[Bundle, ...]
    layers: tuple[str, ...]
    weights: tuple[Bundle, ...]


@dataclass(frozen=True)
class Schedule:
    """When the exchanges of a step are submitted."""

    backward: dict[str, Stage]  # after the weight gradient of the layer
    update: tuple[Stage, ...]
    awaited: frozenset[str] = frozenset()  # layers whose reduce-scatters end before backward goes on


def schedule(
    plan: Plan, bandwidth: float = float("inf"), seconds: dict[str, float] | None = None, early: bool = False
) -> Schedule:
    """The schedule of a plan.

    Parameters
    ----------
    plan : Plan
    bandwidth : float
        What the network carries from and to each rank [byte/s]; the same on all ranks. inf: nothing is held back.
    seconds : dict of str to float, optional
        Compute [s] behind each layer's weight gradient, up to the next one's, awaited layers left out; the same on all
        ranks. Default: as much as the plan's work takes at the peak of the plan's machine.
    early : bool
        Whether updates may begin in backward.
    """
    parts = {}
    for message in plan.messages:
        if message.kind == "reduce_scatter":
            count = max(1, -(-message.bytes // PIECE))
            parts[message.layer] = [Part(message.layer, i, count, message.bytes // count) for i in range(count)]
    learning = [layer for layer in plan.layers if layer.name in parts]
    awaited = frozenset(layer.name for layer in learning if not sums_stay(layer))
    found = _gradients([layer for layer in learning if layer.name not in awaited], parts)
    groups = list(_groups(learning, parts))
    backward, held = _fill(found, groups, plan, bandwidth, seconds or _least_seconds(plan, found), early)
    backward |= {name: Stage(tuple((part,) for part in parts[name]), (), ()) for name in awaited}
    return Schedule(backward, tuple(_update(groups, held)), awaited)


def _gradients(learning, parts) -> dict[str, list[Bundle]]:
    """The exchanges of gradients that can begin after each layer's weight gradient; small layers fused."""
    found, small = {}, []
    for layer in reversed(learning):
        own = parts[layer.name]
        small += own if len(own) == 1 else []
        full = sum(part.bytes for part in small) >= FUSE or len(own) > 1 or layer is learning[0]
        found[layer.name] = [tuple(small)] if small and full else []
        found[layer.name] += [(part,) for part in own] if len(own) > 1 else []
        small = [] if full else small
    return found


class _Group:
    """Layers whose weights travel together, and which of their exchanges are not submitted yet."""

    def __init__(self, layers, weights):
        self.layers, self.weights, self.updated = tuple(layers), list(weights), False

    def stage(self, gradients=()) -> Stage:
        """All that is left."""
        layers, self.updated = () if self.updated else self.layers, True
        weights, self.weights = tuple(self.weights), []
        return Stage(tuple(gradients), layers, weights)


def travelling(plan: Plan) -> dict[str, float]:
    """layer -> which part of its array moves in an exchange: a rank keeps its own share."""
    return {layer.name: 1 - 1 / layer.partition.data for layer in plan.layers}


def _fill(found, groups: list[_Group], plan: Plan, bandwidth: float, seconds: dict[str, float], early: bool):
    """What is submitted after each weight gradient, and the gradients left in the end; `groups` keep what is left."""
    travels = travelling(plan)
    place = {name: i for i, name in enumerate(name for group in groups for name in group.layers)}
    # Parts of gradients that are not submitted; those of awaited layers are complete before backward goes on.
    left = Counter(part.layer for bundles in found.values() for bundle in bundles for part in bundle)
    submitted, waiting, credit = {}, [], 0.0
    for name, bundles in found.items():
        waiting = [*bundles, *waiting]  # this layer's first: it comes before the others in the next forward pass
        # Time that the network idles is lost; time for which it has too much is carried over.
        credit = min(credit, 0.0) + (seconds[name] * bandwidth if bandwidth < float("inf") else bandwidth)
        gradients, layers, weights = [], [], []
        while True:
            # Nobody reads the weights of the layers behind this one any more in this step.
            free = [group for group in groups if early and group.weights and place[group.layers[0]] > place[name]
                    and not any(left[layer] for layer in group.layers)]  # fmt: skip
            if not (waiting or free) or (credit <= 0 and (gradients or not waiting)):
                break
            if waiting and not (free and place[free[0].layers[0]] < place[waiting[0][0].layer]):
                sent = waiting.pop(0)
                gradients.append(sent)
                left.subtract(part.layer for part in sent)
            else:
                layers += () if free[0].updated else free[0].layers
                free[0].updated = True
                sent = free[0].weights.pop(0)
                weights.append(sent)
            credit -= sum(part.bytes * travels[part.layer] for part in sent)
        submitted[name] = Stage(tuple(gradients), tuple(layers), tuple(weights))
    return submitted, waiting


def _least_seconds(plan: Plan, found) -> dict[str, float]:
    """Time [s] from each layer's weight gradient to the next one's, and to the end of backward, at the CPU's peak."""
    rate = plan.threads * (plan.machine.flops or FLOP_A_LANE * plan.machine.width)
    work, current = {}, None
    for layer in reversed(plan.layers):
        if current is not None and layer.weight_grad:
            work[current] += layer.weight_grad.flop
        if layer.name in found:
            current = layer.name
            work[current] = 0
        if current is not None and layer.input_grad:
            work[current] += layer.input_grad.flop
    return {name: flop / rate for name, flop in work.items()}


def _groups(learning, parts):
    """Groups from the first layer to the last; small layers share one."""
    names = [layer.name for layer in learning]
    group = []
    for i, name in enumerate(names):
        group.append(name)
        size = sum(part.bytes for each in group for part in parts[each])
        if size < FUSE and i + 1 < len(names) and len(parts[names[i + 1]]) == 1:
            continue
        whole = len(group) > 1
        yield _Group(group, [tuple(parts[each][0] for each in group)] if whole else [(part,) for part in parts[name]])
        group = []


def _update(groups: list[_Group], held):
    """Stages from the first layer to the last, of what backward has left."""
    for group in groups:
        gradients = [bundle for bundle in held if any(part.layer in group.layers for part in bundle)]
        held = [bundle for bundle in held if bundle not in gradients]
        if gradients or group.weights or not group.updated:
            yield group.stage(gradients)
