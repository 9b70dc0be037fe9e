"""Convolution of every target against the float64 twin, over the table of shapes, and the cases of CASES.md.

Error bound: with standard normal data a sum of T products rounds, term by term, to within about 0.4 eps T of its value
(each of T additions adds at most eps/2 of a partial sum, which grows like sqrt(T)); the largest of a million such
errors is some five times that, more where the sum itself is an outlier. The bound is 4 eps (T + 8). Wrong terms are
errors of the size of 1.
"""

from functools import lru_cache

import numpy as np
import pytest
from blocked import block, block_filter, block_vector, blocks, padding_lanes, unblock, unblock_filter
from cases import AWKWARD_CONVOLUTIONS, NETWORK_CONVOLUTIONS, Convolution

from pcldnn._kernels import reference

EPS = float(np.finfo(np.float32).eps)
UNPADDED = 4  # a network input of at most so many channels is not padded
THREADS = (1, 2, 3)


def bound(terms):
    """Largest error of a sum of products of standard normal numbers in float32."""
    return 4 * EPS * (terms + 8)


def normal(shape, seed):
    """Standard normal numbers that float32 holds exactly."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def logical_arrays(case, make=normal):
    """x, weight, bias, dy of a case, logical order."""
    return (
        make((case.n, case.channels, *case.size), 0),
        make((case.filters, case.channels, *case.kernel), 1),
        make((case.filters,), 2),
        make((case.n, case.filters, *case.output), 3),
    )


def run(kernels, case, arrays, b, bc=None, put=np.array, out=None, threads=1, relu=False, blocking=(None, None, None)):
    """All passes on blocked arrays: y, dx (None when the input is not padded), dweight, dbias, all blocked."""
    x, weight, bias, dy = arrays
    bc = bc or b
    out = out or (lambda *shape: np.full(shape, np.nan, x.dtype))
    kb, cb = blocks(case.filters, b), blocks(case.channels, bc)
    geometry = (case.stride, case.padding)
    x, dy, weight = put(block(x, bc)), put(block(dy, b)), put(block_filter(weight, bc, b))
    bias = None if bias is None else put(block_vector(bias, b))
    y, dweight, dbias = out(*dy.shape), out(*weight.shape), out(kb * b)
    kernels.conv2d_forward(x, weight, bias, y, *geometry, relu=relu, blocking=blocking[0], num_threads=threads)
    copies, across_images = blocking[2][2:] if blocking[2] else (1, False)
    scratch = out((copies - 1) * dweight.size + (x.size + dy.size if across_images else 0))
    kernels.conv2d_weight_grad(x, dy, dweight, *geometry, scratch=scratch, blocking=blocking[2], num_threads=threads)
    kernels.bias_grad(dy.reshape(dy.shape[0], kb, dy.shape[2] * dy.shape[3], b), dbias, num_threads=threads)
    if bc != b:
        return y, None, dweight, dbias
    weight_t, dx = out(cb, kb, *case.kernel, b, b), out(*x.shape)
    kernels.conv2d_transpose_filter(weight, weight_t, num_threads=threads)
    kernels.conv2d_input_grad(dy, weight_t, dx, *geometry, blocking=blocking[1], num_threads=threads)
    return y, dx, dweight, dbias


def logical(case, y, dx, dweight, dbias):
    """Results of `run` in logical order."""
    return (
        unblock(y, case.filters),
        None if dx is None else unblock(dx, case.channels),
        unblock_filter(dweight, case.filters, case.channels),
        dbias[: case.filters],
    )


@lru_cache(maxsize=2)
def oracle(case):
    """Results of the twin in float64."""
    arrays = [array.astype(np.float64) for array in logical_arrays(case)]
    return logical(case, *run(reference, case, arrays, 8))


def check_padding(case, y, dx, dweight, dbias):
    """Lanes that no channel owns hold exactly 0."""
    assert not padding_lanes(y, case.filters).any()
    assert dx is None or not padding_lanes(dx, case.channels).any()
    assert not dbias[case.filters :].any()
    padded = dweight.copy()
    inside = unblock_filter(padded, case.filters, case.channels)
    assert np.count_nonzero(dweight) == np.count_nonzero(inside)


def channel_blocks(case, target):
    """Block sizes of the input to test: b, and C itself where a network input would not be padded."""
    b = target.SIMD_WIDTH
    return [b, case.channels] if case.channels <= UNPADDED and case.channels != b else [b]


@pytest.mark.parametrize("case", [*NETWORK_CONVOLUTIONS, *AWKWARD_CONVOLUTIONS], ids=lambda case: case.name)
def test_convolution(target, case, arena):
    pixels = case.output[0] * case.output[1]
    terms = (
        case.channels * case.kernel[0] * case.kernel[1],
        case.filters * case.kernel[0] * case.kernel[1],
        case.n * pixels,
        0,
    )
    for bc in channel_blocks(case, target):
        got = run(target, case, logical_arrays(case), target.SIMD_WIDTH, bc, arena.put, arena.out)
        check_padding(case, *got)
        for pass_, result, want, count in zip(
            "y dx dweight dbias".split(), logical(case, *got), oracle(case), terms, strict=True
        ):
            if result is not None:
                limit = bound(count) if count else 4 * EPS * np.sqrt(case.n * pixels + 1) * 8
                np.testing.assert_allclose(result, want, rtol=0, atol=limit, err_msg=pass_)


@pytest.mark.parametrize("case", AWKWARD_CONVOLUTIONS, ids=lambda case: case.name)
def test_threads_do_not_change_a_bit(target, case):
    for bc in channel_blocks(case, target):
        results = [run(target, case, logical_arrays(case), target.SIMD_WIDTH, bc, threads=t) for t in THREADS]
        for other in results[1:]:
            for first, second in zip(results[0], other, strict=True):
                assert first is None or first.tobytes() == second.tobytes()


def integers(shape, seed):
    """Whole numbers in [-3, 3]: their sums are exact in float32 in whatever order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def exact(case):
    """Forward and both gradients in int64, tap by tap from the definition."""
    x, weight, bias, dy = (array.astype(np.int64) for array in logical_arrays(case, integers))
    (sh, sw), (ph, pw), (p, q) = case.stride, case.padding, case.output
    framed = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    dframed, dweight = np.zeros_like(framed), np.zeros_like(weight)
    y = np.broadcast_to(bias[:, None, None], dy.shape).copy()
    for r in range(case.kernel[0]):
        for s in range(case.kernel[1]):
            tap = np.s_[:, :, r : r + (p - 1) * sh + 1 : sh, s : s + (q - 1) * sw + 1 : sw]
            y += np.einsum("nchw,kc->nkhw", framed[tap], weight[:, :, r, s])
            dframed[tap] += np.einsum("nkhw,kc->nchw", dy, weight[:, :, r, s])
            dweight[:, :, r, s] = np.einsum("nchw,nkhw->kc", framed[tap], dy)
    h, w = case.size
    return y, dframed[:, :, ph : ph + h, pw : pw + w], dweight, dy.sum((0, 2, 3))


def check_exact(target, case, blocking=(None, None, None)):
    """All passes on whole numbers equal the int64 result bit for bit."""
    want = exact(case)
    for bc in channel_blocks(case, target):
        got = run(target, case, logical_arrays(case, integers), target.SIMD_WIDTH, bc, threads=2, blocking=blocking)
        check_padding(case, *got)
        for pass_, result, right in zip("y dx dweight dbias".split(), logical(case, *got), want, strict=True):
            if result is not None:
                np.testing.assert_array_equal(result, right, err_msg=f"{pass_}, {bc} lanes")


def test_a1_unused_rows_and_columns(target):
    """pytorch/pytorch#25101: input gradient where the stride leaves rows and columns unused."""
    case = Convolution("a1", 1, 9, (32, 32), 3, (5, 5), (3, 3), (1, 1))
    arrays = [np.ones_like(array) for array in logical_arrays(case)]
    dx = unblock(run(target, case, arrays, target.SIMD_WIDTH)[1], 9)
    reach = np.zeros(34)
    for p in range(case.output[0]):
        reach[3 * p : 3 * p + 5] += 1  # outputs that see a row of the padded image
    reach = reach[1:33]
    assert case.output == (10, 10) and reach.tolist()[:8] == [1, 1, 2, 2, 1, 2, 2, 1] and reach[31] == 0
    np.testing.assert_array_equal(dx, np.broadcast_to(3 * np.outer(reach, reach), dx.shape))
    assert dx.sum(dtype=np.float64) == 64827


@pytest.mark.parametrize("count", range(1, 34))
def test_a2_channels_across_the_simd_width(target, count):
    """modular/modular#6248: every channel count on either side."""
    check_exact(target, Convolution("in", 2, count, (5, 6), 2 * count, (3, 3), padding=(1, 1)))
    check_exact(target, Convolution("out", 1, 3, (4, 7), count, (3, 3), padding=(1, 1)))


@pytest.mark.parametrize("case", AWKWARD_CONVOLUTIONS, ids=lambda case: case.name)
def test_exact_on_whole_numbers(target, case):
    check_exact(target, case)


@pytest.mark.parametrize("filters", [2, 6, 24, 72])
def test_a3_padded_lanes_are_zero(target, filters):
    """tenstorrent/tt-metal#11050: lanes beyond the logical channels stay 0, with a bias as well."""
    case = Convolution("a3", 2, 5, (6, 6), filters, (3, 3), padding=(1, 1))
    check_padding(case, *run(target, case, logical_arrays(case), target.SIMD_WIDTH, relu=True))


@pytest.mark.parametrize("filters", [1, 3, 5, 7])
def test_a4_train_with_few_output_channels(target, filters):
    """NervanaSystems/neon#257: five steps of gradient descent on one convolution, against the twin in float64."""
    case = Convolution("a4", 3, 6, (7, 7), filters, (3, 3), padding=(1, 1))
    x, weight, _, goal = logical_arrays(case)
    ends = []
    for kernels, dtype in ((target, np.float32), (reference, np.float64)):
        w = weight.astype(dtype)
        speed = np.zeros(
            block_filter(w, 8, 8).size
            if kernels is reference
            else block_filter(w, target.SIMD_WIDTH, target.SIMD_WIDTH).size,
            dtype,
        )
        b = 8 if kernels is reference else target.SIMD_WIDTH
        shard = block_filter(w, b, b).reshape(-1)
        for _ in range(5):
            arrays = (
                x.astype(dtype),
                unblock_filter(shard.reshape(block_filter(w, b, b).shape), filters, 6),
                None,
                goal.astype(dtype),
            )
            y = unblock(run(kernels, case, arrays, b)[0], filters)
            dweight = run(kernels, case, (arrays[0], arrays[1], None, y - arrays[3]), b)[2]
            kernels.sgd_update(shard, dweight.reshape(-1), speed, 1e-3, 0.9, 1e-4)
        ends.append(unblock_filter(shard.reshape(block_filter(w, b, b).shape), filters, 6))
    np.testing.assert_allclose(ends[0], ends[1], atol=2e-5)


def test_a5_padding_as_large_as_the_filter(target):
    """Maratyszcza/NNPACK#103, ml-explore/mlx#833: (a) an image of one pixel, padding 3; (b) 11 x 14, padding 4."""
    one = Convolution("a", 1, 1, (1, 1), 1, (3, 3), padding=(3, 3))
    arrays = [np.ones_like(array) for array in logical_arrays(one)]
    y = unblock(run(target, one, (*arrays[:2], None, arrays[3]), target.SIMD_WIDTH)[0], 1)[0, 0]
    want = np.zeros((5, 5))
    want[1:4, 1:4] = 1
    np.testing.assert_array_equal(y, want)

    wide = Convolution("b", 1, 2, (11, 14), 3, (3, 3), padding=(4, 4))
    assert wide.output == (17, 20)
    check_exact(target, wide)
    # The convolution is linear, so on whole numbers a difference of any width is the derivative, exactly.
    x, weight, _, dy = logical_arrays(wide, integers)
    before, dx, _, _ = logical(wide, *run(target, wide, (x, weight, None, dy), target.SIMD_WIDTH))
    for place in [(0, 0, 0, 0), (0, 1, 10, 13), (0, 1, 5, 7)]:
        moved = x.copy()
        moved[place] += 1
        after = logical(wide, *run(target, wide, (moved, weight, None, dy), target.SIMD_WIDTH))[0]
        assert ((after - before) * dy).sum() == dx[place]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("channels", [3, 12])
def test_a7_empty_batch(target, channels, threads, arena):
    """FluxML/NNlib.jl#760: no image gives zero gradients, whatever was in the buffers."""
    case = Convolution("a7", 0, channels, (6, 5), 20, (3, 3), padding=(1, 1))
    for bc in channel_blocks(case, target):
        y, dx, dweight, dbias = run(
            target, case, logical_arrays(case), target.SIMD_WIDTH, bc, arena.put, arena.out, threads
        )
        assert y.shape[0] == 0 and (dx is None or dx.shape[0] == 0)
        assert dweight.size and not dweight.any() and not dbias.any()


def test_relu_keeps_nan(target):
    """A diverged network stays visible through the fused ReLU."""
    case = Convolution("nan", 1, 3, (4, 4), 5, (3, 3), padding=(1, 1))
    x, weight, bias, dy = logical_arrays(case)
    x[0, 1, 2, 2] = np.nan
    y = unblock(run(target, case, (x, weight, bias, dy), target.SIMD_WIDTH, relu=True)[0], 5)
    seen = np.zeros((4, 4), bool)
    seen[1:, 1:] = True
    assert (np.isnan(y) == seen).all() and (y[:, :, ~seen] >= 0).all()


# Forward and input gradient: channel blocks a pass, tiles across images, rows of a job. Weight gradient: rows of a
# band, channel blocks of a job, copies of dweight (summed at the end), sums across images.
BLOCKINGS = [
    ((1, False, 1), (1, False, 2), (1, 1, 1, False)),
    ((3, True, 2), (2, True, 1), (2, 3, 2, True)),
    ((100, True, 100), (100, True, 100), (100, 100, 3, False)),
    ((2, False, 3), (1, True, 3), (2, 1, 1, True)),
]


@pytest.mark.parametrize("blocking", BLOCKINGS, ids=str)
@pytest.mark.parametrize("case", AWKWARD_CONVOLUTIONS, ids=lambda case: case.name)
def test_blocking_does_not_change_the_result(target, case, blocking):
    check_exact(target, case, blocking)


@pytest.mark.parametrize(
    "blocking",
    [
        ((0, False, 1), None, None), (None, (1, 0, 1), None), (None, (1, False), None), (None, None, (1, 1, 1, 1)),
        (None, None, (-1, 1, 1, False)),
    ],
    ids=str,
)  # fmt: skip
def test_blocking_is_checked(target, blocking):
    case = Convolution("small", 1, 3, (4, 4), 5, (3, 3))
    with pytest.raises(ValueError, match=r"blocking is .*wanted \(.*across_images\?"):
        run(target, case, logical_arrays(case), target.SIMD_WIDTH, blocking=blocking)


def test_shapes_are_checked(target):
    """A8 at the boundary of the kernels: each wrong array is named, nothing is written."""
    b = target.SIMD_WIDTH
    x, weight, dy = (np.zeros(shape, np.float32) for shape in ((2, 2, 5, 6, b), (3, 2, 3, 3, b, b), (2, 3, 5, 6, b)))
    weight_t, bias, geometry = np.zeros((2, 3, 3, 3, b, b), np.float32), np.zeros(3 * b, np.float32), ((1, 1), (1, 1))
    calls = [
        (
            "conv2d_forward",
            {"weight": weight[:, :1], "bias": bias[:-1], "y": dy[:, :, :4]},
            {"x": x, "weight": weight, "bias": bias, "y": dy},
        ),
        (
            "conv2d_input_grad",
            {"dy": dy[:, :, :4], "weight_t": weight_t[:1]},
            {"dy": dy, "weight_t": weight_t, "dx": x},
        ),
        ("conv2d_weight_grad", {"dy": dy[:1], "dweight": weight[:, :1]}, {"x": x, "dy": dy, "dweight": weight}),
    ]
    for name, wrong, right in calls:
        getattr(target, name)(*right.values(), *geometry)
        for argument, array in wrong.items():
            with pytest.raises(ValueError, match=argument):
                getattr(target, name)(*{**right, argument: np.ascontiguousarray(array)}.values(), *geometry)
        for bad in (((0, 1), (1, 1)), ((1, 1), (-1, 1))):
            with pytest.raises(ValueError, match="stride|padding"):
                getattr(target, name)(*right.values(), *bad)
        with pytest.raises(ValueError, match="num_threads"):
            getattr(target, name)(*right.values(), *geometry, num_threads=0)
    with pytest.raises(ValueError, match="filter.*larger"):
        target.conv2d_forward(x, np.zeros((3, 2, 9, 3, b, b), np.float32), None, dy, (1, 1), (1, 1))
    with pytest.raises(ValueError, match="weight_t"):
        target.conv2d_transpose_filter(weight, weight_t[:, :2].copy())


def test_a8_only_contiguous_float32(target):
    """microsoft/CNTK#1090: an array of other type or order is refused; the twin, which can, computes it right."""
    case = Convolution("a8", 2, 8, (5, 5), 8, (3, 3))
    b = target.SIMD_WIDTH
    x, weight, _, dy = logical_arrays(case)
    x, weight = block(x, b), block_filter(weight, b, b)
    right, y = np.empty(block(dy, b).shape, np.float32), np.empty(block(dy, b).shape, np.float32)
    for view in (
        x[::-1],
        x.transpose(0, 1, 3, 2, 4),
        np.repeat(x, 2, 3)[:, :, :, ::2],
        x.astype(np.float64),
        x.astype(np.int32),
    ):
        if target is reference:
            target.conv2d_forward(np.array(view, np.float32), weight, None, right, (1, 1), (0, 0))
            target.conv2d_forward(view, weight, None, y, (1, 1), (0, 0))
            np.testing.assert_allclose(y, right, atol=1e-4)
        else:
            with pytest.raises(ValueError, match="contiguous|dtype"):
                target.conv2d_forward(view, weight, None, y, (1, 1), (0, 0))
