"""The training scripts and the examples, as their users start them."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pcldnn.checkpoint import load
from pcldnn.communicator import SerialCommunicator

VGG = "scripts/train_vgg.py"
QUICK = "tests/mpi/small_script.py"     # the same code with a network that takes no time
SMALL = ["--minibatch", "8", "--log-interval", "1", "--no-validation"]     # VGG-A at 32x32 is 1 Gflop an image


def metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help_and_wrong_flags_are_told_once(run_mpi):
    shown = run_mpi(2, [VGG, "--help"])
    assert shown.stdout.count("usage:") == 1 and shown.stderr == ""
    for flag in ("--data DIR|FILE", "--synthetic", "--image-size", "--classes", "--minibatch", "--epochs", "--steps",
                 "--lr", "--momentum", "--weight-decay", "--seed", "--threads", "--checkpoint FILE", "--resume FILE",
                 "--metrics FILE", "default 0.9", "images per step", "top5", "mpirun -n 2"):
        assert flag in shown.stdout, flag
    wrong = run_mpi(2, [VGG, "--minibatch", "0"], check=False)
    assert wrong.returncode == 2 and wrong.stderr.count("at least 1") == 1 and "Traceback" not in wrong.stderr


def test_same_curve_and_banner(run_mpi, tmp_path):
    """VGG-A on the digits: 1 and 3 ranks see the same minibatches and print the same losses."""
    losses = {}
    for ranks in (1, 3):
        done = run_mpi(ranks, [VGG, *SMALL, "--steps", "4",
                               "--metrics", tmp_path / f"{ranks}.jsonl"], timeout=120)
        lines = metrics(tmp_path / f"{ranks}.jsonl")
        assert [set(line) for line in lines] == [{"step", "epoch", "loss", "images_per_s"}] * 4
        losses[ranks] = [line["loss"] for line in lines]
        for text in (f"{ranks} rank", "on 1 node", "thread", "ISA", "floats a vector", "digits", "28,142,858",
                     "step 4/4", "images/s", "left"):
            assert text in done.stdout, done.output
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-4)


def test_oversubscription_is_named(run_mpi):
    """A23: more ranks than cores get one thread each, and the warning names the fix."""
    cores = len(os.sched_getaffinity(0))
    ranks, threads = (2 * cores, 1) if cores <= 4 else (2, cores)
    done = run_mpi(ranks, [VGG, *SMALL, "--steps", "1", "--threads", threads])
    assert done.stderr.count("oversubscribed") == 1, done.output
    assert "mpirun -n" in done.stderr or "--threads" in done.stderr, done.output


@pytest.mark.mpi
def test_launcher_that_disagrees_with_mpi_is_refused(tmp_path):
    """A20: Slurm started four tasks, MPI sees one; unless a single process is asked for."""
    environment = {**os.environ, "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
    command = [sys.executable, VGG, *SMALL, "--steps", "1"]
    refused = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--single-process" in refused.stderr and "Traceback" not in refused.stderr
    alone = subprocess.run([*command, "--single-process"], env=environment, check=True, capture_output=True, text=True,
                           timeout=60)
    assert "1 rank on 1 node" in alone.stdout and "no MPI (a single process was asked for)" in alone.stdout
    assert "Slurm has 4 tasks (SLURM_NTASKS, this is task 2)" in alone.stderr


def test_copies_say_that_they_are_copies(run_mpi):
    done = run_mpi(2, [QUICK, "--synthetic", "--steps", "1", "--minibatch", "8", "--single-process"])
    for task in "01":
        assert len(re.findall(rf"has 2 tasks \(\w+, this is task {task}\)", done.stderr)) == 1, done.output


@pytest.fixture
def vectors(tmp_path):
    """A file of small vectors in four classes, for a script without images."""
    random = np.random.default_rng(0)
    labels = np.arange(60) % 4
    images = random.standard_normal((60, 12), dtype=np.float32) + labels[:, None].astype(np.float32)
    np.savez(tmp_path / "frames.npz", images=images, labels=labels, val_images=images[:9], val_labels=labels[:9])
    return tmp_path / "frames.npz"


def test_resume_takes_settings_from_the_checkpoint(run_mpi, vectors, tmp_path):
    """``--resume FILE`` alone goes on with the data, seed, minibatch and schedule of the run; flags override."""
    script, checkpoint = QUICK, tmp_path / "run.safetensors"
    run_mpi(2, [script, "--data", vectors, "--minibatch", "20", "--epochs", "2", "--lr", "0.05",
                "--lr-schedule", "poly", "--seed", "3", "--steps", "2", "--checkpoint", checkpoint,
                "--metrics", tmp_path / "m.jsonl"])
    done = run_mpi(2, [script, "--resume", checkpoint, "--checkpoint", checkpoint, "--metrics", tmp_path / "m.jsonl"])
    for text in ("minibatch 20, epochs 2, PolynomialDecay(lr=0.05", "epochs=2,", "seed 3"):
        assert text in done.stdout, done.output
    lines = metrics(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5, 6]
    assert [(line["epoch"], line["count"]) for line in lines if "top1" in line][-1] == (2, 9)
    tensors, metadata = load(checkpoint)
    assert metadata["step"] == 6 and metadata["settings"]["lr"] == 0.05 and metadata["class_names"] == list("0123")
    assert tensors["fc1.weight"].shape == (16, 12) and tensors["momentum.fc3.bias"].shape == (4,)
    assert "larger than the training set" not in done.stderr
    longer = run_mpi(2, [script, "--resume", checkpoint, "--epochs", "3", "--lr-schedule", "constant",
                         "--minibatch", "61"])
    assert "step 3/3" in longer.stdout
    assert longer.stderr.count("the minibatch of 61 is larger than the training set") == 1, longer.output
    assert "all 60 images" in longer.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_isa_is_one_line(run_mpi, ranks):
    for command in ([VGG], ["pcldnn/__main__.py", "info"]):
        done = run_mpi(ranks, command, env={"PCLDNN_ISA": "nonsense"}, check=False)
        # Open MPI's mpirun adds a paragraph of its own.
        assert done.returncode == 2 and done.stderr.count("error: PCLDNN_ISA=nonsense") == 1, done.output
        assert done.stdout == "" and "Traceback" not in done.stderr, done.output


@pytest.mark.parametrize("script, flags", [
    ("scripts/train_overfeat.py", ["--synthetic", "--image-size", "71", "--classes", "10", "--minibatch", "6"]),
    ("scripts/train_cddnn.py", ["--synthetic", "--classes", "50", "--minibatch", "16"])])
def test_the_other_networks_of_the_paper(run_mpi, script, flags):
    done = run_mpi(2, [script, *flags, "--steps", "2"], timeout=120)
    assert "step 2/2" in done.stdout and "done: 2 steps" in done.stdout


@pytest.mark.parametrize("flags, words", [
    (["--data", "nowhere"], ["nowhere"]), (["--image-size", "16"], ["features.", "size"]),
    (["--classes", "11"], ["11", "10"]), (["--momentum", "1"], ["momentum"]),
    (["--partition", "fc6=3x1"], ["fc6", "2, the number of ranks"]),
    (["--minibatch", "100000000"], ["memory: 2 ranks of this node", "--minibatch"]),
    (["--resume", "nowhere.safetensors"], ["nowhere.safetensors"]),
    (["--data", "x.npz", "--synthetic"], ["--synthetic"]), (["--samples", "5"], ["--samples 5", "--synthetic"]),
    (["--lr-every", "2"], ["--lr-every", "--lr-schedule step", "poly"]),
    (["--lr-power", "2", "--lr-schedule", "step"], ["--lr-power", "poly"]), (["--digest-interval", "2"], ["--metrics"]),
    (["--steps", "0"], ["--steps", "at least 1"]), (["--synthetic", "--scale", "40", "50"], ["--scale", "--synthetic"]), (["--exact", "--tune"], ["--no-tune"]),
    (["--threads", "100000"], ["threads", "1 to 1024"]), (["--comm-cores", "99"], ["comm-cores: got 99"]),
    (["--metrics", "no/m.jsonl"], ["no/m.jsonl"]), (["--checkpoint", "no/c"], ["no/c"])])
def test_user_errors_are_one_message(run_mpi, flags, words):
    """A6 and others: told once, by rank 0, without a traceback."""
    done = run_mpi(2, [VGG, *SMALL, *flags], check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.output
    said = done.stderr.split("error: ")[1]  # what is before it is the usage, which has the names of all flags
    for word in words:
        assert word in said, done.output


def test_a_checkpoint_says_whose_it_is_and_how_far(run_mpi, tmp_path):
    """Another network's is refused by name; one that has come to the end says so; digests go on as they were."""
    file, metrics = tmp_path / "c.safetensors", tmp_path / "m.jsonl"
    run_mpi(1, [VGG, *SMALL, "--steps", "2", "--checkpoint", file, "--metrics", metrics, "--digest-interval", "1"])
    done = run_mpi(1, [VGG, "--resume", file, "--steps", "2", "--no-validation"])
    assert "nothing is left to train: it is at step 2, this run ends at step 2" in done.stdout, done.output
    done = run_mpi(1, [VGG, "--resume", file, "--steps", "4", "--no-validation", "--metrics", metrics])
    assert "training goes on after step 2" in done.stdout, done.output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "digest" in line] == [1, 2, 3, 4]
    done = run_mpi(1, ["scripts/train_overfeat.py", "--resume", file], check=False)
    assert done.returncode == 2 and "is a checkpoint of VGG-A" in done.stderr.split("error: ")[1], done.output


def test_metrics_that_cannot_be_written_on_end_in_an_error(run_mpi):
    done = run_mpi(2, [VGG, *SMALL, "--steps", "2", "--metrics", "/dev/full"], check=False)
    assert done.returncode == 1 and "done: 2 steps" in done.stdout and "No space left" in done.stderr, done.output


@pytest.mark.parametrize("file, output", [("none.jsonl", "x.png"), ("m.jsonl", "no/x.png")])
def test_a_picture_of_wrong_paths_is_one_line(tmp_path, file, output):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    if output == "no/x.png":
        pytest.importorskip("matplotlib")
    done = subprocess.run([sys.executable, "scripts/plot_metrics.py", tmp_path / file, "-o", tmp_path / output],
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 1 and "No such file" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_folder_of_images_with_a_damaged_one(run_mpi, tmp_path):
    """A27: the truncated file is named; with --skip-damaged it is replaced and training goes on."""
    image_module = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("10", "2"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 255, (40, 48, 3), dtype=np.uint8)
                image_module.fromarray(pixels).save(folder / f"{i}.jpg", quality=90)
    damaged = tmp_path / "images" / "train" / "2" / "3.jpg"
    damaged.write_bytes(damaged.read_bytes()[:damaged.stat().st_size // 2])
    command = [VGG, "--data", tmp_path / "images", "--image-size", "32", "--minibatch", "6", "--epochs", "1",
               "--lr", "0.001"]
    failed = run_mpi(2, command, check=False)
    assert failed.returncode != 0 and str(damaged) in failed.stderr and "--skip-damaged" in failed.stderr, failed.output
    assert failed.stderr.count("Traceback") == 0 and failed.stderr.count("error: ") == 1, failed.output
    done = run_mpi(2, [*command, "--skip-damaged", "--checkpoint", tmp_path / "c"])
    assert f"({damaged})" in done.stderr and "warning: sample" in done.stderr and "loader.py" not in done.stderr
    assert "of 4 samples" in done.stdout and "2 classes" in done.stdout, done.output
    assert load(tmp_path / "c")[1]["class_names"] == ["10", "2"]       # byte order of names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_ranks_with_a_checkpoint(vectors, tmp_path, number):
    """On the process of a run that would last for ever."""
    command = [sys.executable, QUICK, "--single-process", "--data", vectors, "--epochs", "100000",
               "--checkpoint", tmp_path / "c", "--log-interval", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # noqa: PLW1509
    try:
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "stopped after step" in out and number.name in out
    assert "Traceback" not in err and ("a second one ends it at once" in err) == (number == signal.SIGINT), err
    assert load(tmp_path / "c")[1]["step"] >= 1


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_second_interrupt_is_not_caught(before):
    from pcldnn.script import stop_signals
    trainer = SimpleNamespace(reasons=[], communicator=SerialCommunicator())
    trainer.request_stop = trainer.reasons.append
    outside = signal.signal(signal.SIGINT, before)
    try:
        with stop_signals(trainer):
            signal.raise_signal(signal.SIGINT)
            during = signal.getsignal(signal.SIGINT)
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, outside)
    assert after == before
    assert (during, trainer.reasons) == ((before, []) if before == signal.SIG_IGN else (signal.SIG_DFL, ["SIGINT"]))


def test_examples(run_mpi):
    assert "2 of 3 ranks trained" in run_mpi(3, "docs/examples/user_mpi_program.py", timeout=120).stdout
    command = [sys.executable, "docs/examples/lone_layer.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "(8, 20, 16, 16)" in done.stdout


def test_settings_come_from_flags_then_checkpoint_then_job():
    from pcldnn.arguments import Job, fill, make_parser, settings_of
    defaults = {"minibatch": 256, "lr": 0.1, "epochs": 3, "momentum": 0.9, "weight_decay": 0.0}
    job = Job("t", "about", None, None, 8, 5, defaults, {"minibatch": 64})

    def settled(flags, stored):
        args = make_parser(job).parse_args(flags)
        fill(job, args, stored)
        return args
    assert settled([], {}).minibatch == 64 and settled(["--synthetic"], {}).minibatch == 256
    assert settled(["--data", "x"], {}).minibatch == 256
    assert settled([], {"minibatch": 7, "lr": 0.5}).minibatch == 7
    assert settled(["--minibatch", "9"], {"minibatch": 7}).minibatch == 9
    assert settled(["--data", "new"], {"data": "old", "seed": 4}).data == "new"
    assert settled([], {"data": "old"}).data == "old" and settled(["--synthetic"], {"data": "old"}).data is None
    made_up = settings_of(job, settled(["--synthetic", "--steps", "2", "--no-validation"], {}))
    assert made_up["samples"] == 2 * 256 and made_up["validation"] is False
    longer = settled(["--synthetic", "--steps", "6"], made_up)      # the same data, however many steps are wanted now
    assert longer.samples == 2 * 256 and longer.validation is False
    assert settled(["--data", "x"], made_up).samples is None and settled([], {}).validation is True
    kept = settings_of(job, settled(["--data", "x", "--mirror"], {}))
    assert kept["data"] == os.path.abspath("x") and kept["mirror"] is True
    json.dumps(kept)


def test_together_names_the_rank_only_when_ranks_differ():
    from pcldnn.script import UsageError, together

    class TwoRanks(SerialCommunicator):
        def __init__(self, other):
            self.other = other

        def allgather_object(self, value):
            return [value, self.other]

    def fail():
        raise ValueError("no such file")
    with pytest.raises(UsageError, match="^no such file$"):
        together(TwoRanks("no such file"), fail)
    with pytest.raises(UsageError, match="rank 0: no such file$"):
        together(TwoRanks(None), fail)
    with pytest.raises(UsageError, match="rank 1: broken"):
        together(TwoRanks("broken"), lambda: 3)
    assert together(TwoRanks(None), lambda: 3) == 3


def test_ranks_and_threads_take_turns(run_mpi):
    """Two ranks of one thread and one process of two: the shares of their speeds, turn by turn."""
    words = ["scripts/ranks_and_threads.py", "--network", "cd_dnn", "--minibatch", "8", "--turns", "1", "--steps", "1"]
    result = run_mpi(3, words, timeout=120)
    rates = [float(rate) for rate in re.findall(r"^[12] x [12]: median ([\d.]+) images/s", result.stdout, re.MULTILINE)]
    ratio = re.search(r"^2 x 1 against 1 x 2, turn by turn: median (\d+) %", result.stdout, re.MULTILINE)
    assert 100 * rates[0] / rates[1] == pytest.approx(float(ratio[1]), rel=0.02, abs=0.6), result.output
