"""``experiments.learned_vector``: the choice of a layer, a planted gate, and the whole command."""

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Silent
from shell import call, refusal

from experiments.learned_vector import main
from ia_mech.judge.label import label_run
from ia_mech.judge.rubric import GENUINE
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import Verdict
from ia_mech.run import Run
from ia_mech.steering import ADD, SteeringVector


def by_chance(self, item) -> Verdict:
    """A judge that accepts half of all turns, by what was said and after what."""
    text = f"{item.response}\0{item.turn}".encode(errors="surrogatepass")
    return Verdict((GENUINE, "new_topic")[hashlib.sha256(text).digest()[0] % 2])


def test_the_command(siblings, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(RulesJudge, "verdict", by_chance)
    run = Run.open(shutil.copytree(siblings.path, tmp_path / "run"))
    out = tmp_path / "out"
    words = [str(run.path), "--out", str(out), "--resamples", "100", "--steps", "2"]
    label_run(run, RulesJudge(), "rules", Silent())
    planned = call(main, [*words, "--dry-run"], capfd)
    print(planned)
    outcome = call(main, words, capfd)
    print(outcome.out, outcome.err)
    assert outcome.status == 0
    outcome = call(main, [*words, "--full"], capfd)
    print(outcome.out, outcome.err)
    assert 0
