import json
import math

import pytest

from common.errors import UserError
from measure.to_loss import Curve, cells, note, p_value, reach, read_curve, summarize


def test_a_curve_counts_training_steps_alone(tmp_path):
    """The first steps of each batch size, which compile, count as the median of the steps of that size."""
    rows, tokens = [dict(step=0, tokens=0, val_loss=9.0)], 0
    for step in range(16):
        first, size, ms = (5000, 50, 120) if step < 8 else (4000, 100, 200)
        tokens += size
        rows.append(dict(step=step, tokens=tokens, step_ms=first if step % 8 == 0 else ms))
    rows += [dict(step=16, tokens=tokens, val_loss=5.0), dict(step=16, tokens=tokens, samples=[""])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_curve(tmp_path, 16)
    assert curve.tokens == [0, 1200] and curve.losses == [9.0, 5.0] and curve.seconds == pytest.approx([0, 2.56])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    for count in (1, 5, 17):  # no step; too few of them; the last validation is missing
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:count]))
        with pytest.raises(UserError, match=f"metrics.jsonl lacks lines: delete {tmp_path}.json"):
            read_curve(tmp_path, 16)


def test_a_loss_is_reached_between_two_validations():
    curve = Curve([0, 100, 200], [0.0, 1.0, 3.0], [8.0, 6.0, 2.0])
    assert reach(curve, 5.0) == pytest.approx((125, 1.5))
    assert reach(curve, 9.0) == (0, 0.0) and reach(curve, 2.0) == (200, 3.0) and reach(curve, 1.0) is None


def test_a_run_that_ends_without_a_finite_loss_has_diverged(tmp_path):
    """Its earlier losses do not count; a loss in the middle that is not finite is no end."""
    curves = {}
    for name, losses in (("sound", (9.0, None, 5.0)), ("ruined", (9.0, 6.0, None))):
        rows = [dict(step=step, tokens=100 * (step + 1), step_ms=200) for step in range(8)]
        rows += [dict(step=8, tokens=800 + i, val_loss=loss) for i, loss in enumerate(losses)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        curves[name] = read_curve(tmp_path / name, 8)
    assert reach(curves["sound"], 7.0) == pytest.approx((802, 1.6)) and reach(curves["ruined"], 4.0) is None
    first = summarize([curves["sound"]])
    ruined = summarize([curves["sound"], curves["ruined"]], first["loss"])
    assert (first["loss"], ruined["status"]) == (5.0, "diverged")
    assert ruined["reason"] == "the last validation loss is not finite for 1 of 2 seeds"


def test_the_table_has_ratios_to_the_first_rung():
    def curves(*ends):
        return [Curve([0, 1000], [0.0, 10.0], [10.0, end]) for end in ends]

    first = summarize(curves(5.9, 6.1))
    faster, worse = summarize(curves(2.0, 2.0), first["loss"]), summarize(curves(7.0, 2.0), first["loss"])
    assert (first["loss"], first["tokens"]) == (6.0, 1000) and worse["tokens"] is None
    assert cells("first", first, []) == ["first", "6.0000 ± 0.1414", "", "", "1,000", "", "10.0", ""]
    assert cells("skipped", dict(status="skipped"), [first]) == ["skipped"]
    row = ["faster", "2.0000 ± 0.0000", "-4.0000 ± 0.1414", "0.016", "500", "2.00", "5.0", "2.00"]
    assert cells("faster", faster, [first]) == row
    row = ["worse", "4.5000 ± 3.5355", "+2.5000 ± 3.5355", "0.5", "not reached", "", "not reached", ""]
    assert cells("worse", worse, [first, faster]) == row
    assert note(6.0, seeds=2) == (
        "Tokens and seconds to a validation loss of 6.0000: means over 2 seeds, ± the standard deviation; "
        "difference: seed by seed, to the rung before; p: of Student's paired t-test."
    )


def test_p_values_are_those_of_a_t_table():
    # the 97.5% and 99.5% points of Student's t for 4 degrees of freedom
    for t, p in ((2.776445, 0.05), (4.604095, 0.01)):
        deviations = [-2, -1, 0, 1, 2]  # their standard deviation is sqrt(2.5)
        differences = [each + t * math.sqrt(2.5 / 5) for each in deviations]
        assert p_value(differences) == p_value([-each for each in differences]) == pytest.approx(p, rel=1e-5)
    assert p_value([0.0, 0.0]) == 1 and p_value([0.1, 0.1]) == 0


def test_a_loss_of_ones_own_to_compare_at():
    slow, fast = ([Curve([0, 1000], [0.0, 10.0], [10.0, end])] for end in (6.0, 2.0))
    assert cells("fast", summarize(fast, 8.0), [summarize(slow, 8.0)]) == [
        "fast",
        "2.0000",
        "-4.0000",
        "",
        "250",
        "2.00",
        "2.5",
        "2.00",
    ]
    assert note(8.0, seeds=1).endswith("loss of 8.0000: one seed.")
