"""The site of the documentation: `make docs`.

Its sources are those of the repository, as pages link to results. The README is the first page.
"""

import pathlib

import jaxcgx

# The pages of docs/, in the order of the contents.
PAGES = {
    "Start": "recipes convert training codecs plans explain mpi",
    "Networks": "collectives meshes wan diloco failures security gpu",
    "Coming from": "migration from-bagua from-dgc from-geomx from-ddp-hooks from-deepspeed from-horovod",
    "Does it pay?": "when-not planner simulation lab speed",
    "Inside": "api architecture wire-format references",
}

project, author, copyright = "jaxcgx", "the authors of jaxcgx", "the authors of jaxcgx"
release = version = jaxcgx.__version__
html_theme, html_title = "sphinx_book_theme", "jaxcgx"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/README.md", "benchmarks/notes/*.md", "benchmarks/results/*.md"]
suppress_warnings = ["toc.not_included"]  # results are where pages link to them

default_role = "code"  # of `words` in docstrings
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_typehints = "none"  # many are `Any`, where JAX has no type
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run the programs of pages


def add_contents(app, page, source):
    """Appends the contents to the first page."""
    for caption, pages in PAGES.items() if page == root_doc else ():
        names = "\n".join(f"docs/{name}" for name in pages.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def mark_code(app, what, name, thing, options, lines):
    """Makes literal blocks of the indented lines of a docstring, outside of its sections."""
    given, lines[:] = list(lines), []
    before = ""  # the last line that isn't empty
    for i, line in enumerate(given):
        if line.startswith("    ") and before and not before.startswith(" ") and not given[i - 1]:
            lines += ["::", ""]
        lines.append(line)
        before = line or before


def write_index(app, error):
    pathlib.Path(app.outdir, "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">')


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
    app.connect("build-finished", write_index)
