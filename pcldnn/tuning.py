"""Timing in the place of the model: which algorithm computes a pass of a layer in the least time, here and now.

The plan's own choice between direct and Winograd convolution is a model of cycles (`winograd_blocking.pays`). With
`tune=True` both are timed once for the shapes that a rank has. A clock may give another answer tomorrow, so what it
says becomes an argument of the plan, `tuned`: the plan stays a pure value, and a checkpoint can keep the choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.grid import member_part
from pcldnn.layers.base import PASSES, LayerPlan, Memory, Unit
from pcldnn.layout import aligned_zeros
from pcldnn.plan import Plan

ENOUGH = 0.05  # [s] of timed calls
MOST_CALLS = 5

_known: dict[tuple, float] = {}  # seconds of what this process has timed


def quicker(make: Callable[..., Plan], communicator) -> dict[str, dict[str, str]]:
    """The quicker algorithm of each layer and pass for which there are two; collective.

    All ranks time at the same time, as they will compute; their times are added, and rank 0 decides.

    Parameters
    ----------
    make : callable
        `make(algorithm=...)` -> Plan.
    communicator : Communicator

    Returns
    -------
    dict of str to dict of str to str
        What `plan.plan` takes as `tuned`, the same on every rank.

    Raises
    ------
    ValueError
        In exact mode, whose bits may not depend on a clock.
    DisagreementError
        On all ranks, when they built different networks.
    """
    plans = [make(algorithm=name) for name in ("direct", "winograd")]
    if plans[0].pieces:
        raise ValueError(
            "tune: got True in exact mode, where bits may not depend on a clock; wanted False, or the choice of an "
            "earlier plan (Plan.tuned)"
        )
    communicator.agree({**plans[0].description(), "tune": "True"})
    choices = [(layers, name) for layers in zip(*(made.layers for made in plans), strict=True)
               for name in PASSES if len({layer.algorithms.get(name) for layer in layers}) > 1]  # fmt: skip
    times = np.array([[seconds(layer, name, plans[0].threads) for layer in layers] for layers, name in choices])
    if choices:
        times = communicator.allreduce_sum(times)
    best = communicator.broadcast([int(row.argmin()) for row in times])
    tuned = {}
    for (layers, name), which in zip(choices, best, strict=True):
        tuned.setdefault(layers[which].name, {})[name] = layers[which].algorithms[name]
    return tuned


def seconds(layer: LayerPlan, pass_name: str, threads: int) -> float:
    """Time of one pass of a layer with all images of a step; timed once in a process, the best of a few calls [s]."""
    key = kernels.TARGET, threads, pass_name, replace(layer, index=0, name="")
    if key not in _known:
        _known[key] = _best(_call(layer, pass_name, threads))
    return _known[key]


def _best(call: Callable[[], object]) -> float:
    call()  # touches memory for the first time
    times = []
    while sum(times) < ENOUGH and len(times) < MOST_CALLS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _call(layer: LayerPlan, pass_name: str, threads: int) -> Callable[[], object]:
    """The pass as a Unit makes it in a step, on memory of its own; of a layer on a grid, a member's part of it."""
    layer = member_part(layer, 0)
    memory = Memory.alone(layer, layer.group_images)
    x, dy = (aligned_zeros(array.shape) for array in (memory.input_grad, memory.output))
    for read in (x, dy, memory.output, memory.parameters):
        read.fill(1)  # pages that nobody has written are one page of zeros, which stays in cache
    return Unit(layer, memory, threads).call(pass_name, x, dy)
