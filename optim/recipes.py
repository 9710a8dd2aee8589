"""Training recipes: sets of flags."""

from optim.optimizer import OPTIMIZERS

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


def recipe_defaults(flags):
    """The defaults of --demo, --model tiny and --optimizer muon, where they are among flags: {name: value}."""
    small = DEMO if flags.get("demo") else TINY if flags.get("model") == "tiny" else {}
    return small | optimizer_defaults(flags)


def optimizer_defaults(flags):
    """The defaults of --optimizer; none where its value is not an optimizer."""
    name = flags.get("optimizer")
    return OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}
