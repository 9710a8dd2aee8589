"""Write a model as a Hugging Face folder (config, weights, tokenizer) for `transformers` and evaluation harnesses.

    python export.py log/RUN my-gpt2                    # the newest checkpoint of a run
    python export.py out/ckpt.pt my-gpt2                # a checkpoint of nanoGPT or build-nanogpt
    python export.py log/RUN my-gpt2 --push USER/my-gpt2 --license mit      # and uploads it, for USER alone to see

A checkpoint of this project is such a folder already; the export leaves out the training state and adds a model card,
README.md, with the run's data, losses, command and hardware. Other benchmarks are lm_eval's (pip install lm_eval):

    lm_eval --model hf --model_args pretrained=my-gpt2 --tasks arc_easy,piqa,lambada_openai
"""

import common.interrupt  # first: Ctrl-C during the other imports

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from safetensors import SafetensorError

from checkpoints import hugging_face
from checkpoints.load import load_located, locate, read_training
from checkpoints.run_folder import FLAGS, TRAINING, run_of
from common.cli import parse
from common.errors import UserError, first_line, out_of_memory, run
from common.hub import answered, check_hub
from data.tasks import TASKS, split_tasks
from data.tokenizer import save_tokenizer
from watch.curves import METRICS, read_rows

LOCAL = ("#", "log_dir:", "run_name:", "data_dir:", "wandb")  # lines of flags.yaml that a model card leaves out


@dataclass
class Flags:
    """Write a GPT-2 as a Hugging Face folder."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder (its newest checkpoint), a checkpoint, a Hugging Face folder, a name on the hub (gpt2), a .pt."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The folder to write."""
    push: str | None = None
    """Upload the folder to the hub as this repository, NAME or USER/NAME: after `hf auth login`, or with HF_TOKEN."""
    license: str | None = None
    """The license in the model card, by the hub's name: mit, apache-2.0, cc-by-4.0, other, ..."""
    public: bool = False
    """A new repository can be seen by everybody, not by its owner alone."""
    dry_run: bool = False
    """With --push: print what would be uploaded, without a network; OUT is not written."""


def main():
    flags = parse(Flags)
    out = Path(flags.out)
    if out.exists():
        raise UserError(f"{out} already exists: choose another name, or delete it")
    if flags.dry_run and not flags.push:
        raise UserError("--dry_run is for --push: name the repository, or leave it out")
    if flags.push and not flags.license:
        raise UserError("--push needs --license, such as mit, apache-2.0 or other: the model card names it")
    if flags.push and not flags.dry_run:
        check_hub()  # before the model card imports huggingface_hub
    name = locate(flags.model)
    with out_of_memory("use a machine with more memory"):
        model = load_located(name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as unfinished:
            complete = Path(unfinished, out.name)
            complete.mkdir()
            hugging_face.write(model, complete)
            save_tokenizer(complete, model.config.seq_len)
            if flags.push or is_checkpoint(name):
                model_card(name, model, flags).save(complete / "README.md")
            if flags.push and flags.dry_run:
                print((complete / "README.md").read_text())
                for path in sorted(complete.iterdir()):
                    print(f"would upload {path.name} ({path.stat().st_size:,} bytes) to {flags.push}")
                return
            complete.rename(out)  # so that OUT is never half written
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or first_line(error)}") from error
    print(f"{out}: {model.num_params():,} parameters")
    if flags.push:
        push(out, flags.push, private=not flags.public)
    print(f'Next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    print(f"Next, other benchmarks: lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa")


def push(folder, repository, private):
    """Upload a folder to the hub. Raises UserError."""
    from huggingface_hub import HfApi  # only here: the import takes half a second

    hub = HfApi()
    try:
        with answered():
            repository = hub.create_repo(repository, private=private, exist_ok=True).repo_id  # NAME is USER/NAME there
            hub.upload_folder(repo_id=repository, folder_path=folder)
    except OSError as error:
        again = f"hf upload {repository} {folder}" + " --private" * private
        raise UserError(f"cannot push to {repository} ({error}); {folder} is complete: {again}") from error
    print(f"{hub.endpoint}/{repository}")


def model_card(name, model, flags):
    """README.md for the hub: a huggingface_hub.ModelCard with the facts of a checkpoint's run, where it has them."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    title = flags.push or Path(flags.out).name
    training = read_training(name, step=int, tokens=int, run=dict) if is_checkpoint(name) else {}
    facts, lines, results = training.get("run", {}), [], []
    if "command" in facts:
        data = facts.get("dataset") or Path(facts["data_dir"]).name  # not the path on this machine
        versions = " ".join(f"{key} {facts[key]}" for key in ("torch", "cuda") if facts.get(key))
        lines = [f"- Data: {data}; {training['tokens']:,} tokens in {training['step']:,} steps"]
        lines += [f"- Hardware: {facts['world_size']} × {facts['hardware']}; {versions}"]
        lines += [f"- Initial weights: {Path(facts['init_from']).name}", f"- Command: `{facts['command']}`"]
        if "--resume" in facts["command"] and (file := run_of(name) / FLAGS).is_file():  # has its other flags
            own = [line for line in file.read_text().splitlines() if not line.startswith(LOCAL)]
            lines.append(f"- Flags: {', '.join(own)}")
        if rollbacks := facts.get("rolled_back"):
            lines.append(f"- Rollbacks, each at half the learning rate and past some data: {len(rollbacks)}")
        files = split_tasks(facts.get("tasks"))
        tasks = dict(val_loss=None) | {f"{task}_{metric}": task for task in TASKS for metric in TASKS[task].metrics}
        rows = read_rows(run_of(name)) if (run_of(name) / METRICS).is_file() else []
        for row in (row for row in rows if row["step"] == training["step"]):  # evaluations of these weights
            for key, task in tasks.items():
                if isinstance(value := row.get(key), float):
                    dataset = Path(files.get(task) or task).name if task else data
                    of = f"{row[f'{task}_items']:,} items" if task else "nats per token"
                    lines.append(f"- {dataset}, {key}: {value:.4f} ({of})")
                    where = dict(task_type="text-generation", dataset_type=dataset, dataset_name=dataset)
                    results.append(EvalResult(metric_type=key, metric_value=round(value, 4), metric_name=of, **where))
    card = ModelCardData(
        license=flags.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2"],
        datasets=facts.get("dataset"),
        model_name=title,
        eval_results=results or None,
    )
    sizes = f"GPT-2 with {model.num_params():,} parameters and a context of {model.config.seq_len:,} tokens"
    text = "\n".join([f"# {title}", "", f"{sizes}. It continues text; it follows no instructions.", "", *lines])
    return ModelCard(f"---\n{card.to_yaml()}\n---\n\n{text}\n")


def is_checkpoint(name):
    return (Path(name) / TRAINING).is_file()


if __name__ == "__main__":
    run(main)
