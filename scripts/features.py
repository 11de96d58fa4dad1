"""Writes docs/features.md from docs/features.toml.

Run `.venv/bin/python scripts/features.py`. `make test` checks that nothing is out of date, and that tests and links
exist.
"""

import ast
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs/features.toml", ROOT / "docs/features.md"
GPUS, ABSENT = "GPUs", ""  # in place of a test
NO_TEST = {GPUS: "needs several GPUs", ABSENT: "not here"}
HEAD = """# Where each of their features is

This page says where jaxcgx has each feature of CGX, of Bagua's ByteGrad, of Deep Gradient Compression and of GeoMX.
Each row has a statement of their documentation, in its order, the place in jaxcgx, and the tests that run it.
`make ...` is a long suite. A row without a test *needs several GPUs*. The [glossary](glossary.md) explains words.
"""


def rows():
    """Returns {system: {chapter: (the page that has more, [(what it says, where it is, test)])}}."""
    return {
        system: {chapter: (found["page"], list(map(tuple, found["rows"]))) for chapter, found in chapters.items()}
        for system, chapters in tomllib.loads(DATA.read_text()).items()
    }


def render():
    """Returns the page."""
    parts = [HEAD]
    for system, chapters in rows().items():
        parts.append(f"## {system}\n")
        for chapter, (page, features) in chapters.items():
            table = "\n".join(f"| {says} | {here} | {spell(test)} |" for says, here, test in features)
            head = f"| {system} | jaxcgx ([more]({page})) | test |\n|---|---|---|"
            parts.append(f"### {chapter}\n\n{head}\n{table}\n")
    return "\n".join(parts)


def spell(test):
    """Returns tests as links to their files."""
    return NO_TEST.get(test) or ", ".join(map(spell_one, test.split(", ")))


def spell_one(test):
    if test.startswith("make "):
        return f"`{test}`"
    path, _, name = test.partition("::")
    return f"[{name}](../{path})"


def missing(test):
    """Returns whether the files that pytest collects, or the Makefile, lack this test."""
    if test.startswith("make "):
        return not re.search(rf"^{test.removeprefix('make ')}:.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    path, _, name = test.partition("::")
    collected = re.fullmatch(r"tests/(.*/)?test_\w+\.py", path) and (ROOT / path).is_file()
    return not collected or name not in functions((ROOT / path).read_text())


def functions(source):
    """Returns the names of the tests of a file."""
    found = (node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {name for name in found if name.startswith("test_")}


def broken(text):
    """Returns the links of a row whose file, or whose heading, doesn't exist."""
    return [link for link in re.findall(r"\]\(([^)]*)\)", text) if not leads(*link.partition("#")[::2])]


def leads(name, heading):
    path = PAGE.parent / name
    return path.exists() and (not heading or heading in map(anchor, re.findall(r"^#+ (.*)", path.read_text(), re.M)))


def anchor(heading):
    """Returns the anchor that Sphinx and GitHub give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(render())
