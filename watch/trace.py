"""--profile and --memory_snapshot: the one door from a run to measure/."""

import contextlib
from types import SimpleNamespace


def traced(run):
    """A context for the training loop, whose object has a step() to call after each step.

    run: train_gpt2.Run. Rank 0 traces. Other runs import nothing of measure/.
    """
    config = run.trainer.config
    if run.log and (config.profile or config.memory_snapshot):
        from measure import profile

        return profile.trace(config, run.log)
    return contextlib.nullcontext(SimpleNamespace(step=lambda: None))
