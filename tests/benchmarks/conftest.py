"""Options of the benchmarks, and their collection: `pytest tests/benchmarks --benchmark-only`.

Without --benchmark-only nothing here is measured: `pytest` runs one small layer of everything (test_smoke.py).
"""

import importlib.util
import re
from dataclasses import dataclass

import pytest

OPTIONS = {
    "nets": ("vgg_a,overfeat_fast,cd_dnn", "networks; also 'digits', and 'tiny' to try the benchmarks themselves"),
    "layers": ("*", "patterns of layer names: conv1, pool2, fc6, ...; 'conv[2-8],fc*'"),
    "passes": ("forward,input_grad,weight_grad,step", "passes; 'step' is the whole training step"),
    "minibatch": (None, "images of a call, one or several; default: conv 8, pool 32, fc 64,256, step 32 or 1024"),
    "threads": (None, "threads of ours and of the peer; default: the cores of this process"),
    "algorithms": ("direct,winograd", "of our convolutions, each where it can be; 'auto' is the plan's choice"),
    "targets": (None, "avx512, avx2, sse2, neon, reference, or 'all'; default: the chosen one and the NumPy reference"),
}


def pytest_addoption(parser):
    group = parser.getgroup("pcldnn benchmarks")
    for name, (default, text) in OPTIONS.items():
        group.addoption(f"--{name}", default=default, help=f"{text} (default: {default})" if default else text)
    group.addoption("--wait-quiet", type=float, default=0.0, metavar="SECONDS",
                    help="how long a row may wait for moments in which nobody else is on the cores (default: 0)")  # fmt: skip
    group.addoption("--peer", action="store_true", default=None, help="measure PyTorch too, or fail if it is not there")
    group.addoption("--no-peer", action="store_false", dest="peer", help="do not (default: if it is installed)")


def pytest_collect_file(file_path, parent):
    """bench_*.py, which no other run of pytest should find."""
    named = parent.session.isinitpath(file_path)  # on the command line: pytest collects it anyway
    if file_path.match("bench_*.py") and parent.config.getoption("benchmark_only", False) and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@dataclass(frozen=True)
class Options:
    """What was asked for, checked."""

    nets: tuple[str, ...]
    layers: tuple[str, ...]
    passes: tuple[str, ...]
    minibatch: tuple[int, ...]  # empty: as the kind of layer has it
    threads: int
    targets: tuple[str, ...]
    algorithms: tuple[str, ...]
    peer: bool


def read_options(config) -> Options:
    """The options of this run."""
    from workloads import NETWORKS

    from pcldnn import _kernels, machine
    from pcldnn.layers.conv import ALGORITHMS

    def listed(name, known=None):
        text = config.getoption(name, None) or OPTIONS[name][0] or ""
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        unknown = [word for word in words if known is not None and word not in known]
        if unknown:
            raise pytest.UsageError(f"--{name}: got {', '.join(unknown)}, wanted some of {', '.join(known)}")
        return words

    def integers(name):
        words = listed(name)
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise pytest.UsageError(f"--{name}: got {','.join(words)}, wanted positive numbers")
        return tuple(map(int, words))

    targets = listed("targets", [*_kernels.targets, "all"]) or tuple(dict.fromkeys((_kernels.TARGET, "reference")))
    if "all" in targets:
        targets = tuple(_kernels.targets)
    peer = config.getoption("peer", None)
    if peer and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("--peer: PyTorch is not installed; pip install torch")
    return Options(
        listed("nets", list(NETWORKS)), listed("layers"),
        listed("passes", ["forward", "input_grad", "weight_grad", "step"]), integers("minibatch"),
        machine.threads_per_rank(1, *integers("threads")[:1])[0], targets,
        listed("algorithms", ALGORITHMS),
        importlib.util.find_spec("torch") is not None if peer is None else peer,
    )  # fmt: skip


def pytest_generate_tests(metafunc):
    """One test for each row, in the order in which rows are to be measured."""
    if "row" not in metafunc.fixturenames:
        return
    rows = metafunc.module.rows(read_options(metafunc.config))
    metafunc.parametrize("row", [pytest.param(row, id=row.name, marks=_marks(row, metafunc.config)) for row in rows])


def _marks(row, config):
    """oneDNN's rows are timed by what oneDNN reports; no row is too slow."""
    marks = [pytest.mark.timeout(0)] if config.pluginmanager.hasplugin("timeout") else []
    if row.by == "onednn":
        from peer import primitive_clock

        marks.append(pytest.mark.benchmark(timer=primitive_clock))
    return marks


@pytest.fixture(scope="session")
def options(request):
    return read_options(request.config)


@pytest.fixture(scope="session")
def rates(options):
    from measuring import Rates

    return Rates(options.threads)


def pytest_terminal_summary(terminalreporter):
    """What the table of pytest-benchmark does not show: rates, and shares of the peak or of the triad."""
    from measuring import summary

    lines = summary()
    if lines:
        terminalreporter.section("median rates, and their share of the peak (of STREAM triad where there is no flop)")
        terminalreporter.write("\n".join(lines) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    """What the numbers depend on beside the CPU."""
    import numpy

    from pcldnn import _kernels

    machine_info["pcldnn_target"] = _kernels.TARGET
    machine_info["numpy"] = numpy.__version__
    if importlib.util.find_spec("torch"):
        import torch

        machine_info["torch"] = torch.__version__
        machine_info["onednn"] = next(iter(re.findall(r"MKL-DNN v([\d.]+)", torch.__config__.show())), None)
