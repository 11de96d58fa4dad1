"""The site of the documentation: `make docs`.

Its sources are those of the repository, as pages link to results. The README is the first page.
"""

import ast
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap

from docutils import nodes
from latex2mathml import converter

import jaxcgx
from jaxcgx.report import figures, results

ROOT = pathlib.Path(__file__).parent.parent

# The pages of docs/, in the order of the contents.
PAGES = {
    "Start": "install first-step which how-it-works two-centers recipes gallery",
    "Convert a program": "convert frameworks training mpi fsdp meshes",
    "Choose what is sent": "codecs plans bfloat16 feedback sparse matrices hierarchies overlap",
    "Far apart": "wan diloco patches publishing",
    "Keep it running": "explain checkpoints failures security gpu gpu-ethernet",
    "Does it pay?": "when-not planner costs lab speed simulation results ../benchmarks/README",
    "Coming from": "compared features migration from-bagua from-dgc from-geomx from-ddp-hooks from-deepspeed "
    "from-horovod",
    "Reference": "api collectives error-bounds wire-format glossary promises references",
    "Develop": "architecture extend-codec extend-transport ../CONTRIBUTING",
}

# Pages that are notebooks on the site. In the repository they are plain Markdown, which more programs can show. The
# programs of all other pages run in tests only (tests/test_pages.py).
TUTORIALS = "docs/first-step", "docs/two-centers"
NOTEBOOK = "---\nfile_format: mystnb\nkernelspec: {name: python3, display_name: Python}\n---\n"

# Where other projects explain their names. They are written out, because Sphinx's intersphinx would fetch lists of all
# names. PUBLIC has names by which objects call themselves. The first beginning in ELSEWHERE that fits counts.
JAX, NUMPY = "https://docs.jax.dev/en/latest", "https://numpy.org/doc/stable/reference"
OPTAX = "https://optax.readthedocs.io/en/latest/api"
PUBLIC = {
    "jax.jaxlib._jax.Array": "jax.Array",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "jax._src.stages.Compiled": "jax.stages.Compiled",
    "numpy.random._generator.Generator": "numpy.random.Generator",
}
ELSEWHERE = {
    "jax.distributed.": f"{JAX}/_autosummary/{{}}.html",
    "jax.distributed": f"{JAX}/{{}}.html",
    "jax.sharding.": f"{JAX}/jax.sharding.html#{{}}",
    "jax.stages.": f"{JAX}/jax.stages.html#{{}}",
    "jax.": f"{JAX}/_autosummary/{{}}.html",
    "numpy.dtype": f"{NUMPY}/generated/{{}}.html",
    "numpy.ndarray": f"{NUMPY}/generated/{{}}.html",
    "numpy.random.": f"{NUMPY}/random/generator.html#{{}}",
    "numpy.": f"{NUMPY}/arrays.scalars.html#{{}}",
    "optax.Gradient": f"{OPTAX}/transformations.html#{{}}",
    "optax.": f"{OPTAX}/optimizers.html#{{}}",
}

project, author, copyright = "jaxcgx", "the authors of jaxcgx", "the authors of jaxcgx"
release = version = jaxcgx.__version__
html_theme, html_title = "sphinx_book_theme", "jaxcgx"
html_logo = html_favicon = "favicon.svg"
html_theme_options = {"show_navbar_depth": 1, "use_download_button": False, "use_fullscreen_button": False}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "benchmarks/notes/*.md", "benchmarks/results/*.md"]
suppress_warnings = ["toc.not_included"]  # results are where pages link to them

default_role = "py:obj"  # of `words` in docstrings: a link where there is such a name, else code
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_typehints, autodoc_typehints_format = "signature", "short"
autodoc_preserve_defaults, python_maximum_signature_line_length = True, 88
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

# Pages load nothing from other servers: formulas are MathML, and `make docs` gets Mermaid from npm.
html_math_renderer = "mathml"
html_static_path, html_css_files = ["../build/mermaid", "site.css"], ["site.css"]
mermaid_use_local, mermaid_fullscreen, mermaid_height = "mermaid.esm.min.mjs", False, "auto"
myst_html_meta = {"description": "Data-parallel training in JAX, fast where the network is slow"}

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # prices, such as $10.4 and $24.5, aren't formulas
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "force", True, 600  # seconds for each cell


def add_contents(app, page, source):
    """Appends the contents to the first page, and the pages of its groups to that of the API."""
    for caption, pages in PAGES.items() if page == root_doc else ():
        names = "\n".join(f"docs/{name}" for name in pages.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"
    if page == "docs/api":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\napi/*\n```\n"


def make_notebooks(app, page, source):
    """Makes a notebook of a tutorial: its programs are the cells, and myst-nb runs them.

    A program that begins with the name of its file is for several processes, and isn't a cell.
    """
    if page in TUTORIALS:
        cell = "\n```{code-cell} python\n"
        source[0] = NOTEBOOK + re.sub(r"\n```python\n(?!# \w+\.py\n)", cell, source[0])


def narrow(code):
    """Returns Python code in lines of at most 88 columns, except strings."""
    wrap = lambda match: textwrap.fill(match[0], 88, subsequent_indent=f"{match[1]}# ")
    run = [sys.executable, "-m", "ruff", "format", "--line-length=88", "--stdin-filename=page.py", "-"]
    formatted = subprocess.run(run, input=code, capture_output=True, text=True, check=True).stdout
    return re.sub(r"^( *)# .{80,}$", wrap, formatted, flags=re.MULTILINE)


def add_examples(app, page, source):
    """Appends every example to the gallery: its docstring, its code, and what it printed (`make gallery`)."""
    for path in sorted((ROOT / "examples").rglob("*.py")) if page == "docs/gallery" else ():
        name, text = path.relative_to(ROOT / "examples"), path.read_text()
        printed = ROOT / "examples/output" / f"{path.stem}.txt"
        app.env.note_dependency(path)
        app.env.note_dependency(printed)
        code = "\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno :]).strip()
        source[0] += f"\n## {name}\n\n{ast.get_docstring(ast.parse(text))}\n\n"
        if printed.is_file():
            _, shown = printed.read_text().split("\n", 1)  # without the digest of the code
            source[0] += f"```text\n{shown}```\n\n"
        source[0] += f"```python\n{narrow(code)}```\n"


def add_plots(app, page, source):
    """Appends the plots of all results, as `python -m jaxcgx report` draws them. They are written to build/plots."""
    folder = ROOT / "build/plots"
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")) if page == "docs/results" else ():
        data = results.read(path)
        app.env.note_dependency(path)
        source[0] += (
            f"\n## {path.stem}\n\n{figures.spell_origin(data)} [Tables](../benchmarks/results/{path.stem}.md).\n"
        )
        folder.mkdir(parents=True, exist_ok=True)
        for number, (title, png) in enumerate(figures.plots(data).items()):
            (folder / f"{path.stem}-{number}.png").write_bytes(png)
            source[0] += f"\n![{title}](/build/plots/{path.stem}-{number}.png)\n"


def mark_results(app, page, source):
    """Gives a page of results a title, and keeps its many numbers out of the search."""
    if page.startswith("benchmarks/results/"):
        source[0] = f"---\nnosearch: true\n---\n\n# Results: {page.rsplit('/', 1)[1]}\n\n{source[0]}"


def link_elsewhere(app, env, node, shown):
    """Links a name of another project to the page there."""
    name = PUBLIC.get(node["reftarget"], node["reftarget"])
    start = next((start for start in ELSEWHERE if re.fullmatch(rf"{re.escape(start)}[\w.]*", name)), None)
    if start is None:
        return None
    pkgutil.resolve_name(name)  # an error if there is no such name
    return nodes.reference("", "", shown, internal=False, refuri=ELSEWHERE[start].format(name))


def draw_formula(display):
    def visit(self, node):
        self.body.append(converter.convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit, None


def leave_out_fields(app, what, name, thing, skip, options):
    """Leaves out the fields of NamedTuples, which the docstrings of their classes explain."""
    return True if type(thing).__name__ == "_tuplegetter" else None


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
    app.add_html_math_renderer("mathml", draw_formula("inline"), draw_formula("block"))
    for added in (add_contents, make_notebooks, add_examples, add_plots, mark_results):
        app.connect("source-read", added)
    app.connect("missing-reference", link_elsewhere)
    app.connect("autodoc-skip-member", leave_out_fields)
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
    app.connect("build-finished", write_index)
