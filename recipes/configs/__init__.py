"""What all configs begin with."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The sections: `model`, `optimizer` and `schedule` are filled in by each config."""
    return ConfigDict(
        dict(
            compression="none",  # the name of a file in compression/
            data=dict(name="", synthetic=False),  # synthetic: random numbers in place of the data
            model=dict(name=""),
            optimizer=dict(name="sgd", momentum=0.9, nesterov=False, weight_decay=1e-4, decay_1d=True, clip=0.0),
            schedule=dict(name="steps", rate=0.1, warmup_epochs=0.0, drops=(), factor=0.1),
            train=dict(
                batch_size=128,  # of all ranks together
                num_epochs=1.0,
                steps=0,  # training stops after this many steps; 0: after num_epochs. The schedule stays
                seed=0,
                log_every=20,  # steps
                test_every=1.0,  # epochs
                test_examples=0,  # 0: all
                save_every=500,  # steps
            ),
        )
    )
