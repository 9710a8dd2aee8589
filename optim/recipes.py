"""Training recipes: sets of flags."""

from common.errors import UserError
from measure.sweep_axes import read_recipe

# The defaults with --optimizer muon. docs/benchmarks.md says how they were chosen
MUON = dict(
    optimizer="muon",
    lr=3.6e-3,
    adamw_lr=3.6e-3,
    warmup_steps=10,
    lr_schedule="wsd",
    cooldown_ratio=0.4,
    min_lr_ratio=0.0,
)

# The defaults with --model tiny: it learns something on two CPU cores within three minutes
TINY = dict(
    model="tiny",
    seq_len=128,
    total_batch_size=1024,
    max_steps=200,
    compile=False,
    lr=2e-3,
    warmup_steps=20,
    val_every=50,
    val_tokens=8192,
    hellaswag_every=0,
    sample_every=100,
    checkpoint_every=100,
)
# The defaults with --demo
DEMO = dict(TINY, demo=True, data_dir="demo_data")

# The defaults of `ladder.py --to_loss --demo`: 12 minutes on two CPU cores. The first recipe has GPT-3's learning rate
TO_LOSS_DEMO = dict(lr=6e-4, max_steps=40, val_tokens=4096, seeds=2, micro_batch_size=2)


def recipe_defaults(flags):
    """The defaults of --demo, --model tiny and --optimizer muon, where they are among flags: {name: value}."""
    small = DEMO if flags.get("demo") else TINY if flags.get("model") == "tiny" else {}
    return small | optimizer_defaults(flags)


def optimizer_defaults(flags):
    """The defaults of --optimizer."""
    return MUON if flags.get("optimizer") == "muon" else {}


# The ladder of `ladder.py --to_loss`, {rung: the flags that it changes}. The first rung is the command line's recipe,
# by default GPT-3's (Brown et al. 2020)
RECIPES = {
    "GPT-3's recipe": {},
    "learning rate 1.8e-3": dict(lr=1.8e-3),
    "linear decay to 0": dict(lr_schedule="linear", min_lr_ratio=0.0),
    "Muon": MUON,
    "batch warm-up": dict(batch_warmup_steps=8000),  # 2 billion tokens (GPT-3: 4 to 12); fewer in a short run
    "fp8, also in the head": dict(fp8=True, fp8_head=True),
}


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
