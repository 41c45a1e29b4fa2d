"""Seeds for parts of a run."""

import numpy as np


def derived_seed(seed: int, number: int) -> int:
    """A seed of its own for step, batch or row `number` of a run with `seed`.

    Mixed into 32 bits, for torch's CPU generator ignores all above them.
    """
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
