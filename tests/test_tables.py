"""Tests figures of the docs: those that follow from the library are computed, others are those of committed results.

tests/train/test_sharded.py has the table of docs/fsdp.md.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import roundtrip, vnmse

import jaxcgx as cgx
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange import costs
from jaxcgx.transports.network import Network

ROOT = pathlib.Path(__file__).parent.parent
NORMAL = np.random.default_rng(0).standard_normal(2**20, np.float32)


def page(name):
    """Returns the words of a page with single spaces between them, and its tables, each as a list of rows."""
    text = (ROOT / f"docs/{name}.md").read_text()
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    cells = lambda line: [cell.strip() for cell in line.strip().strip("|").split("|")]
    return " ".join(text.split()), [[cells(line) for line in table.splitlines()] for table in found]


def table(name, header):
    (found,) = [rows for rows in page(name)[1] if rows[0][: len(header)] == header]
    return found[0], found[2:]


def result(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def lost(codec):
    return vnmse(NORMAL, roundtrip(NORMAL, codec))


def assert_printed(value, text, off=0.02):
    """Checks that a page prints a value, which may be off by a fraction as it is a sample's, in the digits it has."""
    digits = len(text.partition(".")[2])
    assert abs(value - float(text)) <= 0.5001 * 10.0**-digits + off * value, (value, text)


def test_the_errors_of_codecs_with_feedback():
    header, rows = table("feedback", ["bucket"])
    assert header[1:] == ["`MaxMin` 1", "2", "3", "4", "`AbsMax` 2", "3", "4", "`Sign`"]
    assert [row[0] for row in rows] == ["64", "512"]
    for bucket, *cells in rows:
        size = int(bucket)
        codecs = [cgx.MaxMin(bits, size) for bits in (1, 2, 3, 4)]
        codecs += [*(cgx.AbsMax(bits, size) for bits in (2, 3, 4)), cgx.Sign(size)]
        for codec, text in zip(codecs, cells, strict=True):
            assert_printed(lost(codec), text)

    words = re.search(r"`Eden` has ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) for 1 to 4 bits", page("feedback")[0])
    for bits in (1, 2, 3, 4):
        assert_printed(lost(cgx.Eden(bits)), words[bits])
    twice = lost(cgx.MaxMin(4, rounding="stochastic")) / lost(cgx.MaxMin(4))
    assert 1.95 < twice < 2.05  # "the error is twice as large"


def test_the_table_of_codecs():
    """Bits are computed. Errors are those of `make bench-errors`."""
    header, rows = table("codecs", ["codec", "bits per element"])
    assert header[2:] == ["normal", "Laplace", "Student t, 3 degrees"] and rows
    measured = {(row["codec"], row["numbers"]): row["one"] for row in result("errors")["codecs"]}
    for name, bits, *errors in rows:
        codec = eval(f"cgx.{name.strip('`')}")
        assert (spell(codec), "normal") in measured, (
            f"add {name} to FAMILIES in benchmarks/errors.py and run `make bench-errors`"
        )
        assert_printed(codec.wire_bytes((2**20,), jnp.float32) * 8 / 2**20, bits, 0)
        for numbers, text in zip(("normal", "laplace", "student"), errors, strict=True):
            assert_printed(measured[spell(codec), numbers], text, 0)


@pytest.mark.parametrize(
    ("ratio", "spelled"), [(0.001, "13 ranks on at a ratio of 0.1 %"), (0.01, "12 ranks on at 1 %")]
)
def test_from_how_many_ranks_a_sparse_sum_is_smaller_in_two_shots(ratio, spelled):
    leaf, codec = jax.ShapeDtypeStruct((2**24,), jnp.float32), cgx.TopK(ratio)
    two, one = (
        [costs.sent(schedule, codec, [leaf], ranks) for ranks in range(3, 33)] for schedule in ("two_shot", "one_shot")
    )
    fewer = [ranks for ranks, a, b in zip(range(3, 33), two, one) if a < b]
    assert fewer == list(range(fewer[0], 33)) and f"from {spelled}".startswith(f"from {fewer[0]} ranks on")
    assert spelled in page("collectives")[0]


def test_a_small_message_over_8_ranks():
    leaf, codec = jax.ShapeDtypeStruct((3000,), jnp.float32), cgx.Cast("float16")
    load = costs.Load.of(codec, [leaf], 12_000, 8, None)
    chosen = costs.choose(load, Network())
    words = "for 3,000 elements as float16 over 8 ranks it chooses `{}`, which sends {:,} bytes. `lax.psum` sends {:,}."
    plain = costs.sent("two_shot", cgx.Raw(), [leaf], 8)
    assert words.format(chosen, costs.sent(chosen, codec, [leaf], 8), plain) in page("collectives")[0]


def test_the_derived_errors():
    """docs/error-bounds.md computes them from the mean squared range of a bucket."""
    text = page("error-bounds")[0]
    buckets = NORMAL.reshape(-1, 512)
    squares = float(np.square(np.ptp(buckets, axis=1)).mean())
    assert_printed(squares, re.search(r"in a bucket of 512 is ([\d.]+)\. ", text)[1])
    first = squares / 15**2 / 12
    assert_printed(first, re.search(r"/ 15\^2 / 12 = ([\d.]+)\$", text)[1])
    assert_printed(squares / 3**2 / 12, re.search(r"2 bits ([\d.]+), and 8 bits", text)[1])
    measured = re.search(r"The measured values are ([\d.]+), ([\d.]+) and", text)
    assert_printed(lost(cgx.MaxMin(4)), measured[1])
    assert_printed(lost(cgx.MaxMin(2)), measured[2])
    assert_printed(1 - 2 / np.pi, re.search(r"\$1 - 2/\\pi = ([\d.]+)\$ of", text)[1], 0)
    assert_printed(1 / (2 / np.pi) - 1, re.search(r"\$D = 1 - 2/\\pi\$ gives ([\d.]+)\.", text)[1], 0)
    assert_printed(1 / (1 - 0.1175) - 1, re.search(r"\$D = 0.1175\$ gives ([\d.]+)\.", text)[1], 0)
    assert_printed(4.0**-5 * (7 / 8 + 1), re.search(r"8 ranks and 5 bits this is ([\d.]+)\.", text)[1], 0)
    assert_printed(7 / 8 * 0.0138 + 0.0138, re.search(r"7/8 \\cdot 0.0138 \+ 0.0138 = ([\d.]+)\$", text)[1], 0)


def test_the_planner_against_measurements():
    """docs/planner.md counts the rows of prediction.json."""
    text, found = page("planner")[0].replace(" %", "%"), result("prediction")
    new, old = ([row for row in found["rows"] if (row["table"] == "New runs") is kind] for kind in (True, False))
    count = lambda offs: f"{sum(abs(off) <= found['goal'] for off in offs)} of {len(offs)}"
    offs = lambda rows: [off for row in rows for off in row["off"].values()]
    two, four, eight = (count(offs([r for r in new if r["processes"] == hosts])) for hosts in (2, 4, 8))
    within = f"{count(offs(new))} predictions are within 15%: {two} between 2 hosts, {four.split()[0]} between 4, "
    assert f"{within}{eight.split()[0]} between 8. The median error is {np.median(np.abs(offs(new))):.0%}" in text
    assert f"{count(offs(old))} are within 15%" in text

    fast = lambda rows, ways, of: f"{sum(r['ms'][of(r)] <= 1.1 * min(r['ms'][way] for way in ways) for r in rows)}"
    load = lambda row: costs.Load(
        row["processes"], row["size_bytes"], cgx.MaxMin(4).wire_bytes((row["size_bytes"] // 4,), jnp.float32)
    )
    auto = lambda row: costs.choose(load(row), Network(mover="gloo"))
    tcp, choices = (lambda _: "Tcp"), ("psum", "one_shot", "two_shot")
    assert fast(old, old[0]["ms"], tcp) == "8" and f"and in {fast(new, new[0]['ms'], tcp)} of {len(new)} cases" in text
    assert fast(old, choices, auto) == "8" and f"in all of the 8 cases, and in {fast(new, choices, auto)} of" in text
    rings = *choices, "ring"
    assert f"in {fast(old, rings, auto)} of the 8 and in {fast(new, rings, auto)} of the 27 cases" in text

    others = {row["what"]: row for row in found["others"]}
    assert len(others) == 5
    slow, uneven = (others[f"hierarchy, {line}"]["off"] for line in ("100 Mbit/s", "110 up, 500 down"))
    assert f"are {slow:.0%} too high at 100 Mbit/s, and {uneven:.0%} between lines of" in text
    gained = others["hierarchy, 1 Gbit/s"]
    assert f"gains {gained['ms']:.0f} ms of a step in place of {gained['predicted_ms']:.0f}," in text
    assert abs(others["slow line, two_shot"]["off"]) <= 0.01
    ring = others["slow line, ring"]
    assert f"and a ring {ring['ms'] / ring['predicted_ms'] - 1:.0%} longer than predicted" in text

    place = dict(network="loopback, 2 processes", what="calls", size_bytes=2**24)
    (calls,) = (row["ms"] for row in result("collectives")["rows"] if place.items() <= row.items())
    assert f"of 16 MiB take {calls['Tcp'] / calls['one_shot']:.2f} times as long as `one_shot` over Gloo" in text

    steps = found["steps"]
    of = lambda name, **where: count([r["off"] for r in steps if name in r["method"] and where.items() <= r.items()])
    median = np.median([abs(r["off"]) for r in steps])
    assert f"{of('')} steps are within 15%, and the median error is {median:.0%}" in text
    assert of("psum, one array") == "12 of 12"
    both = [r["off"] for r in steps if r["method"] in ("MaxMin(4), Gloo", "MaxMin(4), Tcp")]
    assert f"`MaxMin(4)` over Gloo and over `Tcp`, {count(both)}." in text
    assert f"A psum of each array: {of('psum, float32')}." in text
    assert f"`PowerSGD(4)`: {of('PowerSGD')}." in text and f"DiLoCo: {of('DiLoCo')}." in text
    assert f"at 100 Mbit/s: {of('', network='ResNet-20, 4 hosts', mbit=100)}." in text


def test_whole_training_runs():
    header, rows = table("speed", ["hosts", "link"])
    seconds = {(row["network"], row["mbit"], row["method"]): row["seconds"] for row in result("training-speed")["rows"]}
    ours = ("MaxMin(4), Tcp", "MaxMin(4), backward", "MaxMin(4), priority")
    methods = {
        "`lax.psum` of each array": ["psum, float32"],
        "of all at once": ["psum, one array"],
        "bfloat16 by hand": ["by hand, bfloat16"],
        "4 bits by hand": ["by hand, 4 bits"],
        "`MaxMin(4)`": ours,
        "DGC, 1 %": ["DGC 1 %, Tcp"],
        "`PowerSGD(4)`": ["PowerSGD(4), Gloo"],
        "PyTorch, no hook": ["PyTorch, no hook"],
        "fp16 hook": ["PyTorch, fp16"],
        "PowerSGD hook": ["PyTorch, PowerSGD(4)"],
    }
    assert len(rows) == 6
    for hosts, link, *cells in rows:
        number, unit = link.split()
        place = f"transformer, {hosts} hosts", int(number) * {"Mbit/s": 1, "Gbit/s": 1000}[unit]
        for column, text in zip(header[2:], cells, strict=True):
            assert_printed(min(seconds[*place, method] for method in methods[column]), text, 0)


def test_what_techniques_for_wide_areas_gain():
    _, rows = table("wan", ["at 100 Mbit/s"])
    network = "2 centers of 2 ranks, 100 Mbit/s"

    def rows_of(name):
        return {row["technique"]: row for row in result(name)["rows"] if row["network"] == network}

    measured, few = rows_of("wan"), rows_of("wan-few")
    measured |= {name: row for name, row in few.items() if "HFA" in name or "DiLoCo" in name}
    for name, shorter, megabytes, loss, at_equal_time in rows:
        row = measured[re.sub(r'[`"]|, every 20 steps', "", name)]
        if name != "float32":
            assert_printed(100 * row["less"], shorter.removesuffix(" %"), 0)
        assert_printed(max(row["up_bytes"]) / 1e6, megabytes, 0)
        assert_printed(row["loss"], loss, 0)
        assert_printed(row["loss_at_time"], at_equal_time.removeprefix(">"), 0)
        assert at_equal_time.startswith(">") == row["all_done"]


def test_what_dgt_hides_at_best():
    """It hides half of the time on the wire, but not more than the rest of the step."""
    measured = {(row["network"], row["technique"]): row for row in result("wan")["rows"]}
    links = {"100 Mbit/s": (1e8, 1e8), "1 Gbit/s": (1e9, 1e9), "110 up, 500 down": (1.1e8, 5e8)}  # bits/s up, down
    shares = []
    for network, (up, down) in links.items():
        for technique in "float32", "4 bits":
            row = measured[f"2 centers of 2 ranks, {network}", technique]
            wire = 8e3 * max(max(row["up_bytes"]) / up, max(row["down_bytes"]) / down)
            shares.append(100 * min(wire / 2, row["ms"] - wire) / row["ms"])
    assert f"at best {min(shares):.0f} to {max(shares):.0f} % of these steps" in page("wan")[0] and max(shares) < 25


def test_what_priority_cannot_hide():
    """docs/overlap.md and docs/wan.md have the rows of priority.json."""
    rows, text = result("priority")["rows"], page("overlap")[0].replace(" %", "%")
    equal = [row for row in rows if 0.9 <= row["communicate_over_compute"] <= 1.1]
    less, more = (
        next(row for row in rows if f"{row['communicate_over_compute']:.1f}" == ratio) for ratio in ("0.7", "1.4")
    )
    assert f"a step took {100 * less['more']:.0f} and {more['more']:.0%} longer than the longer of the two" in text
    low, high = sorted(row["more"] for row in equal)
    assert f"it took {100 * low:.0f} and {high:.0%} longer, above the goal of 15%" in text and low > 0.15
    (best,) = {f"{row['at_best']:.0%}" for row in equal}
    assert f"At least {best} longer is unavoidable" in text
    words = f"0.7 to 1.4 times as long as computation: a step takes {100 * more['more']:.0f} to {high:.0%} longer"
    assert words in page("wan")[0].replace(" %", "%")
    assert all(row["at_best"] < row["more"] for row in rows)


def test_how_fast_two_hosts_reach_a_loss():
    words = re.search(r"DiLoCo reaches the loss in ([\d.]+) s, and 4 bits in every step in ([\d.]+) s", page("wan")[0])
    seconds = {row["method"]: row["seconds"] for row in result("diloco")["times"] if row["hosts"] == 2}
    for method, text in zip(("DiLoCo, 4 bits, H 20", "MaxMin(4), Tcp"), words.groups(), strict=True):
        assert_printed(seconds[method], text, 0)


def test_overlays_beside_the_fixed_ring():
    text = page("wan")[0]
    words = re.search(r"an exchange is ([\d.]+) times as fast .* the exchange is ([\d.]+) times as fast", text)
    exchanges = {row["setup"]: row["faster"] for row in result("topology")["rows"] if row["schedule"] == "topology"}
    for setup, printed in zip(("line", "pair"), words.groups(), strict=True):
        assert_printed(exchanges[setup], printed, 0)
    words = re.search(
        r"they are ([\d.]+) times as fast .* and ([\d.]+) times .* it is ([\d.]+) and ([\d.]+) times", text
    )
    steps = {(row["when"], row["setup"]): row for row in result("topology-training")["rows"]}
    where = [(when, setup) for when in ("before", "after") for setup in ("line", "pair")]
    for key, printed in zip(where, words.groups(), strict=True):
        assert_printed(steps[key]["ring_ms"] / steps[key]["topology_ms"], printed, 0)


def test_few_exchanges():
    rows = result("diloco")["rows"]
    runs = [
        "4 bits, H 20",
        "4 bits, H 100, SGD 1.5",
        "4 bits, H 20, streaming",
        "4 bits, H 20, Nesterov 0.9",
        "SparseLoCo, 1 %, 2 bits, H 15",
        "SparseLoCo, no feedback",
        "2 bits, H 20",
        "2 bits, H 20, no feedback",
        "2 bits, H 20, large buckets, no feedback",
    ]
    dense = {row["seed"]: row for row in rows if row["run"] == "float32, every step"}
    for run, (_, fewer, loss) in zip(runs, table("diloco", ["form", "fewer bytes in a step"])[1], strict=True):
        found = [row for row in rows if row["run"] == run]
        more = [100 * (row["loss"] / dense[row["seed"]]["loss"] - 1) for row in found]
        assert fewer == f"{dense[0]['sent_bytes'] / found[0]['sent_bytes']:,.0f} times"
        assert {1: "(one seed)", 2: "(two seeds: ", 3: "(three seeds: "}[len(more)] in loss
        figures = [float(x) for x in re.findall(r"-?\d[\d.]*", loss)]
        expected = [np.mean(more), min(more), max(more)] if len(more) > 1 else [more[0]]
        np.testing.assert_allclose(figures, expected, atol=0.06)


def test_time_between_exchanges():
    methods = [
        "psum, float32",
        "MaxMin(4), Tcp",
        "PyTorch, PowerSGD(4)",
        "DiLoCo, 4 bits, H 20",
        "DiLoCo, 4 bits, H 20, streaming",
    ]
    measured = {(row["hosts"], row["method"]): row for row in result("diloco")["times"]}
    for method, (_, *cells) in zip(methods, table("diloco", ["method", "2 hosts"])[1], strict=True):
        rows = [measured[hosts, method] for hosts in (2, 4)]
        for value, text in zip([row[key] for key in ("busy", "seconds") for row in rows], cells, strict=True):
            assert_printed(value, text, 0)


def test_where_feedback_matters():
    _, rows = table("feedback", ["gradients", "accuracy in %"])
    measured = {row["run"]: row for row in result("training")["rows"] if row["data"] == "Fashion-MNIST"}
    assert [row[0] for row in rows] == list(measured)
    for name, accuracy, sent in rows:
        assert_printed(np.mean(measured[name]["accuracies"]), accuracy, 0)
        assert sent == f"{measured[name]['bytes']:,}"


def test_updates_of_adam():
    header, rows = table("feedback", ["codec", "bits per element", "embedding"])
    measured = {row["codec"]: row for row in result("adam")["rows"] if row["feedback"]}
    for name, bits, *errors in rows:
        codec = eval(f"cgx.{name.strip('`')}")
        assert_printed(codec.wire_bytes((2**20,), jnp.float32) * 8 / 2**20, bits, 0)
        for part, text in zip(header[2:], errors, strict=True):
            assert_printed(measured[spell(codec)][f"{part.split()[0]} update"], text, 0)


def test_the_demonstration():
    """README's times and the table are those of the run that drew the picture."""
    measured = {row["gradients"]: row for row in result("demo")["rows"]}
    _, rows = table("speed", ["gradients", "MB per step"])
    assert [row[0] for row in rows] == list(measured)
    for name, megabytes, ms, loss, accuracy, seconds in rows:
        row = measured[name]
        assert_printed(row["step_bytes"] / 1e6, megabytes, 0)
        assert_printed(row["step_ms"], ms, 0)
        assert_printed(row["loss"], loss, 0)
        assert_printed(100 * row["accuracy"], accuracy.removesuffix(" %"), 0)
        assert_printed(row["reached_seconds"], seconds, 0)
    words = re.search(r"test accuracy is (.*?) of the elements", " ".join((ROOT / "README.md").read_text().split()))[1]
    for row, seconds in zip(measured.values(), re.findall(r"([\d.]+) s with", words), strict=True):
        assert_printed(row["reached_seconds"], seconds, 0)


def test_shares_of_kernels():
    _, rows = table("speed", ["operation", "AVX-512: share"])
    measured = [{row["name"]: row for row in result(f"cpu-kernels-{isa}")["rows"]} for isa in ("avx512", "avx2")]
    for name, *cells, goal in rows:
        for of_isa, share, faster in zip(measured, cells[::2], cells[1::2], strict=True):
            row = of_isa[name.partition(":")[0]]
            assert_printed(row["share"], share, 0)
            assert_printed(row["share_goal"], goal, 0)
            if faster:
                assert_printed(row["speedup"], faster.removesuffix(" times"), 0)


def test_shares_of_gpu_kernels():
    _, rows = table("gpu", ["operation", "H100: 2 bits"])
    names = {
        "encode": "encode MaxMin {}",
        "encode, stochastic rounding": "encode MaxMin {} stochastic",
        "encode with feedback": "encode with feedback MaxMin {}",
        "decode": "decode MaxMin {}",
        "sum of 8 payloads, encoded again": "reduce MaxMin {}",
    }

    def part(gpu, name):
        return {row["name"]: row["share"] for row in result(f"gpu-nvidia-{gpu}/{name}")["rows"]}

    measured = [(bits, part(gpu, "maxmin")) for gpu in ("h100-80gb-hbm3", "h200") for bits in (2, 4, 8)]
    assert [row[0] for row in rows] == list(names)
    for operation, *shares in rows:
        for (bits, of_gpu), share in zip(measured, shares, strict=True):
            assert_printed(of_gpu[names[operation].format(bits)], share, 0)
    words = re.search(r"has ([\d.]+) for 16 million elements and ([\d.]+) for 268 million", page("gpu")[0])
    assert_printed(part("h200", "16m")["16 M: encode TopK 0.01 exact"], words[1], 0)
    assert_printed(part("h200", "others")["encode TopK 0.01 exact"], words[2], 0)
    words = re.search(r"has\s+([\d.]+) \(encode\) and ([\d.]+) \(decode\)", page("gpu")[0])
    for operation, share in zip(("encode", "decode"), words.groups(), strict=True):
        assert_printed(part("h100-80gb-hbm3", "others")[f"{operation} ByteGrad"], share, 0)
