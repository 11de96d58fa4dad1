"""mutate.py: changes one place of the package at a time, and looks whether a test fails.

    python scripts/mutate.py --count 150 --seed 0 --minutes 150

Mutants are drawn by the seed over all modules, each module as likely as it has places. A mutant is killed by the first
test that fails. The tests that enter its line run, the quickest first (mutant/entered.py finds them, once). A line that
an import enters is tested by those that enter any function of its file. Where no test does, those of the module's file
of tests run, then those of its folder, then those of everything.

benchmarks/results/mutants.json keeps what was drawn and its results, so an interrupted run continues. If the line of a
mutant changes, another is drawn in its place. A mutant runs again if the test that killed it is gone. `--again` runs
those of one result again, as `--again survived`, or all, first against the test that killed them. With `--tests`, only
these tests run.
"""

import argparse
import ast
import concurrent.futures
import functools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from jaxcgx.report import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, ENTERED = ROOT / "benchmarks/results", ROOT / "build/entered"
LIMIT = 900  # seconds of one run of pytest
LONGEST = 300  # seconds of the tests that enter a line, all together
KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"
LEAST, MOST_EQUIVALENT = 0.95, 5  # goals
# Tests that enter most of the package, for a mutant that the tests of its folder don't kill.
EVERYTHING = (
    "tests/train/test_product.py",
    "tests/train/test_train.py",
    "tests/train/test_value_and_grad.py",
    "tests/collectives",
    "tests/exchange",
    "tests/transports/test_tcp.py",
    "tests/wan",
    "tests/report",
    "tests/test_errors.py",
)
# {(file, the line before the change): why no test can tell the mutant from the original}
REASONS = {
    ("jaxcgx/report/figures.py", 'figure = Figure(figsize=(8, 4.5), layout="constrained")'): "the size of a picture",
    ("jaxcgx/plan/environment.py", '{"1": 1.0, "1.0": 1.0},'): "nothing reads the ratio, which may only be 1",
    (
        "jaxcgx/plan/environment.py",
        'minimal_size: int = _variable("CGX_COMPRESSION_MINIMAL_SIZE", 0, 0)',
    ): "the least size is 17 with both",
    ("jaxcgx/native/connections.py", "if now >= deadline:"): "no clock shows the same time twice",
    ("jaxcgx/train/feedback.py", "if self.keep and len(at.net.parts) > 1:"): "one axis has no order to warn of",
}
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
INSTEAD = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "*", ast.Pow: "*"}
OPERATORS = (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.If, ast.IfExp)


def places(path):
    """Yields (line, start, end, text) of every change of a file: `text` replaces the bytes from `start` to `end`."""
    code = path.read_bytes()
    lines = [0]
    for line in code.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    start = lambda node: lines[node.lineno - 1] + node.col_offset
    end = lambda node: lines[node.end_lineno - 1] + node.end_col_offset
    of = lambda node: code[start(node) : end(node)].decode()
    tree = ast.parse(code)
    silent = set()  # nodes of types, docstrings and errors, which change nothing that a program computes
    for node in ast.walk(tree):
        said = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        said += [node] if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) else []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("warn", "wrong", "unexpected"):
            said.append(node)
        silent |= {each for part in said if part is not None for each in ast.walk(part)}
    for node in ast.walk(tree):
        if not isinstance(node, OPERATORS) or node in silent:
            continue
        text = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
            text = f"{of(node.left)} {SWAPPED[type(node.ops[0])]} {of(node.comparators[0])}"
        elif isinstance(node, ast.BinOp) and type(node.op) in INSTEAD:
            text = f"{of(node.left)} {INSTEAD[type(node.op)]} {of(node.right)}"
        elif isinstance(node, ast.BoolOp):
            text = (" or " if isinstance(node.op, ast.And) else " and ").join(map(of, node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            text = of(node.operand)
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            text = repr(not node.value if type(node.value) is bool else node.value + 1)
        elif isinstance(node, ast.If | ast.IfExp):
            node = node.test
            text = f"not ({of(node)})"
        if text is not None:
            yield node.lineno, start(node), end(node), f"({text})" if isinstance(node, ast.expr) else text


def drawn(count, seed, known):
    """Returns {what a mutant changes: (path, place)}: those of `known` that the code still has, then others by seed."""
    paths = sorted(path for path in (ROOT / "jaxcgx").rglob("*.py") if path.name != "__init__.py")
    every = {alike(described(path, place)): (path, place) for path in paths for place in places(path)}
    order = lambda change: (change not in known, random.Random(f"{seed} {change}").random())
    return {change: every[change] for change in sorted(every, key=order)[:count]}


@functools.cache
def entered():
    """Returns {test: (seconds, {file: lines})} as mutant/entered.py has written them, the quickest test first."""
    found: dict[str, tuple[float, dict[str, int]]] = {}
    for file in ENTERED.glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):  # of a test, or of a process that it started
            seconds, lines = found.get(row["test"], (0.0, {}))
            for name, bits in row["lines"].items():
                lines[name] = lines.get(name, 0) | int(bits, 16)
            found[row["test"]] = seconds + row["seconds"], lines
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def in_functions(path):
    """Returns the lines of the bodies of a file's functions, as the bits of an integer. Imports enter the others."""
    found = 0
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= (1 << node.end_lineno + 1) - (1 << node.body[0].lineno)
    return found


def entering(path, line):
    """Returns the quickest tests that enter a line of a function, or any function of the file."""
    file, total, found = str(path.relative_to(ROOT)), 0.0, []
    bodies = in_functions(path)
    wanted = 1 << line if bodies >> line & 1 else bodies
    for test, (seconds, lines) in entered().items():
        if lines.get(file, 0) & wanted and total + seconds <= LONGEST:
            total += seconds
            found.append(test)
    return found


def tests_of(path, line):
    """Returns lists of tests, the most likely to kill a mutant of this line first."""
    if found := entering(path, line):
        return [found]
    folder = ROOT / "tests" / path.relative_to(ROOT / "jaxcgx").parts[0]
    near = [str(each.relative_to(ROOT)) for each in (folder / f"test_{path.stem}.py", folder) if each.exists()]
    return [*([each] for each in near), list(EVERYTHING)]


def killer(row):
    """Returns the function of tests that killed a mutant, "" if it is gone, or None if no test did."""
    test, _, _ = (row["by"] or "").partition("[")
    if row["result"] != KILLED or not test.startswith("tests/"):
        return None
    file, _, name = test.partition("::")
    return test if (ROOT / file).is_file() and name in (ROOT / file).read_text() else ""


def run(tests, module, path):
    """Returns the first test that fails with a mutant, "a hang", or None."""
    env = os.environ | {"JAXCGX_MUTANT": f"{module}={path}", "PYTHONPATH": str(ROOT / "scripts/mutant")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "a hang"
    if "ERROR: not found" in done.stdout + done.stderr:
        raise RuntimeError("mutate: tests have other names now; remove build/entered, so that they are found anew")
    lines = [line.partition(" - ")[0] for line in done.stdout.splitlines()]
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else None if done.returncode == 0 else "pytest"


def described(path, place):
    """Returns the first columns of a mutant's row."""
    line, start, end, text = place
    code = path.read_bytes()
    whole = code.splitlines()[line - 1].decode().strip()
    file = str(path.relative_to(ROOT))
    return dict(file=file, line=line, code=whole, before=code[start:end].decode(), after=text)


def alike(row):
    """Returns what a mutant changes, wherever its line is."""
    return tuple(row[name] for name in ("file", "code", "before", "after"))


def examined(path, place, tests):
    """Returns the row of a mutant after `tests`, lists of them."""
    row, (_, start, end, text), code = described(path, place), place, path.read_bytes()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        mutant = pathlib.Path(folder, path.name)
        mutant.write_bytes(code[:start] + text.encode() + code[end:])
        by = next(filter(None, (run(each, module, mutant) for each in tests)), None)
    reason = REASONS.get((row["file"], row["code"]))
    result = KILLED if by else EQUIVALENT if reason else SURVIVED
    return row | dict(result=result, by=by or reason, seconds=round(time.monotonic() - begun))


def table(data):
    rows = data["rows"]
    counts = {each: sum(row["result"] == each for row in rows) for each in (KILLED, SURVIVED, EQUIVALENT)}
    judged = counts[KILLED] + counts[SURVIVED]
    yield f"Made by `{data['command']}` on {data['date']}. Seed {data['seed']}, {len(rows)} of {data['count']} mutants."
    yield ""
    share = counts[KILLED] / judged if judged else 0
    yield f"Killed: {counts[KILLED]} of {judged} ({share:.1%}; goal {LEAST:.0%}). Equivalent: {counts[EQUIVALENT]}."
    yield ""
    yield "| file | line | before | after | result | by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in sorted(rows, key=lambda row: (row["result"] == KILLED, row["file"], row["line"])):
        short = lambda text: " ".join(str(text or "").replace("|", "\\|").split())[:80]
        cells = row["file"], row["line"], f"`{short(row['before'])}`", f"`{short(row['after'])}`", row["result"]
        yield f"| {' | '.join(map(str, cells))} | {short(row['by'])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=150, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=150, help="no mutant begins later")
    results_of = [KILLED, SURVIVED, EQUIVALENT, "all"]
    parser.add_argument("--again", choices=results_of, help="run those with this result again")
    parser.add_argument("--only", nargs="+", metavar="FILE:LINE", help="run the mutants of these places")
    parser.add_argument("--tests", nargs="+", help="run these tests, no others")
    options = parser.parse_args()
    file, begun = RESULTS / "mutants.json", time.monotonic()
    rows = {alike(row): row for row in (results.read(file)["rows"] if file.exists() else [])}
    data = results.origin("make mutate") | dict(seed=options.seed, count=options.count)
    mutants = drawn(options.count, options.seed, rows)

    def asked(change):
        if options.only:
            return f"{change[0]}:{mutants[change][1][0]}" in options.only
        row = rows.get(change)
        return row is None or options.again in ("all", row["result"]) or killer(row) == ""

    def examine(change):
        if time.monotonic() - begun < 60 * options.minutes:
            path, place = mutants[change]
            tests = [options.tests] if options.tests else tests_of(path, place[0])
            if change in rows and (test := killer(rows[change])) and not options.tests:
                tests.insert(0, [test])
            rows[change] = row = examined(path, place, tests)
            what = f"{row['file']}:{row['line']} {row['before']!r} -> {row['after']!r}"
            print(f"{what}: {row['result']} {row['by'] or ''}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(examine, filter(asked, mutants)):
            results.write(file, data | dict(rows=list(rows.values())))
    # A line that is still there may have moved.
    data["rows"] = [rows[each] | dict(line=place[0]) for each, (_, place) in mutants.items() if each in rows]
    results.write(file, data)
    (RESULTS / "mutants.md").write_text("\n".join(table(data)) + "\n")


if __name__ == "__main__":
    main()
