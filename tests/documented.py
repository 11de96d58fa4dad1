"""Finds what the docstrings of public names leave out.

A function, a class, a method and a property have a docstring. The first line of a property's has no colon. An argument
is a line of the section `Args`, or, without this section, a word of the docstring. A class attribute, a field and an
attribute that a method sets are lines of `Args` or `Attributes` in the docstring of their class or of one of its bases.
A protocol documents its members for all classes that have them.
"""

import ast
import functools
import inspect
import re
import textwrap
import typing

import jax
import optax
from commands import ROOT

from jaxcgx.train.exchange import Exchange
from jaxcgx.train.rounds import Rounds


def declared(kind):
    """Returns the public names in the body of a class."""
    return {name for name in {*vars(kind), *inspect.get_annotations(kind)} if not name.startswith("_")}


def public(module):
    """Returns {name: value} of what a package imports `as` itself, which makes it public."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    names = [each for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    return {each.asname: getattr(module, each.asname) for each in names if each.asname == each.name}


def undocumented(things):
    """Returns the names of {name: value}, and of their arguments and members, that have no documentation."""
    found = []
    for name, thing in things.items():
        found += [name] * (not inspect.getdoc(thing))
        if inspect.isfunction(thing):
            found += missing_arguments(name, thing)
        if inspect.isclass(thing):
            found += missing_members(name, thing)
    return found


def results(module):
    """Returns the classes of jaxcgx that a module's public functions, and the methods of its classes, return."""
    own = public(module).values()
    members = [member for thing in own if inspect.isclass(thing) for member in vars(thing).items()]
    methods = [getattr(member, "__func__", member) for name, member in members if not name.startswith("_")]
    functions = filter(inspect.isfunction, [*own, *methods])
    hints = [typing.get_type_hints(each, localns=dict(jax=jax, optax=optax)).get("return") for each in functions]
    found = {kind for hint in hints for kind in (hint, *typing.get_args(hint)) if inspect.isclass(kind)}
    return {kind for kind in found if kind.__module__.startswith("jaxcgx.")} - {*own}


def named_on_pages(module):
    """Returns the names in a module, as jaxcgx.mpi.hierarchy, that README and docs/ mention, except in diffs."""
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    text = re.sub("^```diff\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = {f"jaxcgx{rest}" for rest in re.findall(r"\b(?:jax)?cgx((?:\.[A-Za-z]\w*)+)", text)}
    return sorted(name for name in found if name.startswith(f"{module}."))


def lines(text):
    """Returns the names that the sections of a docstring explain. A line may explain several, as in "a, b: ..."."""
    found = re.findall(r"^ {2}((?:\*{0,2}\w+, )*\*{0,2}\w+):", inspect.cleandoc(text), re.MULTILINE)
    return {name.lstrip("*") for names in found for name in names.split(", ")}


def missing_arguments(name, function):
    """Returns the arguments that a docstring leaves out.

    Without a section `Args`, it may leave out *args and **kwargs.
    """
    text = inspect.getdoc(inspect.unwrap(function)) or ""
    listed = lines(text)
    explained = listed or {*re.findall(r"\w+", text)}
    several = () if listed else (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = inspect.signature(function).parameters.values()
    found = [each.name for each in given if each.name not in explained and each.kind not in several]
    return [f"{name}({argument})" for argument in found if argument not in ("self", "cls")]


def missing_members(name, kind):
    package = kind.__module__.partition(".")[0]
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == package]
    explained = set().union(*(lines(base.__doc__ or "") for base in bases))
    members = set().union(*(declared(base) | set_by_methods(base) for base in bases))
    if kind not in (Exchange, Rounds):
        members -= set().union(*(each for each in map(declared, (Exchange, Rounds)) if each <= members))
    found = []
    for member in sorted(members):
        thing = getattr(kind, member, None)
        if inspect.isfunction(thing) or inspect.ismethod(thing):
            found += [f"{name}.{member}"] * (not inspect.getdoc(thing)) + missing_arguments(f"{name}.{member}", thing)
        elif isinstance(thing, property | functools.cached_property):
            # Not inspect.getdoc, which finds the documentation of `bool` for a property in place of an attribute.
            # Sphinx's napoleon takes what is before a colon for a type.
            found += [f"{name}.{member}"] * (": " in (thing.__doc__ or ": ").splitlines()[0])
        else:
            found += [f"{name}.{member}"] * (member not in explained)
    return found


def set_by_methods(kind):
    """Returns the public names of the attributes that the methods of a class set, as they are written."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {each.attr for each in stored if ast.unparse(each.value) == "self" and not each.attr.startswith("_")}
