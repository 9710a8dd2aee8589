"""Collectives between ranks: their times, and what these mean for a step."""

import json

import pytest
from conftest import ALONE, expect_error

from measure import links

SMALL = "--device cpu --largest 4096 --repeats 2 --models tiny --run_name two_ranks".split()
ESTIMATE = (
    "--peak_tflops 0.5 --mfu 0.4 --total_batch_size 8192 --gpus_per_machine 4 --machines 1 2 --network 400".split()
)


def test_it_measures_every_collective_and_says_what_a_step_waits_for(command, tmp_path):
    done = command("measure/links.py", *SMALL, *ESTIMATE, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / "two_ranks"
    results = json.loads((folder / "links.json").read_text())["results"]
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    assert [(r["name"], r["bytes"]) for r in results] == [(name, size) for name in names for size in (1024, 4096)]
    for result in results:
        assert result["algorithm_gb_per_s"] == pytest.approx(result["bytes"] / result["ms"] * 1e3 / 1e9)
        # two ranks: all of an all-reduce's bytes cross a rank's link in each direction, and half of the others'
        factor = 1 if result["name"] == "all-reduce" else 0.5
        assert result["bus_gb_per_s"] == pytest.approx(factor * result["algorithm_gb_per_s"])
    text = (folder / "links.md").read_text()
    assert (folder / "links.png").stat().st_size > 10_000
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| tiny")]
    steps, machines = rows[:3], rows[3:]
    # 7M parameters; on a CPU a micro-batch is one sequence of 1,024 tokens, so each of two ranks has four of them
    assert [row[1:3] for row in steps] == [["ddp", "1"], ["zero2", "1"], ["zero3", "1"]]
    assert float(steps[0][3]) == 0.03 < float(steps[1][3]) < float(steps[2][3])
    for row in steps:
        communication, computation = (float(text.replace(",", "")) for text in row[4:6])
        assert float(row[6][:-1]) == pytest.approx(100 * communication / (communication + computation), abs=0.1)
    assert [row[1:3] for row in machines] == [["4", ""], ["8", "400"]]
    for row in machines:
        ms, rate = (float(text.replace(",", "")) for text in row[3:5])
        assert rate == pytest.approx(8192e3 / ms, rel=0.05)


def test_machines_are_estimated_from_the_largest_all_reduce():
    flags = links.Flags(models=("gpt2",), machines=(1, 2), network=(400.0, 12.5), gpus_per_machine=8)
    flags.peak_tflops, flags.micro_batch_size = 989.4, 32
    steps = links.plan_machines(flags, links.replace(ALONE, world_size=2), None)
    measured = {"all-reduce": [(2**20, 1.0), (3 * 10**9, 10.0)]}  # 300 GB/s
    text = links.machine_table(flags, links.replace(ALONE, world_size=2), steps, measured)
    assert "machines of 8 GPUs" in text and "300 GB/s" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| gpt2")]
    # 0.5 GB of gradients: 3 ms in a machine, 1 or 40 ms between two; backward hides all buckets but the last, 27 of 43
    assert [row[:4] for row in rows] == [
        ["gpt2", "8", "", "121"],
        ["gpt2", "16", "400", "64"],
        ["gpt2", "16", "12.5", "103"],
    ]
    assert [row[6] for row in rows[:2]] == ["–", "–"] and rows[2][4].startswith("5,1") and rows[2][6].startswith("6,3")


def test_variables_that_choose_a_route_are_in_the_title(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    title = links.facts_of_links(ALONE)["title"]
    assert title.endswith("NCCL_P2P_DISABLE=1") and "INFO" not in title


def test_one_rank_has_no_links(command):
    expect_error(command("measure/links.py", *SMALL), "--nproc_per_node=2 -m measure.links")


@pytest.mark.parametrize(
    "changed, complaint",
    [
        (dict(largest=1000), "--largest must be at least 1024"),
        (dict(mfu=1.1), "--mfu must be above 0 and at most 1"),
        (dict(machines=(0,)), "--machines and --network must be above 0"),
        (dict(machines=(1, 2)), "--machines and --network go together"),
        (dict(network=(1.0,)), "--machines and --network go together"),
        (dict(machines=(1,), network=(1.0,)), "--machines and --network go together"),
        (dict(gpus_per_machine=8), "--gpus_per_machine must be at least 2, and needs --machines"),
        (dict(gpus_per_machine=1, machines=(1,)), "--gpus_per_machine must be at least 2"),
        (dict(machines=(1,)), "--machines needs the device's peak: use --peak_tflops"),
    ],
)
def test_wrong_flags_are_refused(monkeypatch, changed, complaint):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    flags = links.Flags(**dict(largest=1024) | changed)
    with pytest.raises(links.UserError, match=complaint):
        links.check(flags, links.replace(ALONE, world_size=2))


def test_sizes_in_words():
    assert [links.size_text(size) for size in (1020, 4096, 2**20 - 4, 2**28, 2**30)] == [
        "0.996 KB", "4 KB", "1 MB", "256 MB", "1 GB",
    ]  # fmt: skip
