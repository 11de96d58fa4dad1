"""Tests the conversion of a plan to TOML and back."""

import tomllib

import pytest
from errors import refused, rows
from helpers import CODECS, Halves, each_codec

import jaxcgx as cgx

FOUR = cgx.MaxMin(4)


@pytest.mark.parametrize("codec", **each_codec())
def test_every_codec_comes_back(tmp_path, codec):
    path = tmp_path / "plan.toml"
    plan = cgx.Plan({"node": codec, "a local one": cgx.Raw(), "name": codec}, [("kernel$", codec)])
    plan.save(path)
    assert cgx.Plan.load(path) == plan


def test_every_codec_is_there():
    known = {type(codec) for codec in [*CODECS, cgx.PowerSGD(), cgx.TopK(), cgx.Skip()]}
    assert known == set(cgx.plan.file.CODECS.values())


EVERYTHING = dict(min_size=0, skip_1d=False, fusion_mb=0.5, schedule={"node": "tree", "local": "one_shot"})
EVERYTHING |= dict(own="encoded", leader=True, strict=True, prefer="bytes")
ODD = cgx.Rule(cgx.MaxMin(8), "^a\\.b\"'\\d+$|é\x7f\t\n|☃", None, 1, 2**40, 0, -3, True)


@pytest.mark.short
@pytest.mark.parametrize(
    "plan",
    [
        cgx.Plan(FOUR),
        cgx.Plan.mixed_precision(axis_name=("dc", "local")),
        cgx.Plan(cgx.TopK(0.1, cgx.MaxMin(2), cgx.Sampled(0.02, "exponential", 0.5, 3), "top", 2)),
        cgx.Plan.from_env(("node", "local"), {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}),
        cgx.Plan({"node": cgx.PowerSGD(3), "local": cgx.Raw()}, [("head", cgx.PowerSGD())]),
        cgx.Plan(FOUR, [ODD, ("frozen", cgx.Skip())], **EVERYTHING),
    ],
)
def test_every_field_comes_back(tmp_path, plan):
    path = str(tmp_path / "plan.toml")
    plan.save(path)
    assert cgx.Plan.load(path) == plan


def test_a_file_by_hand(tmp_path):
    (tmp_path / "plan.toml").write_text("""
    default = { name = "MaxMin" }
    skip_1d = false
    [[rules]]
    path = "embed"
    codec = { node = { name = "MaxMin", bits = 8 }, local = { name = "Raw" } }
    """)
    plan = cgx.Plan(FOUR, [("embed", {"node": cgx.MaxMin(8), "local": cgx.Raw()})], skip_1d=False)
    assert cgx.Plan.load(tmp_path / "plan.toml") == plan


UNSAVED = {
    "Plan.save": [
        (cgx.Plan(FOUR, [("a", FOUR), (lambda path, leaf: True, FOUR)]), ValueError, "", "one by a predicate"),
        (cgx.Plan(Halves()), ValueError, "", "Halves(bucket_size=10)"),
        (cgx.Plan(FOUR, [("a", {"x": Halves()})]), ValueError, "", "Halves(bucket_size=10)"),
        (cgx.Plan({0: FOUR}), ValueError, "", "0"),
    ]
}


@pytest.mark.parametrize("row", rows(UNSAVED))
def test_what_can_not_be_saved(tmp_path, row):
    refused(*row, run=lambda plan: plan.save(tmp_path / "plan.toml"))
    assert not (tmp_path / "plan.toml").exists()


def codec(fields):
    return f'default = {{ name = "MaxMin" }}\n{fields}'


def rule(fields):
    return codec(f"[[rules]]\n{fields}")


BAD_FILES = {
    "Plan.load": [
        ("", ValueError, "default", "none"),
        ("default = 4", ValueError, "default", "4"),
        ("default = { node = 3 }", ValueError, "default.node", "3"),
        ('default = { name = "maxmin" }', ValueError, "default.name", "'maxmin'"),
        ('default = { name = "Codec" }', ValueError, "default.name", "'Codec'"),
        ('default = { name = "MaxMin", bit = 4 }', ValueError, "default.bit", "'bit'"),
        ('default = { name = "MaxMin", bits = "4" }', ValueError, "default", "'4'"),
        ('default = { node = { name = "MaxMin", bits = 9 } }', ValueError, "default.node", "9"),
        (codec("min_sizes = 3"), ValueError, "min_sizes", "'min_sizes'"),
        (codec("rules = 3"), ValueError, "rules", "3"),
        (codec("rules = [3]"), ValueError, "rules", "[3]"),
        (rule('path = "a"'), ValueError, "rules[0].codec", "none"),
        ('default = { name = "TopK", values = { name = "MaxMin", bits = 9 } }', ValueError, "default.values", "9"),
        ('default = { name = "TopK", values = { name = "Sampled" } }', ValueError, "default", "Sampled("),
        ('default = { name = "TopK", select = { name = "Sampled", share = 2 } }', ValueError, "default.select", "2"),
        (rule('codec = { name = "Raw" }\nwhere = "a"'), ValueError, "rules[0].where", "'where'"),
        (rule('codec = { name = "Raw" }\npath = "("'), ValueError, "rules[0]", "'('"),
        (rule('codec = { name = "Raw", x = 1 }'), ValueError, "rules[0].codec.x", "'x'"),
        ("default = ", ValueError, ""),
        ("default = \xe9", ValueError, ""),
    ],
    "Plan": [
        ("default = {}", ValueError, "default", "{}"),
        (codec("min_size = -3"), ValueError, "min_size", "-3"),
        (codec('schedule = "star"'), ValueError, "schedule", "'star'"),
        ('default = { name = "Sampled" }', ValueError, "default", "Sampled("),
    ],
}


@pytest.mark.parametrize("row", rows(BAD_FILES))
def test_bad_files(tmp_path, row):
    path = tmp_path / "plan.toml"

    def load(text):
        path.write_text(text, encoding="latin-1")
        cgx.Plan.load(path)

    assert str(path) in refused(*row, run=load)


def test_a_saved_plan_is_readable(tmp_path):
    cgx.Plan({"node": FOUR, "local": cgx.Raw()}, [("embed", cgx.Float8())]).save(tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert (
        'default = { node = { name = "MaxMin", bits = 4, bucket_size = 512, rounding = "nearest", skip_incomplete = '
        'false, rotate = false }, local = { name = "Raw" } }' in text
    )
    float8 = dict(name="Float8", format="e4m3", bucket_size=128)
    assert tomllib.loads(text)["rules"] == [dict(codec=float8, path="embed", priority=0, optional=False)]
