"""The plot of a run."""

import pathlib
from typing import Any

import matplotlib


def draw(lines: list[dict[str, float]], title: str, path: pathlib.Path) -> None:
    """Draws losses and test accuracy.

    Args:
      lines: the lines of metrics.jsonl.
      title: the title of the figure.
      path: the path of the PNG file.
    """
    matplotlib.use("Agg")  # writes files and needs no display
    import matplotlib.pyplot as plt

    def curve(axes: Any, name: str, scale: float = 1, **style: Any) -> None:
        points = [(line["step"], scale * line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points), label=name.replace("_", " "), **style)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    curve(left, "loss", color="#f5a962")
    curve(left, "test_loss", color="#1f4e8c", marker=".")
    curve(right, "test_accuracy", 100, color="#1f4e8c", marker=".")
    losses = [line[name] for line in lines for name in ("loss", "test_loss") if name in line]
    left.set(yscale="log" if min(losses) > 0 else "linear", xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="test accuracy in %")
    for axes in left, right:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
