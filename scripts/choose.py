"""choose.py: writes tests/full.txt, the tests that only `make test-full` runs (`make choose`).

A test that takes long is one of them if the other tests enter each of its lines (mutant/entered.py finds which lines a
test enters), and if no mutant is killed by it first (benchmarks/results/mutants.json). A test that enters none always
runs, because its lines weren't seen. The file has options of pytest: `pytest @tests/full.txt` leaves the tests out.
"""

import collections
import json
import pathlib

import mutate

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "tests/full.txt"
LONG = 1.0  # seconds; quicker tests always run
# Tests that are there for what they combine, or for pages that users copy, and not for lines.
ALWAYS = (
    "tests/exchange/test_noise.py",
    "tests/test_fuzz.py",
    "tests/test_house.py",
    "tests/test_pages.py",
    "tests/train/test_machine.py",
    "tests/train/test_product.py",
)


def killers():
    """Returns the tests that kill a mutant."""
    file = mutate.RESULTS / "mutants.json"
    return {row["by"] for row in json.loads(file.read_text())["rows"]} if file.exists() else set()


def always(entered, kept):
    """Returns the tests that always run: `kept`, those above, and long ones until every line is entered.

    `entered` is {test: (seconds, {file: lines})}. The tests that enter most other lines a second are taken first.
    """
    certain = lambda test, seconds, lines: seconds <= LONG or not lines or test in kept or test.startswith(ALWAYS)
    found = {test for test, row in entered.items() if certain(test, *row)}
    seen = collections.Counter()

    def more(test):
        """Returns how many lines the test enters that none of the found ones enters."""
        return sum((bits & ~seen[file]).bit_count() for file, bits in entered[test][1].items())

    def take(test):
        found.add(test)
        for file, bits in entered[test][1].items():
            seen[file] |= bits

    for test in sorted(found):
        take(test)
    rest = sorted(set(entered) - found)
    while rest := [test for test in rest if more(test)]:
        take(max(rest, key=lambda test: more(test) / entered[test][0]))
    return found


def main():
    entered = mutate.entered()
    run = always(entered, killers())
    # pytest leaves out every test that begins with the text of the option.
    left = [test for test in sorted(set(entered) - run) if not any(other.startswith(test) for other in run)]
    FILE.write_text("".join(f"--deselect={test}\n" for test in left))
    seconds = [sum(entered[test][0] for test in tests) for tests in (entered, left)]
    print(
        f"{FILE.relative_to(ROOT)}: {len(left)} of {len(entered)} tests, {seconds[1]:.0f} of {seconds[0]:.0f} seconds"
    )


if __name__ == "__main__":
    main()
