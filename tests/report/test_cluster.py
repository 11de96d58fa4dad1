"""Cluster: the networks that it describes, and what it refuses."""

import dataclasses

from errors import names, table

import jaxcgx as cgx
from jaxcgx.report import link
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
    with names(ValueError, "Cluster link None jaxcgx link"):
        cgx.Cluster(world=4)
    with names(ValueError, "Cluster link None"):
        cgx.Cluster(world=4, up="10mbit")
    link._keep("b", link.Measured(up=2e6, down=9e6, delay=0.01))
    link._keep("c", link.Measured(up=3e6, down=8e6, delay=0.02))
    cluster = cgx.Cluster(world=4, nodes=2)
    link._keep("d", link.Measured(1.0, 1.0, 1.0))  # later: changes nothing
    network = cluster.between("tcp")
    assert (network.up, network.down) == (1e6, 4e6) and network.latency == WAYS["tcp"].latency + 0.02
    assert dataclasses.replace(cluster, latency="0s").between("tcp").latency == 0
    assert cgx.Cluster(world=4, link="1gbit").measured is None


REFUSED = [
    (dict(world=1), ValueError, "world", "1"),
    (dict(world=4.0), TypeError, "world", "4.0"),
    (dict(nodes=3), ValueError, "nodes", "3"),
    (dict(nodes=1), ValueError, "nodes", "1"),
    (dict(link="fast"), ValueError, "link", "'fast'"),
    (dict(up="1"), ValueError, "up", "'1'"),
    (dict(inner_link=None), TypeError, "inner_link", "None"),
    (dict(latency="5"), ValueError, "latency", "40ms '5'"),
    (dict(over="ib"), ValueError, "over", "'ib'"),
]
test_what_it_refuses = table({"Cluster": REFUSED}, lambda fields: cgx.Cluster(**dict(world=4, link="1gbit") | fields))
