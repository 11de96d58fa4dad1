"""Fails if a fast CUDA kernel spills registers or has a stack frame in local memory, or if there is no report on it.

    python scripts/cuda_resources.py sm_80,sm_90 LOG...

Each LOG is the output of nvcc with -Xptxas=-v, together for at least these architectures. The kernels of
cuda/any_bucket.cu, cuda/rotated.cu and cuda/unbucketed.cu may spill: they take what the fast kernels leave over. So may
those TopK kernels that see little of the data.
"""

import collections
import pathlib
import re
import sys

ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
FAST = re.compile(r"(?:encode|decode|reduce|find|pick|scatter|unpack|pack)_kernel")


def main(architectures, *logs):
    entries = [m.groupdict() for log in logs for m in ENTRY.finditer(pathlib.Path(log).read_text())]
    by_arch, bad = collections.defaultdict(list), []
    for e in entries:
        if not (fast := FAST.search(e["kernel"])):
            continue
        by_arch[e["arch"], fast[0]].append(int(e["registers"]))
        if int(e["stack"]) or int(e["stores"]) or int(e["loads"]):
            bad.append(
                "{kernel} for {arch}: {stack} bytes of stack, {stores} stored, {loads} loaded in spills".format(**e)
            )
    wanted = [
        (a, f"{k}_kernel")
        for a in architectures.split(",")
        for k in ("decode", "encode", "reduce", "find", "pick", "scatter", "pack", "unpack")
    ]
    if missing := [f"{kernel} for {arch}" for arch, kernel in wanted if (arch, kernel) not in by_arch]:
        sys.exit(f"cuda_resources: no report on {', '.join(missing)}: compile with -Xptxas=-v")
    for (arch, kernel), registers in sorted(
        by_arch.items(), key=lambda item: (int(re.sub(r"\D", "", item[0][0])), item[0][1])
    ):
        print(f"{arch:8} {kernel:14} {len(registers):3} variants, {min(registers):3} to {max(registers):3} registers")
    if bad:
        sys.exit("\n".join(["cuda_resources: fast kernels in local memory:", *bad]))


if __name__ == "__main__":
    main(*sys.argv[1:])
