"""Whether the plan chooses well: each pass that it computes by Winograd, turn by turn with direct convolution.

In `extra_info` beside what bench_kernels.py writes: direct_ratio, how many times as long direct convolution takes
(ratio of medians). The networks are those that the scripts train, at minibatches of one rank and of a rank of four;
VGG-A on digits only with `--nets digits`.
"""

import statistics
import time
from dataclasses import replace

import ours
from measuring import measure, record
from workloads import turns_rows

rows = turns_rows


def test_choice(benchmark, row, options, rates, pytestconfig):
    """One pass of one layer, both ways."""
    call, made = ours.layer_call(row, rates.threads)
    direct, _ = ours.layer_call(replace(row, algorithm="direct"), rates.threads)
    seconds = []

    def turn():
        start = time.perf_counter()
        direct()
        seconds.append(time.perf_counter() - start)

    direct()  # touches memory for the first time
    median = measure(benchmark, row, call, pytestconfig, rates, turn)
    more = {} if median is None else {"direct_ratio": statistics.median(seconds) / median}
    record(benchmark, rates, row, row.by, made.algorithm, made.flop, made.bytes, median, **more)
