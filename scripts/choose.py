"""choose.py: writes tests/full.txt, the tests that only `make test-full` runs (`make choose`).

A test that takes long is one of them if `TIMES` of the other tests enter each of its lines, or as many as there are
(mutant/entered.py finds which lines a test enters), and if no mutant is killed by it first
(benchmarks/results/mutants.json). A test that enters none always runs, because its lines weren't seen. The file has
options of pytest: `pytest @tests/full.txt` leaves the tests out.
"""

import collections
import json
import pathlib

import mutate

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "tests/full.txt"
LONG = 2.0  # seconds; quicker tests always run
TIMES = 2
# Tests that are there for what they combine, or for pages that users copy, and not for lines.
ALWAYS = (
    "tests/exchange/test_correlated.py::test_every_rank_and_the_sum_are_unbiased[stochastic",
    "tests/exchange/test_noise.py",
    "tests/test_fuzz.py",
    "tests/test_house.py",
    "tests/test_pages.py",
    "tests/train/test_machine.py",
    "tests/train/test_product.py",
    # one fixture runs what all of them compare
    "tests/transports/test_tcp.py::test_the_bits_of_plain_axes",
    "tests/wan/test_differential.py::test_the_steps_are_those_of_numpy[drop]",
    # the value and the gradient of weighted means
    "tests/train/test_value_and_grad.py::test_losses_that_look_at_all_ranks[shard_map-AxisType.Auto]",
    "tests/train/test_value_and_grad.py::test_no_style_changes_a_number[Auto-True]",
)


def killers():
    """Returns the tests that kill a mutant."""
    file = mutate.RESULTS / "mutants.json"
    return {row["by"] for row in json.loads(file.read_text())["rows"]} if file.exists() else set()


def always(entered, kept):
    """Returns the tests that always run: `kept`, those above, and long ones until every line is entered `TIMES` times.

    `entered` is {test: (seconds, {file: lines})}. The tests that enter most such lines a second are taken first.
    """
    certain = lambda test, seconds, lines: seconds <= LONG or not lines or test in kept or test.startswith(ALWAYS)
    found = set()
    seen = [collections.Counter() for _ in range(TIMES)]  # the lines that 1, 2, ... of the tests have entered

    def more(test):
        """Returns how many lines the test enters that fewer than `TIMES` of the found ones enter."""
        return sum((bits & ~seen[-1][file]).bit_count() for file, bits in entered[test][1].items())

    def take(test):
        found.add(test)
        for file, bits in entered[test][1].items():
            for lines in seen:
                before, lines[file] = lines[file], lines[file] | bits
                bits &= before

    for test in sorted(test for test, row in entered.items() if certain(test, *row)):
        take(test)
    while rest := [test for test in sorted(set(entered) - found) if more(test)]:
        take(max(rest, key=lambda test: more(test) / entered[test][0]))
    return found


def main():
    entered = mutate.entered()
    run = always(entered, killers())
    # pytest leaves out every test that begins with the text of the option.
    alone = lambda text: not any(test.startswith(text) for test in run)
    texts = [test.partition("[")[0] if alone(test.partition("[")[0]) else test for test in set(entered) - run]
    FILE.write_text("".join(f"--deselect={text}\n" for text in sorted(set(filter(alone, texts)))))
    left, seconds = len(entered) - len(run), lambda tests: round(sum(entered[test][0] for test in tests))
    print(f"left out: {left} of {len(entered)} tests, {seconds(entered) - seconds(run)} of {seconds(entered)} seconds")


if __name__ == "__main__":
    main()
