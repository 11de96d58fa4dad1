"""Checks whom errors name, what came and what to write instead. test_errors.py has the wording of a dozen errors."""

import contextlib
import re

import pytest


def named(text, words):
    """Checks whom an error names, such as "encode key jax.random.key(".

    The first word is the function and the second one its argument, or "-". The other words, such as what was given and
    the remedy, must follow in their order. Other words may be between them.
    """
    function, argument, *others = words.split(" ", 2)
    place = rf"(/[^:,]*(: |, ))?(argument|array|key|variable) '?{re.escape(argument)}'?[,:]" * (argument != "-")
    found = re.search(rf"(^|[: ]){re.escape(function)}: {place}", text)
    assert found and has(" ".join(others), text[found.end() :]), f"expected {words!r}: {text}"


def has(words, text):
    """Returns whether all words are in the text, in their order. The end of a number or name must be complete."""
    patterns = [re.escape(word) + (r"(?!\w|\[|\.\d)" if word[-1].isalnum() else "") for word in words.split()]
    return re.search(".*?".join(rf"(?<![\w.-]){pattern}" for pattern in patterns), text, re.DOTALL)


def says(function, argument="-", at="", expected="", got="", remedy=""):
    """Returns what `raises` checks: words in their order, and those of the remedy, which may be anywhere after them."""
    return [f"{function} {argument} {at} {expected} {got}", f"{function} {argument} {remedy}"]


def check(text, every):
    for words in every:
        named(text, words)


@contextlib.contextmanager
def raises(error, every):
    """Works like pytest.raises for an error that has all that `says` or `named` asks for."""
    with pytest.raises(error) as caught:
        yield caught
    check(str(caught.value), every)


def names(error, words):
    return raises(error, [words])


def rows(table):
    """Returns the parameters of a test of a table of errors: {function: [(call, error, place, got, remedy)]}.

    A place is an argument, and maybe its leaf, "x ['w']". What came (got) and what to write instead (remedy) are words
    of the error. Both may be left out.
    """
    return [pytest.param((name, *row), id=f"{name} {row[2]}") for name, each in table.items() for row in each]


def table(found, run=lambda call: call()):
    """Returns a test of a table of errors, which may call run(call) in place of call()."""

    @pytest.mark.parametrize("row", rows(found))
    def test(row):
        refused(*row, run=run)

    return test


def refused(function, call, error, place, got="", remedy="", run=lambda call: call()):
    """Checks that run(call) raises an error with the function, the place, what came and the remedy.

    Returns its text.
    """
    argument, _, leaf = place.partition(" ")
    with raises(error, says(function, argument or "-", f"leaf {leaf}" if leaf else "", "", got, remedy)) as caught:
        run(call)
    return str(caught.value)
