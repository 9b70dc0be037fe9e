"""Every convolution, pooling and fully connected layer, each pass by itself: ours, the NumPy twin, the peer.

Run `pytest tests/benchmarks --benchmark-only`; the options are those of conftest.py. Rows of a layer, a pass and a
minibatch form a group; convolutions have one for each of --algorithms that can compute them, gflops being those of the
work of direct convolution in all of them. In `extra_info`: gflops and peak_share are of the median; bytes_per_s and
triad_share count every array once.
"""

import ours
from measuring import blas_threads, measure, memory_kept, record
from on_target import running_on
from workloads import layer_plan, layer_rows

from pcldnn import _kernels

REFERENCE_ALGORITHMS = {"conv": "im2col", "stage": "im2col", "fc": "gemm", "pool": "direct"}

rows = layer_rows


def test_layer(benchmark, row, options, rates, pytestconfig):
    """One pass of one layer."""
    if row.by in _kernels.targets:
        _ours(benchmark, row, rates, pytestconfig)
    elif row.by == "torch":
        _torch(benchmark, row, rates, pytestconfig)
    else:
        _onednn(benchmark, row, rates, pytestconfig)


def _work(row, rates):
    """Flop and bytes of the pass, the same for all who compute it."""
    made = getattr(layer_plan(row, rates.threads), row.pass_name)
    return made.flop, made.bytes


def _ours(benchmark, row, rates, config):
    with running_on(row.by), blas_threads(rates.threads):
        call, made = ours.layer_call(row, rates.threads)
        median = measure(benchmark, row, call, config, rates)
    algorithm = REFERENCE_ALGORITHMS[row.kind] if row.by == "reference" else made.algorithm
    blocking = None if made.blocking is None else str(made.blocking)
    record(benchmark, rates, row, row.by, algorithm, *_work(row, rates), median, blocking=blocking)


def _torch(benchmark, row, rates, config):
    import peer

    with peer.torch.no_grad(), memory_kept():
        name, call = peer.best(peer.layer_variants(row, rates.threads))
        median = measure(benchmark, row, call, config, rates)
    algorithm = "gemm" if row.kind == "fc" else "direct"
    record(benchmark, rates, row, "torch", algorithm, *_work(row, rates), median, variant=name)


def _onednn(benchmark, row, rates, config):
    import peer

    with peer.torch.no_grad(), memory_kept():
        variants = peer.layer_variants(row, rates.threads)
        with peer.listening() as heard:
            name, call = peer.best(variants, peer.primitive_seconds)
            median = measure(benchmark, row, call, config, rates)
        algorithm = "gemm" if row.kind == "fc" else "direct"
        record(benchmark, rates, row, "onednn", algorithm, *_work(row, rates), median,
               variant=name, implementation=heard.implementation)  # fmt: skip
