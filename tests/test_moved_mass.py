"""The follow-up mass under states of donors: a planted model, families, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from shell import call, refusal
from test_interchange import BLOCK, SHARES, Marked, sampled

from experiments import interchange, mass
from experiments.control import ARMS, DONORS, EQUAL, MOVED, RATIO, UNCHANGED
from experiments.experiment import Model
from experiments.moved_mass import COVERED, HALF, MassUnder, half_moved, spans
from experiments.outcome import IN_ROLE
from ia_mech.engine.intervene import Replace
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, Subject
from ia_mech.run import Run


@pytest.fixture(scope="module")
def used(tiny_subject, tmp_path_factory) -> Run:
    """One turn after each conversation is enough."""
    folder = tmp_path_factory.mktemp("moved")
    return sampled(tiny_subject, (-0.5, -3.0), folder, samples=1)


@pytest.fixture
def command(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)

    def run(main, path, *words):
        return call(main, [str(path), "--resamples", "200", *words], capfd)

    return run


def test_the_mass_travels_with_the_state_that_decides_the_first_token(used, command, tmp_path):
    words = ("--outcome", "mass", "--out", str(tmp_path / "out"))
    line = refusal(command(interchange.main, used.path, *words))
    assert "no first token of" in line and "ia-mech mass" in line
    outcome = command(mass.main, used.path, "--share", "0.99")
    assert outcome.status == 0, outcome.err
    outcome = command(interchange.main, used.path, *words)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    cells = found.set_index(["quantity", "term", "layer"])["value"]
    whole, wanted = found.set_index("quantity")["value"], SHARES["z"] - SHARES["q"]
    assert whole[DONORS] == pytest.approx(wanted, abs=0.01)
    assert whole[UNCHANGED] == pytest.approx(sum(SHARES.values()) / 2, abs=0.01)
    for layer in range(1, 5):
        moved = wanted if layer >= BLOCK else 0.0
        assert cells[MOVED, "header_last", layer] == pytest.approx(moved, abs=0.01)
        assert cells[RATIO, "header_last", layer] == pytest.approx(float(layer >= BLOCK), abs=0.01)
        assert abs(cells[EQUAL, "header_last", layer]) < 0.01
        assert (cells[HALF, "header_last", layer] > 0.05) == (layer == BLOCK)
    assert "from layer 3 of 4 on (95% confidence set: 3)" in outcome.out
    assert "A state is shown to move it at 1 of 3 cells before the last layer" in outcome.out
    again = command(interchange.main, used.path, *words)
    assert (again.status, again.out) == (0, outcome.out)
    more = command(interchange.main, used.path, *words, "--tokens", "turn_end", "--layers", "3")
    assert more.status == 0, more.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    moved = found[found["quantity"] == MOVED].set_index(["term", "layer"])["value"]
    assert moved["turn_end", 3] == 0 and moved["header_last", 4] == pytest.approx(wanted, abs=0.01)
    line = refusal(command(interchange.main, used.path, *words, "--category", "degenerate"))
    assert line.startswith("--category is of --outcome follow-up")
