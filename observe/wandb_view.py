"""Save a view of a wandb project with the panels to watch during a run, in order: loss, speed, GPUs.

    python -m observe.wandb_view                                  # of the project "gpt2" of the login's default entity
    python -m observe.wandb_view --entity TEAM --project NAME

It needs wandb-workspaces and a login. Saving again makes another view.
https://docs.wandb.ai/ref/wandb_workspaces/workspaces
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass

from common.cli import UserError, first_line, parse, run
from common.device import missing_package
from config import Config

# {section: {panel: the metrics that it draws}}, of observe/run_log.py
VIEW = {
    "Training": {
        "Loss, nats per token": ("loss/train", "loss/val"),
        "HellaSwag": ("val/hellaswag_acc_norm",),
        "Bits per byte": ("val/bits_per_byte",),
        "Gradient norm": ("train/grad_norm",),
        "Learning rate": ("train/lr",),
    },
    "Speed": {
        "Tokens/sec": ("train/tokens_per_sec",),
        "MFU": ("train/mfu",),
        "Step, ms": ("train/step_ms",),
    },
    "GPUs": {
        "Peak memory, GB": ("train/peak_gb",),
        "Power of all GPUs, W": ("train/watts",),
        "Slowest SM clock, MHz": ("train/sm_mhz",),
        "Hottest GPU, °C": ("train/celsius",),
        "Slowest rank behind the median, fraction": ("train/slowest_behind",),
    },
}


@dataclass
class Flags:
    """Save a view of a wandb project with the panels to watch during a run: loss, speed, GPUs."""

    project: str = Config.wandb_project
    """The project, train_gpt2.py's --wandb_project."""
    entity: str | None = None
    """The user or team that has the project; by default the login's."""
    name: str = "GPT-2"
    """The view's name."""


def main():
    flags = parse(Flags)
    if problem := missing_package("wandb_workspaces", "wandb-workspaces"):
        raise UserError(f"observe.wandb_view: {problem}")
    import wandb

    try:
        view = make_view(flags.entity or wandb.Api().default_entity, flags.project, flags.name).save()
    except (wandb.Error, OSError) as error:
        raise UserError(f"wandb cannot save the view: {first_line(error)}") from error
    print(f"saved: {view.url}")


def make_view(entity, project, name):
    """A wandb_workspaces Workspace with the sections of VIEW, over tokens."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import LinePlot

    sections = []
    for section, panels in VIEW.items():
        plots = [LinePlot(title=title, x="tokens", y=list(metrics)) for title, metrics in panels.items()]
        sections.append(workspaces.Section(name=section, panels=plots, is_open=True))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


if __name__ == "__main__":
    run(main)
