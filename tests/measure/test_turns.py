"""Runs that are timed in turn."""

import math
import subprocess

import pytest
from texts import write_corpus

from config import INTERVALS, Config
from measure import turns
from measure.turns import FIRST_STEPS, SETTLING_SECONDS, TimedRun, compare
from watch.hardware import GPU_FACTS


class Clock:
    """Stands in for a TimedRun: its rates, and a log of whose turn it was."""

    def __init__(self, name, rates, turns, seconds=0.5, cuda="13.2"):
        self.name, self.rates, self.turns, self.seconds = name, iter(rates), turns, seconds
        self.facts, self.asked = dict(cuda=cuda), 0

    def ask_gpu(self):
        self.asked += 1
        return subprocess.Popen(["echo", ", ".join(map(str, range(len(GPU_FACTS))))], stdout=subprocess.PIPE, text=True)

    def train(self, steps, again=False):
        assert again == (self.name in [name for name, _ in self.turns[-1:]])
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
    assert "".join(name for name, _ in turns) == "ABBAABBAAB"
    assert set(turns) == {("A", 4), ("B", 20)}  # 20 steps at least, and turns of one length


@pytest.mark.parametrize("step, rounds, share", [(0.85, 7, 1), (0.98, 7, 1), (1.02, 5, 1), (0.1, 20, 3)])
def test_the_rounds_have_the_seconds(step, rounds, share):
    """Long steps have a turn each: five of 0.85 s are 4.25 s of the 5 asked for. A CPU's turn has 0.25 s of short
    ones, a GPU's a second."""
    for cuda, expected in ((None, [share] * 2 * rounds), ("13.2", [math.ceil(1 / step)] * 2 * 5)):
        turns = []
        runs = (Clock(name, [1] * 20, turns, step, cuda) for name in "AB")
        compare(*runs, seconds=5, steps=5)
        assert [steps for _, steps in turns] == expected


def test_turns_have_about_one_length():
    turns = []
    compare(Clock("A", [1] * 20, turns, 0.85), Clock("B", [1] * 20, turns, 0.6), seconds=5, steps=5)
    assert set(turns) == {("A", 2), ("B", 3)}  # a second is two steps of both, 1.7 and 1.2 s


def test_a_slow_turn_does_not_end_the_timing():
    class Stutters(Clock):
        def train(self, steps, again=False):
            self.seconds = 0.25 if len(self.turns) in (8, 9) else 0.05  # in the fifth round
            return super().train(steps, again)

    turns = []
    runs = (Stutters(name, [1] * 20, turns, 0.05, cuda=None) for name in "AB")
    assert min(compare(*runs, seconds=5, steps=5)["seconds"]) >= 5 and len(turns) == 40


@pytest.mark.parametrize("spread, rounds, student_t", [(1.0, 10, 2.262), (0.4, 7, 2.447), (0.1, 5, 2.776)])
def test_the_interval_gets_more_rounds_while_it_is_wide(spread, rounds, student_t):
    """student_t: of any table, for rounds - 1 degrees of freedom."""
    logs = [spread * each for each in [0.01, 0.03, -0.01, 0.0, 0.02]] * 4
    turns = []
    gain = compare(Clock("A", [1] * 20, turns), Clock("B", map(math.exp, logs), turns), 5, 1)
    assert len(turns) == 2 * rounds
    logs = logs[:rounds]
    mean = sum(logs) / rounds
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / (rounds - 1))
    assert math.log(gain["ratio"]) == pytest.approx(mean)
    assert math.log(gain["high"] / gain["ratio"]) == pytest.approx(student_t * deviation / math.sqrt(rounds))
    assert gain["is_clear"] == (gain["low"] > 1)


def print_steps():
    turns.train_step = lambda *args, step=turns.train_step: print("a step", flush=True) or step(*args)


def test_after_the_first_steps_the_weights_stay_as_they_are(tmp_path):
    """A step reads all the tokens that there are, so equal weights have equal losses."""
    write_corpus(tmp_path, sizes=(400, 128))
    small = dict(n_layer=1, n_head=2, n_embd=32, seq_len=32, total_batch_size=128, micro_batch_size=2, lr=1e-2)
    plain = dict(device="cpu", compile=False, shuffle=False, warmup_steps=0, **dict.fromkeys(INTERVALS, 0))
    config, output = Config(data_dir=str(tmp_path), **small, **plain), tmp_path / "output.txt"
    run = TimedRun(config, 1, output, prepare=print_steps)
    taken = [FIRST_STEPS]
    for steps, again, cuda in ((2, False, None), (1, False, "13.2"), (2, True, "13.2"), (1, False, None)):
        run.facts["cuda"] = cuda
        taken.append(steps + (math.ceil(SETTLING_SECONDS / run.seconds) if cuda and not again else 1))
        run.train(steps, again)
    run.close()
    assert output.read_text().count("a step") == sum(taken)
    assert len(run.losses) == FIRST_STEPS + 6  # those of untimed steps are not among them
    assert len(set(run.losses)) == FIRST_STEPS + 1 and len(set(run.losses[FIRST_STEPS:])) == 1
