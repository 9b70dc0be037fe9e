"""The benchmarks of one small network, so that they do not rot. Times are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from measuring import Rates

pytest.importorskip("pytest_benchmark")

REPOSITORY = Path(__file__).resolve().parents[2]
KEYS = {"net", "layer", "pass", "algorithm", "target", "threads", "minibatch", "gflops", "peak_share", "tile_share"}


def sampled(undisturbed: dict, samples: dict) -> Rates:
    """Rates after a row; loops go by their names."""
    rates = object.__new__(Rates)
    rates._loops, rates._samples = {name: name for name in samples}, samples
    rates._known = {name: (1, rate) for name, rate in undisturbed.items()}
    return rates


def test_quiet_rounds_are_those_between_two_quick_samples():
    rates = sampled({"peak": 0, "tile": 0}, {"peak": [100] * 7, "tile": [99, 50, 99, 99, 60, 99, 99]})
    rates._first_after = [1, 3, 4, 6]
    assert rates.quiet([1.0, 2.0, 3.0, 4.0]) == [2.0, 4.0]


def test_peaks_are_medians_and_never_far_below_the_best():
    rates = sampled({"peak": 100, "own": 50}, {"peak": [93, 97, 99], "own": [30, 35, 49]})
    assert rates.peak == 97 and rates.own_peak == pytest.approx(45)
    assert sampled({"peak": 100}, {"peak": [93]}).own_peak is None


def run(*arguments):
    """Run a Python program that must succeed."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """JSON file of a run over everything of the tiny network."""
    file = tmp_path_factory.mktemp("benchmark") / "results.json"
    run("-m", "pytest", "tests/benchmarks", "-q", "-p", "no:cacheprovider", "--benchmark-only", "--nets=tiny",
        "--minibatch=2", "--benchmark-min-rounds=1", "--benchmark-max-time=0.001",
        f"--benchmark-json={file}")  # fmt: skip
    return file


def test_every_row_says_what_it_is(results):
    rows = json.loads(results.read_text())["benchmarks"]
    infos = [row["extra_info"] for row in rows]
    assert all(KEYS <= set(info) for info in infos)
    layers = {(info["layer"], info["pass"]) for info in infos}
    assert {("conv1", "forward"), ("conv2", "input_grad"), ("pool1", "input_grad"), ("pool2", "forward"),
            ("stage1", "forward"), ("stage1", "weight_grad"), ("fc7", "weight_grad"), ("all", "step"),
            ("sgd", "update")} <= layers  # fmt: skip
    assert not {("conv1", "input_grad"), ("stage1", "input_grad"), ("pool3", "forward")} & layers
    computing = [info for info in infos if info["layer"][:4] in ("conv", "fc6", "fc7", "all")]
    assert all(info["gflops"] > 0 and info["peak_share"] > 0 for info in computing)
    assert all(info["bytes_per_s"] > 0 and info["triad_share"] > 0 for info in infos if info["pass"] != "step")


def test_rows_of_a_layer_and_pass_form_a_group(results):
    groups = {}
    for row in json.loads(results.read_text())["benchmarks"]:
        info = row["extra_info"]
        if "direct_ratio" in info:
            continue
        groups.setdefault(row["group"], []).append((info["target"], info["algorithm"]))
    assert all(len(rows) == len(set(rows)) and "reference" in dict(rows) for rows in groups.values())
    for step in ("forward", "input_grad", "weight_grad"):
        others = ("reference", "torch", "onednn")
        ways = [way for target, way in groups[f"tiny conv2 {step} n2"] if target not in others]
        assert ways == ["direct", "winograd"] * (len(ways) // 2)
    assert {way for _, way in groups["tiny conv1 forward n2"]} == {"direct", "im2col"}
    assert {way for _, way in groups["tiny stage1 forward n2"]} == {"direct", "im2col"}


def test_winograd_and_direct_by_turns(results):
    rows = [row["extra_info"] for row in json.loads(results.read_text())["benchmarks"] if "turns" in row["group"]]
    assert {row["pass"] for row in rows} == {"forward", "input_grad", "weight_grad"}
    assert all(row["direct_ratio"] > 0 and row["algorithm"] == "winograd" for row in rows)


def test_report(results, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nWritten by hand.\n")
    run("scripts/benchmark_report.py", results, "--output", page, "--no-plot")
    text = page.read_text()
    assert text.startswith("# Performance\n\nWritten by hand.\n")
    assert "| tiny | conv2 | weight_grad | 2 | direct |" in text
    assert "| tiny | conv2 | weight_grad | 2 | winograd |" in text
    assert "| tiny | 2 | 3 |" in text
    run("scripts/benchmark_report.py", results, "--output", page, "--no-plot")
    assert page.read_text() == text


def test_plot(results, tmp_path):
    pytest.importorskip("matplotlib")
    run("scripts/benchmark_report.py", results, "--output", tmp_path / "performance.md")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
