"""Tests the structure of the code: no module imports upward or in a circle, and calls name their arguments.

C++ and CUDA functions have few parameters, and only codec/traits.h and two similar files ask which codec there is. For
Python, ruff limits parameters and complexity, and knows which modules of JAX only _compat.py imports.
"""

import ast
import dataclasses
import re
import sys

import pytest
from commands import ROOT
from helpers import load_script

with pytest.MonkeyPatch.context() as patch:
    source = load_script(ROOT / "scripts/source.py", patch)
EXCEPTIONS, MOST, STOREYS = source.EXCEPTIONS, source.MOST, source.STOREYS
MOST_BY_POSITION = 4  # arguments of a call inside the package
# (module, class): why this module asks whether a codec has this class. Other code asks the contract of codecs.
CLASSES = {
    ("jaxcgx.plan.adapt", "MaxMin"): "CGX's k-means chooses the bits and the bucket sizes of a MaxMin",
    ("jaxcgx.plan.leaves", "PowerSGD"): "only it has factor_shape, which the type checker must know",
}
KIND_FILES = {f"xla_ffi/codec/{name}.h" for name in ("base", "dispatch", "traits")}


def none(wrong, rule):
    """Checks that nothing is wrong. An error says the rule and the remedy, and then each wrong place on a line."""
    lines = [str(each) for each in wrong]
    if lines:  # assert would show the list twice
        raise AssertionError("\n".join([f"{rule}:", *lines]))


def packages():
    return {name.split(".")[1] for name in source.modules() if name != "jaxcgx"}


def test_every_module_has_a_storey():
    places = {name for names in STOREYS for name in names}
    rule = "every module has a storey; add it to STOREYS in scripts/source.py and to docs/architecture.md"
    none(sorted(packages() - places), rule)


def test_nothing_imports_upward():
    spelled = lambda module: f"{module} (storey {'/'.join(STOREYS[source.storey(module)])})"
    rule, found = "a module imports no storey above its own; move what both need down", source.upward().items()
    none([f"{name}:{line} imports {spelled(module)}, above {spelled(name)}" for (name, module), line in found], rule)


def test_nothing_imports_in_a_circle():
    graph = {name: [] for name in source.modules()}
    for name, module in source.edges():
        graph[name].append(module)
    done, path = set(), []

    def walk(name):
        circle = [*path[path.index(name) :], name] if name in path else []
        none([" imports ".join(circle)] if circle else [], "imports make no circle; move what both need down")
        if name not in done:
            path.append(name)
            for module in graph[name]:
                walk(module)
            done.add(path.pop())

    for name in graph:
        walk(name)


def test_exceptions_are_needed():
    found = {(name, module) for name in source.modules() for module, _, _ in source.imports(name)}
    none(EXCEPTIONS.keys() - found, "these imports are gone; remove them from EXCEPTIONS in scripts/source.py")


def test_bodies_and_complexity():
    function = ast.parse(
        """def f(x):
        'Not counted.'
        if x and x.a or x.b:

            return [y for y in x if y] if x else 1

        def inner():
            while x: pass
        return inner"""
    ).body[0]
    assert (source.body_lines(function), source.complexity(function)) == (7, 2)
    assert source.complexity(function, conditions=True) == 7  # and, or, for, if in it, if else


def definitions():
    """Returns {name: [node]} of every function and class of the package."""
    found = {}
    for tree in source.modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def test_calls_name_their_arguments():
    """Exceptions are the functions of checks.py, which have the same order everywhere, and functions with *args."""
    takes_any = lambda node: isinstance(node, ast.FunctionDef) and node.args.vararg is not None
    checks = {node.name for node in source.modules()["jaxcgx.checks"].body if isinstance(node, ast.FunctionDef)}
    exempt = checks | {name for name, nodes in definitions().items() if all(map(takes_any, nodes))}
    known, wrong = definitions().keys() - exempt, []
    for module, tree in source.modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION:
                name = getattr(node.func, "id", getattr(node.func, "attr", None))  # f(...) or module.f(...)
                if name in known:
                    wrong.append(f"{module}:{node.lineno} {name} has {len(node.args)} arguments without a name")
    assert {"Grid", "_run"} <= known
    none(wrong, f"a call has at most {MOST_BY_POSITION} arguments without a name; name the others")


def codec_classes():
    """The names of all codecs: the classes of codecs/ that inherit from Codec."""
    trees = [tree for name, tree in source.modules().items() if name.startswith("jaxcgx.codecs.")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {node.name: set(map(ast.unparse, node.bases)) for node in classes}
    found = {"Codec"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - {"Codec"}


def members(*names):
    """The fields, methods and properties that classes of the package declare."""
    nodes = [node for name in names for node in definitions()[name] if isinstance(node, ast.ClassDef)]
    found = {each.name for node in nodes for each in node.body if isinstance(each, ast.FunctionDef)}
    return found | {each.target.id for node in nodes for each in node.body if isinstance(each, ast.AnnAssign)}


def outside_codecs():
    """(module, node) of all code that may not know one codec from another."""
    for module, tree in source.modules().items():
        if not module.startswith("jaxcgx.codecs"):
            yield from ((module, node) for node in ast.walk(tree))


def test_code_asks_the_contract_what_a_codec_can_do():
    """An argument `codec` may also be a plan or a dict by axis."""
    known = members("Codec", "PowerSGD", "Plan", "Assignment", "Sending") | {"values"}
    assert {"sparse", "of_sum", "sums_grow", "factor_shape", "network", "default"} <= known and "bits" not in known
    asked = [
        (module, node)
        for module, node in outside_codecs()
        if isinstance(node, ast.Attribute)
        and (ast.unparse(node.value) == "codec" or getattr(node.value, "attr", None) in ("codec", "backward"))
    ]
    assert len(asked) > 100
    wrong = [f"{module}:{node.lineno} {ast.unparse(node)}" for module, node in asked if node.attr not in known]
    none(wrong, "only jaxcgx/codecs knows one codec from another; ask base.Codec, with a new trait if it needs one")


def test_code_does_not_ask_for_the_class_of_a_codec():
    classes, found = codec_classes(), set()
    assert {"MaxMin", "Skip", "PowerSGD", "Lossless"} <= classes
    for module, node in outside_codecs():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            named = [getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node.args[1])]
            found |= {(module, name) for name in named if name in classes}
    rule = "only jaxcgx/codecs asks for the class of a codec; ask base.Codec, or add it to CLASSES and say why"
    none(found - CLASSES.keys(), rule)
    none(CLASSES.keys() - found, "these questions are gone; remove them from CLASSES")


def test_definitions_are_found():
    text = """
    struct S { S(int a, std::pair<int, int> b) : a(a), b(b) {} };  // f(int a) {
    auto f(void (*g)(int, int), int b = h(1, 2)) const -> int { if (a < b, c) { return k(1, 2, 3); } }
    const auto l = [&](int a, int b, int c) mutable { print("f(int a) {"); };
    int declared(int a, int b);
    void none() {}
    """
    found = list(source.native_definitions(source.without_text(text)))
    assert found == [(2, "S", 2), (3, "f", 2), (4, "]", 3), (6, "none", 0)]


def test_native_functions_have_few_parameters():
    found = [(path, *each) for path, text in source.native().items() for each in source.native_definitions(text)]
    known = {("cuda/load_store.cuh", "store_quad", 5), ("xla_ffi/handlers/tcp.cc", "exchange", 6)}
    assert known <= {(path, name, count) for path, _, name, count in found}
    wrong = [f"{path}:{line} {name} has {count}" for path, line, name, count in found if count > MOST]
    none(wrong, f"a C++ function has at most {MOST} parameters; pass some as a struct")


def test_native_code_asks_traits_which_codec_it_has():
    asks, own = re.compile(r"(?<!Error::)\bKind::k"), re.compile(r"static constexpr Kind kKind = Kind::k\w+;")
    lines = [
        f"{path}:{number} {line.strip()}"
        for path, text in source.native().items()
        if path not in KIND_FILES
        for number, line in enumerate(text.splitlines(), 1)
        if asks.search(line) and not own.search(line)
    ]
    none(lines, "only codec/base.h, dispatch.h and traits.h know one codec from another; ask traits_of")


def test_values_are_frozen():
    """Four are filled in step by step, and two are arguments of Orbax."""
    modules = [module for name, module in sys.modules.items() if name.startswith("jaxcgx.")]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    values = [each for each in classes if each.__module__.startswith("jaxcgx.") and dataclasses.is_dataclass(each)]
    changing = {each.__name__ for each in values if not each.__dataclass_params__.frozen}
    assert changing - {"Restore", "Save"} == {"Assembly", "Grid", "Outputs", "Rotated"}


def test_the_package_is_typed():
    assert (ROOT / "jaxcgx/py.typed").exists()


def test_the_architecture_page_shows_the_storeys():
    """The arrows of the picture go from the first storey to the last, in order."""
    page = (ROOT / "docs/architecture.md").read_text()
    shown = [names[0] for names in STOREYS[1:-1] if names[0] in packages()]
    arrows = f"    {' --> '.join([*shown, 'ground'])}\n"
    none([arrows] * (arrows not in page), "the picture in docs/architecture.md shows the storeys; it lacks this line")
    lacks = [name for name in shown if f"**{name}**" not in page]
    none(lacks, "docs/architecture.md describes each storey; add **name**")
