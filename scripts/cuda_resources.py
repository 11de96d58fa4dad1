"""Compares the costs of the CUDA kernels with scripts/cuda-resources.json (`make cuda-resources` writes it).

    python scripts/cuda_resources.py sm_80,sm_90 LOG COUNTS

LOG is the output of a build with nvcc's -Xptxas=-v, for at least these architectures. COUNTS is the output of
tests/cpp/ptx/count.cc. Without COUNTS, nothing is compared. With `--write`, the costs are written instead.

The script always fails if a fast kernel spills registers, has a stack frame in local memory, or is missing in LOG. The
kernels of cuda/any_bucket.cu and cuda/rotated.cu may spill, because they handle the cases that the fast kernels don't
handle. TopK kernels that process little of the data may spill, too, and so may select_kernel, outside its inner loops.
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys

RESULT = pathlib.Path(__file__).resolve().parent / "cuda-resources.json"
COMPARED = "sm_90"
ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]* (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
# How the names of the fast kernels end.
FAST = "decode", "encode", "blocks", "range", "reduce", "unbucketed", "unsent", "scatter", "pack", "unpack"


def check(architectures, entries):
    """Prints the registers of the fast kernels. Ends the program if one of them uses local memory or is missing."""
    by_arch, bad = collections.defaultdict(list), []
    for e in entries:
        if not (fast := re.search(rf"(?:{'|'.join(FAST)})_kernel", e["kernel"])):
            continue
        by_arch[e["arch"], fast[0]].append(int(e["registers"]))
        if int(e["stack"]) or int(e["stores"]) or int(e["loads"]):
            bad.append(
                "{kernel} for {arch}: {stack} bytes of stack, {stores} stored, {loads} loaded in spills".format(**e)
            )
    wanted = [(a, f"{kernel}_kernel") for a in architectures.split(",") for kernel in FAST]
    if missing := [f"{kernel} for {arch}" for arch, kernel in wanted if (arch, kernel) not in by_arch]:
        sys.exit(f"cuda_resources: no report on {', '.join(missing)}: compile with -Xptxas=-v")
    for (arch, kernel), registers in sorted(
        by_arch.items(), key=lambda item: (int(re.sub(r"\D", "", item[0][0])), item[0][1])
    ):
        print(f"{arch:8} {kernel:14} {len(registers):3} variants, {min(registers):3} to {max(registers):3} registers")
    if bad:
        sys.exit("\n".join(["cuda_resources: fast kernels in local memory:", *bad]))


def readable(kernels):
    """Returns {mangled name: name in the source, without namespaces and parameters}."""
    names = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True).stdout
    bare = lambda name: re.sub(r"^void |\(anonymous namespace\)::|jaxcgx::|cuda::", "", name)
    short = lambda name: re.sub(r"\([^()]*\)$", "", bare(name))
    return dict(zip(kernels, map(short, names.splitlines()), strict=True))


def instructions(counts):
    """Returns {mangled name: PTX instructions per element, of all threads of a launch}."""
    elements = int(re.search(r"^(\d+) elements$", counts, re.MULTILINE)[1])
    found = re.findall(r"^ptx: (\w+): (\d+) instructions in ([1-9]\d*) launches$", counts, re.MULTILINE)
    return {kernel: round(int(count) / int(launches) / elements, 2) for kernel, count, launches in found}


def measured(log, entries, counts):
    entries = [e for e in entries if e["arch"] == COMPARED]
    names, each = readable([e["kernel"] for e in entries]), instructions(counts)
    kernels = {
        names[e["kernel"]]: {
            "registers": int(e["registers"]),
            "shared": int(e["shared"] or 0),
            "stack": int(e["stack"]),
            "spills": int(e["stores"]) + int(e["loads"]),
            "instructions": each.get(e["kernel"]),
        }
        for e in entries
    }
    return {
        "what": "of each CUDA kernel: registers, bytes of shared memory, of the stack frame and of spills; PTX "
        "instructions an element, of all threads, for one large aligned leaf (reduce: 4 payloads)",
        "architecture": COMPARED,
        "compiler": re.search(r"CUDA half: toolkit ([\d.]+)", log)[1],
        "kernels": dict(sorted(kernels.items())),
    }


def differences(old, new):
    for kernel in sorted(old.keys() | new.keys()):
        if kernel not in old or kernel not in new:
            yield f"{kernel}: {'new' if kernel in new else 'gone'}"
            continue
        for what, value in sorted(new[kernel].items()):
            if value != old[kernel][what]:
                yield f"{kernel}: {what} {value}, was {old[kernel][what]}"


def compare(new):
    old = json.loads(RESULT.read_text())
    if old["compiler"] != new["compiler"]:
        print(f"not compared with {RESULT.name}: that is of nvcc {old['compiler']}, this is {new['compiler']}")
    elif changes := list(differences(old["kernels"], new["kernels"])):
        sys.exit(
            "\n".join(["cuda_resources: the kernels' costs changed:", *changes])
            + f"\nIf that is meant, run `make cuda-resources` and commit scripts/{RESULT.name}."
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures")
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("counts", type=pathlib.Path, nargs="?")
    parser.add_argument("--write", action="store_true", help="write the result anew instead of comparing")
    args = parser.parse_args()
    log = args.log.read_text()
    entries = [m.groupdict() for m in ENTRY.finditer(log)]
    check(args.architectures, entries)
    if not args.counts:
        return
    new = measured(log, entries, args.counts.read_text())
    if args.write:
        RESULT.write_text(json.dumps(new, indent=1) + "\n")
    else:
        compare(new)


if __name__ == "__main__":
    main()
