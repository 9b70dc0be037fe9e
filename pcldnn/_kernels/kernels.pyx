# cython: language_level=3, cdivision=True, wraparound=False, initializedcheck=False
"""The compile unit of the kernels: built once for every instruction set of isa.py, from this one source.

Each included file holds one operation in all its passes and begins with its design decisions. What they share:

a. Python validates, kernels compute. A ``def`` checks shapes and raises; the work is in ``noexcept nogil`` functions
   on pointers. A sliced memoryview handed to a ``::1`` parameter of a ``cdef`` function is not checked, hence pointers.
b. A job is the unit of ``prange``. Jobs write disjoint memory and sum in an order that depends on shapes and
   blocking, never on the number of threads: results are bit-identical for any ``num_threads``.
c. Accumulators are C arrays of `vec` with constant indices, so that the compiler keeps them in registers; functions
   that take such arrays are always inlined (setup.py defines CYTHON_INLINE).
d. Shape letters: N images of this rank, C in channels, K out channels, CB, KB their channel blocks, H W input,
   P Q output, R S filter, b SIMD width, F features of a vector.
"""

from cython.parallel cimport prange
from cython.view cimport array
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from pcldnn._kernels import checks

cdef extern from "simd.h" nogil:
    const int b "PCL_WIDTH"
    const int TILE "PCL_TILE"
    const int VECTORS "PCL_VECTORS"
    ctypedef float vec
    ctypedef int ivec
    vec load "vec_load"(const float* p)
    void store "vec_store"(float* p, vec a)
    void store_past "vec_store_past"(float* p, vec a)     # past the caches, for aligned p
    void store_fence "vec_fence"()
    vec zero "vec_zero"()
    vec broadcast "vec_set"(float s)
    vec select "vec_select"(ivec mask, vec a, vec b)
    vec vrelu "vec_relu"(vec a)
    void transpose "vec_transpose"(const float* src, Py_ssize_t stride, float* dst)

cdef enum:
    PAST = 4194304       # an output array of so many floats goes past the caches: nobody would find it there [elements]

SIMD_WIDTH = b
TARGET = __name__.rpartition("_")[2]


cdef tuple dims(view):
    """Shape of a memoryview, for the functions of checks.py; in C a shape has no end."""
    return view.shape


cdef float[::1] scratch_of(float[::1] scratch, Py_ssize_t wanted):
    """The scratch array that was given, or a new one where one is needed; refused when too small."""
    cdef Py_ssize_t got = 0 if scratch is None else scratch.shape[0]
    if got >= wanted:
        return scratch
    if scratch is None:
        return array(shape=(wanted,), itemsize=sizeof(float), format="f")
    raise ValueError(f"scratch has {got} elements, wanted at least {wanted}")


cdef inline float* start_of(float[::1] scratch) noexcept:
    return NULL if scratch is None or scratch.shape[0] == 0 else &scratch[0]


cdef inline bint goes_past(const float* out, Py_ssize_t size) noexcept nogil:
    """Whether an output array of whole vectors is written past the caches (`put`): its lines are not read first."""
    return size >= PAST and <size_t>out % (b * sizeof(float)) == 0


cdef inline void put(float* out, vec a, bint past) noexcept nogil:
    if past:
        store_past(out, a)
    else:
        store(out, a)


include "tile.pxi"
include "peak.pxi"
include "conv.pxi"
include "conv_weight_grad.pxi"
include "winograd_transforms.pxi"
include "winograd.pxi"
include "winograd_weight_grad.pxi"
include "linear.pxi"
include "elementwise.pxi"
include "pool.pxi"
include "pool_input_grad.pxi"
include "conv_pool.pxi"
include "loss.pxi"
include "optim.pxi"
include "layout.pxi"
include "exchange.pxi"
