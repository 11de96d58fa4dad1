"""Checks errors field by field. All tests compare the facts, and test_errors.py the wording of about a dozen errors."""

import contextlib
import dataclasses
import re

import pytest

# "function: argument 'x', leaf ['w']: ...". A command or the place of another error may precede it. A place in a file
# (key, array) or a variable may replace the argument.
FUNCTION = r"(?:python -m jaxcgx )?(?P<function>[A-Za-z][\w.]*): (?:/[^:,]*(?:: |, ))?"
WITHOUT_ARGUMENT = re.compile(FUNCTION + "(?P<rest>.*)", re.DOTALL)
PLACE = re.compile(
    rf"(?:.*?: )??{FUNCTION}(?:argument|array|key|variable) (?:'(?P<argument>[^']+)'|(?P<variable>\w+))(?P<at>.*?): "
    "(?P<rest>.*)",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class says:
    """The fields of an error "function: argument 'x', leaf ['w']: expected ..., got ...; remedy".

    Args:
      function: the whole name.
      argument: the whole name.
      at: the whole text after the argument, such as a leaf.
      expected: words in their order. Other words may be between them.
      got: how the text begins.
      remedy: words in their order, anywhere after the argument.
    """

    function: str
    argument: str | None = None
    at: str = ""
    expected: str = ""
    got: str = ""
    remedy: str = ""

    def check(self, text):
        found = (PLACE if self.argument else WITHOUT_ARGUMENT).fullmatch(text)
        assert found, text
        fields = found.groupdict()
        assert fields["function"] == self.function, text
        if self.argument:
            argument = fields["argument"] or fields["variable"]
            assert (argument, fields["at"].removeprefix(", ")) == (self.argument, self.at), text
        expected, _, got = fields["rest"].partition(", got ")
        assert has(self.expected, expected), f"expected {self.expected!r}: {text}"
        assert re.match(beginning(self.got), got), f"got {self.got!r}: {text}"
        assert has(self.remedy, fields["rest"]), f"remedy {self.remedy!r}: {text}"


def beginning(words):
    """Returns the pattern of a text that begins with `words`. The last number or name must be complete."""
    return re.escape(words) + (r"(?!\w|\[|\.\d)" if words[-1:].isalnum() else "")


def has(words, text):
    """Returns whether all words are in the text, in their order."""
    return re.search(".*?".join(rf"(?<![\w.-]){beginning(word)}" for word in words.split()), text, re.DOTALL)


@contextlib.contextmanager
def raises(error, words):
    """Works like pytest.raises for an error that matches `words`, a `says`."""
    with pytest.raises(error) as caught:
        yield caught
    words.check(str(caught.value))


def rows(table):
    """Returns the parameters of a test of a table of errors: {function: [(call, error, place, got, remedy)]}.

    A place is an argument, and maybe its leaf, "x ['w']". What came (got) and what to write instead (remedy) are the
    beginning of the one and words of the other. Both may be left out.
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
    with raises(
        error, says(function, argument or None, f"leaf {leaf}" if leaf else "", got=got, remedy=remedy)
    ) as caught:
        run(call)
    return str(caught.value)


@contextlib.contextmanager
def names(error, words):
    """Works like pytest.raises. The error must name a function and an argument, as `named` checks."""
    with pytest.raises(error) as caught:
        yield caught
    named(str(caught.value), words)


def named(text, words):
    """Checks whom an error names, such as "encode key jax.random.key(".

    The first word is the function and the second one its argument, or "-". The other words, such as what was given and
    the remedy, must follow in their order. Other words may be between them.
    """
    function, argument, *others = words.split(" ", 2)
    place = rf"(/[^:,]*(: |, ))?(argument|array|key|variable) '?{re.escape(argument)}'?[,:]" * (argument != "-")
    found = re.search(rf"(^|[: ]){re.escape(function)}: {place}", text)
    assert found and has(" ".join(others), text[found.end() :]), f"expected {words!r}: {text}"
