"""Timeline and profile of a training run: what `--trace` and `--profile` write and print."""

import contextlib

from pcldnn import trace, traffic
from pcldnn.layers.base import PASSES
from pcldnn.machine import measure_flops
from pcldnn.text import align
from pcldnn.trace import LIMIT, STEP, WAIT, Trace


class Recording:
    """Records one run of a network, when asked to; a context manager around the run, on every rank.

    However the run ends, the file is valid JSON. After an error that all ranks raise it holds the events of all ranks;
    after one on this rank alone, those of this rank, for the others can no longer be asked.

    Parameters
    ----------
    network : Network
        Its `trace` is set meanwhile.
    communicator : Communicator
    path : path or None
        Of the timeline.
    profile : bool
        Whether a profile is wanted.
    report : Report
    """

    def __init__(self, network, communicator, path, profile, report):
        self._network, self._communicator, self._report = network, communicator, report
        self._path, self._profile = path, profile
        self._steps, self._done = 0, False
        self._first = {}  # totals of the first step: it touches all memory for the first time, and no other step does
        self.trace = Trace(max(LIMIT // communicator.size, 1000)) if path is not None or profile else None

    def __enter__(self):
        self._network.trace = self.trace
        return self

    def open(self):
        """Rank 0 writes an empty timeline, so that a wrong path is told now, and a killed run leaves valid JSON."""
        if self._path is not None:
            trace.write(self._path, [], "the run has not come to its end")

    @contextlib.contextmanager
    def step(self, start):
        """Around one step; `start` is when its data were asked for."""
        if self.trace is not None:
            self.trace.compute("data", "", start)
        yield
        if self.trace is not None:
            self.trace.compute(STEP, "", start)
            self._steps += 1
            if self._steps == 1:
                self._first, self.trace.totals = self.trace.totals, {}

    def finish(self):
        """Write and print what was recorded; collective."""
        self._done = True
        if self.trace is None:
            return
        self._network.finish()
        ranks = trace.gather(self.trace, self._communicator)
        if self._communicator.rank == 0:
            several = self._communicator.size > 1
            self._write(lambda: trace.write(self._path, ranks, findings=traffic.findings(ranks) if several else None))
            if several:
                order = [layer.name for layer in self._network.prepared.layers]
                self._say(traffic.summary(ranks, order, self._steps))
        if self._profile:
            # All ranks measure the peak, as they have all computed.
            peak = measure_flops(self._network.prepared.threads)
            self._say(profile_table(self._network.prepared, self.trace.totals or self._first, peak))

    def __exit__(self, kind, error, traceback):
        self._network.trace = None
        if error is None or self._done or self._path is None:
            return
        if getattr(error, "raised_on_all_ranks", False):
            ranks = trace.gather(self.trace, self._communicator)
            if self._communicator.rank == 0:
                self._write(lambda: trace.write(self._path, ranks, f"ended by {error!r}"))
        else:
            rank = self._communicator.rank
            self._write(lambda: trace.write_own(self._path, self.trace, rank, f"ended on rank {rank} by {error!r}"))

    def _write(self, function):
        if self._path is None:
            return
        try:
            function()
        except OSError as error:
            self._report.warn(f"the trace {str(self._path)!r} cannot be written: {error.strerror}")

    def _say(self, lines):
        for line in lines:
            self._report.say(line)


def profile_table(plan, totals, peak):
    """Lines: time, flop/s, share of peak and byte/s by layer and pass, means over the steps, and what is left over.

    Parameters
    ----------
    totals : dict
        `Trace.totals` of one rank.
    peak : float
        Of this rank's threads [flop/s].
    """
    steps, step_seconds, _, _ = totals.get((STEP, ""), (0, 0.0, 0, 0))
    if not steps:
        return ["profile: no step was made"]
    rows = [("layer", "pass", "ms/step", "share", "Gflop/s", "of peak", "GB/s")]
    names = {layer.name: str(layer) for layer in plan.layers}
    work = [(layer, kind) for layer in names for kind in PASSES if (kind, layer) in totals]
    extra = [key for key in totals if key[0] not in (*PASSES, STEP, WAIT)]
    known = 0.0
    for kind, layer in [*((kind, layer) for layer, kind in work), *extra]:
        _, seconds, size, flop = totals[kind, layer]
        known += seconds
        rows.append((
            f"{layer} {names.get(layer, '')}".strip(), kind, f"{1e3 * seconds / steps:,.2f}",
            f"{100 * seconds / step_seconds:.1f} %", f"{flop / seconds / 1e9:,.1f}" if flop else "",
            f"{100 * flop / seconds / peak:.0f} %" if flop else "", f"{size / seconds / 1e9:,.1f}" if size else "",
        ))  # fmt: skip
    waited = sum(total[1] for (kind, _), total in totals.items() if kind == WAIT)
    left = max(step_seconds - known - waited, 0.0)
    rate = sum(total[3] for total in totals.values()) / step_seconds
    for name, seconds, rates in (
        ("waiting for other ranks", waited, ("", "")), ("outside kernels", left, ("", "")),
        ("step", step_seconds, (f"{rate / 1e9:,.1f}", f"{100 * rate / peak:.0f} %")),
    ):  # fmt: skip
        share = f"{100 * seconds / step_seconds:.1f} %"
        rows.append((name, "", f"{1e3 * seconds / steps:,.2f}", share, *rates, ""))
    title = f"profile of the last {steps} steps on this rank, peak of its {plan.threads} threads"
    return [f"{title} {peak / 1e9:,.0f} Gflop/s:", *(f"  {line}" for line in align(rows, 2))]
