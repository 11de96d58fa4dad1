"""slowest.py FOLDER: a table of the 20 tests that took longest, of the JUnit reports in a folder.

A report is one part of the tests, named PART.xml or, for each rank of mpirun, PART.RANK.xml: the slowest rank counts.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as xml

ROWS = 20


def times(folder):
    """{(part, test): seconds}, setup and teardown included."""
    found = {}
    for report in pathlib.Path(folder).glob("*.xml"):
        part = re.sub(r"\.\d+$", "", report.stem)
        for case in xml.parse(report).iter("testcase"):
            # ctest's class is the test's name once more
            names = [case.get("classname", "").removeprefix("tests."), case.get("name")]
            key = part, "::".join(dict.fromkeys(filter(None, names)))
            found[key] = max(found.get(key, 0), float(case.get("time") or 0))
    return found


def main():
    found = times(sys.argv[1])
    if not found:
        sys.exit(f"slowest: no reports in {sys.argv[1]}")
    parts = {part: sum(s for (p, _), s in found.items() if p == part) for part, _ in found}
    print(f"\n== The {ROWS} slowest of {len(found)} tests")
    for (part, test), seconds in sorted(found.items(), key=lambda item: -item[1])[:ROWS]:
        print(f"{seconds:7.1f} s  {part:{max(map(len, parts))}}  {test if len(test) <= 100 else test[:97] + '...'}")
    print("== Seconds of tests in each part:", ", ".join(f"{part} {s:.0f}" for part, s in sorted(parts.items())))


if __name__ == "__main__":
    main()
