"""A job on a cluster that is there already, over two nodes of one processor each."""

from __future__ import annotations

import pytest

from tests.cluster.cluster_run import PRIVATE, begin, cluster_by, config_of, ended, folder_with_one_process, metrics_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_one_process(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def address():
    with cluster_by("two_nodes.py") as line:
        yield line


@pytest.mark.slow
@pytest.mark.parametrize("by", ["address", "RAY_ADDRESS"])
def test_a_job_spreads_over_nodes_and_leaves_the_cluster_as_it_was(folder, address, by):
    """A processor for each: the second run would find no room if the first had kept any."""
    cluster = {"backend": "ray", "start_timeout_s": 60.0, **({"address": address} if by == "address" else {})}
    run = begin(config_of(folder, by, cluster=cluster, train={"parallel": {"shard": 2}}), **PRIVATE, RAY_ADDRESS=address)
    status, _, err = ended(run)
    assert status == 0, err
    for mine, theirs in zip(metrics_of(folder, by), metrics_of(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5)


@pytest.mark.slow
def test_no_room_is_told_with_what_is_wanted(folder, address):
    cluster = {"backend": "ray", "address": address, "start_timeout_s": 3.0}
    status, _, err = ended(begin(config_of(folder, "no_room", cluster=cluster, train={"parallel": {"shard": 3}}), **PRIVATE))
    assert status == 2
    assert "the Ray cluster had no room within 3 s: the run wants 3 CPUs, of which it has 2 (2 free), in 3 bundles; lower" in err


APART = {"backend": "ray", "layout": "disaggregate", "start_timeout_s": 60.0}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "delta"])
def test_the_engine_may_be_on_another_node_than_the_leader(folder, address, transport):
    """A processor on each: one has the trainer, the other the engine."""
    name = f"apart_{transport}"
    config = config_of(folder, name, cluster={**APART, "address": address}, sync={"transport": transport})
    status, _, err = ended(begin(config, **PRIVATE))
    assert status == 0, err
    for mine, theirs in zip(metrics_of(folder, name), metrics_of(folder, "alone"), strict=True):
        of_both = mine.keys() & theirs.keys()  # an engine of its own tells more
        assert {"optim/grad_norm", "reward/total"} < of_both
        assert {key: mine[key] for key in of_both} == pytest.approx({key: theirs[key] for key in of_both}, rel=1e-3, abs=2e-5)


@pytest.mark.slow
def test_memory_that_another_node_does_not_have_is_told_with_the_remedy(folder, address):
    status, _, err = ended(begin(config_of(folder, "apart_shared", cluster={**APART, "address": address}), **PRIVATE))
    assert status == 2
    assert "engine copy 0 was placed on" in err and "set sync.transport to broadcast, delta or disk" in err
