"""The table of instruction sets that pcldnn is compiled for.

One row an ISA: everything that setup.py, the dispatcher and the blocking solver need to know about it. A new ISA
is a new row here and, where the compiler's generic vectors do not suffice, an ``#if`` in ``simd.h``. Rows of x86-64 with
FMA get the micro-kernel of ``tile_x86.py`` as well, which knows vectors of 8 lanes as AVX2's and of 16 as AVX-512's.

setup.py runs this file by its path, before anything is built, so it imports nothing but the standard library.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ISA:
    """One instruction set.

    Attributes
    ----------
    name : str
        Name of the target, as in ``PCLDNN_ISA``.
    machines : tuple of str
        Values of ``platform.machine()`` on which it can be compiled.
    width : int
        Lanes of a vector of float32: the block size ``b`` of the NHWC-blocked layout.
    registers : int
        Vector registers that the instruction set names.
    tile_vectors, tile_pixels : int
        Register tile of the micro-kernel: vectors of output channels times broadcast pixels. See `register_tile`.
    flags : tuple of str
        Compiler flags.
    features : tuple of str
        What the CPU must have, in the words of the compiler's ``__builtin_cpu_supports``.
    """

    name: str
    machines: tuple
    width: int
    registers: int
    tile_vectors: int
    tile_pixels: int
    flags: tuple
    features: tuple


def register_tile(registers, latency=4, fma_per_cycle=2, loads_per_cycle=2):
    """Register tile: vectors and pixels whose accumulators stay in registers.

    A tile of V vectors times X pixels does V*X multiply-adds per V + X loads (V filter vectors, X broadcasts); it
    holds V*X accumulators, V filter vectors and one broadcast at a time. It must offer ``latency * fma_per_cycle``
    independent chains and may not need more than ``loads_per_cycle / fma_per_cycle`` loads per multiply-add (Das et
    al. 2016, section on register blocking, gives the same two conditions). Vectors are 2, or 4 with 32 registers,
    powers of two because the channels of most networks fill such panels; pixels are as many as the registers leave: 6.
    More vectors mean fewer loads per multiply-add (0.42 at 4 x 6, 0.57 at 2 x 14): these cost nothing on a core of its
    own, but 10 % where two hardware threads share its decoders (docs/performance.md).

    Returns
    -------
    (vectors, pixels) : tuple of int
    """
    vectors = 4 if registers >= 32 else 2
    pixels = (registers - vectors - 1) // vectors
    assert vectors * pixels >= latency * fma_per_cycle
    assert (vectors + pixels) * fma_per_cycle <= loads_per_cycle * vectors * pixels
    return vectors, pixels


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")

# From the weakest to the strongest on each machine: the last one that the CPU runs is chosen.
ISAS = (
    ISA("sse2", _X86, 4, 16, *register_tile(16), ("-msse2",), ()),
    ISA("avx2", _X86, 8, 16, *register_tile(16), ("-mavx2", "-mfma"), ("avx2", "fma")),
    ISA(
        "avx512", _X86, 16, 32, *register_tile(32),
        ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
        ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
    ),
    ISA("neon", _ARM, 4, 32, *register_tile(32), (), ()),
)


def isa(name):
    """Row of the ISA called `name`; KeyError names the known ones."""
    for row in ISAS:
        if row.name == name:
            return row
    raise KeyError(f"no ISA {name!r}: known are {', '.join(row.name for row in ISAS)}")


def compiled_for(machine):
    """Rows that can be compiled on a machine (`platform.machine()`), weakest first."""
    return [row for row in ISAS if machine in row.machines]
