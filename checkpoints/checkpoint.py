"""Checkpoints: a Hugging Face folder (config.json, model.safetensors, the tokenizer), and in it what resuming needs as
well: optimizer.safetensors (AdamW's moments, fp8's scales, random states) and training.json (everything else). A model
in pieces over the ranks has pieces, shard-*.safetensors, for both files; export.py puts the model's together.

A checkpoint appears whole or not at all: it is written under another name, flushed to disk, read back against what was
written, and then renamed. Nothing in it can execute when it is loaded.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from checkpoints import formats, pieces
from common.cli import UserError, first_line, hub_errors
from common.files import digest, flush_to_disk
from data.tokenizer import VOCAB_SIZE, save_tokenizer
from model import GPT, GPTConfig, find_file, stored, to_host

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
LOADER = dict(position=int, total=int, seed=int, shuffle=bool)  # its state
WEIGHTS, STATE, TRAINING = "model.safetensors", "optimizer.safetensors", "training.json"


# ----------------------------------------------------------------------------------------------------------------------
# Saving


def snapshot(model, optimizer, distributed):
    """Copies in host memory of what a checkpoint holds in tensors. To be called on every rank.

    Rank 0 gets two dictionaries, weights and state. Of a model in pieces every rank gets one, with its own.
    """
    if pieces.is_sharded(model):
        return sharded_snapshot(model, optimizer, distributed)
    state = {f"random.{rank}": random for rank, random in enumerate(distributed.all_gather(random_state(distributed.device)))}
    if scaled := scaled_modules(model):
        scales = torch.cat([module.scales[:, 0] for module in scaled])
        state |= {f"scales.{rank}": each for rank, each in enumerate(distributed.all_gather(scales))}
    if not distributed.is_main:
        return None
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter) or fresh_state(parameter)
        state["adamw_steps"] = own["step"]  # the same for all
        for moment in MOMENTS:
            state[f"{moment}.{name}"] = without_padding(name, own[moment], model)
    state = {name: to_host(tensor.detach()) for name, tensor in state.items()}
    return model.to_hugging_face(), state


def sharded_snapshot(model, optimizer, distributed):
    tensors = {}
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter) or fresh_state(parameter)
        tensors[name] = stored(name, parameter.detach())
        tensors |= {f"{moment}.{name}": own[moment] for moment in MOMENTS}
    state = {"adamw_steps": to_host(own["step"]), f"random.{distributed.rank}": random_state(distributed.device)}
    return state | {name: pieces.host_piece(tensor) for name, tensor in tensors.items()}


def fresh_state(parameter):
    """AdamW's before its first step, which fp16's scaler may have skipped."""
    return dict(step=torch.zeros(()), **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS})


def random_state(device):
    """The states of this process's random generators as bytes: (n,) uint8."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def scaled_modules(model):
    """The modules that fp8.convert made; each rank has scales of its own for them."""
    return [module for module in model.modules() if hasattr(module, "scales")]


def without_padding(name, tensor, model):
    """A tensor of a parameter's shape without the rows that pad_vocab adds; in them there is nothing but zeros."""
    return tensor[: model.config.vocab_size] if name.endswith("wte.weight") else tensor


def write(folder, model, tensors, training, group=None):
    """Write a snapshot and `training`, a JSON-able dictionary, to a new folder, which appears whole or not at all.

    For a model in pieces every rank calls this with the group (gloo) of all. Rank 0 alone needs training.
    """
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    hashes = {}
    if group:
        hashes = pieces.write(unfinished, tensors, group)
        if dist.get_rank(group) > 0:
            return
        model.save_config(unfinished)
    else:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        weights, state = tensors
        model.save_pretrained(unfinished, weights)
        save_file(state, unfinished / STATE)
        (unfinished / STATE).chmod(0o644)  # safetensors leaves it readable to its owner alone
        for name, written in ((WEIGHTS, weights), (STATE, state)):
            pieces.check_written(unfinished / name, written)
    save_tokenizer(unfinished)
    hashes |= {path.name: digest(path) for path in sorted(unfinished.iterdir()) if path.name not in hashes}
    (unfinished / TRAINING).write_text(json.dumps(training | dict(sha256=hashes), indent=2) + "\n")
    for path in [*unfinished.iterdir(), unfinished]:
        flush_to_disk(path)
    unfinished.rename(folder)
    flush_to_disk(folder.parent)
    return folder


def start_writer(config, step, distributed):
    """The Writer of a run that is at `step`, on those ranks that write: rank 0, or all of a model in pieces."""
    group = None if config.parallel == "ddp" else dist.new_group(backend="gloo")
    if distributed.is_main or group:
        return Writer(Path(config.log_dir) / config.run_name, config.keep_checkpoints, step, group)
    return None


class Writer:
    """Writes checkpoints of a run in a thread, one at a time, and keeps the newest and the best of them."""

    def __init__(self, folder, keep, step=0, group=None):
        """step: where the run goes on from; what is newer belongs to a past that it left, and is set aside.

        group: as write takes it; then every rank has a Writer, and they do the same at the same time.
        """
        self.folder = Path(folder)
        self.keep = keep
        self.group = group
        self.is_main = not group or dist.get_rank(group) == 0
        self._thread = ThreadPoolExecutor(1)
        self._writing = None
        self.failed = False  # the last one that was waited for
        if not self.is_main:
            return
        for torn in self.folder.glob("checkpoint_*.unfinished"):  # by the end of the run before
            shutil.rmtree(torn, ignore_errors=True)
        for path in checkpoints(self.folder):
            if number(path) > step:
                aside = path.rename(unused_name(path.with_name(path.name + ".abandoned")))
                print(f"{path} is from after step {step}: set aside as {aside.name}")

    def start(self, model, tensors, training):
        """Begin to write; returns the folder that will appear. What was begun before has to be waited for first."""
        folder = self.folder / f"checkpoint_{training['step']:06d}"
        self._writing = self._thread.submit(self._write, folder, model, tensors, training)
        return folder

    def wait(self):
        """Until what was begun is on disk; where that failed the reason is printed, and training goes on."""
        if not self._writing:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
            self.failed = False
        except (OSError, SafetensorError) as error:
            self.failed = True
            if self.is_main:
                found = checkpoints(self.folder)
                newest = f"{found[0]} is the last" if found else "there is none yet"
                print(f"the checkpoint was not written ({error}); {newest}")

    def _write(self, folder, model, tensors, training):
        try:
            write(folder, model, tensors, training, self.group)
        except (OSError, SafetensorError):
            if self.is_main:
                shutil.rmtree(folder.with_name(folder.name + ".unfinished"), ignore_errors=True)
            raise
        if not self.is_main:
            return
        try:
            self._prune()
        except OSError as error:
            print(f"an older checkpoint could not be removed: {error}")

    def _prune(self):
        """Remove all but the newest `keep` and the one with the lowest validation loss."""
        found = checkpoints(self.folder)
        losses = {}
        for path in found:
            with contextlib.suppress(UserError):  # a damaged one has no loss, and goes like the others
                losses[path] = read_training(path).get("val_loss")
        scored = [path for path in found if losses.get(path) is not None and math.isfinite(losses[path])]
        kept = found[: self.keep] + ([min(scored, key=losses.get)] if scored else [])
        for path in found:
            if path not in kept:
                doomed = path.with_name(path.name + ".unfinished")  # half a folder is never taken for a checkpoint
                path.rename(doomed)
                shutil.rmtree(doomed)


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


def checkpoints(folder):
    """A run's checkpoints, the newest first."""
    return sorted((path for path in Path(folder).glob("checkpoint_*") if path.name[11:].isdigit()), key=number)[::-1]


def number(path):
    """The step of a checkpoint, by its name."""
    return int(path.name[11:])


def unused_name(path):
    """path, or if that is taken path.1, path.2, …"""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(name for name in names if not name.exists())


def newest(folder, distributed):
    """The newest checkpoint of a run that is whole, or None where there are none; those that are not whole are named.

    Raises UserError when none of them is.
    """

    def look():
        found = checkpoints(folder)
        for path in found:
            try:
                verify(path)
                return path.name
            except UserError as error:
                print(f"{error}: looking for the one before")
        if found:
            raise UserError(
                f"no checkpoint in {folder} is whole: choose another --run_name (--init_from starts from weights alone)"
            )

    name = distributed.broadcast(distributed.on_main(look))
    return name and Path(folder) / name


def read_training(folder):
    """training.json of a checkpoint. Raises UserError when there is none."""
    path = Path(folder) / TRAINING
    try:
        training = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{folder} is not a checkpoint to resume from: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {path.name} is not JSON ({error})") from error
    kinds = dict(step=int, tokens=int, evaluated=bool, loader=dict, scaler=dict, run=dict, sha256=dict)
    if not (
        isinstance(training, dict)
        and all(isinstance(training.get(name), kind) for name, kind in kinds.items())
        and training["step"] >= 0
        and all(type(training["loader"].get(name)) is kind for name, kind in LOADER.items())
        and "config.json" in training["sha256"]
        and (training["sha256"].keys() >= {WEIGHTS, STATE} or any(map(pieces.is_piece, training["sha256"])))
    ):
        raise UserError(f"{folder} has no training state to resume from: train from its weights with --init_from")
    return training


def verify(folder):
    """Raises UserError when a file of a checkpoint is not byte for byte what was written."""
    compare(folder, read_training(folder)["sha256"])


def compare(folder, hashes):
    """Raises UserError when one of a folder's files, {name: SHA-256}, is missing or has another hash."""
    for name, expected in hashes.items():
        path = Path(folder) / name
        try:
            found = digest(path)
        except OSError as error:
            raise UserError(f"{folder} is damaged: {name}: {error.strerror}") from error
        if found != expected:
            raise UserError(f"{folder} is damaged: {name} is not what was written")


def hashes_of(folder):
    """A checkpoint's files and their SHA-256; nothing for another folder, whose weights can be read all the same."""
    try:
        hashes = json.loads((Path(folder) / TRAINING).read_text())["sha256"]
        return hashes if isinstance(hashes, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def set_random_state(states, device):
    size = len(torch.get_rng_state())
    torch.set_rng_state(states[:size])
    if device.type == "cuda" and len(states) > size:
        torch.cuda.set_rng_state(states[size:], device)


# ----------------------------------------------------------------------------------------------------------------------
# The model alone


def load_model(name, **options):
    """The GPT in a checkpoint, in a Hugging Face folder, on the hub, or in a .pt of nanoGPT or build-nanogpt.

    options: GPTConfig's, but for the sizes. Raises UserError when there is none, or it is damaged.
    """
    config = dataclasses.replace(load_config(name), **options)
    with explained(name):
        model = GPT.empty(config)
    verify_weights(name)
    load_weights(name, model)
    return model


def verify_weights(name):
    """Raises UserError when a checkpoint's weights are not byte for byte what was written."""
    everything = in_pieces(name)
    compare(name, {file: value for file, value in hashes_of(name).items() if everything or file == WEIGHTS})


def in_pieces(name):
    return any(pieces.is_piece(path.name) for path in Path(name).glob("*"))


def load_weights(name, model):
    """Copy the weights of what load_model takes into a GPT of its sizes, which may be in pieces over the ranks.

    Their hashes are not compared: that takes one rank, and this all of them. Raises as load_model.
    """
    with explained(name):
        if formats.is_torch_file(name):
            model.load_hugging_face(formats.load(name)[1], pieces.fill)
        elif in_pieces(name):
            pieces.load(name, {own: stored(own, each.detach()) for own, each in model.named_parameters()})
        else:
            model.load_hugging_face(load_file(find_file(name, WEIGHTS)), pieces.fill)


def load_config(name):
    """The GPTConfig of what load_model would load. Raises UserError when there is none, or another vocabulary."""
    if found := checkpoints(name):
        raise UserError(f"{name} is a run's folder: give one of its checkpoints, such as {found[0]}")
    with explained(name):
        if formats.is_torch_file(name):
            return GPTConfig(**formats.load(name)[0])
        config = GPT.pretrained_config(name)
    if config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{name} has a vocabulary of {config.vocab_size}, but GPT-2's has {VOCAB_SIZE}")
    return config


@contextlib.contextmanager
def explained(name):
    """Errors of reading a model, as a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # not the file's fault
    except (*hub_errors(), KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"cannot load {name} ({type(error).__name__}: {first_line(error)}); give a checkpoint, a Hugging Face "
            "folder, gpt2, gpt2-medium, gpt2-large or gpt2-xl, or a .pt of nanoGPT or build-nanogpt"
        ) from error
