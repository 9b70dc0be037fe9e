"""Digests in the metrics file, and ``python -m pcldnn replay``."""

import json

import numpy as np
import pytest

from pcldnn import cli
from pcldnn.checkpoint import load, save

SCRIPT = "tests/mpi/small_script.py"
RUN = [SCRIPT, "--minibatch", "8", "--no-validation", "--exact"]


@pytest.fixture(scope="module")
def recorded(run_mpi, tmp_path_factory):
    """A run on 2 ranks, with a partition, of 6 steps; a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("replay")
    start, end, metrics = folder / "start.safetensors", folder / "end.safetensors", folder / "run.jsonl"
    random = np.random.default_rng(0)
    np.savez(folder / "data.npz", images=random.standard_normal((30, 12, 1, 1)).astype(np.float32),
             labels=random.integers(0, 5, 30))  # fmt: skip
    wishes = ["--data", folder / "data.npz", "--metrics", metrics, "--digest-interval", "2", "--partition", "fc=1x2"]
    first = run_mpi(2, [*RUN, "--steps", "2", "--checkpoint", start, *wishes])
    assert "exact: sums are trees over 8 pieces" in first.stdout, first.output
    assert "1x2" in first.stdout, first.output
    run_mpi(2, [*RUN, "--steps", "6", "--resume", start, "--checkpoint", end, *wishes])
    return start, metrics


def replayed(capsys, *arguments):
    code = cli.main(["replay", SCRIPT, *map(str, arguments)])
    return code, capsys.readouterr()


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_digests_are_recorded(recorded):
    lines = [json.loads(line) for line in recorded[1].read_text().splitlines()]
    assert [line["step"] for line in lines if "digest" in line] == [2, 4, 6]
    for line in lines:
        if "digest" in line:
            assert len(line["digest"]) == 64
            assert all(len(digest) == 64 for digest in line["layers"].values())


def test_replay_on_one_rank(recorded, capsys):
    code, said = replayed(capsys, *recorded)
    assert (code, said.out) == (0, "steps 3 to 6: all 2 digests are those of the run\n"), said
    code, said = replayed(capsys, *recorded, "--steps", "2")
    assert (code, said.out) == (0, "steps 3 to 4: all 1 digests are those of the run\n"), said


def test_replay_names_step_and_layer(recorded, capsys, tmp_path):
    start, metrics = recorded
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    layer = list(lines[-1]["layers"])[1]
    lines[-1]["layers"][layer] = "0" * 64
    (tmp_path / "changed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = replayed(capsys, start, tmp_path / "changed.jsonl")
    assert code == 1
    assert said.out.startswith(f"step 6 differs, first in layer {layer} "), said


def test_one_bit_is_found(recorded, capsys, tmp_path):
    start, metrics = recorded
    tensors, metadata = load(start)
    name = next(name for name in tensors if name.endswith("weight"))
    flat = tensors[name].reshape(-1)
    flat[3] = np.nextafter(flat[3], np.float32(9))
    save(tmp_path / "bit.safetensors", tensors, metadata)
    code, said = replayed(capsys, tmp_path / "bit.safetensors", metrics)
    assert code == 1
    assert said.out.startswith("step 4 differs"), said


@pytest.mark.parametrize("flags, words", [
    (["--seed", "1", "--lr", "0.02"], ["seed 1 (checkpoint: 0)", "optimizer", "'lr': 0.02"]),
    (["--data", "other"], ["dataset"])])
def test_metrics_of_another_run_are_refused(recorded, run_mpi, capsys, tmp_path, flags, words):
    start, _ = recorded
    other, data = tmp_path / "other.npz", start.parent / "data.npz"
    arrays = dict(np.load(data))
    np.savez(other, images=arrays["images"] + 1, labels=arrays["labels"])
    run_mpi(1, [*RUN, "--data", data, "--steps", "4", "--metrics", tmp_path / "m.jsonl",
                *(other if flag == "other" else flag for flag in flags)])  # fmt: skip
    code, said = replayed(capsys, start, tmp_path / "m.jsonl")
    assert (code, said.out) == (2, "") and "step 4" in said.err, said
    for word in [*words, str(start), "m.jsonl"]:
        assert word in said.err, said
    assert said.err.count(" (checkpoint: ") == len(flags) // 2, said


def test_metrics_of_another_network_are_refused(recorded, capsys, tmp_path):
    """As a script of the same name with another layer would write them."""
    from pcldnn import models
    from pcldnn.digest import network_digest, run_identity

    start, metrics = recorded
    metadata = load(start)[1]
    assert metadata["network"] == network_digest(models.cd_dnn(12, (16, 16), 5, seed=7))
    changed = {**metadata, "network": network_digest(models.cd_dnn(12, (16, 17), 5))}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[-1]["run"] = run_identity(changed)
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = replayed(capsys, start, tmp_path / "m.jsonl")
    assert code == 2 and "step 6" in said.err and said.err.count(" (checkpoint: ") == 1 and "network" in said.err, said
    assert replayed(capsys, start, tmp_path / "m.jsonl", "--steps", "2")[0] == 0      # up to there it is the same run


def test_a_replay_by_other_kernels_is_refused(recorded, capsys, tmp_path):
    """Bits would differ and say nothing of the run: another ISA, direct convolution in the place of Winograd."""
    start, metrics = recorded
    tensors, metadata = load(start)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    algorithms = {name: dict.fromkeys(passes, "fft") for name, passes in metadata["algorithms"].items()}
    for key, value, words in (("target", "mmx", "wanted PCLDNN_ISA=mmx"), ("algorithms", algorithms, "PCLDNN_CONV")):
        save(tmp_path / "other.safetensors", tensors, {**metadata, key: value})
        for line in lines:
            if "run" in line:
                line["run"] = {**metadata, key: value}
        (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, said = replayed(capsys, tmp_path / "other.safetensors", tmp_path / "m.jsonl")
        assert (code, said.out) == (2, "") and words in said.err and "other.safetensors" in said.err, said


def test_records_of_no_run_are_refused(recorded, capsys, tmp_path):
    start, metrics = recorded
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[-1].pop("run")
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = replayed(capsys, start, tmp_path / "m.jsonl")
    assert code == 2 and "step 6" in said.err and "does not say of which run" in said.err, said


@pytest.mark.parametrize("which", ["no digest", "no checkpoint", "no script"])
def test_what_cannot_be_replayed(recorded, capsys, tmp_path, which):
    start, metrics = recorded
    if which == "no digest":
        metrics = tmp_path / "empty.jsonl"
        metrics.write_text('{"step": 3, "loss": 1.0}\n')
    elif which == "no checkpoint":
        start = tmp_path / "none.safetensors"
    script = "tests/cases.py" if which == "no script" else SCRIPT
    assert cli.main(["replay", script, str(start), str(metrics)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert {"no digest": "no digest", "no checkpoint": "none.safetensors", "no script": "JOB"}[which] in error
