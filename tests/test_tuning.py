"""The choice by timing: what the clock says is obeyed, the same on every rank, and kept by checkpoints."""

import numpy as np
import pytest
from test_winograd_plan import SMALL

from pcldnn import SGD, Network, Trainer, tuning
from pcldnn.checkpoint import load
from pcldnn.data import ArrayDataset
from pcldnn.partition import Partition

PASSES = ("forward", "weight_grad", "input_grad")
TWO_WAYS = dict.fromkeys(("features.2", "features.5", "features.7"), PASSES)


def network():
    return Network(SMALL, (3, 8, 8), seed=3)


@pytest.fixture
def clock(monkeypatch):
    """A made-up clock: direct takes 2 s, Winograd 3 s in the forward passes and 1 s in the others; unless `turned`."""

    class Clock:
        calls, turned = 0, False

        def seconds(self, layer, pass_name, threads):
            self.calls += 1
            slow = (pass_name == "forward") != self.turned
            return 2.0 if getattr(layer, pass_name).algorithm == "direct" else 3.0 if slow else 1.0

    clock = Clock()
    monkeypatch.delenv("PCLDNN_CONV", raising=False)
    monkeypatch.setattr(tuning, "seconds", clock.seconds)
    return clock


def test_the_clock_decides_by_layer_and_pass(clock):
    plan = network().plan(4, tune=True)
    assert plan.tuned and clock.calls == 2 * 9
    for name, passes in TWO_WAYS.items():
        wanted = {step: "direct" if step == "forward" else "winograd" for step in passes}
        assert plan.algorithms[name] == wanted
    assert "direct/winograd/winograd (tuned)" in str(plan) and str(plan).count("tuned") == 3
    again = network().plan(4, tune=plan.tuned)
    assert clock.calls == 2 * 9, "a choice that is given is not timed"
    assert str(again) == str(plan) and again.digest() == plan.digest()
    assert plan.digest() != network().plan(4, algorithm="winograd").digest()


def test_an_override_is_stronger(clock, monkeypatch):
    chosen = network().plan(4, tune=True).tuned
    clock.calls = 0
    for plan in (network().plan(4, tune=True, algorithm="direct"), network().plan(4, tune=chosen, algorithm="direct")):
        assert {step for passes in plan.algorithms.values() for step in passes.values()} == {"direct"}
        assert not plan.tuned
    monkeypatch.setenv("PCLDNN_CONV", "winograd")
    assert network().plan(4, tune=True).algorithms["features.2"]["forward"] == "winograd"
    assert clock.calls == 0


def test_exact_mode_takes_a_choice_but_makes_none(clock):
    chosen = network().plan(8, tune=True).tuned
    with pytest.raises(ValueError, match="exact mode"):
        network().plan(8, tune=True, exact=True)
    assert network().plan(8, ranks=2, tune=chosen, exact=True).tuned == chosen


def test_a_wrong_choice_is_refused():
    for tuned, words in (({"no": {}}, "no"), ({"features.2": {"step": "direct"}}, "step"),
                         ({"features.2": {"forward": "fft"}}, "fft")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            network().plan(4, tune=tuned)


def test_real_times_are_taken_once_for_a_shape(monkeypatch, target):
    monkeypatch.setattr(tuning, "_known", {})
    timed = []
    monkeypatch.setattr(tuning, "_best", lambda call: timed.append(call()) or float(len(timed)))
    first = network()
    made = first.prepare(5, threads=2, tune=True)
    assert len(timed) == 2 * 9 and made.tuned
    assert set(tuning._known.values()) == {float(i + 1) for i in range(18)}
    assert network().plan(5, threads=2, tune=True).digest() == made.digest() and len(timed) == 18


def test_of_a_layer_on_a_grid_a_slice_is_timed(monkeypatch, target):
    timed = []
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_best", lambda call: timed.append(call()) or 1.0)
    plan = network().plan(4, ranks=2, tune=True, partitions={"conv": Partition(1, 2), "fc": Partition(1, 2)})
    assert len(timed) == 2 * 9 and plan.tuned.keys() == TWO_WAYS.keys()


def test_a_checkpoint_keeps_the_choice(clock, tmp_path, capsys):
    random = np.random.default_rng(0)
    data = ArrayDataset(random.standard_normal((8, 3, 8, 8)).astype(np.float32), np.arange(8) % 5, num_classes=5)
    file = tmp_path / "run.safetensors"

    def train(steps, net=None, **options):
        resume = file if file.exists() else None
        trainer = Trainer(net or network(), SGD(0.01), threads=1, **options)
        trainer.fit(data, minibatch=4, epochs=4, steps=steps, checkpoint=file, resume=resume, progress_bar=False)
        said = capsys.readouterr()
        return load(file)[1], said

    first, said = train(2, tune=True)
    assert first["tuned"] and first["algorithms"]["features.2"]["forward"] == "direct"
    assert "tuned: features.2 direct/winograd/winograd, " in said.out and not said.err
    clock.turned, clock.calls = True, 0
    second, said = train(3, tune=True)
    assert second["tuned"] == first["tuned"] and clock.calls == 0 and not said.err
    third, said = train(4, Network(SMALL, (3, 8, 8), seed=3, algorithm="direct"))
    assert "features.2 direct/winograd/winograd, now direct" in said.err and "bits will differ" in said.err
    assert not third["tuned"]
    _, said = train(5, tune=True)
    assert clock.calls == 18 and "now winograd/direct/direct" in said.err


def test_ranks_that_time_differently_choose_alike(run_mpi):
    """Rank 1 finds Winograd slower by less than rank 0 finds it faster; of a network that differs all are told."""
    code = """
from pcldnn import Conv2d, Flatten, Linear, Network, communicator, tuning
from pcldnn.faults import DisagreementError
with communicator.create() as comm, comm.abort_on_error():
    gain = 3.0 if comm.rank == 0 else -1.0
    tuning.seconds = lambda layer, name, threads: 5 - gain * (layer.algorithms[name] == "winograd")
    net = Network([Conv2d(16, 16, 3), Conv2d(16, 16, 3), Flatten(), Linear(16 * 25, 2)], (16, 9, 9))
    found = net.prepare(2, comm, tune=True).algorithms
    assert all(set(found[f"features.{i}"].values()) == {"winograd"} for i in (0, 1)), found
    try:
        Network([Conv2d(16, 16 + comm.rank, 3), Flatten()], (16, 3, 3)).prepare(2, comm, tune=True)
    except DisagreementError as error:
        assert "features.0" in str(error)
        print("told")
"""
    assert run_mpi(2, ["tests/mpi/run_code.py", code], timeout=60).stdout.count("told") == 2
