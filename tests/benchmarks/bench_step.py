"""The whole training step of the three networks: forward, loss, backward, SGD with momentum and weight decay.

In `extra_info` beside what bench_kernels.py writes: images_per_s, and peak_memory, the most that the process held
beyond what it held before the network was built [byte]; gflops counts the layers' multiply-adds only.
"""

import gc

import ours
from measuring import PeakMemory, blas_threads, measure, record
from on_target import running_on
from workloads import outline, step_rows

rows = step_rows


def test_step(benchmark, row, options, rates, pytestconfig):
    """One training step."""
    if row.by == "torch":
        target, algorithm, more, median, memory = _torch(benchmark, row, rates, pytestconfig)
    else:
        target, algorithm, more, median, memory = _ours(benchmark, row, rates, pytestconfig)
    plan = outline(row.net).plan(row.minibatch)
    if median is not None:
        more["images_per_s"] = row.minibatch / median
    record(benchmark, rates, row, target, algorithm, plan.flop() * row.minibatch, None, median,
           peak_memory=memory, **more)  # fmt: skip
    gc.collect()  # networks of gigabytes do not wait for their turn


def _ours(benchmark, row, rates, config):
    with running_on(row.by), blas_threads(rates.threads):
        with PeakMemory() as memory:
            call, plan = ours.step_call(row, rates.threads)
            median = measure(benchmark, row, call, config, rates)
        algorithm = "im2col" if row.by == "reference" else ours.algorithms(plan)
    return row.by, algorithm, {}, median, memory.bytes


def _torch(benchmark, row, rates, config):
    import peer

    seconds = {layout: peer.step_seconds(row, rates.threads, layout) for layout in peer.step_layouts(row)}
    layout = min(seconds, key=seconds.get)
    with PeakMemory() as memory:
        call = peer.step_call(row, rates.threads, layout)
        median = measure(benchmark, row, call, config, rates)
    return "torch", "direct", {"variant": layout}, median, memory.bytes
