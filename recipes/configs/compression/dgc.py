"""Deep Gradient Compression: 0.1 % of the elements, after a warm-up of 5 epochs."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            kind="dgc",
            ratio=0.001,
            warmup_epochs=5,
            warmup_coeff=None,  # the ratios of the warm-up, as `coeff` of jaxcgx.WarmUp
            masking=True,
            select="sampled",  # how the largest elements are found, as in jaxcgx.DGC
            clip_value=None,  # the largest magnitude of an element of a gradient
            values=dict(name="Raw"),
        )
    )
