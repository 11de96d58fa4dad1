"""The commands that the pages print, and the reasons why some of them are not run."""

import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]

PROGRAMS = r"make|pip|sudo|mpirun|mpiexec|srun|sbatch|kubectl|(?:\.venv/bin/)?python|scripts/\w+|\.ci/run"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?= |$).*")
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
INLINE = re.compile(r"`([^`]+)`")

# Reasons why `make test-commands` doesn't run a command. The first pattern that is found in the command counts.
FOREIGN = "is another system's"
ROOT_NEEDED = "needs root"
GPU = "needs a GPU"
COMPILER = "needs nvcc"
CLUSTER = "needs several hosts or a scheduler"
LONG = "takes longer than a few minutes"
FILLED_IN = "is a name, or has words that the reader fills in"
OTHER_MPI = "would take the place of Open MPI"
NOT_RUN = {
    r"bagua|pytorch-cgx|mpirun -np \d+ (python train.py|\.\.\.)": FOREIGN,
    r"^sudo |--measure|MEASURE=|\d hosts|(training_speed|wan)\.py": ROOT_NEEDED,
    r"bench-(lab|long-links|overlap|powersgd|priority|topology|training-speed|wan)": ROOT_NEEDED,
    r"cuda1[23]|gpu": GPU,
    r"make cuda": COMPILER,
    r"^(srun|sbatch|kubectl|mpiexec)|hostfile|ray_train|jaxcgx link": CLUSTER,
    r"bench$|bench-(?!simulation|prediction)|(collectives|errors|mpi)\.py --": LONG,
    r"kernels\.py --(kernels|size)|\.ci/run|make (gallery|matrix|mpich|test|wheels)|num_epochs=500": LONG,
    r"\.\.\.|FILE|SECONDS|^python -m (mpi4py|jaxcgx (lab|plan|tune))$|^(pip|mpirun) -[^n]": FILLED_IN,
    r"mpich": OTHER_MPI,
}


class Script(NamedTuple):
    """A block of a page, or code in its text, whose lines are for a shell."""

    page: pathlib.Path
    text: str

    @property
    def lines(self):
        """The lines without comments, with continued lines joined."""
        return [re.sub(r"\s+#.*", "", line) for line in re.sub(r"\\\n\s*", "", self.text).splitlines()]

    @property
    def commands(self):
        """The words of each command."""
        return [words for line in self.lines if (words := command_of(line))]

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}: {self.lines[0]}"


def command_of(line):
    """Returns the words of the command of a line, or [] if it has none."""
    match = COMMAND.match(line.strip())
    return shlex.split(match[0]) if match else []


def scripts():
    """Returns all scripts, in the order of the pages."""
    return [script for page in PAGES for script in of_page(page)]


def of_page(page):
    text = page.read_text()
    blocks = [(match.start(), match[3]) for match in FENCE.finditer(text) if not match[2]]
    text = FENCE.sub(lambda match: "~" * len(match[0]), text)
    blocks += [(match.start(), match[0]) for match in INDENTED.finditer(text)]
    found = [(start, shell) for start, block in blocks if (shell := for_shell(block))]
    for match in INLINE.finditer(INDENTED.sub(lambda match: "~" * len(match[0]), text)):
        words = " ".join(match[1].split())
        if COMMAND.fullmatch(words) and (" " in words or "/" in words):
            found.append((match.start(), words))
    return [Script(page, shell) for _, shell in sorted(found)]


def for_shell(block):
    """Returns the part of a block that is for a shell.

    This is the text after prompts if the block has prompts. Otherwise it is the whole block if it begins with a
    command.
    """
    lines = [line.strip() for line in block.strip().splitlines()]
    prompts = [line[2:] for line in lines if line.startswith("$ ")]
    if not prompts and not COMMAND.match(lines[0]) and not lines[0].startswith("for "):
        return None
    return "\n".join(prompts or lines)


def why_not_run(words):
    """Returns the reason, or None if the command is run."""
    command = " ".join(words)
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)
