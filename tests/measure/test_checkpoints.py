"""The time of saving, loading and resharding."""

import json

from conftest import expect_error


def rows_of(command, tmp_path, name, ranks, *flags):
    done = command("measure/checkpoints.py", *flags, "--device", "cpu", "--run_name", name, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / name
    assert not (folder / "checkpoint").exists()
    return json.loads((folder / "checkpoints.json").read_text())["results"], done.stdout


def test_two_ranks_save_and_load_their_shards_and_broadcast(command, tmp_path):
    rows, text = rows_of(command, tmp_path, "saved", 2, "--models", "tiny")
    assert [(row["saved"], row["read"], row["ranks"], row["files"]) for row in rows] == [
        (f"2 x {saved}", read, 2, 2) for saved in ("ddp", "zero3") for read in ("ddp", "zero3", "broadcast")
    ]
    parameters = 50257 * 128 + 1024 * 128 + 4 * 12 * 128**2
    for row in rows:
        assert all(row[phase] > 0 for phase in ("snapshot", "write", "verify", "load"))
        assert 12 * parameters < row["gb"] * 2**30 < 12.2 * parameters  # weights and two moments
    assert "tiny, 2 x zero3 -> 2 x broadcast" in text


def test_one_rank_reads_what_two_have_saved(command, train, tmp_path):
    run = train("run", "--parallel", "zero3", "--max_steps", 1, "--checkpoint_every", 9, ranks=2)
    rows, text = rows_of(command, tmp_path, "read", 1, "--checkpoint", run)  # its newest
    assert [(row["saved"], row["read"], row["ranks"], row["files"]) for row in rows] == [("2 x zero3", "ddp", 1, 2)]
    assert rows[0]["verify"] > 0 and rows[0]["load"] > 0
    assert "L = 2, C = 32, 2 x zero3 -> 1 x ddp" in text and (run / "checkpoint_000001").exists()


def test_a_checkpoint_with_more_positions_than_the_run_has(command, train, tmp_path):
    first = train("first", "--max_steps", 1, "--checkpoint_every", 9)
    flags = "--init_from", first, "--seq_len", 8, "--max_steps", 1, "--checkpoint_every", 9
    run = train("short", *flags, drop="--seq_len --n_layer --n_head --n_embd")
    (row,), _ = rows_of(command, tmp_path, "read", 1, "--checkpoint", run / "checkpoint_000001")
    assert row["load"] > 0


def test_nothing_to_measure_ends_in_one_line(call_main, tmp_path):
    def error(*flags):
        return call_main("measure/checkpoints.py", *flags, "--device", "cpu")

    expect_error(error("--checkpoint", tmp_path), "not a checkpoint to resume from")
    expect_error(error("--checkpoint", ""), "not a checkpoint to resume from")
    expect_error(error("--modes", "zero3"), "one rank measures ddp")
    assert not (tmp_path / "log").exists()
