"""The machine that a plan is made for: instruction set, cores, caches, memory, network.

`Machine.detect()` describes this one. A Machine is a plain value, so the solver (`blocking.py`) and the paper's model
(`scaling.py`) can be asked about machines that are not at hand; `CLUSTERS` holds the paper's two.
"""

import contextlib
import os
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn._kernels.isa import ISAS, isa

_CPUS = Path("/sys/devices/system/cpu")

MOST_THREADS = 1024  # of a rank: far more end in a crash of the OpenMP library
CORES_FOR_COMMUNICATION = 8  # cores of a rank from which on one of them is worth more to communication than to compute


@dataclass(frozen=True)
class Machine:
    """One node of a cluster.

    Attributes
    ----------
    name : str
    target : str
        ISA of the kernels, a row of `_kernels.isa.ISAS`.
    cores : int
        Cores that may be used.
    l1, l2, l3 : int
        Data caches [byte]: l1 and l2 of a core, l3 of all cores together; 0 where there is none.
    flops : float or None
        Multiply-add peak of one core, a multiply-add counted as 2 [flop/s]; None: not measured.
    memory_bandwidth : float or None
        STREAM triad of all cores [byte/s].
    network_bandwidth, network_latency : float or None
        One direction, a node [byte/s]; a message [s].
    """

    name: str
    target: str
    cores: int
    l1: int = 32 * 1024
    l2: int = 256 * 1024
    l3: int = 0
    flops: float | None = None
    memory_bandwidth: float | None = None
    network_bandwidth: float | None = None
    network_latency: float | None = None

    @property
    def tile(self) -> tuple[int, int]:
        """Register tile of the kernels: (vectors, pixels)."""
        row = isa(self.target)
        return row.tile_vectors, row.tile_pixels

    @property
    def width(self) -> int:
        """SIMD width b: lanes of float32."""
        return isa(self.target).width

    @property
    def balance(self) -> float | None:
        """Bytes that memory delivers per flop of the peak [byte/flop]; None when not measured."""
        if self.flops is None or self.memory_bandwidth is None:
            return None
        return self.memory_bandwidth / (self.flops * self.cores)

    @staticmethod
    def detect() -> "Machine":
        """This machine, without rates: see `measured`."""
        return _detect()

    def measured(self) -> "Machine":
        """The same with the rates of this process's cores, measured in about half a second."""
        return replace(self, flops=measure_flops(1), memory_bandwidth=measure_bandwidth(self.cores))


# Sources: PAPER section 10 (Cori: NERSC's configuration page; AWS: EC2's instance table; peaks derived as cores * clock
# * 32 flop a cycle). Two sockets count as one node; caches are those of the E5 v3 family.
CLUSTERS = {
    "cori": Machine("cori", "avx2", 32, 32 * 1024, 256 * 1024, 80 * 1024 * 1024, flops=2.3e9 * 32,
                    network_bandwidth=8e9, network_latency=2e-6),
    "aws-c4.8xlarge": Machine("aws-c4.8xlarge", "avx2", 18, 32 * 1024, 256 * 1024, 50 * 1024 * 1024,
                              flops=2.9e9 * 32, network_bandwidth=1.25e9, network_latency=50e-6),
}  # fmt: skip


@lru_cache
def _detect():
    known = kernels.TARGET in {row.name for row in ISAS}
    target = kernels.TARGET if known else next(row.name for row in ISAS if row.width == kernels.SIMD_WIDTH)
    defaults = Machine("this machine", target, available_cores()[0])
    found = {name: size for name, size in cache_sizes().items() if size}
    return replace(defaults, **found)


def cache_sizes() -> dict[str, int]:
    """Sizes of the data caches of the first CPU of this process [byte], as far as the system tells."""
    sizes = {}
    cpu = min(os.sched_getaffinity(0))
    for folder in sorted((_CPUS / f"cpu{cpu}" / "cache").glob("index*")):
        try:
            kind, level, size = ((folder / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit():
            sizes[f"l{level}"] = int(size[:-1]) * {"K": 1024, "M": 1024**2, "G": 1024**3}[size[-1]]
    return {level: size for level, size in sizes.items() if level in ("l1", "l2", "l3")}


def cgroup_quota() -> float | None:
    """CPUs that the control group of this process may use per unit of time; None: no limit."""
    for read in (_quota_v2, _quota_v1):
        try:
            quota = read()
        except (OSError, ValueError, IndexError):
            continue
        if quota is not None:
            return quota
    return None


def _quota_v2():
    limits = (text.split() for text in _group_files("cpu.max"))
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def _group_files(name):
    """Texts of the files of this name on the path from this process's group to the root (version 2)."""
    group = next(line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines()
                 if line.startswith("0::"))  # fmt: skip
    root, texts = Path("/sys/fs/cgroup"), []
    for folder in (root / group.lstrip("/"), *(root / group.lstrip("/")).parents):
        if (folder / name).exists():
            texts.append((folder / name).read_text().strip())
        if folder == root:
            break
    return texts


def _quota_v1():
    folder = Path("/sys/fs/cgroup/cpu")
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None


def memory_limit() -> int:
    """Memory that the processes of this node may use: physical memory, or less by control group [byte]."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limits += [int(text) for text in _group_files("memory.max") if text != "max"]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").read_text()))
    return min(limits)


def available_cores() -> tuple[int, str]:
    """Physical cores that this process may use, and what limits them.

    Two hardware threads of a core share its multiply-add units, so they count once.
    """
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in cpus}
    count, reason = len(cores), f"{len(cores)} cores in the affinity mask"
    if len(cpus) > len(cores):
        reason += f" of {len(cpus)} hardware threads"
    quota = cgroup_quota()
    if quota is not None and quota < count:
        count = max(int(quota), 1)
        reason = f"the control group's quota of {quota:g} CPUs"
    return count, reason


def _siblings(cpu):
    """What names the core of a CPU: the list of its hardware threads."""
    try:
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return cpu


def threads_per_rank(ranks_sharing_cores: int, requested: int | None = None) -> tuple[int, str]:
    """Threads of this rank, and why.

    Parameters
    ----------
    ranks_sharing_cores : int
        Ranks that may run on the cores of this one, itself included: those on this node, unless the launcher has
        given each its own cores.
    requested : int, optional
        What the user asked for; obeyed. Next in order is OMP_NUM_THREADS, then the share of the available cores.

    Raises
    ------
    ValueError
        When a request is not a number from 1 to MOST_THREADS.
    """
    for value, source in ((requested, "as requested"), (os.environ.get("OMP_NUM_THREADS"), "OMP_NUM_THREADS")):
        if value in (None, ""):
            continue
        text = str(value).split(",")[0].strip()
        if not text.isdigit() or not 1 <= int(text) <= MOST_THREADS:
            raise ValueError(f"threads ({source}): got {value!r}, wanted a number from 1 to {MOST_THREADS}")
        return int(text), source
    cores, reason = available_cores()
    if ranks_sharing_cores > 1:
        reason += f", shared by {ranks_sharing_cores} ranks"
    return max(cores // ranks_sharing_cores, 1), reason


def reserved_cores(threads: int, reason: str, requested: int | None = None) -> tuple[int, str]:
    """Cores of a rank to keep for its communication thread, which then spins instead of sleeping; and why.

    Parameters
    ----------
    threads, reason : int, str
        What `threads_per_rank` found.
    requested : int, optional
        What the user asked for; obeyed.

    Raises
    ------
    ValueError
        When no core would be left to compute.
    """
    given = reason in ("as requested", "OMP_NUM_THREADS")
    if requested is not None:
        if requested >= threads and requested > 0 and not given:
            raise ValueError(f"comm-cores: got {requested}, wanted at most {threads - 1}: of the cores of a rank "
                             f"({threads}: {reason}) one must be left to compute")  # fmt: skip
        return requested, "as requested"
    if given:
        return 0, "the number of threads is given"
    if threads < CORES_FOR_COMMUNICATION:
        return 0, f"fewer than {CORES_FOR_COMMUNICATION} cores a rank"
    return 1, f"{threads} cores a rank"


def measure_flops(num_threads: int, seconds: float = 0.1, kind: str = "fma_loop") -> float:
    """Multiply-add peak: best of several register-resident loops of 12 accumulators [flop/s].

    With kind="tile_loop" what the kernels' register tile reaches on operands in L1: nearly the peak, unless somebody
    else uses the same cores.
    """
    return best_rate(getattr(_compiled(), kind), num_threads, seconds)


def best_rate(loop, num_threads: int, seconds: float = 0.1) -> float:
    """What a loop of peak.pxi does where nothing disturbs it [flop/s]."""
    best, steps, samples = 0.0, 1000, 0
    loop(steps, num_threads)
    stop = time.perf_counter() + seconds
    while samples < 5 or time.perf_counter() < stop:  # on a busy machine most of them are disturbed
        start = time.perf_counter()
        flop = loop(steps, num_threads)
        best = max(best, flop / (time.perf_counter() - start))
        if flop / best < seconds / 20:  # what it takes undisturbed
            steps *= 2
        else:
            samples += 1
    return best


def measure_bandwidth(num_threads: int, megabytes: int = 192, repeats: int = 5) -> float:
    """STREAM triad: best of several passes over three arrays of `megabytes` together [byte/s]."""
    size = megabytes * 1_000_000 // 12
    x, y, z = (np.ones(size, np.float32) for _ in range(3))
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        _compiled().triad(x, y, z, 0.5, num_threads)
        best = max(best, 12 * size / (time.perf_counter() - start))
    return best


def _compiled():
    """The strongest compiled target: rates are the machine's, also when the NumPy twins are the target."""
    return next(iter(kernels.targets.values()))
