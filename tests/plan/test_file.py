"""Tests the conversion of a plan to TOML and back."""

import tomllib

import pytest
from errors import raises, says
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
    assert {type(codec) for codec in [*CODECS, cgx.PowerSGD(), cgx.TopK(), cgx.Skip()]} == set(
        cgx.plan.file.CODECS.values()
    )


@pytest.mark.short
@pytest.mark.parametrize(
    "plan",
    [
        cgx.Plan(FOUR),
        cgx.Plan.cgx(3, 100, "stochastic"),
        cgx.Plan.bytegrad(("a", "b")),
        cgx.Plan.mixed_precision(axis_name=("dc", "local")),
        cgx.Plan.bsc(axis_name=("dc", "local")),
        cgx.Plan(cgx.TopK(0.1, cgx.MaxMin(2), cgx.Sampled(0.02, "exponential", 0.5, 3), "top", 2)),
        cgx.Plan.from_env(("node", "local"), {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}),
        cgx.Plan(
            FOUR,
            [
                cgx.Rule(
                    cgx.MaxMin(8),
                    path="^a\\.b\"'\\d+$|é\x7f\t\n|☃",
                    min_size=1,
                    max_size=2**40,
                    ndim=0,
                    priority=-3,
                    optional=True,
                ),
                ("frozen", cgx.Skip()),
            ],
            min_size=0,
            skip_1d=False,
            fusion_mb=0.5,
            schedule={"node": "tree", "local": "one_shot"},
            own="encoded",
            leader=True,
            strict=True,
            prefer="bytes",
        ),
    ],
    ids=["default", "cgx", "bytegrad", "mixed precision", "bsc", "top-k", "environment", "everything"],
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
    assert cgx.Plan.load(tmp_path / "plan.toml") == cgx.Plan(
        FOUR, [("embed", {"node": cgx.MaxMin(8), "local": cgx.Raw()})], skip_1d=False
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            cgx.Plan(FOUR, [("a", FOUR), (lambda path, leaf: True, FOUR)]),
            says("Plan.save", expected="rules[1] path size dimensions", got="one by a predicate"),
        ),
        (cgx.Plan(Halves()), says("Plan.save", expected="default codec", got="Halves(bucket_size=10)")),
        (
            cgx.Plan(FOUR, [("a", {"x": Halves()})]),
            says("Plan.save", expected="rules[0].codec codec", got="Halves(bucket_size=10)"),
        ),
        (cgx.Plan({0: FOUR}), says("Plan.save", expected="default axis names", got="0")),
    ],
    ids=["predicate", "codec", "codec of an axis", "axis"],
)
def test_what_can_not_be_saved(tmp_path, plan, words):
    with raises(ValueError, words):
        plan.save(tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()


DEFAULT = 'default = { name = "MaxMin" }\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", says("Plan.load", "default", expected="codec", got="none")),
        ("default = 4", says("Plan.load", "default", expected="codec MaxMin bits axis", got="4")),
        ("default = {}", says("Plan", "default", expected="codec axis", got="{}")),
        ("default = { node = 3 }", says("Plan.load", "default.node", expected="codec MaxMin bits axis", got="3")),
        (
            'default = { name = "maxmin" }',
            says("Plan.load", "default.name", expected="AbsMax ByteGrad Float8 MaxMin PowerSGD TopK", got="'maxmin'"),
        ),
        (
            'default = { name = "Codec" }',
            says("Plan.load", "default.name", expected="AbsMax ByteGrad Float8 MaxMin PowerSGD TopK", got="'Codec'"),
        ),
        (
            'default = { name = "MaxMin", bit = 4 }',
            says("Plan.load", "default.bit", expected="one of bits bucket_size rounding skip_incomplete", got="'bit'"),
        ),
        (
            'default = { name = "MaxMin", bits = "4" }',
            says("Plan.load", "default", expected="MaxMin 'bits' integer 1 8", got="'4'"),
        ),
        (
            'default = { node = { name = "MaxMin", bits = 9 } }',
            says("Plan.load", "default.node", expected="MaxMin 'bits' integer 1 8", got="9"),
        ),
        (
            DEFAULT + "min_sizes = 3",
            says(
                "Plan.load",
                "min_sizes",
                expected="one of default rules min_size skip_1d schedule own leader strict fusion_mb",
                got="'min_sizes'",
            ),
        ),
        (DEFAULT + "min_size = -3", says("Plan", "min_size", expected="integer 0", got="-3")),
        (
            DEFAULT + 'schedule = "star"',
            says("Plan", "schedule", expected="'auto' 'two_shot' 'one_shot' 'ring'", got="'star'"),
        ),
        (DEFAULT + "rules = 3", says("Plan.load", "rules", expected="[[rules]]", got="3")),
        (DEFAULT + "rules = [3]", says("Plan.load", "rules", expected="[[rules]]", got="[3]")),
        (DEFAULT + '[[rules]]\npath = "a"', says("Plan.load", "rules[0].codec", expected="codec", got="none")),
        (
            'default = { name = "TopK", values = { name = "MaxMin", bits = 9 } }',
            says("Plan.load", "default.values", expected="MaxMin 'bits' integer 1 8", got="9"),
        ),
        (
            'default = { name = "TopK", values = { name = "Sampled" } }',
            says("Plan.load", "default", expected="TopK 'values' codec", got="Sampled("),
        ),
        (
            'default = { name = "TopK", select = { name = "Sampled", share = 2 } }',
            says("Plan.load", "default.select", expected="Sampled 'share' number 1", got="2"),
        ),
        ('default = { name = "Sampled" }', says("Plan", "default", expected="codec", got="Sampled(")),
        (
            DEFAULT + '[[rules]]\ncodec = { name = "Raw" }\nwhere = "a"',
            says(
                "Plan.load",
                "rules[0].where",
                expected="one of codec path min_size max_size ndim priority optional",
                got="'where'",
            ),
        ),
        (
            DEFAULT + '[[rules]]\ncodec = { name = "Raw" }\npath = "("',
            says("Plan.load", "rules[0]", expected="Rule 'path' regular expression", got="'('"),
        ),
        (
            DEFAULT + '[[rules]]\ncodec = { name = "Raw", x = 1 }',
            says("Plan.load", "rules[0].codec.x", expected="none", got="'x'"),
        ),
        ("default = ", says("Plan.load", expected="Invalid value")),
        ("default = \xe9".encode("latin-1"), says("Plan.load", expected="'utf-8' decode")),
    ],
    ids=[
        "empty",
        "number",
        "no axes",
        "axis",
        "codec",
        "no codec",
        "codec's key",
        "codec's value",
        "axis's codec",
        "key",
        "value",
        "schedule",
        "rules",
        "a rule",
        "rule without codec",
        "values",
        "values that are no codec",
        "selection",
        "no codec but a selection",
        "rule's key",
        "rule's value",
        "rule's codec",
        "no TOML",
        "no text",
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises(ValueError, words) as caught:
        cgx.Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_saved_plan_is_readable(tmp_path):
    cgx.Plan({"node": FOUR, "local": cgx.Raw()}, [("embed", cgx.Float8())]).save(tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert (
        'default = { node = { name = "MaxMin", bits = 4, bucket_size = 512, rounding = "nearest", skip_incomplete = '
        'false, rotate = false }, local = { name = "Raw" } }' in text
    )
    assert tomllib.loads(text)["rules"] == [
        dict(codec=dict(name="Float8", format="e4m3", bucket_size=128), path="embed", priority=0, optional=False)
    ]
