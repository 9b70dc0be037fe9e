"""The communication thread, the schedule of exchanges, and that neither changes a bit of what is learnt."""

import collections
import itertools
import os
import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcldnn import models, overlap, schedule
from pcldnn.commthread import CommunicationThread
from pcldnn.layers import Linear, Sigmoid
from pcldnn.partition import Partition
from pcldnn.plan import plan

# --- the thread ---------------------------------------------------------------------------------------------------


def test_commands_run_in_order_on_one_other_thread():
    thread, ran = CommunicationThread(), []
    requests = [thread.submit(f"command {i}", lambda i=i: ran.append((i, threading.current_thread().name)) or i)
                for i in range(20)]  # fmt: skip
    assert [request.wait() for request in requests] == list(range(20))
    assert ran == [(i, "communication") for i in range(20)]
    thread.close()
    thread.close()  # a second time: nothing
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit("late", print)


def test_an_error_reaches_who_waits_and_stops_what_is_behind():
    thread, ran = CommunicationThread(), []
    gate = threading.Event()
    first = thread.submit("first", gate.wait)
    bad = thread.submit("reduce_scatter of fc6", lambda: 1 / 0)
    behind = thread.submit("behind", ran.append, 1)
    assert not first.done
    gate.set()
    for request in (bad, behind):
        with pytest.raises(ZeroDivisionError) as error:
            request.wait()
        assert "reduce_scatter of fc6" in error.value.__notes__[0]
    assert not ran
    with pytest.raises(ZeroDivisionError):
        thread.close()


def test_an_awaited_error_is_known_and_does_not_stop_the_others():
    thread = CommunicationThread()
    with pytest.raises(ZeroDivisionError):
        thread.submit("agree", lambda: 1 / 0, awaited=True).wait()
    assert thread.submit("next", lambda: 5).wait() == 5
    thread.close()


def test_waiting_leaves_the_core_to_compute():
    thread = CommunicationThread()
    end = time.monotonic() + 0.5
    before = time.process_time()
    thread.submit("a long wait", thread.idle, lambda: time.monotonic() > end).wait()
    assert time.process_time() - before < 0.2
    thread.close()


# --- the schedule ---------------------------------------------------------------------------------------------------


def bundles(made):
    backward = [bundle for stage in made.backward.values() for bundle in stage.gradients]
    return backward, [bundle for stage in made.update for bundle in stage.gradients]


def check(planned, made):
    """Everything travels once; a layer's gradients not before they are there; weights from the first layer on."""
    exchanged = {message.layer for message in planned.messages if message.kind == "reduce_scatter"}
    learning = [layer.name for layer in planned.layers if layer.name in exchanged]
    backward, held = bundles(made)
    parts = [part for bundle in (*backward, *held) for part in bundle]
    wanted = {(name, i) for part in parts for name, i in [(part.layer, i) for i in range(part.count)]}
    assert len(parts) == len(set(parts))
    assert {(part.layer, part.index) for part in parts} == wanted
    assert {part.layer for part in parts} == set(learning)
    ready = set()
    for layer in reversed(learning):
        ready.add(layer)
        assert {part.layer for bundle in made.backward[layer].gradients for part in bundle} <= ready
    left = collections.Counter(part.layer for part in parts)  # parts of gradients that have not come
    came, updated = collections.Counter(), []  # parts of weights
    for layer, stage in [*((name, made.backward[name]) for name in reversed(learning)), *((None, s) for s in made.update)]:
        left.subtract(part.layer for bundle in stage.gradients for part in bundle)
        assert not any(left[name] for name in stage.layers)
        updated += stage.layers
        weights = [part.layer for bundle in stage.weights for part in bundle]
        came.update(weights)
        assert set(weights) <= set(updated)
        if layer is not None:  # in backward only what is behind the layer that computes
            assert all(learning.index(name) > learning.index(layer) for name in (*weights, *stage.layers))
    assert sorted(updated) == sorted(learning)
    assert came == collections.Counter(part.layer for part in parts)
    in_update = [name for stage in made.update for name in stage.layers]
    assert in_update == [name for name in learning if name in in_update]


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(2, 9), st.floats(1e3, 1e12))
@settings(max_examples=60, deadline=None)
def test_any_schedule_is_complete_and_in_order(widths, ranks, bandwidth):
    layers = [part for pair in itertools.pairwise(widths) for part in (Linear(*pair), Sigmoid())]
    planned = plan(layers, (widths[0],), 64, ranks)
    for rate, early in itertools.product((bandwidth, float("inf")), (False, True)):
        made = schedule.schedule(planned, rate, None, early)
        check(planned, made)
        assert made == schedule.schedule(planned, rate, None, early)
        assert early or not any(stage.layers for stage in made.backward.values())
    assert not bundles(made)[1]
    assert len(made.update) <= 1  # the first layer's, and what shares its exchange


def test_large_layers_at_the_end_do_not_block_the_first():
    """VGG-A over 1 Gbit/s: most of FC6 (411 MB) is held back, and all convolutions' gradients travel in backward."""
    planned = plan(models.vgg_a().layers, (3, 224, 224), 32, 8, partitions={"fc": Partition(8)})
    made = schedule.schedule(planned, 125e6)
    check(planned, made)
    held = [part for bundle in bundles(made)[1] for part in bundle]
    assert {part.layer.split(".")[0] for part in held} == {"classifier"}
    assert sum(part.bytes for part in held) > 200e6
    weights = [part.layer for stage in made.update for bundle in stage.weights for part in bundle]
    assert weights[0] == "features.0"


def test_small_layers_share_an_exchange():
    planned = plan([Linear(10, 10)] * 5, (10,), 8, 2, partitions={"fc": Partition(2)})
    made = schedule.schedule(planned)
    assert [len(bundle) for bundle in bundles(made)[0]] == [5]
    assert [len(bundle) for stage in made.update for bundle in stage.weights] == [5]


@pytest.mark.parametrize(
    ("ranks", "pieces", "awaited"), [(2, 8, False), (3, 8, True), (5, 8, False), (5, 16, True), (9, 8, False)]
)
def test_exact_mode_overlaps_where_partial_sums_stay(ranks, pieces, awaited):
    """What must be exchanged before backward goes on is neither fused nor held back."""
    layers = [Linear(50, 3000), Sigmoid(), Linear(3000, 2000), Sigmoid(), Linear(2000, 10)]
    grids = {"fc": Partition(ranks)}
    exact = plan(layers, (50,), 64, ranks, partitions=grids, exact=pieces)
    for early in (False, True):
        made = schedule.schedule(exact, 1e6, None, early)
        check(exact, made)
        if awaited:
            assert made.awaited == set(made.backward) and not bundles(made)[1]
            assert all({part.layer for bundle in stage.gradients for part in bundle} == {name}
                       for name, stage in made.backward.items())  # fmt: skip
        else:
            assert made == schedule.schedule(plan(layers, (50,), 64, ranks, partitions=grids), 1e6, None, early)
            assert bundles(made)[1]


@pytest.mark.parametrize("exact", [False, 8])
def test_the_pace_decides_what_is_held_back(exact):
    """Also where some layers are awaited (in exact mode the last one, of 5 and of 3 pieces) and others are not."""
    layers = [Linear(50, 3000), Sigmoid(), Linear(3000, 2000), Sigmoid(), Linear(2000, 1000)]
    grids = {"fc1": Partition(6), "fc2": Partition(3, 2), "fc3": Partition(2, 3)}
    planned = plan(layers, (50,), 64, 6, partitions=grids, exact=exact)
    first = schedule.schedule(planned)
    assert first.awaited == ({"4"} if exact else set())
    hidden = first.backward.keys() - first.awaited
    counts = []
    for seconds in (1e-3, 3.0, 1e3):
        for early in (True, False):
            made = schedule.schedule(planned, 1e6, dict.fromkeys(hidden, seconds), early)
            check(planned, made)
        counts.append(len(bundles(made)[1]))
    assert counts[0] > counts[1] > counts[2] == 0


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_overlap_changes_no_bit(run_mpi, ranks):
    result = run_mpi(ranks, "tests/mpi/overlap_cases.py", timeout=120)
    assert f"same bits on {ranks} ranks with a communication thread" in result.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_overlap_changes_no_bit_on_grids_and_in_exact_mode(run_mpi, ranks):
    assert run_mpi(ranks, ["tests/mpi/overlap_cases.py", "grids"], timeout=180).stdout == "same bits on grids\n"


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_follow_the_rate_that_rank_0_measured(run_mpi, ranks):
    assert run_mpi(ranks, ["tests/mpi/overlap_cases.py", "followed"]).stdout == "same bits whatever was measured\n"


def test_a_refused_step_leaves_nothing_to_the_next_one(run_mpi):
    result = run_mpi(2, ["tests/mpi/overlap_cases.py", "refused"])
    assert result.stdout == "same bits without the refused steps\n"


def test_the_pace_leaves_out_refused_steps(monkeypatch):
    """Each layer takes 2 s; behind the refused step, which stops at its last layer, 100 s go by."""
    now = 0.0
    monkeypatch.setattr(overlap, "clock", lambda: now)
    pace = overlap.Pace()
    for update in (True, True, False, True):
        pace.begin()
        for layer in ("b", "a", None) if update else ("b", "a"):
            pace.mark(layer)
            now += 2
        now += 100
    assert pace.steps == 3 and pace.take() == ({"b": 2, "a": 2}, None)


def test_the_pace_of_exchanges_is_that_of_most_bytes():
    """Neither one that waited for a late rank nor many small ones make the network slow."""
    pace = overlap.Pace()
    for size, seconds in (4e6, 0.04), (4e6, 0.9), (4e6, 0.038), *[(1e3, 0.001)] * 20, (0, 0.0):
        pace.carried(size, seconds)
    assert pace.take()[1] == 4e6 / 0.04
    assert pace.take()[1] is None, "of exchanges since the last time"


def test_a_program_that_closes_nothing_ends(run_mpi):
    result = run_mpi(3, ["tests/mpi/overlap_cases.py", "unclosed"])
    assert result.stdout.count("end of the program") == 3


def test_without_thread_support_exchanges_block(run_mpi):
    code = """
import mpi4py; mpi4py.rc.thread_level = "serialized"
from pcldnn import communicator
with communicator.create() as comm:
    said = comm.start_thread()
    assert not comm.has_thread
    print(said)
"""
    said = run_mpi(2, ["tests/mpi/run_code.py", code]).stdout
    assert said.count("MPI was started with thread level serialized") == 2


# --- faults -------------------------------------------------------------------------------------------------------

PHASES = (
    "data", "forward", "weight_grad", "input_grad", "update", "reduce_scatter", "allgather", "checkpoint", "write",
)  # fmt: skip
FAULTS = "tests/mpi/overlap_faults.py"
# PCLDNN_ALL_FAULTS=1 asks for every fault at every phase, through shared memory and by messages.
MATRIX = list(itertools.product("10", PHASES))
EVERY = os.environ.get("PCLDNN_ALL_FAULTS") == "1"
ERRORS = MATRIX if EVERY else [*(("1", phase) for phase in PHASES), ("0", "reduce_scatter")]
KILLS = MATRIX if EVERY else [("1", "weight_grad"), ("0", "allgather"), ("1", "write")]
STALLS = MATRIX if EVERY else [(shared, ",".join(PHASES)) for shared in "10"]  # all in one run
ENDS = 30  # [s] from the fault to the end of the job: about 1, and more on a crowded machine


def end_of(run_mpi, tmp_path, action, phase, shared):
    """What a job of two ranks says that ends by a fault of one of them, in time."""
    result = run_mpi(2, [FAULTS, action, phase, tmp_path], timeout=90, env={"PCLDNN_SHM": shared}, check=False)
    assert result.returncode != 0, result.output
    assert "reached the end" not in result.stdout, result.output
    failure = float(re.search(r"fails at ([\d.]+)", result.stdout)[1])
    assert time.monotonic() - failure < ENDS, result.output
    return result


@pytest.mark.parametrize(("shared", "phase"), ERRORS)
def test_an_error_at_any_phase_ends_the_job(run_mpi, tmp_path, shared, phase):
    result = end_of(run_mpi, tmp_path, "raise", phase, shared)
    assert result.stderr.count("pcldnn: rank ") == 1, result.output  # one report
    assert f"pcldnn: rank {int(phase != 'write')} of 2" in result.stderr, result.output
    assert "ValueError: boom" in result.stderr, result.output
    if phase in ("update", "reduce_scatter", "allgather"):
        assert f"in {phase} of" in result.stderr, result.output
        assert "thread 'communication'" in result.stderr, result.output


@pytest.mark.parametrize(("shared", "phase"), KILLS)
def test_a_killed_rank_ends_the_job(run_mpi, tmp_path, shared, phase):
    end_of(run_mpi, tmp_path, "kill", phase, shared)
    assert not list(tmp_path.glob("*.safetensors")), "a checkpoint that is not complete"


@pytest.mark.parametrize(("shared", "phases"), STALLS)
def test_a_stalled_rank_is_waited_for(run_mpi, tmp_path, shared, phases):
    result = run_mpi(3, [FAULTS, "stall", phases, tmp_path], timeout=90, env={"PCLDNN_SHM": shared})
    assert result.stdout.count("reached the end") == 3, result.output
    assert result.stdout.count("fails at") == phases.count(",") + 1, result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint.safetensors"]
