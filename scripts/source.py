"""Reads the source of the package: its storeys, its imports and its functions, and how large and how plain they are."""

import ast
import collections
import functools
import pathlib
import re
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
# From top to bottom. A module may import from its own storey and from those below it.
STOREYS = (
    ("__init__", "__main__"),
    ("report",),
    ("lab",),
    ("wan",),
    ("train",),
    ("collectives",),
    ("exchange",),
    ("mpi",),
    ("patch",),
    ("plan",),
    ("codecs",),
    ("transports",),
    ("native",),
    ("checks", "text", "typing", "_compat", "_programs"),
)
# (importer, imported): why this import may point upward or close a circle.
SETTINGS = "reads CHECK, WAIT or MEET when it is needed: programs may set them"
EXCEPTIONS = {("jaxcgx.mpi.ranks", "jaxcgx.mpi"): SETTINGS, ("jaxcgx.mpi.agreement", "jaxcgx.mpi"): SETTINGS}
MOST = 7  # parameters
UNREAD = re.compile(  # in C++: comments, strings, characters and preprocessor lines
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
MEMBER = re.compile(r"(?:,|\)\s*:)\s*\w+\s*$")  # a member that a constructor initializes
BODY = re.compile(r"(?:\s*(?:const|noexcept|override|final|mutable|&&?|->[^;{}()=]*))*\s*(?:\{|:(?!:))")


@functools.cache
def modules():
    """Returns {name: syntax tree} of every module of the package. A package has the name of its folder."""
    found = {}
    for path in sorted((ROOT / "jaxcgx").rglob("*.py")):
        found[name_of(path)] = ast.parse(path.read_text(), str(path))
    return found


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def binds(package, name):
    """Returns whether a package imports an object with this name, which then hides a module of the same name.

    An example is jaxcgx.train.value_and_grad.
    """
    nodes = [node for node in modules()[package].body if isinstance(node, ast.ImportFrom)]
    return any(alias.name == name for node in nodes for alias in node.names)


def imports(name):
    """Yields (module, name or None, line) of the package's modules that a module imports, also inside functions."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: expected imports by the full name"
            if node.module in modules():
                for alias in node.names:
                    inner, known = f"{node.module}.{alias.name}", binds(node.module, alias.name)
                    module = inner in modules() and not known
                    yield (inner, None, node.lineno) if module else (node.module, alias.name, node.lineno)


def edges():
    return {
        (name, module): line
        for name in modules()
        for module, _, line in imports(name)
        if (name, module) not in EXCEPTIONS and not (name == "jaxcgx" and module == "jaxcgx")
    }


@functools.cache
def storey(module):
    """Returns the number of a module's storey, from the top."""
    parts = module.split(".")
    place = parts[1] if len(parts) > 1 else "__init__"
    return next(number for number, names in enumerate(STOREYS) if place in names)


def upward():
    """Returns {(importer, imported): line} of the imports from storeys above."""
    return {edge: line for edge, line in edges().items() if storey(edge[1]) < storey(edge[0])}


def origin(module, name):
    """Returns the module that defines what another module imports as `name`, and its name there."""
    found = [inner for inner, imported, _ in imports(module) if imported == name]
    return origin(found[0], name) if found else (module, name)


def public():
    """Yields (module, name) for everything that the packages that users import import `as` itself."""
    for package in ("jaxcgx", "jaxcgx.mpi", "jaxcgx.patch", "jaxcgx.wan"):
        for node in ast.walk(modules().get(package, ast.Module([], []))):
            names = [alias.name for alias in node.names if alias.asname] if isinstance(node, ast.ImportFrom) else []
            # Without the packages, whose names are yielded separately.
            yield from (origin(package, name) for name in names if package != "jaxcgx" or name not in ("patch", "wan"))


def parameters(function):
    """Returns the names of a function's parameters, without self and cls."""
    given = function.args
    named = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if arg]
    return [name for name in named if name not in ("self", "cls")]


def functions():
    """(module, function, whether a module's own) of every function and lambda of the package."""
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield module, node, node in tree.body


def body_lines(function):
    """Returns the number of lines of a function's body, without its docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def complexity(function, conditions=False):
    """Returns McCabe's number, without inner functions. `conditions`: those in expressions and comprehensions count."""
    found, nodes = 1, list(function.body)
    while nodes:
        node = nodes.pop()
        found += isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case)
        if conditions and isinstance(node, ast.IfExp | ast.BoolOp | ast.comprehension):
            found += len(getattr(node, "values", "ab")) - 1 + len(getattr(node, "ifs", ()))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


def without_text(text):
    """Returns C++ code with what UNREAD matches replaced by spaces. The lines keep their numbers."""
    return UNREAD.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


@functools.cache
def native():
    """Returns {path: code} of every C++ and CUDA file of the package."""
    files = [path for folder in ("xla_ffi", "cuda") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(ROOT)): without_text(path.read_text()) for path in sorted(files)}


def native_definitions(text):
    """Yields (line, name, number of parameters) of every function and lambda that the code defines."""
    opened = []  # (bracket, its position, number of commas directly inside)
    for found in re.finditer(r"[][(){}<>,;]", text.replace("->", "  ")):
        sign, at = found[0], found.start()
        if sign in "([{<":
            opened.append([sign, at, 0])
        elif sign == "," and opened:
            opened[-1][2] += 1
        elif sign in ")]};":  # a < that is still open here was a comparison
            while opened and opened[-1][0] == "<":
                opened.pop()
            if sign == ";":
                continue
            _, start, commas = opened.pop()
            before = text[max(0, start - 80) : start]
            name = re.search(r"(\w+|[])])\s*$", before)
            other = name and (MEMBER.search(before) or name[1] in ("if", "for", "while", "switch", "catch"))
            if sign == ")" and name and not other and BODY.match(text, at + 1):
                count = commas + 1 if text[start + 1 : at].strip() else 0
                yield text.count("\n", 0, start) + 1, name[1], count
        elif sign == ">" and opened and opened[-1][0] == "<":
            opened.pop()


def untyped():
    """Returns (annotations that are Any or an alias of Any except PyTree, annotations)."""
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    named = [
        n for n in nodes if isinstance(n, ast.Assign | ast.AnnAssign) and n.value and ast.unparse(n.value) == "Any"
    ]
    targets = [n.target if isinstance(n, ast.AnnAssign) else n.targets[0] for n in named]
    unknown = {"Any", *map(ast.unparse, targets)} - {"PyTree"}
    given = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    given += [
        node.returns for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns
    ]
    return sum(ast.unparse(each).split(".")[-1] in unknown for each in given), len(given)


def code():
    """Returns {what: count} of the code as it is written."""
    found = {}
    for folder in ("jaxcgx", "tests", "xla_ffi", "cuda", "benchmarks"):
        listed = subprocess.run(
            ["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        paths = [
            path for path in map(ROOT.joinpath, listed.split()) if path.suffix in (".py", ".cc", ".h", ".cu", ".cuh")
        ]
        found[f"lines of {folder}/"] = sum(len(path.read_text().splitlines()) for path in paths)
        found[f"files of {folder}/"] = len(paths)
    own, exported = [(m, f, top) for m, f, top in functions() if not isinstance(f, ast.Lambda)], set(public())
    bodies = [body_lines(function) for _, function, _ in own]
    found["mean lines of a body"] = round(statistics.mean(bodies), 2)
    found["bodies over 60 lines"] = sum(lines > 60 for lines in bodies)
    found["complexity over 15"] = sum(complexity(function) > 15 for _, function, _ in own)
    found["complexity over 15, with conditions in expressions"] = sum(
        complexity(f, conditions=True) > 15 for _, f, _ in own
    )
    counts = [
        len(parameters(node)) - len(node.args.kwonlyargs) * (top and (module, getattr(node, "name", "")) in exported)
        for module, node, top in functions()
    ]
    found[f"functions over {MOST} parameters"] = sum(count > MOST for count in counts)
    unknown, annotations = untyped()
    found["annotations"] = annotations
    found["annotations that are Any (%)"] = round(100 * unknown / annotations, 1)
    classes = [node.name for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found["class names that exist twice"] = sum(count > 1 for count in collections.Counter(classes).values())
    found["imports upward"] = len(upward())
    looks = looks_into_programs()
    found["files that look into programs, without explain"] = len(looks.keys() - {"jaxcgx.report.explain"})
    return found


def looks_into_programs():
    """Returns {module: number of reads of `.eqns`}."""
    reads = lambda tree: sum(isinstance(node, ast.Attribute) and node.attr == "eqns" for node in ast.walk(tree))
    return {name: count for name, tree in modules().items() if (count := reads(tree))}
