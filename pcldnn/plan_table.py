"""A Plan as text: the tables that it prints, and the words for what it has chosen."""

from __future__ import annotations

from pcldnn.balance import bound_by
from pcldnn.grid import nicknames
from pcldnn.layers.base import PASSES, LayerPlan
from pcldnn.layout import FLOAT, Layout
from pcldnn.text import align, format_bytes


def plan_table(plan) -> str:
    """Shapes, parameters, work and memory of each layer, and what ranks exchange."""
    own = {buffer.roles[0]: buffer for buffer in plan.buffers}
    named = {layer.name: layer.layer for layer in plan.layers}
    short = {names[0]: f" ({key})" for key, names in nicknames(named.items()).items()
             if key not in ("conv", "fc", *named)}
    rows = [("layer", "kind", "grid", "output", "algorithm", "parameters", "Mflop/image", "output memory")]
    rows.append(("input", "", "", _shape(plan.input), "", "", "", format_bytes(plan.input.array_bytes(plan.images))))
    for layer in plan.layers:
        buffer = own.get((layer.name, "output"))
        flop = layer.forward.flop / plan.images
        rows.append((
            layer.name + short.get(layer.name, ""), str(layer), str(layer.partition) if layer.parameters else "",
            _shape(layer.output), _algorithms(layer),
            f"{layer.parameter_count:,}" if layer.parameters else "",
            f"{flop / 1e6:,.2f}" if flop else "",
            format_bytes(FLOAT * buffer.size) if buffer else "in place",
        ))  # fmt: skip
    rows.append(("total", "", "", "", "", f"{plan.parameter_count:,}", f"{plan.flop('forward') / 1e6:,.2f}", ""))
    lines = align(rows, 5)
    rule = "-" * max(map(len, lines))
    lines = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    machine = f"{plan.machine.target} (SIMD width {plan.machine.width})"
    doing = "training" if plan.training else "inference"
    lines.insert(0, (
        f"{doing}, minibatch {plan.minibatch}, {plan.ranks} rank{'s' * (plan.ranks > 1)} with at most {plan.images} "
        f"images and {plan.threads} thread{'s' * (plan.threads > 1)}, {machine}"
    ))  # fmt: skip
    if plan.training:
        lines.append(f"work of a training step: {plan.flop() / 1e9:,.3f} Gflop an image")
        sent = sum(message.bytes for message in plan.messages)
        if plan.pieces:
            lines.append(f"exact mode: sums are trees over {plan.pieces} pieces of the minibatch, whatever the ranks")
        lines.append(f"messages of a step: {len(plan.messages)}, of arrays of {format_bytes(sent)} in total")
    memory = plan.memory
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items())
    lines.append(f"memory of a rank: {format_bytes(sum(memory.values()))} ({parts})")
    return "\n".join(lines)


def format_blocking(blocking) -> str:
    """"c_blocks 4, rows 9": the fields of a blocking, of yes and no those that are yes."""
    fields = blocking._asdict().items()
    return ", ".join(name if value is True else f"{name} {value}" for name, value in fields if value is not False)


def blocking_table(plan) -> str:
    """See `Plan.blocking_table`."""
    machine = plan.machine
    if machine.balance is None:
        raise ValueError(f"machine: got {machine.name!r} without rates, wanted one with flops and memory_bandwidth")
    rows = [("layer", "kind", "pass", "algorithm", "blocking", "bytes/flop", "at least", "bound by")]
    for layer in plan.layers:
        for name in PASSES:
            made = getattr(layer, name)
            if made and made.blocking and made.flop:
                rows.append((
                    layer.name, str(layer), name, made.algorithm, format_blocking(made.blocking),
                    f"{made.traffic / made.flop:.4f}", f"{made.bytes / made.flop:.4f}",
                    bound_by(made.traffic, made.flop / made.saving, machine.balance),
                ))  # fmt: skip
    lines = align(rows, 5)
    caches = ", ".join(f"{level.upper()} {getattr(machine, level) // 1024:,} KiB" for level in ("l1", "l2", "l3"))
    threads = f"{plan.threads} thread{'s' * (plan.threads > 1)}"
    rates = f"{machine.memory_bandwidth / 1e9:.1f} GB/s over {machine.cores} x {machine.flops / 1e9:.1f} Gflop/s"
    head = [
        f"blocking for {plan.images} images and {threads}, {machine.target}, {caches}",
        f"balance of the machine: {rates} = {machine.balance:.4f} bytes/flop",
    ]
    return "\n".join([*head, lines[0], "-" * max(map(len, lines)), *lines[1:]])


def format_algorithms(algorithms: dict[str, str]) -> str:
    """"winograd", or where passes differ all of them in the order forward/weight_grad/input_grad."""
    made = list(algorithms.values())
    return made[0] if len(set(made)) == 1 else "/".join(made)


def changed_algorithms(before: dict, planned: dict) -> str:
    """"features.8 winograd, now direct; ...": layers that are not computed as they were, of those that both have."""
    return "; ".join(f"{name} {format_algorithms(passes)}, now {format_algorithms(planned[name])}"
                     for name, passes in before.items() if passes != planned.get(name, passes))  # fmt: skip


def _algorithms(layer: LayerPlan) -> str:
    if not layer.forward.flop:
        return ""
    return format_algorithms(layer.algorithms) + (" (tuned)" if layer.tuned else "")


def _shape(layout: Layout) -> str:
    return "x".join(map(str, layout.logical_shape))
