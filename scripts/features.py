"""Writes docs/features.md from docs/features.toml.

Run `.venv/bin/python scripts/features.py`. `make test` checks that nothing is out of date, and that each test exists.
"""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs/features.toml", ROOT / "docs/features.md"
HEAD = """# Where each of their features is

This page has a row for each feature that the documentation of CGX, of Bagua's ByteGrad, of Deep Gradient Compression
and of GeoMX describes: where it is in jaxcgx, and the test that runs it. `make ...` is a suite that takes long. Rows
without a test need several GPUs.
"""


def rows():
    """Returns {system: (its page, [(feature, where it is, test)])}."""
    data = tomllib.loads(DATA.read_text())
    return {system: (section["page"], [tuple(row) for row in section["rows"]]) for system, section in data.items()}


def render():
    """Returns the page."""
    parts = [HEAD]
    for system, (page, features) in rows().items():
        table = "\n".join(f"| {feature} | {here} | {spell(test)} |" for feature, here, test in features)
        parts.append(f"## {system}\n\n[More]({page}).\n\n| {system} | jaxcgx | test |\n|---|---|---|\n{table}\n")
    return "\n".join(parts)


def spell(test):
    """Returns a test as a link to its file."""
    if not test or test.startswith("make "):
        return f"`{test}`" if test else "several GPUs"
    path, _, name = test.partition("::")
    return f"[{name or pathlib.Path(path).stem}](../{path})"


def missing(test):
    """Returns whether the tests or the Makefile lack this test."""
    if test.startswith("make "):
        return not re.search(rf"^{test.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    path, _, name = test.partition("::")
    return not (ROOT / path).is_file() or (bool(name) and f"def {name}(" not in (ROOT / path).read_text())


if __name__ == "__main__":
    PAGE.write_text(render())
