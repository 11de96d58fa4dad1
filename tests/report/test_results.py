"""Tests the format of results."""

import pathlib
import re

import pytest

from jaxcgx.report import results

ROOT = pathlib.Path(__file__).parents[2]


def test_cells():
    row = {"size_bytes": 5, "ms": {"two_shot": 3}, "ms_of_repetitions": {"psum": [1, 2]}, "up": {"rate_mbit": 1}}
    cells = results.flat(row)
    assert list(cells) == ["size_bytes", "ms two_shot", "ms_of_repetitions psum", "up rate_mbit"]
    heads = ["size (bytes)", "two_shot (ms)", "of repetitions psum (ms)", "up rate (Mbit/s)"]
    assert [results.spell_name(name) for name in cells] == heads
    assert results.unit("up rate_mbit") == "Mbit/s" and results.unit("share") == ""


def test_a_file_is_read_as_it_was_written(tmp_path):
    data = results.origin("make it") | dict(rows=[{"ms": 1}], groups={"a": {"ms": 2}}, charts=[{}], settings=[1, 2])
    results.write(tmp_path / "new/it.json", data)
    read = results.read(tmp_path / "new/it.json")
    assert read == data
    assert results.tables(read) == {"rows": [{"ms": 1}], "groups": [{"name": "a", "ms": 2}]}


@pytest.mark.parametrize("text, got", [("{", "expected JSON"), ("[]", "got no command"), ('{"command":""}', "no date")])
def test_what_is_no_file_of_results(tmp_path, text, got):
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(ValueError, match=got):
        results.read(tmp_path / "it.json")


def links(page):
    """Returns the result files that a page links to."""
    return [ROOT / "benchmarks/results" / name for name in re.findall(r"benchmarks/results/([\w-]+\.md)", page)]


def test_every_result_names_a_command_that_makes_it():
    """Pages quote figures next to a link to their table. The table and its data name the command."""
    makefile = (ROOT / "Makefile").read_text()
    quoted = {path for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for path in links(page.read_text())}
    found = sorted((ROOT / "benchmarks/results").glob("*.json"))
    reports = {path for path in quoted if path.with_suffix("").is_dir()}  # each with a file for every part
    assert all("Made by `scripts/gpu_check` on " in path.read_text() for path in reports)
    assert quoted - reports <= {path.with_suffix(".md") for path in found} and len(quoted) > 5
    for path in found:
        data = results.read(path)
        target = re.match(r"make ([a-z-]+)", data["command"])
        assert target and f"\n{target[1]}:" in makefile, path
        assert f"`{data['command']}`" in path.with_suffix(".md").read_text(), path
        assert results.tables(data), path
