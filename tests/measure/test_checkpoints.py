"""The time of saving, loading and resharding."""

import json


def test_two_ranks_save_and_load_their_shards(command, tmp_path):
    flags = "--models tiny --modes zero3 --device cpu --run_name saved".split()
    done = command("measure/checkpoints.py", *flags, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / "saved"
    (row,) = json.loads((folder / "checkpoints.json").read_text())["results"]
    assert (row["saved"], row["read"], row["ranks"], row["files"]) == ("zero3", "zero3", 2, 2)
    assert all(row[phase] > 0 for phase in ("snapshot", "write", "verify", "load"))
    parameters = 50257 * 128 + 1024 * 128 + 4 * 12 * 128**2
    assert 12 * parameters < row["gb"] * 2**30 < 12.2 * parameters  # weights and two moments
    assert not (folder / "checkpoint").exists() and "tiny, zero3 -> zero3" in done.stdout
