"""torch.compile, of the model and of other functions."""

import torch


def compile_model(function, config):
    """torch.compile's version of a model, or of another function; without --compile the function itself."""
    if not config.compile:
        return function
    options = {}
    if config.tuned_gemms:
        from kernels.tuned_gemms import TuneGemms  # imports the compiler, seconds

        options["post_grad_custom_post_pass"] = TuneGemms()
    return torch.compile(function, dynamic=False, options=options)  # each shape has its own graph
