"""Picks the kernels for this CPU at import and re-exports them.

The strongest ISA of `isa.ISAS` that was built and that the CPU runs is the target; ``PCLDNN_ISA`` names another one
(``avx512``, ``avx2``, ``sse2``, ``neon``, or ``reference`` for the NumPy twins). Every kernel of the target is an
attribute of this package, beside:

TARGET : str
    Name of the target.
SIMD_WIDTH : int
    Its lanes of float32: the block size b of the NHWC-blocked layout.
targets : dict
    Every target that this CPU runs, by name: modules with the same functions.
"""

import importlib
import os
import platform

from pcldnn._kernels import reference
from pcldnn._kernels.isa import ISAS


class TargetError(ImportError):
    """No kernels, or not those that were asked for; `plain`: command lines tell it without a traceback."""

    plain = True


# How long a thread spins for the others before it sleeps, where the user says nothing: tens of microseconds, not the
# milliseconds of gcc's library. Kernels wait for each other much less than that on cores of their own; where others use
# the cores, a spinning thread keeps the one that it waits for from running (docs/performance.md). The library reads it
# when it is loaded: with the first kernels, unless another package has loaded it before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

try:
    from pcldnn._kernels import cpu
except ImportError as error:
    raise TargetError(
        f"pcldnn's kernels are not built ({error}). Install the package (pip install .) or, in a checkout, build in "
        "place: python setup.py build_ext --inplace"
    ) from error


def _load_targets():
    """Modules that can run here, strongest first, and why each other one cannot."""
    found, missing = {}, {}
    for row in reversed(ISAS):
        if platform.machine() not in row.machines:
            missing[row.name] = f"no ISA of this machine ({platform.machine()})"
            continue
        try:
            lacking = [feature for feature in row.features if not cpu.supports(feature)]
            if lacking:
                missing[row.name] = f"this CPU lacks {', '.join(lacking)}"
                continue
            found[row.name] = importlib.import_module(f"pcldnn._kernels.kernels_{row.name}")
        except ModuleNotFoundError:
            missing[row.name] = "not built for this machine"
    found["reference"] = reference
    return found, missing


def _choose(wanted):
    """Name of the target: the strongest, or the one that PCLDNN_ISA asks for."""
    if not wanted:
        return next(iter(targets))
    if wanted in targets:
        return wanted
    reason = _missing.get(wanted, "no such target")
    raise TargetError(f"PCLDNN_ISA={wanted}: {reason}; targets that run here: {', '.join(targets)}")


targets, _missing = _load_targets()
TARGET = _choose(os.environ.get("PCLDNN_ISA"))
_target = targets[TARGET]
SIMD_WIDTH = _target.SIMD_WIDTH


def __getattr__(name):
    """Kernels of the target: ``_kernels.conv2d_forward``."""
    try:
        return getattr(_target, name)
    except AttributeError:
        raise AttributeError(f"target {TARGET!r} of pcldnn._kernels has no {name!r}") from None
