"""slowest.py FOLDER: prints the 20 slowest tests of the JUnit reports in a folder.

Each report is for one part of the tests, and is named PART.xml. Under mpirun, each rank writes PART.RANK.xml, and the
slowest rank counts.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as xml

ROWS = 20


def times(folder):
    """Returns {(part, test): seconds}. The seconds include setup and teardown."""
    found = {}
    for report in pathlib.Path(folder).glob("*.xml"):
        part = re.sub(r"\.\d+$", "", report.stem)
        for case in xml.parse(report).iter("testcase"):
            # In reports of ctest, the class name is the test's name again.
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
