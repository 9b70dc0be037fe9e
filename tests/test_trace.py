"""Timelines: valid JSON however a run ends (A28), what they hold, and what is concluded from them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcldnn import trace, traffic
from pcldnn._kernels import SIMD_WIDTH
from pcldnn.layout import blocks
from pcldnn.trace import COMMUNICATION, COMPUTE, WAIT, Event, RankTrace, Trace


def load(path):
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    events = content["traceEvents"]
    for event in events:
        assert event["ph"] in "MX"
        assert {"name", "pid", "tid"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert "layer" in event["args"]
            assert "bytes" in event["args"]
    return content, [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_timeline_of_a_run(run_mpi, tmp_path, ranks):
    path = tmp_path / "trace.json"
    result = run_mpi(ranks, ["tests/mpi/traced_runs.py", "trained", path])
    content, events = load(path)
    assert "note" not in content["otherData"]
    assert {event["pid"] for event in events} == set(range(ranks))
    forward = [event for event in events if event["cat"] == "forward" and event["args"]["layer"] == "classifier.0"]
    assert len(forward) == 3 * ranks
    assert "profile of the last 2 steps" in result.stdout
    assert "outside kernels" in result.stdout
    if ranks > 1:
        sent = [event for event in events if event["cat"] == "reduce_scatter"]
        assert all(event["tid"] == 1 for event in sent)
        total = sum(event["args"]["bytes"] for event in sent if event["pid"] == 0)
        hidden, classes = (blocks(size, SIMD_WIDTH) * SIMD_WIDTH for size in (300, 3))
        assert total == 3 * 4 * (64 * hidden + hidden + hidden * classes + classes)
        assert "the others waited most for rank" in result.stdout
        assert "classifier.0" in result.stdout


@pytest.mark.parametrize(("case", "note"), [("no_steps", None), ("failed", "boom"), ("diverged", "TrainingDiverged")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_timeline_is_valid_however_the_run_ends(run_mpi, tmp_path, ranks, case, note):
    path = tmp_path / "trace.json"
    result = run_mpi(ranks, ["tests/mpi/traced_runs.py", case, path], check=False)
    content, events = load(path)
    assert (result.returncode == 0) == (note is None), result.output
    assert note is None or note in content["otherData"]["note"]
    assert bool(events) == (case != "no_steps")


def test_memory_is_bounded():
    recorded = Trace(limit=10)
    for _ in range(25):
        recorded.compute("forward", "a", trace.clock(), 8, 4)
    assert len(recorded.events) == 10
    assert recorded.dropped == 15
    assert recorded.totals["forward", "a"][0::2] == [25, 200]


def test_hidden_and_exposed_communication():
    """Rank 1 comes 1 s late to an exchange of 4 s, of which compute of both ranks waits for the last second."""
    ranks = []
    for rank, start in enumerate([10.0, 11.0]):
        sent = Event(COMMUNICATION, "reduce_scatter", ("a", "b"), start, 15.0, (300, 100), 0, 0)
        waited = Event(COMPUTE, WAIT, ("a",), 14.0, 15.5)
        ranks.append(RankTrace(rank, "host", [sent, waited], 0, 0.0))
    layers, late = traffic.traffic(ranks)
    assert layers["a"] == pytest.approx((300, 3.0, 0.75))
    assert layers["b"] == pytest.approx((100, 1.0, 0.25))
    assert late == {1: pytest.approx(1.0)}
    lines = traffic.summary(ranks, ["b", "a"], 1)
    assert lines[2].split() == ["b", "0.00", "1,000.00", "75", "%", "250.00", "ms"]
    assert "rank 1: 1,000.00 ms" in lines[-1]
    assert lines[-2].startswith("gradients and weights: 0.00 ms a step")  # nobody knows when their gradients were ready


def nested_steps(windows, start=0.0):
    """Events of a step: (ready, needed, seconds) of the exchange of each layer, and that exchange."""
    for i, (ready, needed, seconds) in enumerate(windows):
        name = (f"layer {i}",)
        yield Event(COMPUTE, "weight_grad", name, start + ready - 0.5, start + ready)
        yield Event(COMPUTE, "forward", name, start + needed, start + needed + 0.5)
        yield Event(COMMUNICATION, "reduce_scatter", name, start + ready, start + ready + seconds, (8,), 0, int(start) + i)


def two_ranks(events):
    events = sorted(events, key=lambda event: event.start)
    return [RankTrace(rank, "host", events, 0, 0.0) for rank in range(2)]


def test_hidden_of_what_could_be_hidden():
    """A window of 3 s inside one of 10 s, of which 2 s are waits: what fits in them, and what of it was hidden."""
    waits = [Event(COMPUTE, WAIT, ("layer 1",), 7.0, 9.0)]
    waits += [Event(COMMUNICATION, "add_input_grads", ("layer 1",), 7.0, 9.0, (8,), 0, 2)]  # activations have no window
    found = traffic.overlapped(two_ranks([*nested_steps([(3.0, 6.0, 5.0), (1.0, 11.0, 8.0)]), *waits]))
    # Layer 0: all of its 3 s. Layer 1: 10 s, of which 2 s are waits: 8 s hold 3 s and 5 s more of the 8 s.
    assert found == pytest.approx((13.0, 13.0 - 3.0, 8.0))
    assert traffic.Overlapped(4.0, 2.0, 2.5).share == 0.8


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=5), st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_no_schedule_hides_more(gaps, steps):
    """The bound is what a network carries that, each second, serves the layer that is needed first."""
    windows, middle = [], 25
    ready = needed = middle
    for before, after, seconds in gaps:  # from the first layer outwards
        ready, needed = ready - before, needed + after
        windows.append((ready, needed, seconds))
    left, carried = [seconds for _, _, seconds in windows], 0
    for second in range(2 * middle):
        for i, (ready, needed, _) in enumerate(windows):
            if ready <= second < needed and left[i]:
                left[i] -= 1
                carried += 1
                break
    events = [event for step in range(steps) for event in nested_steps(windows, 100.0 * step)]
    assert traffic.overlapped(two_ranks(events)).hideable == pytest.approx(steps * carried)
