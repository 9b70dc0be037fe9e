"""Fully connected layers of every target against the float64 twin. Error bounds as in test_kernels_conv.py."""

from functools import lru_cache

import numpy as np
import pytest
from blocked import block_vector, blocks
from cases import LINEARS, FullyConnected
from test_kernels_conv import THREADS, bound, normal

from pcldnn._kernels import reference

SMALL = [case for case in LINEARS if case.features * case.outputs < 1e6]


def block_weight(weight, b):
    """(K, F) -> (KB, F, b)."""
    k, f = weight.shape
    padded = np.zeros((blocks(k, b) * b, f), weight.dtype)
    padded[:k] = weight
    return np.ascontiguousarray(padded.reshape(blocks(k, b), b, f).transpose(0, 2, 1))


def unblock_weight(weight, k):
    """(KB, F, b) -> (K, F)."""
    kb, f, b = weight.shape
    return weight.transpose(0, 2, 1).reshape(kb * b, f)[:k]


def pad_columns(x, width):
    """Rows filled up with zeros to `width`."""
    padded = np.zeros((len(x), width), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded


def logical_arrays(case, make=normal):
    """x, weight, bias, dy of a case, logical order."""
    return (
        make((case.n, case.features), 0),
        make((case.outputs, case.features), 1),
        make((case.outputs,), 2),
        make((case.n, case.outputs), 3),
    )


def run(kernels, case, arrays, b, put=np.array, out=None, threads=1, scratch=False, relu=False, blocking=None):
    """All passes: y (N, KB*b), dx (N, padded F), dweight (KB, F, b), blocked.

    The input gradient, which wants whole blocks of features, gets a weight whose further features are zero.
    """
    x, weight, bias, dy = arrays
    out = out or (lambda *shape: np.full(shape, np.nan, x.dtype))
    f, padded = case.features, blocks(case.features, b) * b
    x, blocked, dy = put(x), put(block_weight(weight, b)), put(pad_columns(dy, blocks(case.outputs, b) * b))
    whole = put(block_weight(pad_columns(weight, padded), b))
    y, dx, dweight = out(*dy.shape), out(case.n, padded), out(*blocked.shape)
    more = {"num_threads": threads, "blocking": blocking}

    def memory(features):
        return {"scratch": out(kernels.linear_scratch_size(case.n, features, dy.shape[1]))} if scratch else {}

    kernels.linear_forward(x, blocked, put(block_vector(bias, b)), y, relu=relu, **memory(f), **more)
    kernels.linear_input_grad(dy, whole, dx, **memory(padded), **more)
    kernels.linear_weight_grad(x, dy, dweight, **memory(f), **more)
    return y, dx, dweight


def logical(case, y, dx, dweight):
    """Results of `run` in logical order."""
    return y[:, : case.outputs], dx[:, : case.features], unblock_weight(dweight, case.outputs)


@lru_cache(maxsize=2)
def oracle(case):
    """Results of the twin in float64."""
    return logical(case, *run(reference, case, [a.astype(np.float64) for a in logical_arrays(case)], 8))


@pytest.mark.parametrize("scratch", [False, True], ids=["own-memory", "scratch"])
@pytest.mark.parametrize("case", LINEARS, ids=lambda case: case.name)
def test_linear(target, case, arena, scratch):
    got = run(target, case, logical_arrays(case), target.SIMD_WIDTH, arena.put, arena.out, 2, scratch)
    y, dx, dweight = got
    assert not y[:, case.outputs :].any() and not dx[:, case.features :].any()
    assert np.count_nonzero(dweight) == np.count_nonzero(unblock_weight(dweight, case.outputs))
    terms = (case.features, case.outputs, case.n)
    for pass_, result, want, count in zip(
        "y dx dweight".split(), logical(case, *got), oracle(case), terms, strict=True
    ):
        np.testing.assert_allclose(result, want, rtol=0, atol=bound(count), err_msg=pass_)


def integers(shape, seed):
    """Whole numbers in [-3, 3]: their sums are exact in float32."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize(
    "case", [*SMALL, *(FullyConnected(f"{k}", 3, 2 * k + 1, k) for k in range(1, 34))], ids=lambda case: case.name
)
def test_exact_on_whole_numbers(target, case):
    """All passes equal the int64 product bit for bit, for every count of outputs across the SIMD width."""
    x, weight, bias, dy = (array.astype(np.int64) for array in logical_arrays(case, integers))
    want = (np.maximum(x @ weight.T + bias, 0), dy @ weight, dy.T @ x)
    got = run(target, case, logical_arrays(case, integers), target.SIMD_WIDTH, threads=2, relu=True)
    for result, right in zip(logical(case, *got), want, strict=True):
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a12_threads_do_not_change_a_bit(target, case):
    """pytorch/pytorch#88718 (the case `thread-count`): 1, 2, 3 and 6 threads give the same bits."""
    results = [run(target, case, logical_arrays(case), target.SIMD_WIDTH, threads=t) for t in (*THREADS, 6)]
    for other in results[1:]:
        assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in other]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_blocking_does_not_change_a_bit(target, case):
    """Depth (of the input gradient a multiple of every SIMD width), tiles, panels: small ones, and larger than all."""
    b = target.SIMD_WIDTH
    cuts = (None, (16, 1, 1), (48, 3, 2), (1024 // b, 1000, 4))
    results = [run(target, case, logical_arrays(case), b, threads=2, blocking=cut) for cut in cuts]
    for other in results[1:]:
        assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in other]


@pytest.mark.parametrize(
    "blocking", [(0, 1, 1), (16, 1), (16, 1, 1, 1), (16, 1, True), (16, 1, 2.0), (16, 1, 2**31), 16, "one"], ids=str
)
def test_blocking_is_checked(target, blocking):
    case = FullyConnected("small", 2, 8, 8)
    with pytest.raises(ValueError, match=r"blocking is .*wanted \(depth, tiles, panels\)"):
        run(target, case, logical_arrays(case), target.SIMD_WIDTH, blocking=blocking)


@pytest.mark.parametrize("blocking, said", [((17, 1, 1), "multiple of the SIMD width"), ((256, 1, 2**20), "stack")])
def test_the_blocking_of_the_input_gradient_is_checked(target, blocking, said):
    if target is reference:
        pytest.skip("the twin keeps no sums")
    b = target.SIMD_WIDTH
    dy, weight, dx = np.zeros((1, 512), np.float32), np.zeros((512 // b, b, b), np.float32), np.zeros((1, b), np.float32)
    with pytest.raises(ValueError, match=said):
        target.linear_input_grad(dy, weight, dx, blocking=blocking)


@pytest.mark.parametrize("threads", [1, 4])
def test_a7_empty_batch(target, threads, arena):
    case = FullyConnected("a7", 0, 24, 10)
    y, dx, dweight = run(target, case, logical_arrays(case), target.SIMD_WIDTH, arena.put, arena.out, threads)
    assert y.shape[0] == dx.shape[0] == 0 and dweight.size and not dweight.any()


def test_relu_keeps_nan(target):
    case = FullyConnected("nan", 2, 9, 5)
    x, weight, bias, dy = logical_arrays(case)
    x[1, 3] = np.nan
    y = run(target, case, (x, weight, bias, dy), target.SIMD_WIDTH, relu=True)[0][:, :5]
    assert np.isnan(y[1]).all() and (y[0] >= 0).all()


def test_shapes_are_checked(target):
    b = target.SIMD_WIDTH
    x, weight, bias, y = (np.zeros(shape, np.float32) for shape in ((3, 2 * b), (4, 2 * b, b), (4 * b,), (3, 4 * b)))
    calls = [
        (
            "linear_forward",
            {"weight": weight[:, :-1], "bias": bias[:-1], "y": y[:, :-1]},
            {"x": x, "weight": weight, "bias": bias, "y": y},
        ),
        ("linear_input_grad", {"dy": y[:2], "weight": weight[:, :-1]}, {"dy": y, "weight": weight, "dx": x}),
        ("linear_weight_grad", {"dy": y[:, :-b], "dweight": weight[:, :-1]}, {"x": x, "dy": y, "dweight": weight}),
    ]
    for name, wrong, right in calls:
        getattr(target, name)(*right.values())
        for argument, array in wrong.items():
            with pytest.raises(ValueError, match=argument):
                getattr(target, name)(*{**right, argument: np.ascontiguousarray(array)}.values())
        size = target.linear_scratch_size(3, 2 * b, 4 * b)
        if size:
            with pytest.raises(ValueError, match="scratch"):
                getattr(target, name)(*right.values(), scratch=np.zeros(size - 1, np.float32))
        with pytest.raises(ValueError, match="num_threads"):
            getattr(target, name)(*right.values(), num_threads=0)
        for view in (x[::-1], x.T.copy().T, x.astype(np.float64)) if target is not reference else ():
            with pytest.raises(ValueError, match="contiguous|dtype"):
                key = "dx" if "dx" in right else "x"
                getattr(target, name)(*{**right, key: view}.values())
