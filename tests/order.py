"""Finds exchanges of a compiled program whose order XLA leaves open."""

import re

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(%[\w.-]+|\{[^}]*\})")
NAME = re.compile(r"%([\w.-]+)")


def unordered(program):
    """Returns pairs of XLA's collectives, the first one inside of a conditional or loop, that don't wait for another.

    XLA's CPU programs start these in an order that differs from rank to rank, and Gloo then mixes up their bytes.
    """
    computations, lines = {}, {}
    for line in program.splitlines():
        if m := re.match(r"(?:ENTRY )?%?([\w.-]+) .*-> .*\{$", line):
            lines = computations[m[1]] = {}
        elif m := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line):
            lines[m[1]] = re.sub(r'"(?:[^"\\]|\\.)*"', '""', m[2])

    def moves(line):
        inside = NAME.findall(" ".join(CALLED.findall(line)))
        return any(COLLECTIVE.search(each) or moves(each) for name in inside for each in computations[name].values())

    found = []
    for lines in computations.values():
        moving = {name for name, line in lines.items() if COLLECTIVE.search(line) or moves(line)}
        before = {}
        for name, line in lines.items():  # operands come first
            needs = [need for need in NAME.findall(line) if need in before]
            before[name] = set(needs).union(*(before[need] for need in needs))
        nested = {name for name in moving if not COLLECTIVE.search(lines[name])}
        found += [(x, y) for x in nested for y in moving - {x} if x not in before[y] and y not in before[x]]
    return found
