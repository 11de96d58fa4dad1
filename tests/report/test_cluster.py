"""Cluster: the networks that it describes, and what it refuses."""

import pytest
from errors import raises, says

import jaxcgx as cgx
from jaxcgx.transports.network import PAYLOAD


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(world=1), says("Cluster", "world", expected="an integer of at least 2", got="1")),
        (dict(world=4.0), says("Cluster", "world", expected="an integer of at least 2", got="4.0")),
        (dict(nodes=3), says("Cluster", "nodes", expected="a divisor of world=4", got="3")),
        (dict(nodes=1), says("Cluster", "nodes", expected="a divisor of world=4, at least 2", got="1")),
        (dict(link="fast"), says("Cluster", "link", expected="a number and one of", got="'fast'")),
        (dict(up="1"), says("Cluster", "up", expected="a number and one of", got="'1'")),
        (dict(inner_link=None), says("Cluster", "inner_link", expected="a number and one of", got="None")),
        (dict(latency="5"), says("Cluster", "latency", expected="a number and one of us, ms, s", got="'5'")),
        (dict(over="ib"), says("Cluster", "over", expected="one of 'gloo', 'tcp', 'duplex'", got="'ib'")),
    ],
)
def test_what_it_refuses(fields, said):
    with raises((TypeError, ValueError), said):
        cgx.Cluster(**dict(world=4, link="1gbit") | fields)
