"""MultiGPS: how many ranks own sums, and how much each.

Two data centers of two ranks, which all exchange with one another:

    pip install ".[examples]"
    sudo python examples/wan/multigps.py [--rate 100mbit] [--delay 5ms] [--steps 100]
"""

from common import demonstrate
from tsengine import fixed

from jaxcgx.wan import Overlay

TECHNIQUES = {
    "one owner": fixed(Overlay.owners(4, 1)),
    "four owners": fixed(Overlay.owners(4)),
    "weighted owners": fixed(Overlay.owners(4, [2, 1, 2, 1])),
}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)
