"""The default config, from which all configs start."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the defaults of all sections. Each config sets at least `data` and `model`."""
    return ConfigDict(
        dict(
            compression="none",  # the name of a file in configs/compression
            data=dict(name="", synthetic=False),  # synthetic: random numbers in place of the data
            model=dict(name=""),
            # decay_1d: weight decay of biases and norms, too. clip: the largest norm of the gradients; 0: no clipping.
            optimizer=dict(name="sgd", momentum=0.9, nesterov=False, weight_decay=1e-4, decay_1d=True, clip=0.0),
            # drops: fractions of the training after which the learning rate is multiplied by factor.
            schedule=dict(name="steps", rate=0.1, warmup_epochs=0.0, drops=(), factor=0.1),
            train=dict(
                batch_size=128,  # examples per step, of all ranks together or, with per_rank, of each
                per_rank=False,
                num_epochs=1.0,
                steps=0,  # stops after this many steps, with the same schedule; 0: after num_epochs
                seed=0,
                log_every=20,  # steps between two lines of metrics
                test_every=1.0,  # epochs between two tests
                test_examples=0,  # 0: all
                save_every=500,  # steps between two checkpoints
            ),
        )
    )
