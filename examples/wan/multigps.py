"""MultiGPS: gradients are summed on one rank, on four ranks in equal parts, or on four ranks in weighted parts.

The script starts two data centers of two ranks each. All four ranks are on one axis of the mesh:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/multigps.py --rate 100mbit --delay 5ms
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
