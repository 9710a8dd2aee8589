"""Runs that are timed in turn."""

import math
import subprocess

import pytest
import torch
from texts import write_corpus

from config import INTERVALS, Config
from measure import turns
from measure.turns import FIRST_STEPS, SETTLING_SECONDS, TimedRun, compare
from watch.hardware import GPU_FACTS


class Clock:
    """Stands in for a TimedRun: its rates, and a log of whose turn it was."""

    def __init__(self, name, rates, turns, seconds=0.5):
        self.name, self.rates, self.turns, self.seconds, self.asked = name, iter(rates), turns, seconds, 0

    def ask_gpu(self):
        self.asked += 1
        return subprocess.Popen(["echo", ", ".join(map(str, range(len(GPU_FACTS))))], stdout=subprocess.PIPE, text=True)

    def train(self, steps):
        self.turns.append((self.name, steps))
        return next(self.rates)


def test_the_gain_is_that_of_the_rounds_in_turn():
    turns, drift = [], [100, 90, 80, 90, 100]
    first = Clock("A", drift, turns)
    second = Clock("B", [1.2 * rate for rate in drift], turns, seconds=0.1)
    gain = compare(first, second, seconds=2.5, steps=20)
    assert gain.pop("rounds") == [(rate, pytest.approx(1.2 * rate)) for rate in drift]
    assert [*gain.pop("gpu").values()] == [*map(str, range(len(GPU_FACTS)))] and (first.asked, second.asked) == (0, 1)
    assert gain.pop("steps") == [20, 100] and gain.pop("seconds") == pytest.approx([10, 10])
    assert gain == pytest.approx(dict(ratio=1.2, low=1.2, high=1.2, is_clear=True))
    assert "".join(name for name, _ in turns) == "BAABBAABBA"
    assert set(turns) == {("A", 4), ("B", 20)}  # 20 steps at least, and turns of one length


@pytest.mark.parametrize(
    "lengths, expected", [((0.5, 0.1), {("A", 2), ("B", 10)}), ((0.85, 0.6), {("A", 2), ("B", 3)})]
)
def test_turns_have_about_one_length(lengths, expected):
    """Five turns of a second are the 5 s asked for: 2 × 0.5 and 10 × 0.1 s, or 2 × 0.85 and 3 × 0.6 s."""
    turns = []
    compare(*(Clock(name, [1] * 5, turns, each) for name, each in zip("AB", lengths)), seconds=5, steps=5)
    assert set(turns) == expected


@pytest.mark.parametrize("mean", [0.01, 0.1])
def test_the_interval_is_that_of_students_t(mean):
    noise = [0.01, 0.03, -0.05, 0.01, 0.0]
    turns = []
    gain = compare(
        Clock("A", [1] * 5, turns), Clock("B", [math.exp(mean + each) for each in noise], turns), seconds=5, steps=5
    )
    margin = 2.776 * math.sqrt(sum(each**2 for each in noise) / 4 / 5)  # 2.776: of any table, for 4 degrees of freedom
    assert [math.log(gain[name]) for name in ("low", "ratio", "high")] == pytest.approx(
        [mean - margin, mean, mean + margin]
    )
    assert gain["is_clear"] == (mean > margin)


class Replies(TimedRun):
    """A TimedRun whose processes' replies are given."""

    def __init__(self, cuda, *replies):
        self.facts, self.replies, self.asked = dict(cuda=cuda), iter(replies), []
        self.rates, self.losses, self.seconds = [], [], None

    def ask(self, message):
        self.asked.append(message)

    def answer(self):
        seconds, tokens = next(self.replies)
        return seconds, [0.0] * len(seconds), tokens, 0.5


@pytest.mark.parametrize("cuda, untimed", [(None, 1), ("13.2", math.ceil(SETTLING_SECONDS / 0.1))])
def test_the_speed_is_that_of_the_mean_step(cuda, untimed):
    """Of the first steps, which compile, that of the shortest."""
    run = Replies(cuda, ([30, 0.1, 0.4], 10), ([0.1, 0.1, 0.4], 10))
    assert run.train(3) == pytest.approx(100) and run.train(3) == pytest.approx(50)
    assert run.asked == [(0, 3), (untimed, 3)]


def print_steps():
    print("workers end:", torch._inductor.config.quiesce_async_compile_pool)
    turns.train_step = lambda *args, step=turns.train_step: print("a step", flush=True) or step(*args)


def test_after_the_first_steps_the_weights_stay_as_they_are(tmp_path):
    """A step reads all the tokens that there are, so equal weights have equal losses."""
    write_corpus(tmp_path, sizes=(400, 128))
    small = dict(n_layer=1, n_head=2, n_embd=32, seq_len=32, total_batch_size=128, micro_batch_size=2, lr=1e-2)
    plain = dict(device="cpu", compile=False, shuffle=False, warmup_steps=0, **dict.fromkeys(INTERVALS, 0))
    config, output = Config(data_dir=str(tmp_path), **small, **plain), tmp_path / "output.txt"
    run = TimedRun(config, 1, output, prepare=print_steps)
    run.train(2)
    run.train(1)
    run.close()
    assert output.read_text().count("a step") == FIRST_STEPS + (1 + 2) + (1 + 1)
    assert len(run.losses) == FIRST_STEPS + 3  # those of untimed steps are not among them
    assert len(set(run.losses)) == FIRST_STEPS + 1 and len(set(run.losses[FIRST_STEPS:])) == 1
    assert "workers end: False" in output.read_text()
