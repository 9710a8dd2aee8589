"""What watches the training loop from outside; each is imported only by a run that needs it."""

import contextlib
from types import SimpleNamespace


@contextlib.contextmanager
def watched(run):
    """A context for the training loop, whose object has a step() to call after each step. run: train_gpt2.Run."""
    config, distributed = run.trainer.config, run.trainer.distributed
    with contextlib.ExitStack() as stack:
        if distributed.world_size > 1:
            from watch import hang

            stack.enter_context(hang.watch(run.checkpointer.folder, distributed))
        if run.log and (config.profile or config.memory_snapshot):
            from measure import profile

            yield stack.enter_context(profile.trace(config, run.log))
        else:
            yield SimpleNamespace(step=lambda: None)
