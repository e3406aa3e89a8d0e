"""``python -m benchmarks.probe_validation``: a small version of what its table in docs/ says."""

import numpy as np
import pytest
from shell import call, refusal

from benchmarks.probe_validation import __main__ as validate
from benchmarks.probe_validation.__main__ import RUNS, Found, shares, table, try_one


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Found]:
    """Two runs of each kind, eight without signal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return [
            try_one(kind, 500 + seed) for kind in RUNS for seed in range(8 if kind == "none" else 2)
        ]


def test_the_headline_lands_where_the_signal_is(found):
    planted = [f for f in found if f.kind in ("signal", "elsewhere")]
    assert all(f.landed and f.readable for f in planted)


def test_latent_is_said_of_what_the_output_lacks_and_of_nothing_else(found):
    assert all(f.latent == (f.kind == "elsewhere") for f in found)


def test_text_exposes_a_topic(found):
    topics = [f for f in found if f.kind == "topic"]
    assert all(f.readable and not f.beyond_text for f in topics)


def test_nothing_is_seldom_found_where_nothing_is(found):
    nothing = [f for f in found if f.kind == "none"]
    # Of eight at the 5% level, more than two have a chance of 1 in 170.
    assert sum(f.headline_p <= 0.05 for f in nothing) <= 2
    assert sum(f.family_p <= 0.05 for f in nothing) <= 2


def test_intervals_hold_what_they_estimate(found):
    known = [f for f in found if f.covered is not None]
    assert len(known) == 16
    # Of 16 at 95%, fewer than 13 have a chance of 1 in 140.
    assert sum(f.covered for f in known) >= 13
    assert abs(np.mean([f.auroc - f.truth for f in known])) < 0.02


def test_the_table_counts_runs(found):
    rows = {(kind, question): rate for kind, question, _, rate in shares(found)}
    assert rows["topic", "beyond the text"].value == 0
    assert rows["none", "headline p ≤ 0.05"].sources == 8
    text = table(found, 60, 2)
    assert "| elsewhere | 2 | latent | near 1 | 1.000" in text
    assert text.endswith("18 runs in 1 min with 2 processes.")


def test_bad_input_is_one_line(tmp_path, capfd):
    missing = str(tmp_path / "no" / "table.md")
    assert "there is no folder" in refusal(call(validate.main, ["--write", missing], capfd))
    assert "'0' is not a whole number" in refusal(call(validate.main, ["--of-each", "0"], capfd))
