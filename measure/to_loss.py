"""How many tokens and how much time a run takes to reach a validation loss."""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import UserError
from config import SETTLING_STEPS
from measure.child_run import plain
from measure.sweep_axes import read_recipe
from measure.tables import markdown_table
from optim import muon
from optim.recipes import optimizer_defaults

COLUMNS = ("rung", "final loss", "difference", "tokens", "× before", "× first", "seconds", "× before", "× first")
WIDTHS = (22, 15, 16, 13, 8, 8, 11, 8, 8)
VAL_TOKENS = 2621440  # at most, in each of some 20 validations
# Each warm-up's largest fraction of max_steps. A high learning rate needs a long one: docs/benchmarks.md, "Recipes"
LR_WARMUP, BATCH_WARMUP = 0.9, 0.45

# The defaults of `ladder.py --to_loss --demo`: 12 minutes on two CPU cores. The first recipe has GPT-3's learning rate
TO_LOSS_DEMO = dict(lr=6e-4, max_steps=40, val_tokens=4096, seeds=2, micro_batch_size=2)

# The ladder of `ladder.py --to_loss`, {rung: the flags that it changes}. The first rung is the command line's recipe,
# by default GPT-3's (Brown et al. 2020)
RECIPES = {
    "GPT-3's recipe": {},
    "learning rate 1.8e-3": dict(lr=1.8e-3),
    "linear decay to 0": dict(lr_schedule="linear", min_lr_ratio=0.0),
    "Muon": muon.DEFAULTS,
    "batch warm-up": dict(batch_warmup_steps=8000),  # 2 billion tokens (GPT-3: 4 to 12); fewer in a short run
    "fp8, also in the head": dict(fp8=True, fp8_head=True),
}


@dataclass
class ToLoss:
    """The ladder of training recipes."""

    TITLE = "time to a loss"

    to_loss: bool = False
    """Train --max_steps with each recipe; compare tokens and time to a validation loss."""
    recipes: tuple[str, ...] = ()
    """Use these rungs instead; each names flags to change, as "lr=1e-3 fp8=on"; optimizer=muon sets Muon's recipe."""
    seeds: int = 3
    """Runs of each recipe, with --seed and the numbers after it."""
    target_loss: float | None = None
    """Loss to compare the recipes at; by default the loss that the first recipe ends with."""


def choose_recipes(texts, config_class):
    """RECIPES, or those of --recipes: a rung of the command line's flags, then one for each text. config_class: Config.

    Raises UserError for a bad text.
    """
    if len(set(texts)) < len(texts):
        raise UserError("--recipes names a rung twice")
    if not texts:
        return RECIPES
    given = {text: read_recipe(text, config_class) for text in texts}
    # not recipe_defaults: model=tiny has defaults for steps and evaluations, which are the ladder's
    return {"flags as given": {}} | {text: optimizer_defaults(flags) | flags for text, flags in given.items()}


def recipe_run(config, changes):
    """The Config of a recipe's run: some 20 validations, no other evaluations; the warm-ups fit into the steps."""
    own = dict(hellaswag_every=0, sample_every=0, checkpoint_every=0, val_every=max(1, config.max_steps // 20))
    own |= dict(val_tokens=min(config.val_tokens, VAL_TOKENS), **changes)
    changed = dataclasses.replace(plain(config), **own)
    warmup_steps = min(changed.warmup_steps, int(LR_WARMUP * config.max_steps))
    batch_warmup_steps = min(changed.batch_warmup_steps, int(BATCH_WARMUP * config.max_steps))
    return dataclasses.replace(changed, warmup_steps=warmup_steps, batch_warmup_steps=batch_warmup_steps)


class Curve(NamedTuple):
    """The validation losses of a run, each with what it took to get there."""

    tokens: list  # trained on
    seconds: list  # of training steps; evaluations and compilation do not count
    losses: list  # nats; NaN where the loss was not finite


def read_curve(folder):
    """The Curve of a run's folder. The first steps include compilation: their time is their tokens times the median
    time per token of the others."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_ms" in row]
    sizes = [row["tokens"] - before for row, before in zip(steps, [0, *(row["tokens"] for row in steps)])]
    usual = statistics.median(row["step_ms"] / n for row, n in list(zip(steps, sizes))[SETTLING_STEPS:])
    for row, n in zip(steps[:SETTLING_STEPS], sizes):
        row["step_ms"] = usual * n
    curve, seconds = Curve([], [], []), 0.0
    for row in rows:
        if "step_ms" in row:
            seconds += row["step_ms"] / 1000
        elif "val_loss" in row:
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


def summarize(name, curves, target=None):
    """A rung over several seeds: their final losses and the mean, mean tokens and seconds to the target.

    target: a loss; without one the runs' ends count. tokens and seconds are None if a seed does not reach the target.
    status is "diverged", with a reason, if a seed's last validation loss is not finite.
    """
    finals = [curve.losses[-1] for curve in curves]
    if diverged := sum(not math.isfinite(loss) for loss in finals):
        reason = f"the last validation loss is not finite for {diverged} of {len(finals)} seeds"
        return dict(rung=name, status="diverged", reason=reason)
    reached = [(c.tokens[-1], c.seconds[-1]) if target is None else reach(c, target) for c in curves]
    tokens, seconds = map(statistics.mean, zip(*reached)) if all(reached) else (None, None)
    loss = statistics.mean(finals)
    return dict(rung=name, status="done", loss=loss, tokens=tokens, seconds=seconds, finals=finals)


def cells(results):
    """The last rung's row of the table as text."""
    result, done = results[-1], [result for result in results if result["status"] == "done"]
    if result["status"] != "done":
        return [result["rung"], f"{result['status']}: {result['reason']}"]
    differences = [b - a for before in done[-2:-1] for a, b in zip(before["finals"], result["finals"])]
    texts = [
        result["rung"],
        mean_and_spread(result["finals"]),
        mean_and_spread(differences, "+") if differences else "",
    ]
    for key, number in (("tokens", "{:,.0f}"), ("seconds", "{:,.1f}")):
        texts.append("not reached" if result[key] is None else number.format(result[key]))
        for other in (done[-2:-1], done[:1] if len(done) > 1 else []):
            ratio = other[0][key] / result[key] if other and other[0][key] and result[key] else None
            texts.append("" if ratio is None else f"{ratio:.2f}")
    return texts


def widths(rungs):
    """WIDTHS, but the first column is as wide as the longest of the rungs' names."""
    return max(WIDTHS[0], *map(len, rungs)), *WIDTHS[1:]


def mean_and_spread(values, sign=""):
    """ "3.8846 ± 0.0411": the mean and, of several values, their standard deviation. sign: "+" for differences."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{spread}"


def markdown(results, config, baseline):
    """The table, and a sentence on what it shows. config: has seeds and target_loss. baseline: sooner()'s."""
    table = markdown_table(COLUMNS, [cells(results[:count]) for count in range(1, len(results) + 1)])
    several = f"means over {config.seeds} seeds, ± the standard deviation; difference: seed by seed, to the rung before"
    means = several if config.seeds > 1 else "one seed"
    target = f"{config.target_loss}" if config.target_loss else f"{results[0]['loss']:.4f}, where the first rung ends"
    return f"{table}\n\nTokens and seconds to a validation loss of {target}: {means}. {sooner(results, baseline)}"


def sooner(results, baseline):
    """How much sooner the fastest rung reaches the target than the first rung would without optimizations.

    baseline: measure()'s result of the other ladder's first rung, on one device.
    """
    first = results[0]
    if first["tokens"] is None:
        return f"{first['rung']} does not reach the target."
    best = min((r for r in results if r.get("seconds")), key=lambda r: r["seconds"])
    if baseline["status"] != "done":
        return f"The other ladder's baseline does not run here: {baseline['reason']}."
    rate = baseline["tokens_per_sec"]
    seconds = first["tokens"] / rate
    return (
        f"At the speed of the other ladder's baseline (float32, eager, one device: {rate:,.0f} tokens/sec) "
        f"{first['rung']} would take {seconds:,.1f} s; {best['rung']} takes {best['seconds']:,.1f} s: "
        f"{seconds / best['seconds']:.1f} × sooner."
    )
