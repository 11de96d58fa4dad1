"""Cluster: the networks that it describes, and what it refuses."""

import dataclasses
import platform

import pytest
from errors import names

import jaxcgx as cgx
from jaxcgx.report import link, machine
from jaxcgx.transports.network import PAYLOAD, WAYS


def test_ranks_of_a_host_share_its_link():
    cluster = cgx.Cluster(world=8, nodes=2, link="500mbit", up="100mbit", inner_link="40gbit", latency="20ms")
    assert (cluster.hosts, cluster.each) == (2, 4)
    network = cluster.between("tcp")
    assert (network.up, network.down) == (PAYLOAD * 1e8 / 4, PAYLOAD * 5e8 / 4)
    assert (network.latency, network.mover, network.sharing) == (0.02, "tcp", 4)
    assert cluster.inside() == cgx.Network(up=PAYLOAD * 4e10, mover="duplex")


def test_every_rank_has_its_own_host_by_default():
    cluster = cgx.Cluster(world=4, link="1gbit")
    assert (cluster.hosts, cluster.each) == (4, 1)
    assert cluster.between("gloo") == cgx.Network(up=PAYLOAD * 1e9, down=PAYLOAD * 1e9, mover="gloo")
    assert cluster.movers == ["gloo", "tcp"] and cgx.Cluster(world=4, link="1gbit", over="tcp").movers == ["tcp"]


def test_without_a_rate_the_slowest_measured_link_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = "Cluster link None jaxcgx link"
    with names(ValueError, expected):
        cgx.Cluster(world=4)
    with names(ValueError, "Cluster link None"):
        cgx.Cluster(world=4, up="10mbit")
    for peer, found in (("b", link.Measured(up=2e6, down=9e6, delay=0.01)), ("c", link.Measured(3e6, 8e6, 0.02))):
        machine.save("links", platform.node(), peer, dataclasses.asdict(found))
    cluster = cgx.Cluster(world=4, nodes=2)
    machine.save(
        "links", platform.node(), "d", dataclasses.asdict(link.Measured(1.0, 1.0, 1.0))
    )  # later: changes nothing
    network = cluster.between("tcp")
    assert (network.up, network.down) == (1e6, 4e6) and network.latency == WAYS["tcp"].latency + 0.02
    assert dataclasses.replace(cluster, latency="0s").between("tcp").latency == 0
    assert cgx.Cluster(world=4, link="1gbit").measured is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(world=1), "Cluster world 1"),
        (dict(world=4.0), "Cluster world 4.0"),
        (dict(nodes=3), "Cluster nodes 3"),
        (dict(nodes=1), "Cluster nodes 1"),
        (dict(link="fast"), "Cluster link 'fast'"),
        (dict(up="1"), "Cluster up '1'"),
        (dict(inner_link=None), "Cluster inner_link None"),
        (dict(latency="5"), "Cluster latency 40ms '5'"),
        (dict(over="ib"), "Cluster over 'ib'"),
    ],
)
def test_what_it_refuses(fields, said):
    with names((TypeError, ValueError), said):
        cgx.Cluster(**dict(world=4, link="1gbit") | fields)
