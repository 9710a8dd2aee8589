import re

import pytest
from conftest import TINY, expect_error


@pytest.mark.parametrize("ranks, autocast", [(1, "off"), (2, "off"), (1, "fp16")])
def test_it_times_steps_and_leaves_nothing(command, tmp_path, ranks, autocast):
    result = command("bench.py", *TINY, "--steps", 2, "--autocast", autocast, ranks=ranks)
    assert result.returncode == 0, result.stderr
    rates = re.findall(r"^([\d,]+) tokens/sec, ([\d.]+) ms a step, peak memory [\d.]+ GB$", result.stdout, re.M)
    assert len(rates) == 1
    rate, ms = (float(text.replace(",", "")) for text in rates[0])
    assert rate * ms / 1000 == pytest.approx(256, rel=0.01)  # the tokens of a step
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--steps 0", "--steps 0"),
        ("--init_from gpt2", "leave out --init_from and --resume"),
        ("--ladder", "leave it out"),
        ("--profile 2", "--profile"),
    ],
)
def test_what_it_does_not_do(call_main, flags, complaint):
    expect_error(call_main("bench.py", *TINY, *flags.split()), complaint)
