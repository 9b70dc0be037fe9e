"""Who owns what."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcldnn.partition import Partition, bounds, shard_sizes, share, shares


@given(st.integers(0, 10**12), st.integers(1, 600))
def test_shares_are_fair_and_complete(count, parts):
    sizes = shares(count, parts)
    assert len(sizes) == parts
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_share_is_the_place_of_a_share(count, parts):
    pieces = [share(count, parts, index) for index in range(parts)]
    assert [stop - start for start, stop in pieces] == list(shares(count, parts))
    assert pieces[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    assert pieces == [bounds(shares(count, parts), index) for index in range(parts)]


@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([4, 8, 16]))
def test_shards_are_whole_vectors(elements, owners, vector):
    sizes = shard_sizes(elements, owners, vector)
    assert len(sizes) == owners
    assert sum(sizes) == elements
    starts = [bounds(sizes, index)[0] for index in range(owners) if sizes[index]]
    assert all(start % vector == 0 for start in starts)
    assert max(sizes) - min(size for size in sizes) <= 2 * vector - 1
    if elements % vector == 0:
        assert max(sizes) - min(sizes) <= vector


def test_more_owners_than_vectors():
    assert shard_sizes(16, 4, 8) == (8, 8, 0, 0)
    assert shard_sizes(10, 3, 8) == (8, 2, 0)
    assert shard_sizes(0, 2, 8) == (0, 0)


def test_partition():
    assert Partition(4, 2).ranks == 8
    assert str(Partition(4, 2)) == "4x2"
    with pytest.raises(ValueError, match="data=0"):
        Partition(0, 2)
    with pytest.raises(ValueError, match="index=3"):
        share(10, 3, 3)
    with pytest.raises(ValueError, match="parts=0"):
        shares(10, 0)
