import json
import math

import pytest
import torch
from conftest import ALONE, ROOT, metrics
from texts import make_items

import evaluation
from config import Config
from data.loader import TokenStream
from data.shards import open_shards, write_shard
from data.tokenizer import END_OF_TEXT, tokenize
from evaluation import bits_per_byte, validation_loss
from kernels.documents import find_offsets
from model import GPT, GPTConfig
from parallel.process_group import Distributed


def test_validation_has_the_same_tokens_for_every_batch_and_number_of_ranks(corpus):
    stream, model = TokenStream(open_shards(corpus, "val")), GPT(GPTConfig(seq_len=32, n_layer=1, n_head=1, n_embd=16))

    def losses_of(batch):
        assert torch.equal(batch.offsets, find_offsets(batch.inputs, END_OF_TEXT))
        return model(*batch, reduction="none")

    tokens = torch.from_numpy(stream.read(0, 400)).long()
    for val_tokens, sequences in ((1, 1), (250, 7), (10**9, 12)):  # whole sequences of the 400 tokens
        n = sequences * 32
        expected = model(tokens[:n].view(-1, 32), tokens[1 : n + 1].view(-1, 32)).item()
        for B, total_batch_size in ((1, 64), (4, 256), (8, 512)):
            config = Config(seq_len=32, val_tokens=val_tokens, micro_batch_size=B, total_batch_size=total_batch_size)
            assert validation_loss(losses_of, stream, config, ALONE) == pytest.approx(expected, abs=1e-5)
            ranks = [Distributed(rank, 3, torch.device("cpu")) for rank in range(3)]  # without a group each has a part
            parts = [validation_loss(losses_of, stream, config, rank) for rank in ranks]
            assert sum(parts) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ranks, tensor, context, pipeline", [(1, 1, 1, 1), (3, 1, 1, 1), (8, 2, 1, 2), (8, 2, 2, 1)])
def test_ranks_share_the_batches_of_an_evaluation(ranks, tensor, context, pipeline):
    """Each batch is evaluated once by every part of the model: --context splits no sequence of an evaluation."""
    shares = []
    for rank in range(ranks):
        distributed = Distributed(rank, ranks, torch.device("cpu"), tensor, context, pipeline)
        shares.append(list(evaluation.batches_of_rank(range(7), "", distributed)))
    copies = ranks // tensor // pipeline
    assert shares[: copies * tensor : tensor] == [list(range(first, 7, copies)) for first in range(copies)]
    stages = [shares[first : first + copies * tensor] for first in range(0, ranks, copies * tensor)]
    assert stages == stages[:1] * pipeline
    assert all(share == shares[rank // tensor * tensor] for rank, share in enumerate(shares))


def test_bits_per_byte_count_the_bytes_of_the_text(tmp_path):
    """Not the tokens, and no byte for <|endoftext|>."""
    texts = ["naïve 日本語 🙂, and the rest is English.", "\x00\ufffd  two", "<|endoftext|>"]
    tokens = tokenize(texts)
    write_shard(tmp_path / "edufineweb_val_000000.npy", tokens)
    stream, size = TokenStream(open_shards(tmp_path, "val")), len("".join(texts).encode())
    nats = 2.5 * (len(tokens) - 1)
    assert bits_per_byte(2.5, stream, Config(seq_len=1)) == pytest.approx(nats / size / math.log(2), rel=1e-12)


STOP_IN_AN_EVALUATION = """
import os
import signal
import train_gpt2
from parallel import process_group
def progress(iterable, title, total=None, **options):
    stoppable = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # after the first step
    for number, item in enumerate(iterable):
        if number == 1 and stoppable and (title, os.environ.get("RANK", "0")) == TITLE_AND_RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        yield item
process_group.progress = progress
train_gpt2.main()
"""


@pytest.mark.parametrize("ranks, flags", [(1, ()), (2, ("--parallel", "zero3"))])
def test_a_signal_during_an_evaluation(train, tmp_path, monkeypatch, ranks, flags):
    """The result is not logged, the run is saved, and the resumed run evaluates that step again."""
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(9)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = [*flags, *"--max_steps 4 --val_every 2 --val_tokens 64 --hellaswag_every 2 --sample_every 2".split()]
    flags += ["--checkpoint_every", 100, "--tasks", "hellaswag=items.jsonl", "--micro_batch_size", 1]

    def evaluated(run):
        """The steps of each evaluation in the log."""
        keys = ("val_loss", "hellaswag_acc", "samples")
        return [[row["step"] for row in metrics(run) if key in row] for key in keys]

    def stop_in(title, rank):
        (tmp_path / "stop.py").write_text(STOP_IN_AN_EVALUATION.replace("TITLE_AND_RANK", repr((title, str(rank)))))
        run = train("run", *flags, ranks=ranks, script=tmp_path / "stop.py")
        return evaluated(run), (run / "output.txt").read_text()

    steps, output = stop_in("hellaswag", rank=ranks - 1)
    assert steps == [[0, 2], [0], []]
    assert "stopped at step 2; " in output and "to continue from log/run/checkpoint_000002: " in output
    assert evaluated(train("run", *flags, ranks=ranks)) == [[0, 2, 4], [0, 2, 4], [2, 4]]
