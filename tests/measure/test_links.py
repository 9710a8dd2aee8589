"""Collectives between ranks."""

import json
import sys

import pytest
from conftest import ALONE

from common.errors import UserError
from measure import links

SMALL = "--device cpu --largest 4096 --repeats 2 --run_name two_ranks".split()


def test_it_measures_every_collective(command, tmp_path):
    done = command("measure/links.py", *SMALL, ranks=2)
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
    assert "| all-reduce | 1.00kB |" in (folder / "links.md").read_text()


def test_variables_that_choose_a_route_are_in_the_title(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    title = links.facts_of_links(ALONE)["title"]
    assert title.endswith("NCCL_P2P_DISABLE=1") and "INFO" not in title


def test_one_rank_has_no_links(monkeypatch):
    for flags, complaint in ((SMALL, "--nproc_per_node=2 -m measure.links"), (["--largest", "1000"], "--largest 1000")):
        monkeypatch.setattr(sys, "argv", ["links.py", *flags])
        with pytest.raises(UserError, match=complaint):
            links.main()
