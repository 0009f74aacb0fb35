import itertools

import pytest

import autopar
from autopar.errors import PipelineError
from autopar.inter_op.placement import place_stages


def hosts_of(first, size, cluster):
    return {d // cluster.devices_per_host for d in range(first, first + size)}


def test_in_order_where_that_will_do():
    cluster = autopar.Cluster.of("2x4 v100")
    assert place_stages([1, 1, 2, 4], cluster) == [0, 1, 2, 4]
    assert place_stages([4, 2, 2], cluster) == [0, 4, 6]


@pytest.mark.parametrize("sizes", sorted(set(itertools.permutations([4, 16, 8, 4, 8, 24]))))
def test_every_stage_has_the_fast_links_its_mesh_counts_on(sizes):
    cluster = autopar.Cluster.of("8x8 v100")
    firsts = place_stages(sizes, cluster)
    taken = sorted(d for first, size in zip(firsts, sizes, strict=True) for d in range(first, first + size))
    assert taken == list(range(64))
    for first, size in zip(firsts, sizes, strict=True):
        assert len(hosts_of(first, size, cluster)) == max(1, size // 8)


def test_parts_of_hosts_that_do_not_go_into_the_hosts():
    with pytest.raises(PipelineError, match="the stages do not fit the hosts"):
        place_stages([5, 6, 5], autopar.Cluster.of("2x8 v100"))
