"""The commands that pages and the docstrings of programs print, and the reasons why some of them are not run."""

import ast
import pathlib
import re
import shlex
import textwrap
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/notes/*.md"))]
# The gallery has the docstrings of examples. The others are the text of --help.
PROGRAM_FILES = "examples/**/*.py", "recipes/**/*.py", "scripts/*.py", "scripts/gpu_check"
PROGRAMS_OF_PAGES = [path for pattern in PROGRAM_FILES for path in sorted(ROOT.glob(pattern))]

# The programs of commands. A script with another one fails test_commands.py.
PROGRAMS = (
    r"make|pip|sudo|mpirun|mpiexec|srun|sbatch|kubectl|docker|tensorboard|curl|kill|sysctl|tc|ip|ulimit|horovodrun"
    r"|(?:\.venv/bin/)?python|scripts/\w+|\.ci/run"
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?= |$).*")
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
INLINE = re.compile(r"`([^`]+)`")
SHELL, PROMPT = "shell", "console"  # fences whose lines are commands, and whose lines after "$ " are

# Reasons why `make test-commands` doesn't run a command. The first pattern that is found in the command counts.
FOREIGN = "is another system's"
ROOT_NEEDED = "needs root"
LONG = "takes longer than a few minutes"
FILLED_IN = "is a name, or has words that the reader fills in"
NOT_RUN = {
    r"bagua|horovodrun|pytorch-cgx|mpirun -np \d+ (python train.py|\.\.\.)": FOREIGN,
    r"^(sudo|sysctl|tc) |--measure|MEASURE=|\d hosts|(exposed|training_speed|wan)\.py": ROOT_NEEDED,
    r"bench-(exposed|lab|late|long-links|overlap|powersgd|priority|topology|training-speed|wan)": ROOT_NEEDED,
    r"cuda1[23]|gpu": "needs a GPU",
    r"make cuda": "needs nvcc",
    r"^(srun|sbatch|kubectl|mpiexec)|hostfile|jaxcgx link|a\.example|-H server": "needs several hosts or a scheduler",
    r"^docker ": "needs a container engine",
    r"configs/cifar|cifar_train|^curl ": "needs data that the reader downloads",
    r"^tensorboard ": "runs until it is stopped",
    r"imagenet/vgg16": "needs more memory than small machines have",
    r"release-checks|dist/": "needs the files that `make wheels` makes",
    r"bench$|bench-(?!simulation|prediction)|(collectives|errors|mpi)\.py --": LONG,
    r"kernels\.py --(kernels|size)|\.ci/run|(gallery|mutate)\.py|configs/text/gpt\.py --config\.train\.batch": LONG,
    r"make (choose|gallery|gates|matrix|mpich|site-check|soak|test|wheels)": LONG,
    r"\.\.\.|FILE|LOG|SECONDS|PID|^python -m (mpi4py|jaxcgx (lab|plan|tune))$|^(pip|mpirun) -[^n]|^ip": FILLED_IN,
    r"^pip install$": FILLED_IN,
    r"mpich": "would take the place of Open MPI",
}


class Script(NamedTuple):
    """A block of a page or docstring, or code in its text, whose lines are for a shell."""

    page: pathlib.Path
    text: str

    @property
    def lines(self):
        """The lines without comments, with continued lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in (re.sub(r"(^|\s+)#.*", "", line) for line in lines) if line]

    @property
    def commands(self):
        """The words of each command."""
        return [words for line in self.lines for words in commands_of(line)]

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}: {self.lines[0]}"


def commands_of(line):
    """Returns the words of each command of a line, without the words of a loop around it."""
    found, split = [[]], shlex.shlex(line, posix=True, punctuation_chars=";&|")
    split.whitespace_split = True
    for word in split:
        if set(word) <= set(";&|"):
            found.append([])
        elif word != "do" or found[-1]:
            found[-1].append(word)
    return [words for words in found if words and words[0] not in ("for", "done", "wait")]


def scripts():
    """Returns all scripts, in the order of the pages."""
    return [script for page in [*PAGES, *PROGRAMS_OF_PAGES] for script in of_page(page)]


def of_page(page):
    text = page.read_text() if page in PAGES else f"{ast.get_docstring(ast.parse(page.read_text()))}\n"
    blank = lambda match: "~" * len(match[0])
    found = [(match.start(), match[3].strip()) for match in FENCE.finditer(text) if match[2] == SHELL]
    for match in INDENTED.finditer(text) if page not in PAGES else ():
        block = textwrap.dedent(match[0]).strip()
        found += [(match.start(), block)] * bool(COMMAND.match(block))
    for match in FENCE.finditer(text):
        if match[2] == PROMPT:
            found.append((match.start(), "\n".join(re.findall(r"^\$ (.*)", match[3], re.MULTILINE))))
    for match in INLINE.finditer(INDENTED.sub(blank, FENCE.sub(blank, text))):
        words = " ".join(match[1].split())
        if COMMAND.fullmatch(words) and (" " in words or "/" in words):
            found.append((match.start(), words))
    return [Script(page, shell) for _, shell in sorted(found)]


def why_not_run(words):
    """Returns the reason, or None if the command is run."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, " ".join(words))), None)
