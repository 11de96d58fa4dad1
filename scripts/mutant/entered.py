"""A plugin of pytest that writes which lines of the package each test enters, and how long the test takes.

    JAXCGX_ENTERED=FOLDER python -m pytest -p entered tests

Each process has a file of its own in the folder: a JSON object per line, of a test, or of a process that a test started
(sitecustomize.py). Not seen are lines of a function whose result another test has left in a cache, and those of a
process that is killed.
"""

import atexit
import json
import os
import pathlib
import time
import warnings

import coverage
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = coverage.Coverage(data_file=None, source=[str(ROOT / "jaxcgx")], config_file=False)


def taken():
    """Returns the lines entered since the last call: {file: an integer whose bits are their numbers, as hex}."""
    PACKAGE.stop()
    with warnings.catch_warnings(action="ignore"):  # a test that enters no line
        data = PACKAGE.get_data()
    lines = {file: data.lines(file) for file in data.measured_files()}
    PACKAGE.erase()
    PACKAGE.start()
    return {
        os.path.relpath(file, ROOT): hex(sum(1 << line for line in found)) for file, found in lines.items() if found
    }


def write(test, seconds):
    folder = pathlib.Path(os.environ["JAXCGX_ENTERED"])
    folder.mkdir(parents=True, exist_ok=True)
    row = dict(test=test, seconds=round(seconds, 2), lines=taken())
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def follow(test):
    """Writes at the end of this process which lines it has entered for the test that started it. Imports count."""
    atexit.register(write, test, seconds=0)


class Entered:
    def __init__(self):
        taken()  # what imports have entered

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            write(item.nodeid, time.monotonic() - begun)


def pytest_collection_finish(session):
    if session.config.option.numprocesses and not hasattr(session.config, "workerinput"):
        return  # the process that hands out tests runs none
    os.environ["JAXCGX_ENTERED"] = os.path.abspath(os.environ["JAXCGX_ENTERED"])  # for processes in other folders
    session.config.pluginmanager.register(Entered())


PACKAGE.start()
