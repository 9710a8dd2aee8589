"""The check of the GPUs before a run."""

import itertools
import json

import pytest
from conftest import expect_error

from measure import preflight

DRIVER = """<?xml version="1.0" ?>
<nvidia_smi_log><gpu id="00000000:19:00.0">
  <pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>
  </link_widths></pci_gpu_link_info></pci>
  <clocks_event_reasons><clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
  <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown></clocks_event_reasons>
  <ecc_errors><volatile><dram_correctable>3</dram_correctable><dram_uncorrectable>0</dram_uncorrectable></volatile>
  <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
  <remapped_rows><remapped_row_unc>1</remapped_row_unc><remapped_row_pending>No</remapped_row_pending></remapped_rows>
  <gpu_recovery_action>None</gpu_recovery_action>
  <temperature><gpu_temp>61 C</gpu_temp></temperature>
  <clocks><sm_clock>1605 MHz</sm_clock></clocks><max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
</gpu></nvidia_smi_log>
"""


def row(rank=0, **changes):
    own = dict(name=f"H100 {rank} of node7", hardware="H100", gemm=600.0, copy=2800.0, pairs=270.0, bits=5, peaks={})
    return own | dict(driver=preflight.read_driver(None)) | changes


def test_ranks_are_measured_and_compared(command, tmp_path):
    flags = "--device cpu --seconds 0.01 --tolerance 0.99 --run_name before".split()
    done = command("measure/preflight.py", *flags, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s process group" in done.stdout
    rows = json.loads((tmp_path / "log" / "before" / "preflight.json").read_text())["results"]
    assert [each["rank"] for each in rows] == [0, 1] and rows[0]["bits"] == rows[1]["bits"]
    assert all(each[rate] > 0 for each in rows for rate in preflight.RATES)
    assert rows[0]["partners"].keys() == {"1"} and rows[0]["pairs"] == rows[0]["partners"]["1"]


def test_a_slow_gpu_ends_it_with_one_line(call_main, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "peak_flops", lambda device: 1e18)
    done = call_main("-m", "measure.preflight", "--device", "cpu", "--seconds", 0.01)
    expect_error(done, "rank 0", "its GEMMs are at 0% of the peak, 1,000,000")


def test_every_pair_meets_once():
    for n in range(1, 10):
        rounds = preflight.rounds(n)
        assert sorted(itertools.chain(*rounds)) == [list(pair) for pair in itertools.combinations(range(n), 2)]
        assert len(rounds) == (n - 1 + n % 2 if n > 1 else 0)
        assert all(len({*itertools.chain(*pairs)}) == 2 * len(pairs) for pairs in rounds)


def test_what_the_driver_reports():
    facts = preflight.read_driver(DRIVER)
    assert facts == dict(mhz="1605", max_mhz="1980", celsius="61", faults=[])
    for before, after, fault in (
        ("Not Active", "Active", "hw_slowdown is Active"),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "2 memory errors dram_uncorrectable"),
        ("pending>No", "pending>Yes", "remapped_row_pending is Yes"),
        ("action>None", "action>Reset", "gpu_recovery_action is Reset"),
        ("<current_link_width>16x", "<current_link_width>8x", "PCIe has 8 of 16 lanes"),
    ):
        assert preflight.read_driver(DRIVER.replace(before, after))["faults"] == [fault]


def test_a_driver_that_does_not_answer_is_a_fault():
    for text in ("", "No devices were found", DRIVER[:300], "<none/>"):
        assert preflight.read_driver(text)["faults"] == ["nvidia-smi does not answer"]
    assert preflight.read_driver(None)["faults"] == []


@pytest.mark.parametrize("text", ["CUDA error: uncorrectable ECC error", "CUDA out of memory. Tried to allocate 2 GiB"])
def test_a_gpu_that_fails_is_named(call_main, monkeypatch, text):
    def fail(*_):
        raise RuntimeError(f"{text}\nmore lines")

    monkeypatch.setattr(preflight, "rate_of", fail)
    done = call_main("-m", "measure.preflight", "--device", "cpu", "--seconds", 0.01)
    expect_error(done, "rank 0 (", f") fails: {text}")


def test_the_slow_or_faulty_rank_is_named():
    flags = preflight.Flags()
    assert preflight.find_problems([row(rank) for rank in range(4)], flags) == []
    assert preflight.find_problems([row(peaks=dict(gemm=989.4))], flags) == []
    for changes, words in (
        (dict(gemm=500.0), "its GEMMs are 17% slower than the other ranks'"),
        (dict(pairs=150.0), "its all-reduces with one other rank are 44% slower than the other ranks'"),
        (dict(bits=4), "its GEMM's result is not that of the other GPUs"),
        (dict(peaks=dict(copy=8000)), "its copies in memory are at 35% of the peak, 8,000"),
        (dict(driver=dict(faults=["PCIe has 8 of 16 lanes"])), "PCIe has 8 of 16 lanes"),
    ):
        rows = [row(0), row(1), row(2, **changes), row(3)]
        assert preflight.find_problems(rows, flags) == [f"rank 2 (H100 2 of node7): {words}"]
    assert len(preflight.find_problems([row(0), row(1, bits=4)], flags)) == 2  # two that differ: either may be faulty
