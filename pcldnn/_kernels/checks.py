"""Shape checks of the kernels, shared by every target, so that all of them refuse the same calls with the same words.

Each function takes shapes (sequences of ints, in the order of the kernel's arguments) and raises ValueError
naming the argument, what was got and what was wanted. It returns nothing. Checks of data types and contiguity
are not here: the typed memoryviews of the compiled kernels make those, and the NumPy twins accept any layout
and float type.

Letters: N images, C input channels, K output channels, H W input, P Q output, R S filter, b SIMD width, bc
lanes of an input channel block (b, or C itself for an unpadded network input); CB, KB = number of channel
blocks.
"""

MAX_INT32 = 2**31 - 1
CONV_BLOCKING = ("c_blocks", "across_images?", "rows")  # fields of the tuples of pcldnn.blocking
WEIGHT_GRAD_BLOCKING = ("band", "c_blocks", "copies", "across_images?")
WINOGRAD_BLOCKING = ("tiles", "k_blocks", "c_blocks")
LINEAR_BLOCKING = ("depth", "tiles", "panels")
WINOGRAD_POINTS = 64  # of a tile of 6x6 outputs, of 4x4 for 5x5 filters: the first extent of transformed filters
WINOGRAD_KERNELS = (3, 5)
WINOGRAD_SUM_CHANNELS = 128  # added up from zero at most: the error grows with them (docs/numerics.md)


def shape(name, got, wanted):
    """Refuse `got` unless it equals `wanted`."""
    if tuple(got) != tuple(wanted):
        raise ValueError(f"{name} has shape {tuple(got)}, wanted {tuple(wanted)}")


def pair(name, value, least):
    """Return (vertical, horizontal) as two ints; refuse values under `least`."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, wanted two integers (vertical, horizontal)") from None
    if not (least <= first <= MAX_INT32 and least <= second <= MAX_INT32):
        raise ValueError(f"{name} is {tuple(value)}, wanted two integers of at least {least}")
    return int(first), int(second)


def threads(num_threads):
    """Refuse a thread count under 1."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, wanted at least 1")


def blocking(value, default, names):
    """The blocking of a kernel: a tuple with a count from 1 for each of `names`, True or False for one with a "?".

    None stands for `default`; anything else is refused.
    """
    if value is None:
        return default
    if isinstance(value, tuple) and len(value) == len(names) and all(map(_is_block, value, names)):
        return value
    raise ValueError(f"blocking is {value!r}, wanted ({', '.join(names)}): integers from 1 to {MAX_INT32}, and "
                     "True or False for what has a question mark; pcldnn.blocking solves for them")


def _is_block(value, name):
    if name.endswith("?"):
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INT32


def output_size(size, kernel, stride, padding):
    """Number of whole windows that fit (floor rule); zero or less when the kernel is larger than the padded input."""
    return (size + 2 * padding - kernel) // stride + 1


def width(name, got, wanted):
    """Refuse a block size that is not the SIMD width of a compiled target."""
    if got != wanted:
        raise ValueError(f"{name} has blocks of {got} channels, wanted {wanted}, the SIMD width of this target")


def _conv2d(names, x, weight, y, stride, padding):
    """The relation that ties the three arrays of a convolution in every pass; `names` are theirs in that pass."""
    shape(names[2], y, _conv2d_output(names, x, weight, stride, padding))


def _conv2d_output(names, x, weight, stride, padding):
    """The shape of the output."""
    n, cb, h, w, bc = x
    kb, _, r, s, _, b = weight
    sh, sw = pair("stride", stride, 1)
    ph, pw = pair("padding", padding, 0)
    p, q = output_size(h, r, sh, ph), output_size(w, s, sw, pw)
    if p < 1 or q < 1:
        raise ValueError(f"filter {r}x{s} is larger than the padded input: image {h}x{w}, padding {ph},{pw}")
    shape(names[1], weight, (kb, cb, r, s, bc, b))
    return n, kb, p, q, b


def conv2d_forward(x, weight, bias, y, stride, padding, num_threads):
    _conv2d(("x", "weight", "y"), x, weight, y, stride, padding)
    if bias is not None:
        shape("bias", bias, (weight[0] * weight[5],))
    threads(num_threads)


def conv2d_pool_forward(x, weight, bias, y, places, stride, padding, num_threads):
    shape("y", y, _halved(_conv2d_output(("x", "weight"), x, weight, stride, padding)))
    if bias is not None:
        shape("bias", bias, (weight[0] * weight[5],))
    if places is not None:
        shape("places", places, y)
    threads(num_threads)


def _halved(outputs):
    """The shape of a convolution's outputs after pooling by 2x2."""
    n, kb, p, q, b = outputs
    if p < 2 or q < 2:
        raise ValueError(f"there are {p}x{q} pixels to pool, wanted a whole window of 2x2")
    return n, kb, p // 2, q // 2, b


def conv2d_transpose_filter(weight, weight_t, num_threads):
    kb, cb, r, s, bc, b = weight
    shape("weight_t", weight_t, (cb, kb, r, s, b, bc))
    threads(num_threads)


def conv2d_input_grad(dy, weight_t, dx, stride, padding, num_threads):
    cb, kb, r, s, b, bc = weight_t
    if (dx[1], dx[4]) != (cb, bc):
        wanted = f"{dx[1]} blocks of {dx[4]} input channels as dx"
        raise ValueError(f"weight_t has shape {tuple(weight_t)}, wanted {wanted}")
    _conv2d(("dx", "weight_t", "dy"), dx, (kb, cb, r, s, bc, b), dy, stride, padding)
    threads(num_threads)


def conv2d_weight_grad(x, dy, dweight, stride, padding, num_threads):
    _conv2d(("x", "dweight", "dy"), x, dweight, dy, stride, padding)
    threads(num_threads)


def bias_grad(dy, dbias, num_threads):
    shape("dbias", dbias, (dy[1] * dy[3],))
    threads(num_threads)


def linear(x, weight, bias, y, num_threads, names=("x", "weight", "y")):
    """The relation that ties the arrays of a fully connected layer in every pass."""
    n, f = x
    kb, _, b = weight
    shape(names[1], weight, (kb, f, b))
    shape(names[2], y, (n, kb * b))
    if bias is not None:
        shape("bias", bias, (kb * b,))
    threads(num_threads)


def linear_input_grad(depth, vectors, blocks, width, most):
    """Refuse a blocking of the input gradient whose sums have not room on a thread's stack."""
    if depth % width:
        raise ValueError(f"blocking has depth {depth}, wanted a multiple of the SIMD width {width}")
    if vectors * blocks * width**2 > most:
        raise ValueError(f"blocking has {vectors} vectors of samples and {blocks} blocks of features, wanted at most "
                         f"{most // width**2} as their product: the sums of a job lie on the stack")


def pool2d(x, y, kernel, stride, padding, num_threads, names=("x", "y")):
    """Pooling: every window must touch the image; (P, Q) may follow the floor or the ceil rule."""
    kh, kw = pair("kernel", kernel, 1)
    sh, sw = pair("stride", stride, 1)
    ph, pw = pair("padding", padding, 0)
    if 2 * ph > kh or 2 * pw > kw:
        raise ValueError(f"padding is {(ph, pw)}, wanted at most half of the kernel {(kh, kw)}")
    n, cb, h, w, b = x
    p, q = y[2], y[3]
    shape(names[1], y, (n, cb, p, q, b))
    for name, out, size, k, s, pad in (("P", p, h, kh, sh, ph), ("Q", q, w, kw, sw, pw)):
        if size < 1:
            raise ValueError(f"{names[0]} is {(h, w)} pixels, wanted at least 1 for every window")
        most = (size + pad - 1) // s + 1          # the last window starts inside the image or the left padding
        least = max(1, output_size(size, k, s, pad))
        if not least <= out <= min(most, least + 1):
            wanted = f"{least} (floor rule) or {least + 1} (ceil rule, if that window starts inside)"
            raise ValueError(
                f"{names[1]} has {name} = {out}, wanted {wanted}: size {size}, kernel {k}, stride {s}, padding {pad}")
    threads(num_threads)


def conv2d_pool_output_grad(dy, places, dx, sums, num_threads):
    shape("dy", dy, _halved(dx))
    shape("places", places, dy)
    shape("sums", sums, (*dx[:2], dx[4]))
    threads(num_threads)


def same(num_threads, **shapes):
    """Refuse arrays of unlike shape (element-wise kernels)."""
    (first, wanted), *others = shapes.items()
    for name, got in others:
        if tuple(got) != tuple(wanted):
            raise ValueError(f"{name} has shape {tuple(got)}, wanted {tuple(wanted)} as {first}")
    threads(num_threads)


def channels(number, array):
    """Refuse a logical channel count that does not fit the blocks of (N, CB, M, b)."""
    padded = array[1] * array[3]
    if not padded - array[3] < number <= padded:
        wanted = f"{padded - array[3] + 1}..{padded} for {array[1]} blocks of {array[3]}"
        raise ValueError(f"channels is {number}, wanted {wanted}")


def dropout(x, y, p, seed, layer, epoch, sample_ids, number, num_threads):
    same(num_threads, x=x, y=y)
    channels(number, x)
    shape("sample_ids", sample_ids, (x[0],))
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}, wanted 0 <= p < 1")
    for name, value in (("seed", seed), ("layer", layer), ("epoch", epoch)):
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} is {value}, wanted 0 <= {name} < 2**32")
    if number * x[2] > 2**32:
        raise ValueError(f"x has {number * x[2]} units a sample, wanted at most 2**32")


def softmax_cross_entropy(logits, labels, num_classes, losses, dlogits, num_threads):
    n, k = logits
    if not 1 <= num_classes <= k:
        raise ValueError(f"num_classes is {num_classes}, wanted 1..{k} (logits has shape {tuple(logits)})")
    shape("labels", labels, (n,))
    shape("losses", losses, (n,))
    shape("dlogits", dlogits, (n, k))
    threads(num_threads)


def label_range(sample, label, num_classes):
    """Raise for a label outside the classes."""
    raise ValueError(f"labels[{sample}] is {label}, wanted 0..{num_classes - 1} ({num_classes} classes)")


def sgd_update(weight, grad, momentum_buffer, num_threads):
    shape("grad", grad, weight)
    shape("momentum_buffer", momentum_buffer, weight)
    threads(num_threads)


def sum_arrays(arrays, out, num_threads):
    if not arrays:
        raise ValueError("arrays is empty, wanted at least one array")
    for i, array in enumerate(arrays):
        shape(f"arrays[{i}]", array, out)
    threads(num_threads)


def blocked(plain, blocks, num_threads, names):
    """NCHW against blocked: `names` are those of the plain and of the blocked array."""
    n, c, h, w = plain
    cb, b = blocks[1], blocks[4]
    shape(names[1], blocks, (n, cb, h, w, b))
    if b < 1 or cb != -(-c // b):
        wanted = f"the least number that holds {c} channels"
        raise ValueError(f"{names[1]} has {cb} blocks of {b} channels, wanted {wanted}")
    threads(num_threads)


def _winograd_filter(name, r, s):
    if r != s or r not in WINOGRAD_KERNELS:
        raise ValueError(f"{name} has filters {r}x{s}, wanted 3x3 or 5x5")


def _winograd(names, x, weight, y, padding, num_threads):
    _winograd_filter(names[1], *weight[2:4])
    _conv2d(names, x, weight, y, (1, 1), padding)
    threads(num_threads)


def winograd_transform_filter(weight, u, input_grad, num_threads):
    kb, cb, r, s, bc, b = weight
    _winograd_filter("weight", r, s)
    if bc != b:
        raise ValueError(f"weight has blocks of {bc} input channels, wanted {b}: they must be padded")
    shape("u", u, (WINOGRAD_POINTS, cb, kb * b, b) if input_grad else (WINOGRAD_POINTS, kb, cb * b, b))
    threads(num_threads)


def winograd_forward(x, u, bias, y, padding, num_threads, kernel):
    cb, b = x[1], x[4]
    _winograd(("x", "weight", "y"), x, (y[1], cb, kernel, kernel, b, b), y, padding, num_threads)
    shape("u", u, (WINOGRAD_POINTS, y[1], cb * b, b))
    if bias is not None:
        shape("bias", bias, (y[1] * b,))


def winograd_input_grad(dy, u, dx, padding, num_threads, kernel):
    kb, b = dy[1], dy[4]
    _winograd(("dx", "weight", "dy"), dx, (kb, dx[1], kernel, kernel, b, b), dy, padding, num_threads)
    shape("u", u, (WINOGRAD_POINTS, dx[1], kb * b, b))


def winograd_weight_grad(x, dy, dweight, padding, num_threads):
    _winograd(("x", "dweight", "dy"), x, tuple(dweight), dy, padding, num_threads)
