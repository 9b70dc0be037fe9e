"""Builds one extension module per ISA from the one source pcldnn/_kernels/kernels.pyx, and cpu.pyx once.

Environment: PCLDNN_DEBUG=1 builds with bounds checks and without optimisation; PCLDNN_BUILD_ISAS=sse2,avx2 builds
only these (default: all that the machine's compiler can build).
"""

import copy
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("pcldnn/_kernels")
DEBUG = os.environ.get("PCLDNN_DEBUG", "0") not in ("", "0")


def module(name):
    """A module of pcldnn/_kernels, by its path: the package cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location(f"pcldnn_{name}", KERNELS / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


isa_table, tile_x86 = module("isa"), module("tile_x86")

GCC_ONLY = ["-fno-version-loops-for-strides"]  # left out where the compiler does not know them

OPENMP_PROBE = """
#include <omp.h>
#include <stdio.h>
int main(void) {
    int n = 0;
#pragma omp parallel reduction(+ : n) num_threads(2)
    n += 1;
    printf("%d", omp_get_max_threads());
    return n < 1;
}
"""

OPENMP_REMEDY = """
pcldnn needs a C compiler with OpenMP; this one failed to build or run a small OpenMP program:
    command: {command}
    output:  {output}
Remedy: install gcc (Debian/Ubuntu: apt-get install gcc; conda: conda install gcc_linux-64), or, for clang, its OpenMP
runtime (Debian/Ubuntu: libomp-dev), or choose another compiler: CC=gcc pip install .
"""


def optimisation_flags():
    """No -ffast-math: it sets flush-to-zero for the whole process. Only the parts of it that are wanted.

    Two are for the register tile where it is not in assembler (tile_x86.py). Loops begin at cache lines: its loop of
    130 bytes, spread over one line more, is bound by the instruction fetch of Zen 3 (measured: 75 % of the FMA peak
    instead of 97-100 %). gcc 12 makes a second copy of it for vectors that are neighbours, and then moves sums from
    register to register in both (up to 18 moves beside 12 multiply-adds): GCC_ONLY.
    """
    if DEBUG:
        return ["-O1", "-g", "-ffp-contract=fast", "-fexpensive-optimizations"]  # without the last gcc does not contract
    return ["-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-falign-loops=64",
            *GCC_ONLY]


def isas_to_build():
    """The ISAs of this machine, or those that PCLDNN_BUILD_ISAS names."""
    rows = isa_table.compiled_for(platform.machine())
    if not rows:
        known = sorted({name for row in isa_table.ISAS for name in row.machines})
        raise SystemExit(f"pcldnn has no kernels for machine {platform.machine()!r}; it has for {', '.join(known)}")
    wanted = os.environ.get("PCLDNN_BUILD_ISAS")
    if not wanted:
        return rows
    names = wanted.split(",")
    unknown = set(names) - {row.name for row in rows}
    if unknown:
        raise SystemExit(f"PCLDNN_BUILD_ISAS names {sorted(unknown)}; this machine has {[row.name for row in rows]}")
    return [row for row in rows if row.name in names]


def folder_of(name):
    """Where the C file and the headers of an extension module are made."""
    return Path("build/cython", name + ("-debug" if DEBUG else ""))


def write_if_new(path, text):
    """A file that other things depend on keeps its time of change when it stays as it is."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def assembled_tiles(name):
    """tile_x86.h: the micro-kernel in assembler where there can be one; builds with bounds checks have C instead."""
    (row,) = (row for row in isa_table.ISAS if name == f"kernels_{row.name}")
    if DEBUG or "-mfma" not in row.flags or sys.platform != "linux" or sys.maxsize < 2**32:
        return "#define PCL_ASSEMBLED 0\n"
    return tile_x86.header(row)


def extensions():
    """Every extension module."""
    built = [Extension("pcldnn._kernels.cpu", [str(KERNELS / "cpu.pyx")], extra_compile_args=["-O2"])]
    headers = [str(path) for path in sorted(KERNELS.glob("*.pxi")) + sorted(KERNELS.glob("*.h"))]
    for row in isas_to_build():
        folder = folder_of(f"kernels_{row.name}")
        built.append(Extension(
            f"pcldnn._kernels.kernels_{row.name}",
            [str(KERNELS / "kernels.pyx")],
            include_dirs=[str(KERNELS), str(folder)],
            define_macros=[("PCL_WIDTH", str(row.width)), ("PCL_TILE", str(row.tile_pixels)),
                           ("PCL_VECTORS", str(row.tile_vectors)),
                           ("CYTHON_INLINE", "inline __attribute__((always_inline, unused))")],
            extra_compile_args=[*optimisation_flags(), "-fopenmp", "-Wno-unused-function", *row.flags],
            extra_link_args=["-fopenmp"],
            depends=[*headers, str(folder / "tile_x86.h")],
        ))
    return built


def cythonize_extension(extension):
    """Turn the .pyx of an extension into C, in a folder of its own: the ISAs would share one C file otherwise.

    Only sources are taken over: Cython adds the flags of earlier calls for the same .pyx to those of this one. The
    flags are noted in a file that the module depends on, so that a build with other flags makes new modules.
    """
    name = extension.name.rpartition(".")[2]
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith("kernels_"):
        write_if_new(folder / "tile_x86.h", assembled_tiles(name))
    note = Path("build/cython", f"{name}.flags")
    write_if_new(note, repr((extension.define_macros, extension.extra_compile_args, extension.extra_link_args)))
    (made,) = cythonize([copy.deepcopy(extension)], build_dir=str(folder),
                        compiler_directives={"boundscheck": DEBUG, "embedsignature": True})
    extension.sources = made.sources
    extension.depends = [*extension.depends, str(note)]


class BuildExtensions(build_ext):
    """build_ext that first makes sure that OpenMP works and which flags are known, and builds the ISAs side by side."""

    def build_extensions(self):
        self.check_openmp()
        unknown = {flag for flag in GCC_ONLY if not self.takes(flag)}
        for extension in self.extensions:
            extension.extra_compile_args = [f for f in extension.extra_compile_args if f not in unknown]
            cythonize_extension(extension)
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()

    def command(self):
        """The compiler and its flags, for programs."""
        return [word for word in getattr(self.compiler, "compiler_so", None) or ["cc"] if word != "-fPIC"]

    def takes(self, flag):
        """Whether the compiler knows a flag."""
        command = [*self.command(), "-Werror", flag, "-x", "c", os.devnull, "-c", "-o", os.devnull]
        return not subprocess.run(command, check=False, capture_output=True, timeout=120).returncode

    def check_openmp(self):
        """Refuse to build without OpenMP rather than build something that runs on one core."""
        compiler = self.command()
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder, "probe.c"), Path(folder, "probe")
            source.write_text(OPENMP_PROBE)
            command = [*compiler, "-fopenmp", str(source), "-o", str(program)]
            try:
                for step in (command, [str(program)]):
                    done = subprocess.run(step, check=False, capture_output=True, text=True, timeout=120)
                    if done.returncode:
                        output = (done.stdout + done.stderr).strip()
                        raise SystemExit(OPENMP_REMEDY.format(command=" ".join(step), output=output))
            except FileNotFoundError as error:
                raise SystemExit(OPENMP_REMEDY.format(command=" ".join(command), output=error)) from error


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
