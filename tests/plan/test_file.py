"""A plan as TOML and back."""

import tomllib

import pytest
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
    assert {type(codec) for codec in [*CODECS, cgx.PowerSGD(), cgx.TopK()]} == set(cgx.plan.file.CODECS.values())


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
                )
            ],
            min_size=0,
            skip_1d=False,
            fusion_mb=0.5,
            schedule={"node": "ring", "local": "one_shot"},
            leader=True,
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
            "Plan.save: rules[1]: expected a rule by path, size or dimensions, got one by a predicate",
        ),
        (
            cgx.Plan(Halves()),
            "Plan.save: default: expected a codec of jaxcgx, got Halves(bucket_size=10), which no file can hold",
        ),
        (cgx.Plan(FOUR, [("a", {"x": Halves()})]), "Plan.save: rules[0].codec: expected a codec of jaxcgx"),
        (cgx.Plan({0: FOUR}), "Plan.save: default: expected axis names that are strings, got 0"),
    ],
    ids=["predicate", "codec", "codec of an axis", "axis"],
)
def test_what_can_not_be_saved(tmp_path, plan, words):
    with pytest.raises(ValueError) as caught:
        plan.save(tmp_path / "plan.toml")
    assert words in str(caught.value) and not (tmp_path / "plan.toml").exists()


DEFAULT = 'default = { name = "MaxMin" }\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "key 'default': expected a codec, got none"),
        (
            "default = 4",
            "key 'default': expected a codec such as { name = \"MaxMin\", bits = 4 }, or one for each axis, got 4",
        ),
        ("default = {}", "Plan: argument 'default': expected a codec for each axis, got {}"),
        ("default = { node = 3 }", "key 'default.node': expected a codec such as"),
        ('default = { name = "maxmin" }', "key 'default.name': expected one of AbsMax, "),
        ('default = { name = "Codec" }', "key 'default.name': expected one of AbsMax, "),
        (
            'default = { name = "MaxMin", bit = 4 }',
            "key 'default.bit': unknown, expected one of bits, bucket_size, rounding, skip_incomplete",
        ),
        (
            'default = { name = "MaxMin", bits = "4" }',
            "key 'default': MaxMin: argument 'bits': expected an integer from 1 to 8, got '4'",
        ),
        (
            'default = { node = { name = "MaxMin", bits = 9 } }',
            "key 'default.node': MaxMin: argument 'bits': expected an integer from 1 to 8, got 9",
        ),
        (
            DEFAULT + "min_sizes = 3",
            "key 'min_sizes': unknown, expected one of default, rules, min_size, skip_1d, fusion_mb, schedule, leader",
        ),
        (DEFAULT + "min_size = -3", "Plan: argument 'min_size': expected an integer of at least 0"),
        (DEFAULT + 'schedule = "tree"', "Plan: argument 'schedule': expected one of"),
        (DEFAULT + "rules = 3", "key 'rules': expected tables [[rules]], got 3"),
        (DEFAULT + "rules = [3]", "key 'rules': expected tables [[rules]], got [3]"),
        (DEFAULT + '[[rules]]\npath = "a"', "key 'rules[0].codec': expected a codec, got none"),
        (
            'default = { name = "TopK", values = { name = "MaxMin", bits = 9 } }',
            "key 'default.values': MaxMin: argument 'bits': expected an integer from 1 to 8, got 9",
        ),
        (
            'default = { name = "TopK", values = { name = "Sampled" } }',
            "key 'default': TopK: argument 'values': expected a codec",
        ),
        (
            'default = { name = "TopK", select = { name = "Sampled", share = 2 } }',
            "key 'default.select': Sampled: argument 'share': expected a number from",
        ),
        ('default = { name = "Sampled" }', "Plan: argument 'default': expected a codec such as"),
        (
            DEFAULT + '[[rules]]\ncodec = { name = "Raw" }\nwhere = "a"',
            "key 'rules[0].where': unknown, expected one of codec, path, min_size, max_size, ndim, priority, optional",
        ),
        (
            DEFAULT + '[[rules]]\ncodec = { name = "Raw" }\npath = "("',
            "key 'rules[0]': Rule: argument 'path': expected a regular expression, got '('",
        ),
        (DEFAULT + '[[rules]]\ncodec = { name = "Raw", x = 1 }', "key 'rules[0].codec.x': unknown, expected none"),
        ("default = ", "Invalid value (at "),
        ("default = \xe9".encode("latin-1"), "'utf-8' codec can't decode"),
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
    with pytest.raises(ValueError) as caught:
        cgx.Plan.load(path)
    assert str(caught.value).startswith(f"Plan.load: {path}: {words}")


def test_a_saved_plan_is_readable(tmp_path):
    cgx.Plan({"node": FOUR, "local": cgx.Raw()}, [("embed", cgx.Float8())]).save(tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert (
        'default = { node = { name = "MaxMin", bits = 4, bucket_size = 512, rounding = "nearest", skip_incomplete = '
        'false }, local = { name = "Raw" } }' in text
    )
    assert tomllib.loads(text)["rules"] == [
        dict(codec=dict(name="Float8", format="e4m3", bucket_size=128), path="embed", priority=0, optional=False)
    ]
