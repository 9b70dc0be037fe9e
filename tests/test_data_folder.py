"""Folders of image files: order and classes (A26), formats, damage (A27)."""

import io
import os
import pickle
import traceback
import warnings

import numpy as np
import pytest

from pcldnn.data import DataError, Digits, FolderDataset, Loader, decode, open_dataset
from pcldnn.data.augment import Augment

Image = pytest.importorskip("PIL.Image")
SMALL = Augment((16, 16))


def picture(seed=0, size=(40, 30)):
    """A smooth colour picture that survives JPEG."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return buffer.getvalue()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_tree(root, classes=("a", "b"), each=3, order=1):
    for c in classes[::order]:
        for i in range(each)[::order]:
            write(root / c / f"{i}.jpg", encoded(picture(i)))


# ---- order and classes


def test_byte_order_of_names(tmp_path):
    """A26: the order of creation does not matter, and 10 comes before 2."""
    names = ("1", "10", "2", "B", "a", "é")
    for root, order in ((tmp_path / "one", 1), (tmp_path / "two", -1)):
        make_tree(root, names, order=order)
    one, two = (FolderDataset(tmp_path / name, SMALL) for name in ("one", "two"))
    assert one.class_names == two.class_names == names
    assert one.paths == two.paths == [f"{c}/{i}.jpg" for c in names for i in range(3)]
    assert one.labels.tolist() == np.repeat(range(6), 3).tolist()
    assert one.fingerprint() == two.fingerprint()
    write(tmp_path / "two" / "a" / "1.jpg", encoded(picture(1)) + b" ")
    assert one.fingerprint() != FolderDataset(tmp_path / "two", SMALL).fingerprint()


def test_nested_hidden_and_other_files(tmp_path):
    make_tree(tmp_path)
    write(tmp_path / "README", b"hello")
    write(tmp_path / ".git" / "x.jpg", b"")
    write(tmp_path / "a" / ".DS_Store", b"junk")
    write(tmp_path / "a" / "deep" / "er" / "x.JPEG", encoded(picture()))
    write(tmp_path / "a" / "noending", encoded(picture(), "PNG"))
    write(tmp_path / "b" / "Thumbs.db", b"junk")
    with pytest.warns(UserWarning, match="1 files are no images and are not used, first b/Thumbs.db"):
        dataset = FolderDataset(tmp_path, SMALL)
    assert dataset.paths == ["a/0.jpg", "a/1.jpg", "a/2.jpg", "a/deep/er/x.JPEG", "a/noending",
                             "b/0.jpg", "b/1.jpg", "b/2.jpg"]  # fmt: skip
    assert dataset.ignored == ["b/Thumbs.db"]


def test_train_and_val(tmp_path):
    make_tree(tmp_path / "train", ("cat", "dog"))
    train, validation = open_dataset(tmp_path)
    assert validation is None and train.sample_shape == (3, 224, 224) and train.augment.scale == (256, 384)
    make_tree(tmp_path / "val", ("cat", "dog"), each=1, order=-1)
    train, validation = open_dataset(tmp_path, image_size=32, mirror=False, scale=(32, 40))
    assert (len(train), len(validation), train.num_classes) == (6, 2, 2)
    assert train.augment == validation.augment and not train.augment.mirror
    assert train.sample_shape == (3, 32, 32) and train.augment.mean == (123.675, 116.28, 103.53)
    make_tree(tmp_path / "val", ("cow",), each=1)
    with pytest.raises(ValueError, match="3 classes, wanted 2; not expected 'cow'"):
        open_dataset(tmp_path)
    os.rename(tmp_path / "val", tmp_path / "other")
    grey, _ = open_dataset(tmp_path, channels=1, num_classes=2)
    assert grey.sample_shape == (1, 224, 224) and grey.read(0).shape == (1, 30, 40)


def test_empty_and_unknown_folders(tmp_path):
    with pytest.raises(ValueError, match=r"has no folder train/; wanted .* got an empty folder"):
        open_dataset(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="wanted one sub-folder per class, got 0 files and no folder"):
        open_dataset(tmp_path)
    write(tmp_path / "train" / "x.jpg", encoded(picture()))
    with pytest.raises(ValueError, match="got 1 files and no folder"):
        open_dataset(tmp_path)
    (tmp_path / "train" / "a").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*train/a has no image files"):
        open_dataset(tmp_path)
    make_tree(tmp_path / "train", ("a", "b"))
    with pytest.raises(ValueError, match="num_classes: got 3, but"):
        open_dataset(tmp_path, num_classes=3)
    with pytest.raises(ValueError, match="channels: got 4"):
        open_dataset(tmp_path, channels=4)


# ---- formats


def grey16(image):
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


FORMATS = {
    "rgb.jpg": lambda p: encoded(p),
    "progressive.jpg": lambda p: encoded(p, progressive=True),
    "grey.jpg": lambda p: encoded(p.convert("L")),
    "cmyk.jpg": lambda p: encoded(p.convert("CMYK")),
    "cmyk_subsampled.jpg": lambda p: encoded(p.convert("CMYK"), subsampling=2),
    "png_named.jpg": lambda p: encoded(p, "PNG"),
    "jpeg_named.png": lambda p: encoded(p),
    "palette.png": lambda p: encoded(p.quantize(256), "PNG"),
    "palette_transparent.png": lambda p: encoded(p.quantize(255), "PNG", transparency=b"\x80\xff\x00"),
    "rgba.png": lambda p: encoded(with_alpha(p), "PNG"),
    "grey.png": lambda p: encoded(p.convert("L"), "PNG"),
    "grey_alpha.png": lambda p: encoded(p.convert("LA"), "PNG"),
    "grey16.png": lambda p: encoded(grey16(p), "PNG"),
    "rgb.gif": lambda p: encoded(p.quantize(256), "GIF"),
    "rgb.bmp": lambda p: encoded(p, "BMP"),
    "rgb.tif": lambda p: encoded(p, "TIFF"),
    "rgb.webp": lambda p: encoded(p, "WEBP", lossless=True),
    "rgb.ppm": lambda p: encoded(p, "PPM"),
}


def with_alpha(image):
    image = image.convert("RGBA")
    image.putalpha(100)
    return image


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("library", ["simplejpeg", "Pillow"])
def test_formats(name, channels, library, monkeypatch):
    if library == "Pillow":
        monkeypatch.setattr(decode, "simplejpeg", None)
    original = picture(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode.decode_image(FORMATS[name](original), channels)
    assert pixels.shape == (channels, 30, 40) and pixels.dtype == np.uint8
    grey = np.asarray(original.convert("L")).astype(int)[None]
    wanted = np.asarray(original).astype(int).transpose(2, 0, 1)
    if "grey" in name or channels == 1:
        wanted = np.broadcast_to(grey, pixels.shape)
    worst = 40 if "palette" in name or "gif" in name else 12
    difference = np.abs(pixels - wanted)
    assert difference.max() <= worst and difference.mean() < worst / 4


@pytest.mark.parametrize("channels", [1, 3])
def test_both_libraries_give_the_same_pixels(channels, monkeypatch):
    data = encoded(picture(4))
    fast = decode.decode_image(data, channels)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert np.abs(fast.astype(int) - decode.decode_image(data, channels)).max() <= 1


def test_large_jpegs_are_decoded_reduced(tmp_path):
    data = encoded(picture(5, (400, 300)))
    assert decode.decode_image(data, 3, 150).shape == (3, 150, 200)
    assert decode.decode_image(data, 3, 151).shape[1] >= 151
    assert decode.decode_image(data, 3).shape == decode.decode_image(data, 3, 290).shape == (3, 300, 400)
    write(tmp_path / "a" / "x.jpg", data)
    out = np.empty((3, 64, 64), np.float32), np.empty((3, 64, 64), np.float32)
    augment = Augment((64, 64), scale=(64, 70))
    dataset = FolderDataset(tmp_path, augment)
    assert min(dataset.read(0).shape[1:]) < 150
    augment.apply(dataset.read(0), out[0])
    augment.apply(decode.decode_image(data, 3), out[1])
    assert np.abs(out[0] - out[1]).max() < 8


def test_small_junk_in_a_jpeg_is_no_damage():
    data = encoded(picture(6))
    junk = data[:-2] + b"\x12\x34" * 30 + data[-2:]
    assert (decode.decode_image(junk) == decode.decode_image(data)).all()


# ---- damage


def cut(data):
    return data[: len(data) // 2]


DAMAGE = {
    "half.jpg": lambda p: cut(encoded(p)),
    "half_with_end.jpg": lambda p: cut(encoded(p)) + b"\xff\xd9",
    "half_progressive.jpg": lambda p: cut(encoded(p, progressive=True)),
    "header.jpg": lambda p: encoded(p)[:30],
    "half_cmyk.jpg": lambda p: cut(encoded(p.convert("CMYK"))),
    "half.png": lambda p: cut(encoded(p, "PNG")),
    "half.gif": lambda p: encoded(p.quantize(), "GIF")[:200],
    "empty.jpg": lambda p: b"",
    "text.jpg": lambda p: b"<html>404 not found</html>",
    "float.tif": lambda p: encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name, tmp_path):
    """A27: path, sample index and cause, in one traceback."""
    make_tree(tmp_path)
    write(tmp_path / "b" / name, DAMAGE[name](picture(7, (200, 160))))
    dataset = FolderDataset(tmp_path, SMALL)
    index = dataset.paths.index(f"b/{name}")
    with pytest.raises(DataError) as caught:
        dataset.read(index)
    assert caught.value.index == index and caught.value.path == str(tmp_path / "b" / name)
    assert str(caught.value).startswith(f"sample {index} ({tmp_path / 'b' / name}): ")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_vanished_and_broken_links(tmp_path):
    make_tree(tmp_path)
    os.symlink(tmp_path / "nowhere", tmp_path / "a" / "link.jpg")
    dataset = FolderDataset(tmp_path, SMALL)
    os.remove(tmp_path / "b" / "2.jpg")
    for index in (3, 6):
        with pytest.raises(DataError, match=rf"sample {index} \(.*No such file"):
            dataset.read(index)


def damaged_tree(tmp_path):
    """20 pictures in two classes; number 3 is cut to half its length."""
    make_tree(tmp_path, each=10)
    path = tmp_path / "a" / "3.jpg"
    path.write_bytes(cut(path.read_bytes()))
    return FolderDataset(tmp_path, Augment((30, 40))), path


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("training", [True, False])
def test_damage_surfaces_on_the_rank_that_reads_it(tmp_path, threads, training):
    dataset, path = damaged_tree(tmp_path)
    raised = 0
    for rank in range(2):
        with Loader(dataset, 4, rank=rank, size=2, training=training, threads=threads) as loader:
            try:
                assert sum(len(batch) for batch in loader.epoch(0)) == 10
            except DataError as error:
                raised += 1
                assert str(error).startswith(f"sample 3 ({path}): damaged JPEG")
    assert raised == 1


def test_skip_in_training_replaces_alike_on_every_rank(tmp_path):
    dataset, path = damaged_tree(tmp_path)

    def run(size):
        images, counts = {}, 0
        for rank in range(size):
            loader = Loader(dataset, 4, rank=rank, size=size, skip_damaged=True)
            for batch in loader.epoch(1):
                images |= {
                    int(i): image.tobytes() for i, image in zip(batch.sample_ids, batch.images, strict=True)
                }
                assert (batch.labels == dataset.labels[batch.sample_ids]).all()
            counts += len(loader.damaged)
        assert counts == 1
        return images

    with pytest.warns(RuntimeWarning, match=rf"sample 3 \({path}\): .*another sample of its class"):
        one = run(1)
    with pytest.warns(RuntimeWarning):
        assert run(3) == one
    assert sorted(one) == list(range(20)) and one[3] == one[4]  # nothing is drawn at random for this size


def test_skip_in_evaluation_leaves_out(tmp_path):
    dataset, _ = damaged_tree(tmp_path)

    def run(rank):
        with Loader(dataset, 4, rank=rank, size=3, training=False, skip_damaged=True) as loader:
            batches = list(loader.epoch(0))
        assert all(len(b.images) == len(b.labels) == len(b) for b in batches)
        return [int(i) for b in batches for i in b.sample_ids]

    with pytest.warns(RuntimeWarning, match="it is left out"):
        seen = run(0) + run(1) + run(2)
    assert sorted(seen) == [i for i in range(20) if i != 3]


def test_skip_gives_up_when_a_class_has_nothing_left(tmp_path):
    write(tmp_path / "a" / "0.jpg", cut(encoded(picture())))
    write(tmp_path / "a" / "1.jpg", b"")
    write(tmp_path / "b" / "0.jpg", encoded(picture()))
    loader = Loader(FolderDataset(tmp_path, SMALL), 3, skip_damaged=True, threads=0)
    with pytest.raises(DataError, match="no other sample of its class can be read"):
        list(loader.epoch(0))


def test_digits_as_a_folder_of_odd_files(tmp_path):
    """The embedded digits as JPEG files, a truncated, a CMYK and a wrongly named one among them."""
    for split in ("train", "test"):
        digits = Digits(split)
        for i in range(0, len(digits), 50):
            image = Image.fromarray(digits.images[i, 0])
            kind = {0: encoded(image), 1: encoded(image.convert("CMYK")), 2: encoded(image, "PNG")}
            name = f"{digits.class_names[digits.labels[i]]}/{i:04}.jpg"
            write(tmp_path / {"train": "train", "test": "val"}[split] / name, kind[i // 50 % 3])
    bad = tmp_path / "train" / "4" / "0000.jpg"
    bad.write_bytes(cut(encoded(picture(0, (32, 32)))))
    train, validation = open_dataset(tmp_path, image_size=32, scale=(32, 36), mirror=False)
    assert (len(train), len(validation), train.class_names) == (81, 20, tuple("0123456789"))
    with pytest.raises(DataError, match=rf"sample 32 \({bad}\): damaged JPEG"):
        list(Loader(train, 16).epoch(0))
    with (
        pytest.warns(RuntimeWarning, match=f"sample 32 .{bad}"),
        Loader(train, 16, skip_damaged=True) as loader,
    ):
        assert sum(len(batch) for batch in loader.epoch(0)) == 81
    original, out = Digits("test"), np.empty((3, 32, 32), np.float32)
    for i in range(20):
        validation.augment.apply(validation.read(i), out)
        index = int(os.path.basename(validation.paths[i])[:4])
        pixels = out * np.reshape(train.augment.std, (3, 1, 1)) + np.reshape(train.augment.mean, (3, 1, 1))
        assert np.abs(pixels - original.read(index)).mean() < 4
        assert validation.label(i) == original.label(index)


def test_errors_travel_between_ranks():
    error = pickle.loads(pickle.dumps(DataError("no disk", "x.jpg", 3)))
    assert (str(error), error.path, error.index) == ("sample 3 (x.jpg): no disk", "x.jpg", 3)
