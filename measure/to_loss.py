"""How many tokens and how much time training recipes take to reach a validation loss.

python -m measure.to_loss --max_steps 1090 --total_batch_size 131072      # what each training recipe buys
python -m measure.to_loss --max_steps 1090 --recipes mask_documents=on    # what these flags change
"""

import common.interrupt  # first: Ctrl-C during the other imports

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import mpmath

from common.cli import flag, flags_with, given, parse
from common.errors import UserError, run
from config import SETTLING_STEPS, Config, defaults
from measure import figures
from measure.child_run import begin, count_devices, finish, run_config, train_to_end
from optim.optimizer import OPTIMIZERS, optimizer_defaults
from optim.schedules import LONGEST_WARMUP
from watch.curves import read_rows

COLUMNS = ("rung", "final loss", "difference", "p", "tokens", "× first", "seconds", "× first")
VAL_TOKENS = 2621440  # at most, in each of some 20 validations

# The defaults of --demo: 2 minutes on two CPU cores
DEMO = dict(max_steps=40, val_tokens=4096, seeds=2, micro_batch_size=2)

# {rung: the flags that it changes}. Both optimizers are tuned for 143M tokens in 1,090 steps: docs/recipes.md says how
RECIPES = {
    "tuned AdamW": dict(lr=1.2e-3, weight_decay=0.3),
    "tuned Muon": OPTIMIZERS["muon"].defaults | dict(lr=2.5e-3, weight_decay=0.75),
    "fp8, also in the head": dict(fp8=True, fp8_head=True),
}


@dataclass
class ToLoss:
    """The recipes."""

    TITLE = "time to a loss"

    recipes: tuple[str, ...] = ()
    """Use these rungs instead; each names flags to change, as "lr=1e-3 fp8=on"; optimizer=muon sets Muon's recipe.
    Rungs may differ in total_batch_size and max_steps."""
    seeds: int = flag(3, at_least=1)
    """Runs of each recipe, with --seed and the numbers after it."""
    target_loss: float | None = None
    """Loss to compare the recipes at; by default the loss that the first recipe ends with."""


@dataclass
class ToLossConfig(Config, ToLoss):
    """Train --max_steps with each recipe, from several seeds; compare tokens and time to a validation loss.

    Takes every flag of train_gpt2.py.
    """


def main():
    typed = given(ToLossConfig)
    if "recipes" not in typed and (fixed := sorted(typed.keys() & set().union(*RECIPES.values()))):
        raise UserError(f"leave out --{', --'.join(fixed)}, which the rungs set, or use --recipes")
    base = defaults(typed | dict(ladder=True))
    demo = DEMO if base.demo and "config" not in typed else {}  # a file's flags go before the demo's
    climb(parse(ToLossConfig, ToLossConfig(**vars(base) | demo)))


def climb(config):
    """Train with one recipe after the other, from several seeds: to_loss.json, to_loss.md and the figure to_loss.png.

    config: a ToLossConfig. Raises UserError if the first recipe cannot run, or if a run failed.
    """
    recipes = choose_recipes(config)
    steps = min(recipe.get("max_steps", config.max_steps) for recipe in recipes.values())
    if steps <= SETTLING_STEPS:
        raise UserError(f"--max_steps {steps}: the first {SETTLING_STEPS} steps only warm up; use more")
    results, ranks = begin(config, "to_loss", COLUMNS), count_devices(config)
    curves, changes, target = {}, {}, config.target_loss
    for index, (name, recipe) in enumerate(recipes.items(), 1):
        rung = recipe_run(config, changes | recipe)
        runs = []
        for seed in range(config.seed, config.seed + config.seeds):
            runs.append(train_to_end(replace(rung, seed=seed), results, f"{index:02d}_seed{seed}", ranks))
            if runs[-1]["status"] != "done":
                break  # the other seeds would fail too
        row = runs[-1]
        if row["status"] == "done":
            of_seeds = [read_curve(results.folder / run["name"], rung.max_steps) for run in runs]
            row = summarize(of_seeds, target) | dict(facts=row["facts"], commands=[run["command"] for run in runs])
        if row["status"] == "done":
            changes |= recipe
            curves[name] = of_seeds
            target = target or row["loss"]
        elif not results.rows:
            raise UserError(row["reason"])
        draw = partial(figures.time_to_loss, curves, target, results.rows)
        results.add(dict(row, rung=name), cells(name, row, results.done), note(target, config.seeds), draw)
    finish(results)


def choose_recipes(config):
    """RECIPES, or those of --recipes: a rung of the command line's flags, then one for each text.

    Raises UserError for a bad text.
    """
    texts = config.recipes
    if len(set(texts)) < len(texts):
        raise UserError("--recipes names a rung twice")
    if texts:
        recipes = {text: read_recipe(text) for text in texts}
        # not recipe_defaults: model=tiny has defaults for steps and evaluations, which are the ladder's
        return {"flags as given": {}} | {text: optimizer_defaults(flags) | flags for text, flags in recipes.items()}
    return RECIPES


def read_recipe(text):
    """ "optimizer=muon lr=1e-3" as {"optimizer": "muon", "lr": 0.001}. Raises UserError for a bad flag or value."""
    try:
        recipe = given(Config, [f"--{part}" for part in text.split()])
    except UserError as error:
        raise UserError(f"--recipes {text!r}: {error}") from error
    if not recipe or len(recipe) < len(text.split()):
        raise UserError(f'--recipes {text!r}: it takes flags of train_gpt2.py, each once, as "lr=1e-3 fp8=on"')
    if fixed := sorted(recipe.keys() & (flags_with(Config, sweep=False) | flags_with(Config, sweep="axis"))):
        raise UserError(f"--recipes {text!r}: {fixed[0]} is the same in all runs, or has no effect")
    return recipe


def recipe_run(config, changes):
    """The Config of a recipe's run: some 20 validations, no other evaluations; the warm-up fits into the steps."""
    own = dict(hellaswag_every=0, sample_every=0, checkpoint_every=0, val_tokens=min(config.val_tokens, VAL_TOKENS))
    changed = run_config(config, **own, **changes)
    changed.val_every = max(1, changed.max_steps // 20)
    changed.warmup_steps = min(changed.warmup_steps, int(LONGEST_WARMUP * changed.max_steps))
    return changed


# ----------------------------------------------------------------------------------------------------------------------
# What the curves say


class Curve(NamedTuple):
    """The validation losses of a run, each with what it took to get there."""

    tokens: list  # trained on
    seconds: list  # of training steps; evaluations and compilation do not count
    losses: list  # nats; NaN where the loss was not finite


def read_curve(folder, max_steps):
    """The Curve of a run's folder. The first steps of each batch size include compilation: their time is the median of
    the steps of that size.

    Raises UserError if metrics.jsonl lacks one of the run's max_steps steps, or the validation after the last one.
    """
    rows = read_rows(folder)
    steps = [row for row in rows if "step_ms" in row]
    if len(steps) != max_steps or not any("val_loss" in row for row in rows if row["step"] == max_steps):
        raise UserError(f"{folder}/metrics.jsonl lacks lines: delete {folder}.json, and the run is trained again")
    tokens = [row["tokens"] - before["tokens"] for before, row in pairwise([dict(tokens=0), *steps])]
    times = [row["step_ms"] for row in steps]
    for i, (row, size) in enumerate(zip(steps, tokens)):
        if i < SETTLING_STEPS or size != tokens[i - SETTLING_STEPS]:
            row["step_ms"] = statistics.median(ms for ms, own in zip(times, tokens) if own == size)
    curve, seconds = Curve([], [], []), 0.0
    for row in rows:
        seconds += row.get("step_ms", 0) / 1000
        if "val_loss" in row:
            loss = math.nan if row["val_loss"] is None else row["val_loss"]  # JSON has no NaN
            for values, value in zip(curve, (row["tokens"], seconds, loss)):
                values.append(value)
    return curve


def reach(curve, target):
    """(tokens, seconds) at which a Curve first reaches a loss, by linear interpolation; None if it never does."""
    for i, loss in enumerate(curve.losses):
        if loss <= target:
            before = curve.losses[i - 1] if i else math.nan
            part = (before - target) / (before - loss) if math.isfinite(before) else 1
            return tuple(xs[i] - (1 - part) * (xs[i] - xs[i - 1]) for xs in (curve.tokens, curve.seconds))
    return None


def summarize(curves, target=None):
    """The result of a rung over several seeds: their final losses and the mean, mean tokens and seconds to the target.

    target: a loss; without one the runs' ends count. tokens and seconds are None if a seed does not reach the target.
    status is "diverged", with a reason, if a seed's last validation loss is not finite.
    """
    finals = [curve.losses[-1] for curve in curves]
    if diverged := sum(not math.isfinite(loss) for loss in finals):
        reason = f"the last validation loss is not finite for {diverged} of {len(finals)} seeds"
        return dict(status="diverged", reason=reason)
    reached = [(c.tokens[-1], c.seconds[-1]) if target is None else reach(c, target) for c in curves]
    tokens, seconds = map(statistics.mean, zip(*reached)) if all(reached) else (None, None)
    return dict(status="done", loss=statistics.mean(finals), tokens=tokens, seconds=seconds, finals=finals)


def cells(rung, row, before):
    """A rung's row of the table as text. before: the results of the rungs before."""
    if row["status"] != "done":
        return [rung]
    texts = [rung, mean_and_spread(row["finals"]), "", ""]
    if before:
        differences = [b - a for a, b in zip(before[-1]["finals"], row["finals"])]
        texts[2:] = mean_and_spread(differences, "+"), f"{p_value(differences):.2g}" if len(differences) > 1 else ""
    for key, number in (("tokens", "{:,.0f}"), ("seconds", "{:,.1f}")):
        texts.append("not reached" if row[key] is None else number.format(row[key]))
        texts.append(f"{before[0][key] / row[key]:.2f}" if before and before[0][key] and row[key] else "")
    return texts


def mean_and_spread(values, sign=""):
    """ "3.8846 ± 0.0411": the mean and, of several values, their standard deviation. sign: "+" for differences."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{spread}"


def p_value(differences):
    """Of Student's paired t-test, two-sided: the probability of a mean this far from 0, were the recipes equal.

    https://en.wikipedia.org/wiki/Student%27s_t-distribution#Cumulative_distribution_function
    """
    deviation, freedom = statistics.stdev(differences), len(differences) - 1
    if deviation == 0:
        return float(statistics.mean(differences) == 0)
    t = statistics.mean(differences) / deviation * math.sqrt(len(differences))
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True))


def note(target, seeds):
    """A sentence on what the table shows."""
    several = (
        f"means over {seeds} seeds, ± the standard deviation; difference: seed by seed, to the rung before; p: of "
        "Student's paired t-test"
    )
    return f"Tokens and seconds to a validation loss of {target:.4f}: {several if seeds > 1 else 'one seed'}."


if __name__ == "__main__":
    run(main)
