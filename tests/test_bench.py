import re
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, expect_error


def bench(*arguments, launcher=(sys.executable,)):
    command = [*launcher, ROOT / "bench.py", *TINY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("ranks, autocast", [(1, "off"), (2, "off"), (1, "fp16")])
def test_it_times_steps_and_leaves_nothing(tmp_path, ranks, autocast):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    flags = ("--steps", 2, "--log_dir", tmp_path, "--autocast", autocast)
    result = bench(*flags, launcher=launcher if ranks > 1 else launcher[:1])
    assert result.returncode == 0, result.stderr
    rates = re.findall(r"^([\d,]+) tokens/sec, ([\d.]+) ms a step, peak memory [\d.]+ GB$", result.stdout, re.M)
    assert len(rates) == 1
    rate, ms = (float(text.replace(",", "")) for text in rates[0])
    assert rate * ms / 1000 == pytest.approx(256, rel=0.01)  # the tokens of a step
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, complaint", [("--steps 0", "--steps 0"), ("--init_from gpt2", "--init_from")])
def test_what_it_does_not_do(flags, complaint):
    expect_error(bench(*flags.split()), complaint)
