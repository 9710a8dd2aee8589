import json
import re
import statistics

import pytest
import torch
from conftest import TINY, expect_error


@pytest.mark.parametrize("ranks, autocast", [(1, "off"), (2, "off"), (1, "fp16")])
def test_it_times_steps_and_leaves_nothing(command, tmp_path, ranks, autocast):
    result = command("bench.py", *TINY, "--steps", 2, "--autocast", autocast, ranks=ranks)
    assert result.returncode == 0, result.stderr
    rates = re.findall(r"^([\d,]+) tokens/sec, ([\d.]+) ms a step, peak memory [\d.]+ GB$", result.stdout, re.M)
    assert len(rates) == 1
    rate, ms = (float(text.replace(",", "")) for text in rates[0])
    assert rate * ms / 1000 == pytest.approx(128, rel=0.01)  # the tokens of a step
    assert not list(tmp_path.iterdir())


def test_a_record_has_all_steps_and_replaces_no_file(call_main, tmp_path):
    flags = (*TINY, "--steps", 2, "--record", "record.json")
    done = call_main("bench.py", *flags)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    timed = record["ms"][record["settling_steps"] :]
    assert len(timed) == 2 and record["tokens_per_second"] == pytest.approx(
        128_000 / statistics.median(timed), rel=0.01
    )
    assert f"{record['tokens_per_second']:,} tokens/sec" in done.stdout
    assert record["torch"] == torch.__version__ and record["seed"] == 1337 and "--n_embd 32" in record["command"]
    command = record["command"]  # without bench.py's folder and --record, which may name a person
    assert command.startswith("bench.py ") and command.endswith("--steps 2")
    assert "pad_vocab" in record["on"] and "compile" not in record["on"]
    assert record["gpu"] is None and record["gpus"] == 1
    for path in ("record.json", "no_such_folder/record.json", ""):
        expect_error(call_main("bench.py", *flags[:-1], path), f"--record {path}: it cannot be written")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--steps 0", "--steps 0"),
        ("--init_from gpt2", "--init_from is for train_gpt2.py"),
        ("--ladder", "leave it out"),
        ("--profile 2", "--profile"),
    ],
)
def test_what_it_does_not_do(call_main, flags, complaint):
    expect_error(call_main("bench.py", *TINY, *flags.split()), complaint)
