"""What is shipped: the sdist is complete, a wheel built from it works anywhere, and a poor compiler is refused."""

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pcldnn import __version__, _kernels
from pcldnn._kernels.isa import ISAS, isa

pytest.importorskip("Cython")
pytest.importorskip("setuptools")

REPOSITORY = Path(__file__).resolve().parent.parent
BASELINE = next(row.name for row in ISAS if row.name in _kernels.targets)   # the weakest of this machine
ASSEMBLED = "avx2" if sys.platform == "linux" and "avx2" in _kernels.targets else None   # has tile_x86.py's micro-kernel
SHIPPED = ("pcldnn", "tests", "scripts", "docs", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md",
           "pyproject.toml", "setup.py", "MANIFEST.in")  # fmt: skip


def run(*command, cwd=REPOSITORY, **env):
    """Run a Python command; returns the finished process, its output in one."""
    ours = ("PCLDNN_", "PYTHON", "GOMP_", "OMP_WAIT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env={**environment, **env}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500)  # fmt: skip


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    done = run("setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder)
    assert done.returncode == 0, done.stdout
    shutil.unpack_archive(folder / f"pcldnn-{__version__}.tar.gz", folder)
    return folder / f"pcldnn-{__version__}"


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory):
    """(wheel, folder that it is installed to): built from the sdist for one or two ISAs, with bounds checks."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    done = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder, PCLDNN_DEBUG="1",
               PCLDNN_BUILD_ISAS=",".join(filter(None, (BASELINE, ASSEMBLED))))  # fmt: skip
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    done = run(*pip, "install", "--no-deps", "--target", folder / "site", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout
    return wheel, folder / "site"


def test_sdist_has_every_tracked_file(sdist):
    listed = subprocess.run(["git", "ls-files", *SHIPPED], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    missing = [name for name in listed.stdout.split("\n") if name and not (sdist / name).exists()]
    assert not missing


def test_wheel_has_what_runs_and_no_sources(installed):
    names = zipfile.ZipFile(installed[0]).namelist()
    modules = {name.split(".")[0] for name in names if name.endswith(".so")}
    targets = filter(None, (BASELINE, ASSEMBLED))
    assert modules == {"pcldnn/_kernels/cpu", *(f"pcldnn/_kernels/kernels_{target}" for target in targets)}
    assert {"pcldnn/data/digits.npz", "pcldnn/data/digits.README.md"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    stray = [name for name in names if name.endswith((".pyx", ".pxi", ".h", ".c")) or name.split("/")[0] in ("tests", "scripts")]
    assert not stray


def test_installed_wheel_runs_outside_the_checkout(installed, tmp_path):
    site = str(installed[1])
    info = run("-m", "pcldnn", "info", cwd=tmp_path, PYTHONPATH=site)
    assert info.returncode == 0 and __version__ in info.stdout and BASELINE in info.stdout, info.stdout
    program = "import pcldnn; from pcldnn.data import open_dataset; print(pcldnn.__file__, *map(len, open_dataset()))"
    digits = run("-c", program, cwd=tmp_path, PYTHONPATH=site)
    assert digits.stdout.startswith(site) and digits.stdout.endswith(" 4000 1000\n"), digits.stdout
    layer = run(REPOSITORY / "docs" / "examples" / "lone_layer.py", cwd=tmp_path, PYTHONPATH=site)
    assert layer.returncode == 0, layer.stdout


@pytest.mark.skipif(ASSEMBLED is None, reason="no micro-kernel in assembler here")
def test_micro_kernels_in_assembler_and_in_c_agree_to_the_bit(installed, tmp_path):
    """The wheel, built with bounds checks, has the one in C. (Winograd's transforms gcc fuses differently there.)"""
    program = ("-W", "error", REPOSITORY / "tests" / "tile_bits.py")
    outputs = [run(*program, cwd=tmp_path, PYTHONPATH=str(path), PCLDNN_ISA=ASSEMBLED, PCLDNN_CONV="direct")
               for path in (REPOSITORY, installed[1])]  # fmt: skip
    assert all(len(output.stdout.strip()) == 64 for output in outputs), outputs
    assert outputs[0].stdout == outputs[1].stdout


@pytest.mark.parametrize("value", ["avx1024", "neon" if BASELINE != "neon" else "avx2"])
def test_isa_that_cannot_run_is_refused(value):
    done = run("-c", "import pcldnn._kernels", PCLDNN_ISA=value, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 1 and f"PCLDNN_ISA={value}" in done.stdout and BASELINE in done.stdout, done.stdout


@pytest.mark.parametrize("env, wanted", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "0")])
def test_threads_spin_for_a_short_time_unless_the_user_says_otherwise(env, wanted):
    """What gcc's OpenMP library tells that it has read when it was loaded."""
    done = run("-c", "import pcldnn._kernels", **env, OMP_DISPLAY_ENV="verbose")
    said = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stdout)
    if not said:
        pytest.skip("this OpenMP library has no spin count")
    assert said[1] == wanted, done.stdout


def test_each_target_has_its_own_width():
    """Modules of all ISAs come from one source; each must have been compiled with its own flags."""
    for name, module in _kernels.targets.items():
        if name != "reference":
            assert module.SIMD_WIDTH == isa(name).width, name


def test_compiler_without_openmp_is_refused(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nfor word; do case $word in -fopenmp) echo 'cc: no -fopenmp here' >&2; exit 1;; esac; done\n"
                        'exec gcc "$@"\n')  # fmt: skip
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    done = run("setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path, CC=str(compiler))
    assert done.returncode != 0
    for text in ("OpenMP", "cc: no -fopenmp here", "Remedy", "apt-get install gcc"):
        assert text in done.stdout, done.stdout
