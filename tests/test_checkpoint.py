"""Checkpoint files: format, atomicity, and the collective functions."""
import functools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pcldnn import checkpoint
from pcldnn.checkpoint import CheckpointError, Reader, Writer, load, save


def some_tensors(seed=0):
    random = np.random.default_rng(seed)
    return {"features.0.weight": random.standard_normal((3, 2, 3, 3), dtype=np.float32),
            "features.0.bias": random.standard_normal(3, dtype=np.float32),
            "momentum.features.0.weight": random.standard_normal((3, 2, 3, 3), dtype=np.float32),
            "scalar": np.float32(3.5), "empty": np.zeros((0, 4), np.float32), "labels": np.arange(5)}


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype and got[name].shape == np.shape(array), name
        np.testing.assert_array_equal(got[name], array)


def test_round_trip(tmp_path):
    metadata = {"step": 12, "seed": 2**60, "schedule": {"kind": "step", "at": [1, 2]}, "class_names": ["1", "ä"]}
    save(tmp_path / "a.safetensors", some_tensors(), metadata)
    tensors, got = load(tmp_path / "a.safetensors")
    assert_same(tensors, some_tensors())
    assert got == metadata
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o444 == 0o444      # not the 0600 of a temporary file


def test_the_format_is_the_published_one(tmp_path):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    save(tmp_path / "ours", some_tensors(), {"step": 1})
    theirs = safetensors_numpy.load_file(tmp_path / "ours")
    assert set(theirs) == set(some_tensors())
    for name, array in some_tensors().items():
        np.testing.assert_array_equal(theirs[name], array)
    tensors = {name: np.asarray(array) for name, array in some_tensors().items()}
    safetensors_numpy.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    got, metadata = load(tmp_path / "theirs")
    assert metadata == {}
    for name, array in tensors.items():
        np.testing.assert_array_equal(got[name], array)


def test_half_precision_is_read_exactly(tmp_path):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "bf16").write_bytes(struct.pack("<Q", len(header)) + header + bytes([0x80, 0x3f, 0x40, 0xc0]))
    tensors, _ = load(tmp_path / "bf16")
    np.testing.assert_array_equal(tensors["a"], np.array([1.0, -3.0], np.float32))


def test_every_truncation_is_refused_with_the_path(tmp_path):
    save(tmp_path / "whole", some_tensors(), {"step": 1})
    content = (tmp_path / "whole").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cut"):
            load(tmp_path / "cut")


@pytest.mark.parametrize("header", [
    b"[]", b"{", b"\xff\xfe", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}', b'"text"',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F8", "shape": [4], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    b'{"__metadata__": {"pcldnn": "{"}}', b'{"__metadata__": []}'])
def test_damaged_headers_are_refused(tmp_path, header):
    (tmp_path / "bad").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match="bad"):
        load(tmp_path / "bad")


def test_missing_file_and_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        save(tmp_path / "nowhere" / "a", some_tensors())


def test_writer_checks_order_and_completeness(tmp_path):
    shapes = {"a": (np.float32, (2,)), "b": (np.float32, (1,))}
    with pytest.raises(ValueError, match="'b'.*wanted.*'a'"), Writer(tmp_path / "x", shapes, {}) as writer:
        writer.write("b", np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="'b' was never written"), Writer(tmp_path / "x", shapes, {}) as writer:
        writer.write("a", np.zeros(2, np.float32))
        writer.commit()
    with pytest.raises(ValueError, match="wanted"), Writer(tmp_path / "x", shapes, {}) as writer:
        writer.write("a", np.zeros(2))      # float64
    assert os.listdir(tmp_path) == []


def test_strided_arrays_are_written_in_logical_order(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    save(tmp_path / "a", {"t": array.transpose(2, 0, 1), "r": array[::-1, :, ::2]})
    tensors, _ = load(tmp_path / "a")
    np.testing.assert_array_equal(tensors["t"], array.transpose(2, 0, 1))
    np.testing.assert_array_equal(tensors["r"], array[::-1, :, ::2])


def test_symbolic_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "a")
    save(tmp_path / "latest", some_tensors())
    assert (tmp_path / "latest").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["a"]


def test_leftovers_are_ignored_and_cleaned_but_not_those_of_living_writers(tmp_path):
    save(tmp_path / "a", some_tensors())
    (tmp_path / ".a.deadbeef.tmp").write_bytes(b"half a checkpoint")
    (tmp_path / ".ab.deadbeef.tmp").write_bytes(b"of another checkpoint")
    living = Writer(tmp_path / "a", {"b": (np.float32, (1,))}, {})
    save(tmp_path / "a", some_tensors(1))
    assert_same(load(tmp_path / "a")[0], some_tensors(1))
    assert not (tmp_path / ".a.deadbeef.tmp").exists()
    assert (tmp_path / ".ab.deadbeef.tmp").exists()
    living.write("b", np.ones(1, np.float32))
    living.commit()
    assert_same(load(tmp_path / "a")[0], {"b": np.ones(1, np.float32)})


KILLED_WRITER = """
import sys, numpy as np
from pcldnn.checkpoint import save
value = 0
while True:
    save(sys.argv[1], {"a": np.full(500_000, value, np.float32), "b": np.full(500_000, value, np.float32)},
         {"value": value})
    value += 1
    print(value, flush=True)
"""


def test_kill_during_the_write_leaves_a_whole_file(tmp_path):
    """A24: SIGKILL at any moment of a save; the file that is there always loads."""
    path = tmp_path / "a"
    for attempt in range(8):
        process = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, path], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()       # at least one checkpoint is there
        time.sleep(0.002 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        tensors, metadata = load(path)
        for array in tensors.values():
            assert (array == metadata["value"]).all()
    save(path, {"a": np.zeros(1, np.float32)})
    assert os.listdir(tmp_path) == ["a"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, or a skip where mounting one is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False,
                           capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_keeps_the_old_file(small_disk):
    """A24: ENOSPC is an error that names the file; what was there still loads; the space is given back."""
    save(small_disk / "a", some_tensors())
    for _ in range(3):
        with pytest.raises(CheckpointError, match="small/a.*No space left"):
            save(small_disk / "a", {"big": np.zeros(2**19, np.float32)})
        assert_same(load(small_disk / "a")[0], some_tensors())
        assert os.listdir(small_disk) == ["a"]
    save(small_disk / "a", some_tensors(1))
    assert_same(load(small_disk / "a")[0], some_tensors(1))


def test_full_disk_for_the_last_bytes_only(small_disk):
    """The bytes that fail are those that the buffered file holds until commit."""
    (small_disk / "filler").write_bytes(bytes(2**20 - 4096))
    with pytest.raises(CheckpointError, match="No space left"):
        save(small_disk / "a", {f"t{i}": np.zeros(600, np.float32) for i in range(3)})
    assert os.listdir(small_disk) == ["filler"]


class ThreadRanks:
    """Ranks as threads of this process, with the one call that collective checkpoints need."""

    def __init__(self, size):
        self.barrier, self.slot, self.size = threading.Barrier(size, timeout=20), [None], size

    def run(self, function):
        results = [None] * self.size

        def body(rank):
            try:
                results[rank] = function(ThreadRank(self, rank))
            except Exception as error:  # noqa: BLE001 (the tests look at it)
                results[rank] = error
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


class ThreadRank:
    def __init__(self, ranks, rank):
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def broadcast(self, value):
        if self.rank == 0:
            self.ranks.slot[0] = value
        self.ranks.barrier.wait()
        value = self.ranks.slot[0]
        self.ranks.barrier.wait()
        return value


def collective_save(path, tensors, metadata, communicator):
    def batches():
        for name, array in tensors.items():
            yield {name: communicator.broadcast(array)}     # stands for a gather: every rank must take part
    shapes = {name: (np.asarray(array).dtype, np.shape(array)) for name, array in tensors.items()}
    checkpoint.save_collective(path, shapes, batches(), metadata, communicator)


@pytest.mark.parametrize("size", [1, 3])
def test_collective_save_and_read(tmp_path, size):
    ranks = ThreadRanks(size)
    assert ranks.run(lambda c: collective_save(tmp_path / "a", some_tensors(), {"step": 3}, c)) == [None] * size
    assert_same(load(tmp_path / "a")[0], some_tensors())

    def read(communicator):
        with checkpoint.CollectiveReader(tmp_path / "a", communicator) as reader:
            return {name: reader.read(name) for name in reader.shapes}, reader.metadata
    for tensors, metadata in ranks.run(read):
        assert_same(tensors, some_tensors())
        assert metadata == {"step": 3}


@pytest.mark.parametrize("size", [1, 3])
def test_collective_errors_reach_every_rank(small_disk, size):
    ranks = ThreadRanks(size)
    save(small_disk / "a", some_tensors())
    big = {f"t{i}": np.zeros(2**17, np.float32) for i in range(4)}
    for error in ranks.run(lambda c: collective_save(small_disk / "a", big, {}, c)):
        assert isinstance(error, CheckpointError) and "No space left" in str(error)
    assert os.listdir(small_disk) == ["a"]
    assert_same(load(small_disk / "a")[0], some_tensors())
    (small_disk / "cut").write_bytes((small_disk / "a").read_bytes()[:-1])
    for path in (small_disk / "cut", small_disk / "nowhere"):
        for error in ranks.run(functools.partial(checkpoint.CollectiveReader, path)):
            assert isinstance(error, CheckpointError) and path.name in str(error)


def test_reader_reads_one_tensor(tmp_path):
    save(tmp_path / "a", some_tensors())
    with Reader(tmp_path / "a") as reader:
        assert reader.shapes["features.0.weight"] == (3, 2, 3, 3)
        np.testing.assert_array_equal(reader.read("labels"), np.arange(5))
        with pytest.raises(CheckpointError, match="nothing"):
            reader.read("nothing")


def torch_vgg11(torch, classes, side):
    """torchvision's vgg11 without torchvision: the same modules, names and order (side 224: the same shapes)."""
    nn, layers, channels = torch.nn, [], 3
    for width in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        else:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            channels = width
    features = 512 * (side // 32)**2
    classifier = [nn.Linear(features, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True),
                  nn.Dropout(), nn.Linear(4096, classes)]
    return nn.ModuleDict({"features": nn.Sequential(*layers), "classifier": nn.Sequential(*classifier)}).eval()


@pytest.mark.parametrize("side, classes", [(96, 7)])
def test_state_dict_of_torchvision_gives_the_logits_of_torch(tmp_path, side, classes):
    """A30 for the file format: 3x3 maps before the classifier, so its columns must come in PyTorch's order."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    from pcldnn import models
    torch.manual_seed(0)
    net = torch_vgg11(torch, classes, side)
    save_file(net.state_dict(), tmp_path / "vgg11.safetensors")
    tensors, metadata = load(tmp_path / "vgg11.safetensors")
    assert metadata == {}
    network = models.vgg_a(classes, (3, side, side))
    network.load_state_dict(tensors)
    images = np.random.default_rng(0).standard_normal((3, 3, side, side), dtype=np.float32)
    with torch.no_grad():
        maps = net["features"](torch.from_numpy(images))
        wanted = net["classifier"](torch.flatten(maps, 1)).numpy()
    np.testing.assert_allclose(network.forward(images), wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    save(tmp_path / "back.safetensors", network.state_dict())
    assert_same(load(tmp_path / "back.safetensors")[0], {name: t.numpy() for name, t in net.state_dict().items()})
