"""DGC's warm-up, in which sparsity increases from epoch to epoch."""

from typing import Any

from jaxcgx.checks import check_integer, check_number, wrong


def warm_up(
    ratio: float, epochs: int, coeff: Any, steps_per_epoch: int | None, function: str = "dgc"
) -> dict[int, float]:
    """Returns {first step: ratio}: the ratios of the warm-up's epochs, then the final ratio.

    The docstring of `dgc` explains the arguments. `function` is the public function that errors name.
    """
    epochs = check_integer(function, "warmup_epochs", epochs, 0)
    if not epochs:
        if coeff is not None or steps_per_epoch is not None:
            raise wrong(function, "warmup_epochs", "a positive integer with 'warmup_coeff' or 'steps_per_epoch'", 0)
        return {0: ratio}
    if steps_per_epoch is None:
        raise wrong(function, "steps_per_epoch", "a positive integer with 'warmup_epochs'", None, kind=TypeError)
    steps = check_integer(function, "steps_per_epoch", steps_per_epoch, 1)
    ratios = [*_ratios(function, ratio, epochs=epochs, coeff=coeff), ratio]
    return {epoch * steps: now for epoch, now in enumerate(ratios) if epoch == 0 or now != ratios[epoch - 1]}


def _ratios(function: str, ratio: float, epochs: int, coeff: Any) -> list[float]:
    """Returns the ratio of each epoch of the warm-up."""
    if coeff is None:
        return [ratio ** ((epoch + 1) / (epochs + 1)) for epoch in range(epochs)]
    listed = isinstance(coeff, (tuple, list))
    for each in coeff if listed else [coeff]:
        expected = "a number above 0 and up to 1, or a list of them"
        check_number(function, "warmup_coeff", each, lambda x: 0 < x <= 1, expected)
    if not listed:
        return [max(coeff ** (epoch + 1), ratio) for epoch in range(epochs)]
    if len(coeff) != epochs:
        raise wrong(function, "warmup_coeff", f"a ratio for each of {epochs} epochs", repr(coeff))
    return list(coeff)
