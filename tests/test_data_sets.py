"""Data sets that need no image files: digits, arrays, made-up data; random streams; preparation."""

import numpy as np
import pytest

from pcldnn.data import (
    ArrayDataset,
    Augment,
    Dataset,
    Digits,
    Synthetic,
    check_class_map,
    mean_std,
    open_dataset,
    open_synthetic,
)
from pcldnn.data.random import AUGMENT, permutation, raw, uniforms


def small_images(n=12, shape=(1, 5, 6), dtype=np.uint8):
    return (np.arange(n * int(np.prod(shape))) % 251).reshape(n, *shape).astype(dtype)


# ---- random streams


def test_streams_are_frozen():
    """A checkpoint resumed next year must see the same order: these values may never change."""
    assert permutation(10, seed=7, epoch=0).tolist() == PERMUTATION_7_0
    assert permutation(10, seed=7, epoch=1).tolist() == PERMUTATION_7_1
    assert raw(7, AUGMENT, 3, 11, 2).tolist() == WORDS


PERMUTATION_7_0 = [2, 7, 0, 9, 4, 5, 6, 1, 3, 8]
PERMUTATION_7_1 = [0, 1, 3, 7, 4, 2, 5, 9, 8, 6]
WORDS = [13163417021932715866, 4430157953441819393]


def test_permutation_is_one_and_differs():
    seen = {tuple(permutation(22, seed, epoch)) for seed in (0, 1, 2**64 - 1) for epoch in range(4)}
    assert len(seen) == 12
    assert all(sorted(order) == list(range(22)) for order in seen)


def test_permutation_spreads_evenly():
    place = np.mean([np.argsort(permutation(10, 0, epoch)) for epoch in range(2000)], axis=0)
    assert np.abs(place - 4.5).max() < 0.35  # 5 deviations of the mean of 2000 draws


def test_streams_do_not_overlap():
    draws = [tuple(uniforms(s, AUGMENT, e, i, 4)) for s in (0, 1) for e in range(5) for i in range(50)]
    values = [v for draw in draws for v in draw]
    assert len(set(values)) == len(values) and 0 <= min(values) and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.05


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, None, "7"])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed: got"):
        permutation(3, seed, 0)


# ---- digits


def test_digits():
    train, test = open_dataset()
    for dataset, each in ((train, 400), (test, 100)):
        assert np.bincount(dataset.labels).tolist() == [each] * 10
        assert dataset.sample_shape == (1, 32, 32) and dataset.num_classes == 10
        assert dataset.class_names == tuple("0123456789")
        assert (
            not dataset.images[:, :, [0, 1, 30, 31]].any()
            and not dataset.images[:, :, :, [0, 1, 30, 31]].any()
        )
    both = np.concatenate([train.images, test.images]).reshape(5000, -1)
    assert len(np.unique(both, axis=0)) == 5000
    assert train.augment == test.augment
    assert train.augment.mean == (25.5979,) and train.augment.std == (70.2353,) and not train.augment.mirror
    assert train.fingerprint() == Digits("train").fingerprint() != test.fingerprint()


def test_digits_are_normalised():
    train, _ = open_dataset()
    out = np.empty((1, 32, 32), np.float32)
    values = []
    for i in range(0, 4000, 4):
        train.augment.apply(train.read(i), out)
        values.append(out.copy())
    assert abs(np.mean(values)) < 0.05 and abs(np.std(values) - 1) < 0.05


def test_digits_of_another_size():
    train, test = open_dataset(image_size=64)
    assert train.sample_shape == test.sample_shape == (1, 64, 64)
    assert train.augment.scale == (64, 72) and train.augment.shift == 0
    out = np.empty((1, 64, 64), np.float32)
    train.augment.apply(train.read(5), out)
    assert np.isfinite(out).all() and out.std() > 0.5


def test_options_override():
    train, test = open_dataset(shift=0, mean=(0,), std=255)
    assert train.augment == test.augment == Augment((32, 32), mean=(0.0,), std=(255.0,))
    assert open_dataset(scale=(32, 40))[0].augment.scale == (32, 40)
    with pytest.raises(ValueError, match="channels: got 3, but digits"):
        open_dataset(channels=3)
    with pytest.raises(ValueError, match="num_classes: got 7, but digits"):
        open_dataset(num_classes=7)


# ---- arrays


def test_npy_pair(tmp_path):
    images, labels = small_images(), np.arange(12) % 3
    for name, shift in (("train", 0), ("val", 1)):
        np.save(tmp_path / f"{name}_images.npy", images + np.uint8(shift))
        np.save(tmp_path / f"{name}_labels.npy", labels)
    train, validation = open_dataset(tmp_path / "train_images.npy")
    assert isinstance(train.images, np.memmap) and train.num_classes == 3 and train.sample_shape == (1, 5, 6)
    assert (train.read(3) == images[3]).all() and (validation.read(3) == images[3] + 1).all()
    assert train.label(4) == 1 and train.augment == validation.augment
    mean, std = mean_std(train)
    assert train.augment.mean == mean == (float(f"{images.mean():.6g}"),)
    assert std == (float(f"{images.std():.6g}"),)


def test_npy_names(tmp_path):
    np.save(tmp_path / "x.npy", small_images())
    with pytest.raises(ValueError, match=r"x\.npy: its labels were not found, wanted .*x_labels\.npy"):
        open_dataset(tmp_path / "x.npy")
    np.save(tmp_path / "x_labels.npy", np.zeros(12, np.uint8))
    train, validation = open_dataset(str(tmp_path / "x.npy"), num_classes=4)
    assert validation is None and train.num_classes == 4
    np.save(tmp_path / "images.npy", small_images()[:, 0])
    np.save(tmp_path / "labels.npy", np.zeros(12, np.uint8))
    np.save(tmp_path / "val_images.npy", small_images()[:5, 0])
    np.save(tmp_path / "val_labels.npy", np.zeros(5, np.uint8))
    train, validation = open_dataset(tmp_path / "images.npy")
    assert (len(train), len(validation), train.sample_shape) == (12, 5, (1, 5, 6))


def test_npz(tmp_path):
    images, labels = small_images(dtype=np.float32), np.arange(12) % 3
    np.savez(tmp_path / "x.npz", images=images, labels=labels, val_images=images[:3], val_labels=labels[:3])
    train, validation = open_dataset(tmp_path / "x.npz")
    assert (len(train), len(validation)) == (12, 3)
    assert train.augment.mean == (0.0,) and train.augment.std == (1.0,)  # float32 is taken as it is
    np.savez(tmp_path / "y.npz", images=images, targets=labels)
    with pytest.raises(ValueError, match="wanted arrays images and labels, got images, targets"):
        open_dataset(tmp_path / "y.npz")
    np.savez(tmp_path / "z.npz", images=images, labels=labels, val_images=images[:, :, 1:], val_labels=labels)
    with pytest.raises(ValueError, match="val_images: got images of float32"):
        open_dataset(tmp_path / "z.npz")


def test_unknown_paths(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_dataset(tmp_path / "nothing")
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"neither \.npy nor \.npz"):
        open_dataset(tmp_path / "x.csv")
    (tmp_path / "x.npz").write_text("not a zip file")
    with pytest.raises(ValueError, match=r"x\.npz"):
        open_dataset(tmp_path / "x.npz")


@pytest.mark.parametrize("label", [5, -1, 1000])
def test_label_out_of_range(label):
    """A11: named before any memory is touched."""
    labels = np.arange(12) % 5
    labels[7] = label
    with pytest.raises(ValueError, match=rf"sample 7 has label {label}, wanted 0 to 4 \(5 classes"):
        ArrayDataset(small_images(), labels, num_classes=5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(12), "got float64"),
        (np.zeros(11, int), r"got shape \(11,\), wanted \(12,\)"),
        (np.zeros((12, 1), int), r"got shape \(12, 1\)"),
    ],
)
def test_bad_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        ArrayDataset(small_images(), labels)


def test_strides_and_types():
    """A8: any strides give the values of the copy; other types are refused."""
    base, labels = small_images(12, (3, 8, 8)), np.zeros(12, int)
    views = [
        base[::-1],
        base[:, :, ::2, ::-1],
        base.transpose(0, 1, 3, 2),
        base[:, 1:2],
        np.asfortranarray(base),
    ]
    for images in views + [v.astype(np.float32)[::2] for v in views]:
        dataset = ArrayDataset(images, labels[: len(images)])
        out = [np.empty(dataset.sample_shape, np.float32) for _ in range(2)]
        for i in range(len(dataset)):
            dataset.augment.apply(dataset.read(i), out[0])
            dataset.augment.apply(images[i].copy(), out[1])
            assert (out[0] == out[1]).all()
    for dtype in (np.float64, np.int32, np.dtype(">f4"), np.float16):
        with pytest.raises(ValueError, match="wanted uint8 or float32"):
            ArrayDataset(base.astype(dtype), labels)
    with pytest.warns(UserWarning, match=r"transpose\(0, 3, 1, 2\)"):
        ArrayDataset(base.transpose(0, 2, 3, 1), labels)
    with pytest.raises(ValueError, match=r"wanted \(N, C, H, W\)"):
        ArrayDataset(base[:, :0], labels)


def test_vectors():
    dataset = ArrayDataset(np.ones((4, 429), np.float32), [0, 1, 2, 3])
    assert dataset.sample_shape == (429, 1, 1) and dataset.read(0).shape == (429, 1, 1)


# ---- common to all


def test_fingerprint_notices():
    images, labels = small_images(), np.arange(12) % 3
    kinds = [
        ArrayDataset(images, labels),
        ArrayDataset(images, labels[::-1]),
        ArrayDataset(images[::-1], labels),
        ArrayDataset(images, labels, num_classes=4),
        ArrayDataset(images, labels, class_names=["a", "b", "c"]),
        ArrayDataset(images[:9], labels[:9]),
        Synthetic((1, 5, 6), 3, 12),
        Synthetic((1, 5, 6), 3, 12, seed=1),
    ]
    assert len({d.fingerprint() for d in kinds}) == len(kinds)
    assert ArrayDataset(images.copy(), labels, name="elsewhere").fingerprint() == kinds[0].fingerprint()
    first, second = kinds[0].identity(), kinds[1].identity()
    assert [key for key in first if first[key] != second[key]] == ["labels"]


def test_class_map():
    check_class_map(("a", "b"), ["a", "b"])
    with pytest.raises(ValueError, match="2 classes, wanted 2; missing 'b'; not expected 'c'"):
        check_class_map(("a", "b"), ("a", "c"))
    with pytest.raises(ValueError, match="another order: class 0 is 'b', wanted 'a'"):
        check_class_map(("a", "b"), ("b", "a"))


def test_own_dataset():
    class Mine(Dataset):
        def read(self, index):
            return np.full((2, 3, 3), index, np.float32)

    mine = Mine([0, 1, 1], ["no", "yes"], (2, 3, 3), "mine")
    assert (len(mine), mine.num_classes, mine.label(2), mine.describe(1)) == (3, 2, 1, "mine[1]")
    assert mean_std(mine) == ((1.0, 1.0), (0.816497, 0.816497))


def test_mean_std_of_constant_channel():
    images = small_images(6, (2, 4, 4))
    images[:, 1] = 9
    (_, mean), (_, std) = mean_std(ArrayDataset(images, [0] * 6, augment=Augment((4, 4))))
    assert (mean, std) == (9.0, 1.0)


def test_synthetic():
    train, validation = open_synthetic((3, 16, 16), 10, length=100, seed=5)
    assert (len(train), len(validation), train.num_classes) == (100, 20, 10)
    again = Synthetic((3, 16, 16), 10, 40, seed=5)
    assert (again.read(17) == train.read(17)).all() and (again.read(17) != train.read(27)).any()
    assert (validation.read(0) != train.read(0)).any()
    images = np.stack([train.read(i) for i in range(100)]).astype(float)
    assert abs(images.mean() - 127) < 3 and abs(images.std() - 51.8) < 3
    # The class can be told: the nearest class mean of the training set is right for the others.
    means = np.stack([images[c::10].mean(axis=0) for c in range(10)])
    for i in range(20):
        distance = ((means - validation.read(i)) ** 2).sum(axis=(1, 2, 3))
        assert distance.argmin() == validation.label(i)
    vectors = Synthetic((429,), 9304, 3)
    assert vectors.sample_shape == vectors.read(0).shape == (429, 1, 1)
    with pytest.raises(ValueError, match="classes: got 0"):
        Synthetic((3, 4, 4), 0, 5)


# ---- preparation


def apply(augment, image, **options):
    out = np.full((len(image), *augment.size), np.nan, np.float32)
    augment.apply(image, out, **options)
    assert np.isfinite(out).all()
    return out


def test_evaluation_takes_the_middle():
    image = small_images(1, (3, 8, 10))[0]
    assert (apply(Augment((4, 4)), image) == image[:, 2:6, 3:7]).all()
    padded = apply(Augment((12, 12), shift=3, mirror=True), image)
    assert (padded[:, 2:10, 1:11] == image).all() and padded.sum() == image.sum()


def test_normalisation():
    image = small_images(1, (3, 4, 4))[0]
    out = apply(Augment((4, 4), mean=(1, 2, 3), std=(2, 4, 8)), image)
    for c in range(3):
        assert (out[c] == (image[c] - np.float32(c + 1)) / 2 ** (c + 1)).all()
    padded = apply(Augment((6, 6), mean=(10,), std=(2,)), image)
    assert (padded[:, 0] == -5).all()


def test_training_draws():
    """Every window of the shift occurs, half are mirrored; each decision has its own slot of the stream."""
    image = np.zeros((1, 8, 8), np.uint8)
    image[0, 3, 2] = 1
    places = {}
    for mirror in (False, True):
        augment = Augment((8, 8), shift=2, mirror=mirror)
        outs = [apply(augment, image, training=True, seed=1, epoch=2, sample=i) for i in range(400)]
        places[mirror] = [tuple(np.argwhere(out[0] == 1)[0]) for out in outs]
    assert set(places[False]) == {(y, x) for y in range(1, 6) for x in range(5)}
    mirrored = [a != b or a[1] * 2 == 7 for a, b in zip(places[False], places[True], strict=True)]
    assert all(b in (a, (a[0], 7 - a[1])) for a, b in zip(places[False], places[True], strict=True))
    assert 150 < sum(mirrored) < 250
    again = apply(Augment((8, 8), shift=2), image, training=True, seed=1, epoch=2, sample=17)
    assert tuple(np.argwhere(again[0] == 1)[0]) == places[False][17]
    others = [
        apply(Augment((8, 8), shift=2), image, training=True, seed=1, epoch=e, sample=17) for e in range(20)
    ]
    assert len({out.tobytes() for out in others}) > 5


def test_random_crop_stays_inside():
    image = small_images(1, (1, 9, 7))[0]
    windows = {
        image[:, y : y + 4, x : x + 4].astype(np.float32).tobytes() for y in range(6) for x in range(4)
    }
    seen = {apply(Augment((4, 4)), image, training=True, sample=i).tobytes() for i in range(500)}
    assert seen == windows


def test_resize_of_a_window_equals_window_of_a_resize():
    from PIL import Image

    rng = np.random.default_rng(0)
    image = np.kron(rng.integers(0, 256, (3, 9, 12)), np.ones((5, 5))).astype(np.uint8)
    augment = Augment((24, 20), scale=(30, 30))
    whole = np.asarray(Image.fromarray(image.transpose(1, 2, 0)).resize((40, 30), Image.Resampling.BILINEAR))
    middle = whole.transpose(2, 0, 1)[:, 3:27, 10:30]
    assert np.abs(apply(augment, image) - middle).max() <= 1  # rounding of the window's place
    assert np.abs(apply(augment, image.astype(np.float32)) - middle).max() <= 1
    two = np.concatenate([image, image])[:2]
    assert (apply(augment, two) == apply(augment, image)[:2]).all()


def test_scale_jitter():
    image = np.tile(np.arange(64, dtype=np.uint8) * 2, (1, 64, 1))
    augment = Augment((32, 32), scale=(32, 64))
    slopes = [np.diff(apply(augment, image, training=True, sample=i)[0, 16, 4:28]).mean() for i in range(300)]
    assert 1.95 < min(slopes) < 2.1 and 3.7 < max(slopes) < 4.1  # 2 grey levels a pixel, reduced by 1 to 2
    flat = [apply(augment, image, sample=i)[0, 0] for i in range(2)]
    assert (flat[0] == flat[1]).all() and abs(np.diff(flat[0][4:28]).mean() - 4) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (0, 4)}, "size: got"),
        ({"size": 2.5}, "size: got"),
        ({"scale": (3, 8)}, "scale: got"),
        ({"scale": (9, 8)}, "scale: got"),
        ({"shift": -1}, "shift: got -1"),
        ({"scale": (4, 8), "shift": 1}, "shift: wanted 0"),
        ({"std": (1, 0)}, "std: got"),
        ({"mean": float("nan")}, "mean: got"),
    ],
)
def test_bad_preparation(changes, message):
    with pytest.raises(ValueError, match=message):
        Augment(**{"size": (4, 4), **changes})


def test_bad_samples():
    out = np.empty((3, 4, 4), np.float32)
    with pytest.raises(ValueError, match="wanted 3 channels"):
        Augment((4, 4)).apply(np.zeros((1, 4, 4), np.uint8), out)
    with pytest.raises(ValueError, match="wanted uint8 or float32"):
        Augment((4, 4)).apply(np.zeros((3, 4, 4)), out)
    with pytest.raises(ValueError, match=r"mean: got 2 values, wanted 1 or 3"):
        Augment((4, 4), mean=(1, 2)).apply(np.zeros((3, 4, 4), np.uint8), out)
