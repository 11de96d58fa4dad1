"""With `pytest --results FILE`, the result of each test is kept as soon as the test ends.

The next run continues with the tests that are left.
"""

import json
import os
import pathlib

import pytest


def pytest_addoption(parser):
    parser.addoption("--results", type=pathlib.Path, metavar="FILE", help="where the result of each test is kept")


def pytest_configure(config):
    if path := config.getoption("results", None):  # the option doesn't exist if tests/gpu is one of several folders
        config.pluginmanager.register(Results(path, again=bool(config.option.keyword)))


class Results:
    """Keeps the results in a JSON file.

    In the file, `tests` has {} for a test that is left, and `now` is the test that runs. `again` says whether tests
    that have a result run again, because the user has chosen them (-k).
    """

    def __init__(self, path, again):
        self.path, self.again = path, again
        self.data = json.loads(path.read_text()) if path.exists() else {}
        self.tests = self.data.setdefault("tests", {})

    def write(self):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items, config):
        """Runs before -k and -m choose. The tests that they leave out count as left."""
        ours = [item for item in items if item.get_closest_marker("gpu")]
        done = [] if self.again else [item for item in ours if self.tests.get(item.nodeid)]
        for item in ours:
            self.tests.setdefault(item.nodeid, {})
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)
        self.write()

    def pytest_runtest_logstart(self, nodeid):
        self.data["now"], self.running = nodeid, dict(outcome="passed", seconds=0)
        self.write()

    def pytest_runtest_logreport(self, report):
        self.running["seconds"] = round(self.running["seconds"] + report.duration, 1)
        if report.skipped:
            self.running |= dict(outcome="skipped", why=report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed:
            lines = report.longreprtext.strip().splitlines() or ["no message"]
            why = next((line[1:].strip() for line in lines if line.startswith("E")), lines[-1])
            self.running |= dict(outcome="failed", why=why)

    def pytest_runtest_logfinish(self, nodeid):
        self.tests[nodeid], self.data["now"] = self.running, None
        self.write()
