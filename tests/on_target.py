"""Tests on the other targets that this CPU runs."""

import contextlib

import pytest

from pcldnn import _kernels, machine


@contextlib.contextmanager
def running_on(name):
    """As if PCLDNN_ISA had asked for a target; gives its module."""
    module = _kernels.targets[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "_target", module)
        patch.setattr(_kernels, "TARGET", name)
        patch.setattr(_kernels, "SIMD_WIDTH", module.SIMD_WIDTH)
        machine._detect.cache_clear()
        yield module
    machine._detect.cache_clear()
