"""Comparing runs of --optimizer normuon by what their steps change."""

import torch

from checkpoints import load, pieces


def assert_same_updates(run, whole, before, step):
    """Two runs have the same weights and second moments after a step, but for bf16's rounding of the updates.

    run, whole: their folders; before: an earlier checkpoint of one, since which the changes of weights are compared.
    Rounding is noise, and changes no norm of many rows.
    """
    found, expected = run / f"checkpoint_{step:06d}", whole / f"checkpoint_{step:06d}"
    start, of_run, of_whole = (weights(checkpoint) for checkpoint in (before, found, expected))
    moments = second_moments(found, of_run)
    for name, moment in second_moments(expected, of_whole).items():
        assert (moments[name] - moment).norm() < 0.02 * moment.norm(), (run.name, name)
        change, other = of_whole[name] - start[name], of_run[name] - start[name]
        assert (other - change).norm() < 0.08 * change.norm(), (run.name, name)
        norms = torch.tensor([[rows.norm() for rows in each.chunk(3)] for each in (other, change)])
        torch.testing.assert_close(*norms, rtol=0.015, atol=0, msg=f"{run.name} {name} {norms}")


def weights(checkpoint):
    return {name: weight.detach() for name, weight in load.load_model(checkpoint).named_parameters()}


def second_moments(checkpoint, weights):
    """{name: (rows, 1)} of all matrices in the blocks. weights: the checkpoint's."""
    matrices = {name: weight for name, weight in weights.items() if ".h." in name and weight.dim() == 2}
    moments = {name: torch.empty(len(weight), 1) for name, weight in matrices.items()}
    files = [path.name for path in checkpoint.glob("*.safetensors")]
    pieces.load(checkpoint, files, {f"second_moment.{name}": moments[name] for name in moments}, alone=True)
    return moments
