"""Runs of either engine: what they record, say and write."""

from dataclasses import replace

import numpy as np
import pytest
import tiny

import ia_mech.engine.shared_prefix
from ia_mech.collect.command import build_parser, parse_config
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.display import Bar
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.run import Run, layout

CONFIG = SampleConfig(limit=6, grid=Grid((0.7, 1.3), 2, 12, 0), batch_rows=20)


def differing_rows(one: Run, other: Run) -> list[float]:
    """Margins at the first difference of the rows that differ."""
    margins = []
    for a, b in zip(one.generations.iloc, other.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            length = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:length] != b["token_ids"][:length]))
            margins.append(min(a["margins"][first], b["margins"][first]))
    return margins


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_both_engines_write_the_same_run(architecture, tokenizer, tmp_path, progress):
    subject = tiny.subject(architecture, tokenizer)
    runs = {}
    for engine in ("auto", "shared", "portable"):
        config = replace(CONFIG, engine=engine)
        runs[engine] = collect(config, subject, tmp_path / engine, progress)
    shared = {"llama": 4, "gpt_oss": 2}[architecture]
    said = f"shared-prefix {shared} of 4 layers"
    assert [line for line in progress.lines if line.startswith("engine")] == [
        f"engine: {said}", f"engine: {said}", "engine: portable"
    ]  # fmt: skip
    for engine, recorded in (("auto", said), ("shared", said), ("portable", "portable")):
        identity = layout.read_json(tmp_path / engine / layout.RUN)["identity"]
        assert identity["engine"] == recorded
        assert identity["config"]["engine"] == engine
    assert runs["auto"].digest() == runs["shared"].digest()
    margins = differing_rows(runs["shared"], runs["portable"])
    assert len(runs["shared"].generations) == 30
    assert len(margins) <= 1 and all(margin < 1e-4 for margin in margins)
    kept = [runs[engine].residuals(2, "header_last") for engine in ("shared", "portable")]
    assert kept[0].equal(kept[1]), "the engines differ after the prefill only"


def test_a_run_of_one_engine_is_not_gone_on_with_by_another(tiny_subject, tmp_path, progress):
    collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    with pytest.raises(UserError, match=r"holds another configuration.*engine"):
        collect(replace(CONFIG, engine="portable"), tiny_subject, tmp_path / "run", progress)


def test_a_fall_back_is_said_and_recorded(tiny_subject, tmp_path, progress, monkeypatch):
    monkeypatch.setattr(
        ia_mech.engine.shared_prefix, "merge", lambda parts, sinks=None: parts[1][0]
    )
    run = collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    said = next(line for line in progress.lines if line.startswith("engine: "))
    assert said.startswith("engine: portable (LlamaForCausalLM gives other logits in cached")
    assert layout.read_json(run.path / layout.RUN)["identity"]["engine"] == "portable"
    session = layout.read_json(run.path / layout.MANIFEST)["sessions"][0]
    assert f"engine: {session['engine']}" == said


def test_scoring_in_a_run_is_the_same_by_both(tiny_subject, tmp_path, progress):
    config = replace(CONFIG, score_generations=True, swaps=2)
    both = [
        collect(replace(config, engine=engine), tiny_subject, tmp_path / engine, progress)
        for engine in ("shared", "portable")
    ]
    assert not differing_rows(*both), "the same turns are scored"
    for name in ("logprob_empty", "logprob_swapped", "logprob_header"):
        ours, theirs = (np.hstack(run.generations[name].to_numpy()) for run in both)
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=1e-5, atol=1e-4)


def test_the_flag_reaches_the_configuration():
    parsed = build_parser().parse_args(["--engine", "portable"])
    assert parse_config(parsed).engine == "portable"
    assert parse_config(build_parser().parse_args([])).engine == "auto"


def test_the_heading_comes_before_anything_said(capsys):
    bar = Bar("a model")
    bar.say("engine: portable")
    bar.start("user turns", 1, 0)
    bar.stop()
    assert capsys.readouterr().err.splitlines()[:2] == ["a model", "engine: portable"]
