"""The command line: `jaxcgx COMMAND`, or `python -m jaxcgx COMMAND`. Commands import JAX, and help doesn't."""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def doctor(_: argparse.Namespace) -> int:
    """Runs python -m jaxcgx doctor. Returns 1 if there are problems, else 0."""
    from jaxcgx.report import doctor

    report = doctor.examine()
    print(report)
    return 1 if report.problems else 0


def tune(options: argparse.Namespace) -> None:
    from jaxcgx.report import tune

    how = dict(method=options.method, budget=options.budget, alpha=options.alpha)
    plan, words = tune.tune(options.gradients, plan=options.plan, bits=options.bits, **how)
    print(f"{words}\n")
    plan.save(options.out)
    print(f"saved to {options.out}")


def plan(options: argparse.Namespace) -> None:
    """Runs python -m jaxcgx plan. How the measurements of kernels get on is written to stderr."""
    say = functools.partial(print, file=sys.stderr, flush=True)
    begun = time.strftime("%Y-%m-%d %H:%M")
    say("plan: starting JAX")
    from jaxcgx.checks import wrong
    from jaxcgx.codecs.base import spell
    from jaxcgx.native.layout import DTYPES
    from jaxcgx.report import advise, machine, shapes, tune
    from jaxcgx.report.cluster import Cluster

    if options.steps is None and options.price is not None:
        raise wrong("plan", "price", "--steps beside it", options.price)
    run = None if options.steps is None else advise.Run(options.steps, options.price)
    tree = shapes.read(options.model or options.params, options.layers)
    codecs = [shapes.read_codec(words) for words in options.codecs or ()] or advise.CODECS
    gradients = None
    if options.gradients:  # without leaves that codecs don't take
        steps = tune.read(options.gradients)
        gradients = [{name: x for name, x in step.items() if x.dtype in DTYPES} for step in steps]
    of_cluster = [field.name for field in dataclasses.fields(Cluster) if field.init]
    cluster = Cluster(**{name: getattr(options, name) for name in of_cluster})
    for i, codec in enumerate(codecs):
        say(f"plan: the kernels of {spell(codec)} ({i + 1} of {len(codecs)})", end="")
        speed = machine.kernels(codec, again=options.remeasure)
        say(f", measured {speed.date}")
        if options.remeasure and speed.date < begun:
            say("plan: kept that, as other programs take the processors now")
    how = {name: getattr(options, name) for name in ("compute_ms", "overlap_mb", "max_error")}
    found = advise.advise(tree, cluster, codecs=codecs, gradients=gradients, **how)
    print(json.dumps(found.as_json(run), indent=1) if options.json else found.spell(options.all, run))
    if options.out and found.plan:
        found.plan.save(options.out)
        say(f"\nsaved to {options.out}")


def link(options: argparse.Namespace) -> None:
    import socket

    from jaxcgx.report import link, machine

    if options.host:
        peer, found = options.host, link.measure(options.host, options.port)
    else:
        with socket.create_server(("", options.port)) as server:
            print(f"now run on another host: python -m jaxcgx link {socket.gethostname()}", flush=True)
            peer, found = link.serve(server)
    print(f"{peer}: {found}", f"saved to {machine.path('links')}", sep="\n")


def lab(options: argparse.Namespace) -> int:
    """Runs python -m jaxcgx lab. Returns the worst exit status of the command."""
    from jaxcgx.checks import check_integer
    from jaxcgx.lab import Link, files, network
    from jaxcgx.report import figures, lab, results
    from jaxcgx.text import parse_rate, parse_time

    hosts = check_integer("lab", "--hosts", options.hosts, 1, network.MOST)
    rate = parse_rate("argument '--rate'", options.rate)
    up, down = (
        rate if text is None else parse_rate(f"argument '--{name}'", text)
        for name, text in (("up", options.up), ("down", options.down))
    )
    link = Link(up, down, parse_time("argument '--delay'", options.delay))
    links = files.read_links(options.per_link, hosts, link) if options.per_link else [link] * hosts
    changes = files.read_schedule(options.schedule, hosts) if options.schedule else []
    status, counted = lab.run(links, changes, options.words)
    print(lab.spell(counted), flush=True)
    if options.out:
        data = results.origin(shlex.join(["python", "-m", "jaxcgx", *options.arguments])) | counted
        results.write(options.out / "lab.json", data)
        print(*figures.save(options.out, {"lab": data}), sep="\n")
    return status


def report(options: argparse.Namespace) -> None:
    from jaxcgx.report import figures, results

    names = [path.stem for path in options.files]
    if len(set(names)) < len(names):  # files with the same name in several folders
        names = ["-".join(path.with_suffix("").parts[-2:]) for path in options.files]
    files = {name: results.read(path) for name, path in zip(names, options.files)}
    print(*(figures.spell(name, data) for name, data in files.items()), sep="\n\n")
    print("", *figures.save(options.out, files), sep="\n")


_COMPLETION = """\
_jaxcgx() {{
    local known="{commands}"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in
{options}
            *) known="" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$known" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _jaxcgx jaxcgx
"""


def completion(options: argparse.Namespace) -> None:
    """Prints a script for a shell, which completes the commands and their options. Files are the shell's own."""
    found = {name: parser.format_usage() for name, parser in options.parsers.items()}
    long = {name: re.findall("--[a-z][a-z-]*", usage) for name, usage in found.items()}
    cases = "\n".join(f'            {name}) known="{" ".join(["--help", *found])}" ;;' for name, found in long.items())
    if options.shell == "zsh":  # it has bash's completion
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_COMPLETION.format(commands=" ".join([*long, "--help", "--version"]), options=cases), end="")


Settings = dict[str, dict[str, Any]]  # {argument: how argparse adds it}
_OF_TUNE: Settings = {
    "gradients": dict(
        help="an .npz of arrays named by the leaf's path, block/0/kernel; of several steps block/0/kernel@0, "
        "block/0/kernel@1 ..."
    ),
    "--out": dict(required=True, help="the TOML file that the plan is saved to"),
    "--plan": dict(help="a TOML file with the plan to adapt (by default Plan.cgx())"),
    "--method": dict(default="lgreco", help="lgreco (the default): the best within a budget; kmeans: by size and norm"),
    "--budget": dict(
        default="error",
        help="for lgreco, error (the default): fewest bytes within an error; bytes: least error within bytes",
    ),
    "--alpha": dict(
        type=float,
        default=1.0,
        help="for lgreco, the budget, as a multiple of what the plan's default codec needs everywhere (1.0)",
    ),
    "--bits": dict(
        type=int,
        nargs="+",
        help="what lgreco may choose from, besides the plan's own (by default 2 to 8, as far as its codec has them)",
    ),
}
_OF_PLAN: Settings = {
    "model": dict(
        nargs="?",
        help="bert-base, bert-large, gpt2, gpt2-medium, llama-1b, resnet18, resnet50, transformer-xl, vgg16, "
        "vit-b16, a number of parameters (25M), or a file: .npz of arrays, .json or .toml of shapes by name",
    ),
    "--params": dict(help="a number of parameters (340M), in place of a model"),
    "--layers": dict(type=int, help="the number of layers that they are divided into"),
    "--link": dict(
        help="the rate of a host's link, 10gbit; with --up, the rate down; by default the slowest one that "
        "`python -m jaxcgx link` measured here"
    ),
    "--world": dict(type=int, required=True, help="the number of ranks"),
    "--nodes": dict(type=int, help="the number of hosts (by default one for each rank)"),
    "--inner-link": dict(default="100gbit", help="the rate between ranks of a host (100gbit)"),
    "--up": dict(help="the rate up, where it differs from the rate down"),
    "--latency": dict(help="of a step between hosts, 50us"),
    "--over": dict(help="gloo, tcp or duplex (NCCL, MPI); by default gloo and tcp on CPUs, else duplex"),
    "--compute-ms": dict(type=float, default=0.0, help="milliseconds of a forward and backward pass (0)"),
    "--overlap-mb": dict(
        type=float, help="MiB of the messages that are sent during the backward pass (by default none is)"
    ),
    "--codecs": dict(nargs="+", help="candidates, as in 'MaxMin(4)' 'TopK(0.01)'"),
    "--max-error": dict(type=float, default=0.1, help="the largest vNMSE of a recommended plan (0.1)"),
    "--gradients": dict(help="an .npz of gradients, as for tune; every step counts as a rank"),
    "--steps": dict(type=int, help="the steps of a run, to show how many hours it takes"),
    "--price": dict(type=float, help="of an hour of all hosts together, to show what the run costs"),
    "--out": dict(help="the TOML file that a recommended plan is saved to"),
    "--all": dict(action="store_true", help="show every way, not only the fastest five"),
    "--json": dict(action="store_true", help="print JSON"),
    "--remeasure": dict(action="store_true", help="measure the kernels again"),
}
_OF_LINK: Settings = {
    "host": dict(nargs="?", help="where python -m jaxcgx link waits; without it, wait for another host"),
    "--port": dict(type=int, default=5799, help="where to wait (5799)"),
}
_OF_LAB: Settings = {
    "--hosts": dict(type=int, default=2, help="how many (2)"),
    "--rate": dict(default="1gbit", help="of every link, in both directions (1gbit)"),
    "--up": dict(metavar="RATE", help="of what a host sends, where it isn't --rate"),
    "--down": dict(metavar="RATE", help="of what a host receives, where it isn't --rate"),
    "--delay": dict(metavar="TIME", default="0s", help="from any host to any other one, as in 40ms (0s)"),
    "--per-link": dict(metavar="FILE", help="TOML: the links of single hosts that differ"),
    "--schedule": dict(metavar="FILE", help="TOML: links that change or break while the command runs"),
    "--out": dict(type=pathlib.Path, metavar="DIR", help="where the counts and plots are written"),
    "words": dict(
        nargs="+",
        metavar="CMD",
        help="the command, after --; {rank}, {hosts} and {address} (of host 0) in its words are filled in",
    ),
}
_OF_REPORT: Settings = {
    "files": dict(nargs="+", type=pathlib.Path, metavar="FILE", help="JSON, as in benchmarks/results"),
    "--out": dict(type=pathlib.Path, metavar="DIR", default="report", help="where page and plots are written (report)"),
}
# {command: (function, description, its arguments)}
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str, Settings]] = {
    "doctor": (doctor, "say what this installation has, and what is wrong with it", {}),
    "tune": (tune, "choose the bits of every leaf by what its gradients lose, and save the plan", _OF_TUNE),
    "plan": (plan, "say what compression would gain on a network, and which plan to take, or none", _OF_PLAN),
    "link": (link, "measure the link to another host, which plan then uses", _OF_LINK),
    "lab": (lab, "run a command in every host of a network that it makes on this machine; needs root", _OF_LAB),
    "report": (report, "draw tables, plots and a page of results that benchmarks or the lab wrote", _OF_REPORT),
    "completion": (
        completion,
        'print a script that completes commands in a shell: eval "$(jaxcgx completion bash)"',
        {"shell": dict(choices=("bash", "zsh"))},
    ),
}
EITHER = "model", "--params"  # one of these, and not both


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Runs a command and returns its exit status. The arguments are by default from sys.argv."""
    program = "jaxcgx" if pathlib.Path(sys.argv[0]).name == "jaxcgx" else "python -m jaxcgx"
    parser = argparse.ArgumentParser(prog=program, description="Compressed gradient exchange for JAX.")
    version = f"jaxcgx {importlib.metadata.version('jaxcgx')}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (run, description, settings) in COMMANDS.items():
        added = commands.add_parser(name, help=description, description=description.capitalize() + ".")
        added.set_defaults(run=run, command=name, parsers=commands.choices)
        either = added.add_mutually_exclusive_group(required=True) if name == "plan" else added
        for argument, how in settings.items():
            (either if argument in EITHER else added).add_argument(argument, **how)
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return options.run(options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        said = re.sub("^(tune|plan|advise|Cluster|Run|link|lab): ", "", str(error))
        bare = {"plan": "model", "tune": "gradients", "link": "host"}.get(options.command)  # typed without a name
        typed = lambda name: f"argument '--{name.replace('_', '-')}'" if hasattr(options, name) and name != bare else ""
        said = re.sub(r"^argument '(\w+)'", lambda found: typed(found[1]) or found[0], said)
        sys.exit(f"{program} {options.command}: {said}")


if __name__ == "__main__":
    sys.exit(main())
