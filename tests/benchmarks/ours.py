"""Our side: a layer's pass and a training step as calls without arguments, on memory that is allocated beforehand."""

import numpy as np
from workloads import NETWORKS, Row, filled, layer_plan

from pcldnn import SGD
from pcldnn.layers.base import Memory, Unit


def layer_call(row: Row, threads: int):
    """One pass of one layer through the same Unit that a network would use: (call, PassPlan)."""
    plan = layer_plan(row, threads)
    made = getattr(plan, row.pass_name)
    memory = Memory.alone(plan, row.minibatch)
    memory.parameters[:] = filled(memory.parameters.shape)
    x, dy = filled(memory.input_grad.shape), filled(memory.output.shape)
    return Unit(plan, memory, threads).call(row.pass_name, x, dy), made


def step_call(row: Row, threads: int):
    """A whole training step: (call, Plan)."""
    net = NETWORKS[row.net]()
    plan = net.prepare(row.minibatch, threads=threads)
    optimizer = SGD(1e-4, momentum=0.9, weight_decay=5e-4)
    images = filled((row.minibatch, *net.input_shape))
    labels = np.arange(row.minibatch) % net.num_classes

    def step():
        net.forward_loss(images, labels)
        net.backward()
        net.update(optimizer)

    return step, plan


def algorithms(plan) -> str:
    """The algorithms that a network's plan chose, of the layers that compute."""
    made = [p for layer in plan.layers for p in (layer.forward, layer.weight_grad, layer.input_grad) if p and p.flop]
    return "+".join(sorted({p.algorithm for p in made}))
