"""How it is measured: rounds, the machine's two rooflines in the same run, and what is written beside each result."""

import contextlib
import ctypes
import re
import statistics
import time
from pathlib import Path

from pcldnn import _kernels, machine

LONG = 2.0  # [s] a call from here on gets few rounds
VERY_LONG = 15.0  # [s] and from here on one
SLEEP = 0.01  # [s] longer than threads of OpenMP spin before they sleep
QUIET, ENOUGH = 0.95, 3  # share of the peak that the register tile reaches on quiet cores; quiet rounds for a median
PAUSE = 0.02  # [s] between two looks whether the cores are quiet

RESULTS = {}  # `extra_info` of the rows of this run, by group and target: for the summary at its end


class Rates:
    """Peaks and bandwidth of the machine, measured beside what they are the yardstick of.

    The peak is that of the strongest instruction set. Clocks change during a run, and on a virtual machine somebody
    else may hold the other half of a core, so the peak of a row is the median of samples between its rounds, each as
    long as a call of a kernel is: the best moment of a loop says nothing about milliseconds. Beside it the register
    tile is sampled, fed from L1: what a kernel could reach at most that loses nothing elsewhere; and before both, for
    rows of a weaker instruction set, the loop of 12 accumulators in that set.
    """

    SAMPLE, TRIAD_AGE = 5e-3, 60.0  # [s]

    def __init__(self, threads: int):
        self.threads = threads
        self._strongest = next(iter(_kernels.targets.values()))
        self._known = {}  # what `_undisturbed` has measured
        self._triad = 0.0, -1e9  # value, when
        self._undisturbed(self._strongest.fma_loop)  # at the start of the run
        self.begin_row(self._strongest.TARGET)

    def begin_row(self, by: str):
        """Forget the samples of the row before."""
        self._loops = {"peak": self._strongest.fma_loop, "tile": self._strongest.tile_loop}
        if by in _kernels.targets and by not in ("reference", self._strongest.TARGET):
            self._loops = {"own": _kernels.targets[by].fma_loop, **self._loops}
        self._samples = {name: [] for name in self._loops}
        self._first_after = []  # for each round, which sample is the first one after it

    def before_round(self, deadline: float):
        """Sample; until `deadline` (time.monotonic), again and again until the cores are quiet."""
        self.sample()
        while self._samples["tile"][-1] < self._quiet_rate and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self.sample()
        self._first_after.append(len(self._samples["tile"]))

    def sample(self):
        """Run the FMA loops of 12 accumulators, then the tile, on all threads for a moment."""
        for name, loop in self._loops.items():
            steps, _ = self._undisturbed(loop)
            loop(1000, self.threads)  # wakes the threads
            start = time.perf_counter()
            flop = loop(steps, self.threads)
            self._samples[name].append(flop / (time.perf_counter() - start))

    def _undisturbed(self, loop) -> tuple[int, float]:
        """Steps that a loop does in SAMPLE seconds, and its rate [flop/s], at its best when it was first needed."""
        if loop not in self._known:
            rate = machine.best_rate(loop, self.threads)
            self._known[loop] = max(int(1000 * self.SAMPLE * rate / loop(1000, self.threads)), 1), rate
        return self._known[loop]

    def _rate(self, name) -> float:
        """The median rate of a loop during this row [flop/s]; at least 90 % of its best when it was first needed.

        A thread that was kept from its core in most samples must not make shares of the peak look better.
        """
        return max(statistics.median(self._samples[name]), 0.9 * self._undisturbed(self._loops[name])[1])

    @property
    def peak(self) -> float:
        """The FMA loop's rate in the strongest instruction set [flop/s]."""
        return self._rate("peak")

    @property
    def own_peak(self) -> float | None:
        """That in the instruction set of the row [flop/s], if it has a weaker one."""
        return self._rate("own") if "own" in self._loops else None

    @property
    def _quiet_rate(self) -> float:
        return QUIET * self.peak

    @property
    def tile_share(self) -> float:
        """What a register tile fed from L1 reached of the peak during this row."""
        return statistics.median(self._samples["tile"]) / self.peak

    def quiet(self, times) -> list[float]:
        """Those of a row's rounds before and after which the register tile ran at nearly the peak.

        So it is likely that nobody else was on the cores. The row's own times have no say in which rounds these are.
        """
        tile, least = self._samples["tile"], self._quiet_rate
        rounds = zip(times, self._first_after, strict=True)
        return [seconds for seconds, after in rounds if min(tile[after - 1 : after + 1]) >= least]

    @property
    def triad(self) -> float:
        """STREAM triad on all threads, best of several [byte/s]."""
        if time.monotonic() - self._triad[1] > self.TRIAD_AGE:
            self._triad = machine.measure_bandwidth(self.threads), time.monotonic()
        return self._triad[0]


def measure(benchmark, row, call, config, rates, turn=None) -> float | None:
    """Run `call` in rounds for about --benchmark-max-time, a peer twice that; the median [s].

    At least --benchmark-min-rounds rounds, but three of long calls and one of very long ones. Before each round the
    peak is sampled, until the cores are quiet or the row has waited --wait-quiet seconds. Our kernels run on the threads
    of the sample; for others these get time to go to sleep, and a call that is not counted wakes those of the peer.
    `turn` is called before each round, measures itself, and its time comes on top. None with --benchmark-disable.
    """
    benchmark.group = row.group
    if benchmark.disabled:
        benchmark.pedantic(call)
        return None
    call()  # touches memory for the first time
    seconds = _timed(call)
    if seconds < LONG:
        seconds = min(seconds, _timed(call))
    most_time, least = float(config.getoption("benchmark_max_time")), config.getoption("benchmark_min_rounds")
    if seconds > LONG:
        least = min(least, 3 if seconds < VERY_LONG else 1)
    rates.begin_row(row.by)
    deadline = time.monotonic() + config.getoption("wait_quiet")

    def between_rounds():
        rates.before_round(deadline)
        if turn is not None:
            turn()
        if row.by in _kernels.targets and row.by != "reference":
            return
        time.sleep(SLEEP)
        if seconds < LONG:
            call()

    benchmark.pedantic(call, setup=between_rounds, rounds=min(max(int(most_time / (seconds + SLEEP)), least), 1000))
    rates.sample()
    return benchmark.stats.stats.median


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summary() -> list[str]:
    """A line a group: who reached what."""
    lines = []
    for group, rows in RESULTS.items():
        cells = []
        for info in rows:
            if "images_per_s" in info:
                reached = f"{info['images_per_s']:.1f} img/s"
            elif info["flop"]:
                reached = f"{info['gflops']:.3g} GFLOP/s"
            else:
                reached = f"{info['bytes_per_s'] / 1e9:.1f} GB/s"
            share = info["peak_share"] if info["flop"] else info["triad_share"]
            quiet = f" ({info['quiet_share']:.0%} quiet)" if info["flop"] and "quiet_share" in info else ""
            quiet += f", {info['own_peak_share']:.0%} of its own peak" if "own_peak_share" in info else ""
            quiet += f", {info['direct_ratio']:.2f}x direct" if "direct_ratio" in info else ""
            who = f"{info['target']} winograd" if info["algorithm"] == "winograd" else info["target"]
            cells.append(f"{who} {reached} {share:.0%}{quiet}")
        lines.append(f"{group:<36} " + "  ".join(f"{cell:<44}" for cell in cells).rstrip())
    return lines


def record(benchmark, rates, row, target, algorithm, flop, moved=None, median=None, **more) -> None:
    """Write what a row's times mean beside them.

    Parameters
    ----------
    flop : int
        Work of a call, a multiply-add counted as 2, taps that fall in the padding counted [flop].
    moved : int, optional
        Bytes that a call must move at least: every array once [byte].
    median : float, optional
        Seconds; without it (--benchmark-disable) no rates are written.
    """
    benchmark.extra_info.update(
        {"net": row.net, "layer": row.layer, "pass": row.pass_name, "algorithm": algorithm, "target": target,
         "threads": rates.threads, "minibatch": row.minibatch, "flop": flop, **more}
    )  # fmt: skip
    if median is None:
        return
    benchmark.extra_info.update(
        gflops=flop / median / 1e9, peak_share=flop / median / rates.peak, peak_gflops=rates.peak / 1e9,
        tile_share=rates.tile_share,
    )
    own = rates.own_peak
    if flop and own is not None:
        benchmark.extra_info.update(own_peak_gflops=own / 1e9, own_peak_share=flop / median / own)
    quiet = rates.quiet(benchmark.stats.stats.data)
    benchmark.extra_info["quiet_rounds"] = len(quiet)
    if len(quiet) >= ENOUGH:
        benchmark.extra_info["quiet_gflops"] = flop / statistics.median(quiet) / 1e9
        benchmark.extra_info["quiet_share"] = flop / statistics.median(quiet) / rates.peak
    if moved is not None:
        triad = rates.triad
        benchmark.extra_info.update(
            bytes=moved, bytes_per_s=moved / median, triad_share=moved / median / triad, triad_bytes_per_s=triad
        )
    RESULTS.setdefault(row.group, []).append(benchmark.extra_info)


@contextlib.contextmanager
def blas_threads(threads: int):
    """Limit NumPy's BLAS, if threadpoolctl is installed (else set OPENBLAS_NUM_THREADS)."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield
        return
    with threadpool_limits(threads, "blas"):
        yield


# --- memory -----------------------------------------------------------------------------------------------------

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt


@contextlib.contextmanager
def memory_kept():
    """Freed memory stays with the process, so that a peer that allocates its result in each call finds it warm.

    Otherwise a large result costs PyTorch more in page faults than in arithmetic, and we would be measuring that.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:  # where glibc's own adaptive thresholds end up in a process that has freed a large block
        libc.mallopt(M_MMAP_MAX, 65536)
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 1024**2)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024**2)
        libc.malloc_trim(0)


def _glibc():
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


class PeakMemory:
    """Most memory that this process held in a `with` block beyond what it held before [byte]; 0 where unknown."""

    def __enter__(self):
        libc = _glibc()
        if libc is not None:
            libc.malloc_trim(0)
        self.bytes = 0
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
            self.before = self._status("VmRSS")
        except OSError:
            self.before = None
        return self

    def __exit__(self, *error):
        if self.before is not None:
            self.bytes = max(self._status("VmHWM") - self.before, 0)

    @staticmethod
    def _status(key: str) -> int:
        return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
