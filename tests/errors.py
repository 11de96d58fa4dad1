"""What an error says, field by field. Its facts are tested everywhere, the wording of a dozen in test_errors.py."""

import contextlib
import dataclasses
import re

import pytest

# "function: argument 'x', leaf ['w']: ...". A command or another error's place may come before; the place in a file
# (key, array) or a variable may take the argument's.
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
      function, argument: in full.
      at: what comes behind the argument, such as a leaf, in full.
      expected: words in their order, others may be between them.
      got: how it begins.
      remedy: as `expected`, of everything behind the argument.
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
    """The pattern of a text that begins with `words`, and whose number or name doesn't go on behind them."""
    return re.escape(words) + (r"(?!\w|\[|\.\d)" if words[-1:].isalnum() else "")


def has(words, text):
    """Whether all words are in the text, in their order."""
    return re.search(".*?".join(rf"(?<![\w.-]){beginning(word)}" for word in words.split()), text, re.DOTALL)


@contextlib.contextmanager
def raises(error, words):
    """As pytest.raises, of an error that says so. words: of `says`."""
    with pytest.raises(error) as caught:
        yield caught
    words.check(str(caught.value))
