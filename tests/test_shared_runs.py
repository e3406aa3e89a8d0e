"""Runs of either engine: what they record, say and write."""

from dataclasses import replace

import contract
import numpy as np
import pytest

import ia_mech.engine.shared_prefix
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.run import Run, layout

CONFIG = SampleConfig(limit=3, grid=Grid((0.7, 1.3), 2, 8, 0), batch_rows=10, swaps=0)


def differing_margins(one: Run, other: Run) -> list[float]:
    """Margins at the first difference of the rows that differ."""
    margins = []
    for a, b in zip(one.generations.iloc, other.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            length = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:length] != b["token_ids"][:length]))
            margins.append(min(a["margins"][first], b["margins"][first]))
    return margins


def test_both_engines_write_the_same_run(tiny_subject, tmp_path, progress):
    runs = {
        engine: collect(replace(CONFIG, engine=engine), tiny_subject, tmp_path / engine, progress)
        for engine in ("auto", "shared", "portable")
    }
    recorded = ["shared-prefix 4 of 4 layers", "shared-prefix 4 of 4 layers", "portable"]
    said = [line for line in progress.lines if line.startswith("engine: ")]
    assert said == [f"engine: {name}" for name in recorded]
    for (engine, run), name in zip(runs.items(), recorded, strict=True):
        assert run.record["identity"]["engine"] == name
        assert run.record["identity"]["config"]["engine"] == engine
    assert runs["auto"].digest() == runs["shared"].digest()
    margins = differing_margins(runs["shared"], runs["portable"])
    assert len(runs["shared"].generations) == 15
    assert len(margins) <= 1 and all(margin < contract.MARGIN for margin in margins)
    kept = [runs[engine].residuals(2, "header_last") for engine in ("shared", "portable")]
    assert kept[0].equal(kept[1]), "the engines differ after the prefill only"
    with pytest.raises(UserError, match=r"holds another configuration.*engine"):
        collect(replace(CONFIG, engine="portable"), tiny_subject, runs["auto"].path, progress)


def test_a_fall_back_is_said_and_recorded(tiny_subject, tmp_path, progress, monkeypatch):
    monkeypatch.setattr(
        ia_mech.engine.shared_prefix, "merge", lambda parts, sinks=None: parts[1][0]
    )
    run = collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    said = next(line for line in progress.lines if line.startswith("engine: "))
    assert said.startswith("engine: portable (LlamaForCausalLM gives other logits in cached")
    assert run.record["identity"]["engine"] == "portable"
    session = layout.read_json(run.path / layout.MANIFEST)["sessions"][0]
    assert f"engine: {session['engine']}" == said
