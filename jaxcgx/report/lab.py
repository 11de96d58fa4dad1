"""python -m jaxcgx lab: a command in every host of a network."""

from collections.abc import Sequence

from jaxcgx.lab import Lab, Link, signals_raise


def run(hosts: int, link: Link, command: Sequence[str]) -> int:
    """Runs a command in every host at once, and returns the worst status.

    Args:
      hosts: how many.
      link: of each host.
      command: its words. {rank}, {hosts} and {address} in them are the number of the host, how many there are, and the
        address of host 0.
    """
    with signals_raise(), Lab(hosts, link) as lab:
        for rank in range(hosts):
            known = {"{rank}": str(rank), "{hosts}": str(hosts), "{address}": lab.address(0)}
            lab.start(rank, [_fill(word, known) for word in command])
        return max(abs(process.wait()) for process in lab.running)


def _fill(word: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word
