"""Exchanges in two levels: nodes are pretended, so one machine is enough."""

import pytest

from pcldnn.nodes import pretended_node


@pytest.mark.parametrize("nodes", [["2+1", "1+2"], ["2+2", "3+1", "1+1+2"]], ids="/".join)
def test_exchanges_and_training_in_two_levels(run_mpi, nodes):
    """Sums and copies against NumPy, adjointness, bytes sent, training against one rank, exact mode, fallback."""
    ranks = sum(map(int, nodes[0].split("+")))
    result = run_mpi(ranks, ["tests/mpi/two_levels.py", *nodes], timeout=120)
    assert result.stdout.count("collectives hold") == len(nodes), result.output
    assert result.stderr.count("exchanges go on with messages of") == 1, result.output


def test_nodes_of_one_rank_exchange_messages(run_mpi):
    line = r"print(f'{c.node} {c.nodes} {c.transport}\n', end='')"  # in one piece: ranks write at the same time
    code = f"from pcldnn import communicator\nwith communicator.create() as c: {line}"
    said = run_mpi(2, ["tests/mpi/run_code.py", code], env={"PCLDNN_NODES": "1+1"}).stdout
    assert sorted(line[:3] for line in said.splitlines()) == ["0 2", "1 2"]
    assert said.count("(2 nodes)") == 2


@pytest.mark.parametrize("action", ["stall", "kill"])
def test_a_rank_that_stalls_or_dies(run_mpi, tmp_path, action):
    phases = "weight_grad,reduce_scatter,allgather" if action == "stall" else "reduce_scatter"
    arguments = ["tests/mpi/overlap_faults.py", action, phases, tmp_path]
    result = run_mpi(3, arguments, timeout=90, env={"PCLDNN_NODES": "1+2"}, check=False)
    assert result.stdout.count("fails at") == phases.count(",") + 1, result.output
    assert result.stdout.count("reached the end") == (3 if action == "stall" else 0), result.output
    assert (result.returncode == 0) == (action == "stall"), result.output


def test_what_is_pretended():
    def nodes(text, size):
        return [pretended_node(rank, size, {"PCLDNN_NODES": text}) for rank in range(size)]

    assert nodes("1+1+2", 4) == [0, 1, 2, 2]
    assert nodes("", 2) == [None, None]
    for text in ("2+1", "2+3", "4+0", "2x2", "+4", "-1+5"):
        with pytest.raises(ValueError, match=r"PCLDNN_NODES: got .*, wanted .* such as 3\+1, 4 in all"):
            nodes(text, 4)
