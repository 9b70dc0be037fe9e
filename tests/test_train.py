"""Training on 1, 2, 3 and 4 ranks: the same losses, the same decisions, and never a hang. Cases: mpi/train_cases.py."""
import json
import subprocess

import numpy as np
import pytest

from pcldnn import SGD, Flatten, Linear, Network, ReLU, Trainer, _kernels
from pcldnn.checkpoint import CheckpointError, load
from pcldnn.communicator import SerialCommunicator
from pcldnn.data import ArrayDataset
from pcldnn.train import TrainingDiverged, rank_of_label

CASES = ("curve", "few", "uneven", "accuracy", "refusals", "diverged", "stop", "resumed", "slow")
RANKS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def trained(run_cases):
    """``trained(ranks, case)``: what each rank got in a case."""
    return run_cases("train_cases.py", CASES, timeout=120)


def assert_same_training(got, wanted, tolerance):
    np.testing.assert_allclose(got["losses"], wanted["losses"], rtol=tolerance)
    for key in ("step", "epoch", "stopped", "evaluation"):
        assert got[key] == wanted[key], key


@pytest.mark.parametrize("ranks", RANKS)
def test_same_curve_on_any_number_of_ranks(trained, ranks):
    """A13: 20 steps with shuffle, augmentation, dropout, momentum, weight decay and a schedule."""
    alone = trained(1, "curve")[0]
    assert alone["losses"][-1] < alone["losses"][0] and len(alone["losses"]) == 20
    results = trained(ranks, "curve")
    assert len({result["digest"] for result in results}) == 1       # all ranks hold the same weights
    for result in results:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=2e-5)
        assert result["losses"] == results[0]["losses"]
        assert result["evaluation"][0] == 1000
        assert abs(result["evaluation"][1] - alone["evaluation"][1]) <= 2      # a logit may lie on the edge
    weights, _ = load(trained.folder(ranks) / "curve.safetensors")
    for name, array in load(trained.folder(1) / "curve.safetensors")[0].items():
        # not element by element: a ReLU or a maximum within rounding of its edge may fall to the other side
        assert np.linalg.norm(weights[name] - array) <= 1e-2 * np.linalg.norm(array), name


@pytest.mark.parametrize("ranks", RANKS)
def test_fewer_samples_than_ranks(trained, ranks):
    """A14."""
    for name, alone in trained(1, "few")[0].items():
        for result in trained(ranks, "few"):
            assert_same_training(result[name], alone, 1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_gradient_is_the_mean_over_samples(trained, ranks):
    """A15: of the three gradients (0, 0, x) the step is x / 3 (here -1 and 1), not the mean of means."""
    for weights in trained(ranks, "uneven"):
        np.testing.assert_allclose(weights, [1.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_sample_is_evaluated_once(trained, ranks):
    """A21: the same integers on any number of ranks, for any minibatch."""
    for result in trained(ranks, "accuracy"):
        assert result == [[10, 1, 7]] * 4


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_what_differs_between_ranks_is_refused(trained, ranks):
    """A18: both values and the rank are named, on every rank, and the program goes on."""
    results = trained(ranks, "refusals")
    assert all(result == results[0] for result in results)
    messages, last = results[0], f"rank {ranks - 1}"
    for name, words in {"width": ("classifier.0", "(24, 99)", "(25, 99)", last), "data": ("samples", "10", "11", last),
                        "minibatch": ("minibatch", "4", "5", last), "seed": ("seed", last), "steps": ("steps", last),
                        "resume": ("nowhere.safetensors",)}.items():
        for word in words:
            assert word in messages[name], (name, word)


@pytest.mark.parametrize("ranks", RANKS)
def test_divergence_stops_all_ranks_at_the_same_step(trained, ranks):
    alone = trained(1, "diverged")[0]
    assert alone["sample"]["culprits"] == {"0": "input"}
    results = trained(ranks, "diverged")
    assert all(result["sample"]["text"] == results[0]["sample"]["text"] for result in results)
    for result in results:
        assert result["sample"]["step"] == alone["sample"]["step"]
        assert list(result["sample"]["culprits"].values()) == ["input"]
        assert result["weights"]["step"] == 1
        assert set(result["weights"]["culprits"].values()) == {"classifier.0"}
        assert len(result["weights"]["culprits"]) == ranks
        assert result["weights"]["untouched"]
        assert "classifier.0" in result["weights"]["text"] and "step 1" in result["weights"]["text"]


@pytest.mark.parametrize("ranks", RANKS)
def test_stop_is_decided_together(trained, ranks):
    """A19: asked for by one rank after step 3, it travels with step 4."""
    for result in trained(ranks, "stop"):
        assert result == {"step": 4, "stopped": f"rank {ranks - 1}: patience is over", "again": 5}
    assert load(trained.folder(ranks) / "stop.safetensors")[1]["step"] == 4
    for result in trained(ranks, "slow"):
        assert result["stopped"] == f"rank {ranks - 1}: SIGUSR1" and result["step"] <= 5


@pytest.mark.parametrize("ranks", RANKS)
def test_resumed_run_is_the_uninterrupted_one(trained, ranks):
    """A25: bit for bit, the interruption inside an epoch; weights, momentum, losses, and the metrics file."""
    folder = trained.folder(ranks) if trained(ranks, "resumed") else None
    for result in trained(ranks, "resumed"):
        assert result["first"]["losses"] + result["second"]["losses"] == result["straight"]["losses"]
        assert result["second"]["digest"] == result["straight"]["digest"] != result["first"]["digest"]
        assert result["second"]["evaluation"] == result["straight"]["evaluation"]
    straight, part = load(folder / "straight.safetensors"), load(folder / "part.safetensors")
    assert straight[1] == part[1] and list(straight[0]) == list(part[0])
    assert any(name.startswith("momentum.") for name in straight[0])
    for name in straight[0]:
        np.testing.assert_array_equal(part[0][name], straight[0][name])

    lines = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
             for name in ("straight", "part")}
    losses = {name: [(line["step"], line["epoch"], line["loss"]) for line in found if "step" in line]
              for name, found in lines.items()}
    assert losses["part"] == losses["straight"] and [step for step, *_ in losses["part"]] == list(range(1, 11))
    for line in lines["straight"]:
        assert set(line) in ({"step", "epoch", "loss", "images_per_s"}, {"epoch", "top1", "top5", "count"})
    evaluations = [line for line in lines["straight"] if "top1" in line]
    assert [line["epoch"] for line in evaluations] == [1, 2, 3] and evaluations[0]["count"] == 7
    assert [line for line in lines["part"] if "top1" in line and line["epoch"] != 2][-1] == evaluations[-1]


@pytest.mark.parametrize("written, read", [(1, 3), (4, 2), (2, 1)])
def test_resume_on_another_number_of_ranks(trained, run_mpi, written, read, tmp_path):
    straight = trained(written, "resumed")[0]["straight"]
    (tmp_path / "kept.safetensors").write_bytes((trained.folder(written) / "kept.safetensors").read_bytes())
    run_mpi(read, ["tests/mpi/train_cases.py", tmp_path, "resumed_elsewhere"])
    result = json.loads((tmp_path / "resumed_elsewhere-0.json").read_text())
    np.testing.assert_allclose(result["losses"], straight["losses"][6:], rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_full_disk_is_reported_on_all_ranks_and_training_goes_on(run_mpi, tmp_path, ranks):
    """A24, and the same for the metrics file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        (disk / "filler").write_bytes(bytes(16384))
        run_mpi(ranks, ["tests/mpi/train_cases.py", tmp_path, "full_disk"])
        for rank in range(ranks):
            result = json.loads((tmp_path / f"full_disk-{rank}.json").read_text())
            assert result["step"] == 6
            assert "No space left" in result["checkpoint_error"]
        assert not list(disk.glob(".*"))
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("case, words", [
    ("raises", ["rank 2", "ZeroDivisionError"]), ("exits", ["rank 2", "sys.exit(3)"]),
    ("damaged", ["error: rank", "/data/train/3/17.jpg", "17", "--skip-damaged"]), ("killed", [])])
def test_a_failing_rank_ends_the_job(run_mpi, tmp_path, case, words):
    """A16, A27: within seconds, non-zero, naming the rank: one traceback, or one line for damaged data."""
    result = run_mpi(3, ["tests/mpi/train_cases.py", tmp_path, case], timeout=90, check=False)
    assert result.seconds < 60, result.output      # a few seconds on a machine that is not crowded
    assert result.returncode != 0, result.output
    for word in words:
        assert word in result.stderr, result.output
    if case == "damaged":
        assert "Traceback" not in result.stderr, result.output
    if case in ("raises", "exits"):
        assert result.stderr.count("Traceback") in (1, 2), result.output       # 2: with the cause


# --- one process, no MPI --------------------------------------------------------------------------------------------


def vectors(count=40, classes=3):
    random = np.random.default_rng(0)
    labels = np.arange(count) % classes
    images = random.standard_normal((count, 4, 2, 1), dtype=np.float32) + labels[:, None, None, None].astype(np.float32)
    return ArrayDataset(images, labels, num_classes=classes)


def small_network(seed=0):
    return Network([Flatten(), Linear(8, 16), ReLU(), Linear(16, 3)], (4, 2, 1), seed=seed)


def trainer(network=None, lr=0.1):
    return Trainer(network or small_network(), SGD(lr, momentum=0.9), SerialCommunicator(), threads=1)


def test_it_learns_and_tells(capsys, tmp_path):
    result = trainer().fit(vectors(), vectors(12), minibatch=8, epochs=20, metrics=tmp_path / "m.jsonl",
                           log_interval=30)
    assert result.evaluation.count == 12 and result.evaluation.top1 > 0.8
    assert result.losses[-1] < result.losses[0] and (result.step, result.epoch) == (100, 20)
    out = capsys.readouterr().out
    for text in ("step 1/100", "step 30/100", "step 100/100", "loss", "images/s", "left 0:00", "top-1", "of 12 samples",
                 "done: 100 steps"):
        assert text in out
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 120


def test_progress_bar(capsys):
    pytest.importorskip("tqdm")
    trainer().fit(vectors(), minibatch=8, epochs=2, progress_bar=True)
    captured = capsys.readouterr()
    assert "10/10" in captured.err and "loss" in captured.err and "step 10/10" in captured.out


def test_errors_of_one_process_are_ordinary_exceptions(tmp_path):
    with pytest.raises(ZeroDivisionError):
        trainer().fit(vectors(), minibatch=8, verbose=False, callback=lambda record: 1 / 0)
    with pytest.raises(TrainingDiverged, match="step 2") as caught:
        network = small_network()
        trainer(network, lr=1e30).fit(vectors(), minibatch=8, verbose=False)
    assert caught.value.step == 2 and caught.value.culprits[0].startswith("classifier.")
    with pytest.raises(CheckpointError, match="nowhere"):
        trainer().fit(vectors(), minibatch=8, verbose=False, resume=tmp_path / "nowhere")
    for option in ("metrics", "checkpoint"):
        with pytest.raises(OSError, match="cannot write .*no/file"):
            trainer().fit(vectors(), minibatch=8, verbose=False, **{option: tmp_path / "no" / "file"})
        with pytest.raises(OSError, match="irectory"):
            trainer().fit(vectors(), minibatch=8, verbose=False, **{option: tmp_path})
    with pytest.raises(OSError, match="cannot write '/proc/c': no file can be made in '/proc'"):    # not even by root
        trainer().fit(vectors(), minibatch=8, verbose=False, checkpoint="/proc/c", metrics=tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options, message", [
    ({"minibatch": 0}, "minibatch = 0"), ({"minibatch": 2.5}, "minibatch = 2.5"), ({"epochs": -1}, "epochs = -1"),
    ({"steps": -1}, "steps = -1"), ({"log_interval": 0}, "log_interval = 0")])
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        trainer().fit(vectors(), verbose=False, **{"minibatch": 8, **options})


def test_network_must_have_an_output_for_each_class():
    with pytest.raises(ValueError, match="3 outputs.*4 classes"):
        trainer().fit(vectors(classes=4), minibatch=8, verbose=False)


def test_no_steps_only_evaluates(tmp_path):
    network = small_network()
    before = network.state_dict()
    result = trainer(network).fit(vectors(), vectors(), minibatch=8, epochs=0, verbose=False)
    assert result.step == 0 and result.evaluation.count == 40
    for name, array in network.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_stop_asked_for_at_the_end_of_an_epoch_spares_its_validation(tmp_path):
    stopping = trainer()

    def callback(record):
        if record["step"] == 5:
            stopping.request_stop("time is up")
    result = stopping.fit(vectors(), vectors(12), minibatch=8, epochs=3, verbose=False, callback=callback,
                          checkpoint=tmp_path / "c")
    assert (result.step, result.stopped, result.evaluation) == (5, "rank 0: time is up", None)
    assert load(tmp_path / "c")[1]["step"] == 5


@pytest.mark.skipif(_kernels.TARGET == "reference", reason="exact mode wants a compiled target")
def test_digests_of_exact_mode_do_not_follow_the_printed_lines():
    records = []
    exact = Trainer(small_network(), SGD(0.1), SerialCommunicator(), threads=1, exact=True)
    exact.fit(vectors(), minibatch=8, epochs=5, steps=21, verbose=False, log_interval=1, callback=records.append)
    assert [record["step"] for record in records if "digest" in record] == [10, 20, 21]


def test_resume_refuses_what_would_not_continue(tmp_path):
    path = tmp_path / "c"
    trainer().fit(vectors(), minibatch=8, steps=3, verbose=False, checkpoint=path)
    with pytest.raises(CheckpointError, match="seed 0.*has 1"):
        trainer(small_network(seed=1)).fit(vectors(), minibatch=8, verbose=False, resume=path)
    with pytest.raises(CheckpointError, match="inside an epoch"):
        trainer().fit(vectors(), minibatch=4, verbose=False, resume=path)
    with pytest.raises(CheckpointError, match="class"):
        other = ArrayDataset(vectors().images, vectors().labels, class_names=["a", "b", "c"])
        trainer().fit(other, minibatch=8, verbose=False, resume=path)
    with pytest.raises(CheckpointError, match="missing.*classifier.4"):
        wrong = Network([Flatten(), Linear(8, 16), ReLU(), Linear(16, 4), ReLU(), Linear(4, 3)], (4, 2, 1))
        trainer(wrong).fit(vectors(), minibatch=8, verbose=False, resume=path)


def test_resume_after_the_end_and_with_another_minibatch(tmp_path):
    path = tmp_path / "c"
    first = trainer().fit(vectors(), vectors(), minibatch=8, epochs=2, verbose=False, checkpoint=path)
    again = trainer().fit(vectors(), vectors(), minibatch=8, epochs=2, verbose=False, checkpoint=path, resume=path)
    assert again.losses == [] and again.step == 10 and again.evaluation == first.evaluation
    more = trainer().fit(vectors(), minibatch=20, epochs=3, verbose=False, resume=path)
    assert len(more.losses) == 2 and more.epoch == 3


def test_weights_alone_start_at_the_first_step(tmp_path, capsys):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    source = small_network(seed=5)
    safetensors_numpy.save_file(source.state_dict(), tmp_path / "w")
    network = small_network(seed=0)
    result = trainer(network).fit(vectors(), minibatch=8, epochs=0, resume=tmp_path / "w")
    assert result.step == 0 and "weights only" in capsys.readouterr().out
    for name, array in source.state_dict().items():
        np.testing.assert_array_equal(network.state_dict()[name], array)


def test_rank_of_label():
    logits = np.array([[1, 3, 2], [2, 2, 2], [2, 2, 2], [np.nan, 1, 2], [1, np.nan, 2], [np.inf, 1, 2]], np.float32)
    np.testing.assert_array_equal(rank_of_label(logits, np.array([1, 0, 2, 0, 2, 0])), [0, 0, 2, 8, 0, 8])
