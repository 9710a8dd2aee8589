"""Runs that are timed in turn."""

import math

import pytest

from measure.turns import ROUNDS, compare, turn


class Clock:
    """Stands in for a TimedRun: its rates, and a log of whose turn it was."""

    def __init__(self, name, rates, turns, seconds=0.5):
        self.name, self.rates, self.turns, self.seconds = name, iter(rates), turns, seconds

    def train(self, steps):
        self.turns.append((self.name, steps))
        return next(self.rates)


def test_the_gain_is_that_of_the_rounds_in_turn():
    turns, drift = [], [100, 90, 80, 90, 100]
    first = Clock("A", drift, turns)
    second = Clock("B", [1.2 * rate for rate in drift], turns, seconds=0.1)
    gain = compare(first, second, seconds=5, steps=20)
    assert gain.low == pytest.approx(1.2) and gain.ratio == pytest.approx(1.2) and gain.high == pytest.approx(1.2)
    assert gain.is_clear
    assert "".join(name for name, _ in turns) == "ABBAABBAAB"
    assert set(turns) == {("A", 4), ("B", 10)}  # 20 steps at least, and 5 seconds


def test_the_interval():
    ratios = [1.01, 1.03, 0.99, 1.0, 1.02]
    gain = compare(Clock("A", [1] * ROUNDS, []), Clock("B", ratios, []), 0, 1)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 5
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / 4)
    assert math.log(gain.ratio) == pytest.approx(mean)
    # Student's t for 4 degrees of freedom, of any table
    assert math.log(gain.high / gain.ratio) == pytest.approx(2.776 * deviation / math.sqrt(5))
    assert gain.low < 1 < gain.high and not gain.is_clear


def test_a_turn_has_enough_steps_and_seconds():
    assert turn(Clock("A", [], [], seconds=2.0), seconds=5, steps=20) == 4
    assert turn(Clock("A", [], [], seconds=0.01), seconds=5, steps=20) == 100
