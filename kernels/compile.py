"""torch.compile, of the model and of other functions."""

import torch


def compile_model(function, config, graphs=False):
    """torch.compile's version of a model, or of another function; without --compile the function itself.

    graphs: record the kernels of a model's forward and of its backward as CUDA graphs. The host launches a graph as a
    whole; one by one, a thousand launches take it 10 to 20 ms, and the GPU waits if it computes a micro-batch in less.
    The parameters get gradients, 0, which must stay allocated: backward adds to them, since a graph's own results are
    overwritten by its next launch. https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
    """
    if not config.compile:
        return function
    options = {"triton.cudagraphs": graphs}
    if config.tuned_gemms:
        from kernels.tuned_gemms import TuneGemms  # imports the compiler, seconds

        options["post_grad_custom_post_pass"] = TuneGemms()
    if graphs:
        for parameter in function.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return torch.compile(function, dynamic=False, options=options)  # each shape has its own graph
