"""Tests python -m jaxcgx report: tables, plots and a page."""

import html.parser
import sys

import pytest

from jaxcgx import __main__
from jaxcgx.report import figures, results

ms = lambda n: {"psum": [1.0 * n, 2.0 * n, 3.0 * n], "ring": 2.5}
DATA = dict(
    rows=[dict(network="1 Gbit/s", size_bytes=2**n, ms=ms(n), ok=n > 3) for n in (3, 4, 5)],
    parts=[dict(name="a <b>", ms=1.0, of=None), dict(name="c", ms=20_000.5, of=1)],
    long=[dict(n=n) for n in range(figures.MOST + 1)],
    short=[dict(n=1000 + n) for n in range(figures.MOST)],
    charts=[
        dict(table="rows", title="Sums", x="size_bytes", y=["ms psum", "ms ring"], panel="network", log=True),
        dict(table="parts", title="Parts", x="name", y=["ms"]),
    ],
)


@pytest.fixture
def file(tmp_path):
    results.write(tmp_path / "sums.json", results.origin("make <it>") | DATA)
    return tmp_path / "sums.json"


def test_cells():
    cells = [None, True, 1234, 0.12345, 12345.6, "word", [1, 2, 3], [1]]
    expected = ["", "yes", "1,234", "0.1235", "12,346", "word", "2 [1.5, 2.5]", "1 [1, 1]"]
    assert [figures.spell_cell(cell) for cell in cells] == expected


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.cells, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        assert not found.keys() & {"href", "srcset", "data"} and tag not in ("link", "script", "iframe")
        self.sources += [found["src"]] if "src" in found else []
        self.open += [] if tag in ("meta", "img") else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_report(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert __main__.main(["report", str(file), "--out", str(out)]) is None
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("Made by `make <it>` on", "6 [4.5, 7.5]", "61 rows", "1,059"))
    assert {path.name for path in out.iterdir()} == {"report.html", "sums-1.png", "sums-2.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    # The page needs no other files.
    page = Page()
    page.feed((out / "report.html").read_text())
    assert not page.open and len(page.sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert {"size (bytes)", "psum (ms)", "6 [4.5, 7.5]", "a <b>", "20,000", "1,059"} <= set(page.cells)
    assert "59" not in page.cells  # the plots replace a long table


def test_without_matplotlib(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = figures.save(tmp_path / "out", {"sums": results.read(file)})
    assert said[0].startswith("no plots: they need matplotlib") and (tmp_path / "out/report.html").exists()
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_wrong_file(tmp_path):
    with pytest.raises(SystemExit, match="python -m jaxcgx report: .*No such file"):
        __main__.main(["report", str(tmp_path / "none.json")])
