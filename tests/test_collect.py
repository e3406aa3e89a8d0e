"""The main job where things get tight: memory, precision, and responses that can't be used."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

import ia_mech.collect.job
import ia_mech.engine.loop
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run, layout

CONFIG = SampleConfig(limit=6, grid=Grid((0.7, 1.0), 2, 8, 0), batch_rows=20)


def test_memory_running_out_is_said_once_recorded_and_survived(
    tiny_subject, tmp_path, progress, monkeypatch
):
    whole = collect(CONFIG, tiny_subject, tmp_path / "whole", progress)
    honest = ia_mech.engine.loop.decode_step

    def tight(model, state, token):
        if len(token) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(model, state, token)

    monkeypatch.setattr(ia_mech.engine.loop, "decode_step", tight)
    progress.lines.clear()
    run = collect(CONFIG, tiny_subject, tmp_path / "tight", progress)
    assert [line for line in progress.lines if "memory" in line] == [
        "out of memory: going on with batches of 10 or fewer"
    ]
    sessions = layout.read_json(run.path / layout.MANIFEST)["sessions"]
    assert sessions[0]["out_of_memory"] == [10, 5]
    for a, b in zip(whole.generations.iloc, run.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4


def test_a_prefill_too_large_halves_the_contexts(tiny_subject, tmp_path, progress, monkeypatch):
    honest = ia_mech.collect.job.prefill

    def tight(model, prefixes, *others):
        if len(prefixes) > 2:
            raise MemoryError
        return honest(model, prefixes, *others)

    monkeypatch.setattr(ia_mech.collect.job, "prefill", tight)
    run = collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    assert run.complete and len(run.generations) == 6 * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_to_the_files(dtype, tokenizer, tmp_path, progress):
    model = tiny.model("llama", len(tokenizer)).__class__(
        tiny.model("llama", len(tokenizer)).config
    )
    model.load_state_dict(tiny.model("llama", len(tokenizer)).state_dict())
    model = model.to(dtype).eval()
    subject = Subject(ModelSpec(name="half"), model, tokenizer, weights_hash(model))
    run = collect(CONFIG, subject, tmp_path / "run", progress)
    kept = run.residuals(3, "header_last")
    assert kept.dtype == dtype and not kept.isnan().any()
    assert run.model["dtype"] == str(dtype).removeprefix("torch.")
    assert np.isfinite(run.generations["logprob_raw"]).all()
    assert run.digest() == collect(CONFIG, subject, tmp_path / "again", progress).digest()


def test_logits_that_are_not_numbers_are_refused(tokenizer, tmp_path, progress):
    model = tiny.model("llama", len(tokenizer)).__class__(
        tiny.model("llama", len(tokenizer)).config
    )
    model.model.norm.weight.data.fill_(torch.nan)
    subject = Subject(ModelSpec(name="nan"), model.eval(), tokenizer, "0")
    with pytest.raises(UserError, match="logits of LlamaForCausalLM in float32 are not finite"):
        collect(CONFIG, subject, tmp_path / "run", progress)
    assert not (tmp_path / "run").exists()


def test_a_written_response_that_the_template_refuses_is_left_out_and_said(
    tiny_subject, tmp_path, progress, monkeypatch
):
    config = replace(CONFIG, response="generate", max_response_tokens=4)
    honest = ia_mech.collect.job.ChatFormat.context
    seen = []

    def picky(self, messages):
        if "Yes." not in messages[-1]["content"] and "injera" in messages[-2]["content"]:
            seen.append(messages)
            raise UserError("the template refuses it", "remove it")
        return honest(self, messages)

    monkeypatch.setattr(ia_mech.collect.job.ChatFormat, "context", picky)
    run = collect(config, tiny_subject, tmp_path / "run", progress)
    assert seen and run.complete
    assert "conversation maths-01 is left out: the template refuses it" in progress.lines
    assert "maths-01" not in set(run.contexts["context_id"]) and len(run.contexts) == 5
    sessions = layout.read_json(run.path / layout.MANIFEST)["sessions"]
    assert sessions[0]["left_out"] == ["maths-01"]


def test_responses_cut_off_are_marked_in_both_tables(tiny_subject, tmp_path, progress):
    config = replace(CONFIG, response="generate", max_response_tokens=2)
    run = collect(config, tiny_subject, tmp_path / "run", progress)
    cut = run.contexts.set_index("context_id")["response_cut_off"]
    assert cut.any()
    assert (run.generations["response_cut_off"] == run.generations["context_id"].map(cut)).all()
    assert (run.contexts["response_tokens"] <= 2).all()


def test_logits_that_are_not_numbers_end_the_run_with_nothing_of_them_written(
    tiny_subject, tmp_path, progress, monkeypatch
):
    honest = ia_mech.collect.job.prefill

    def broken(model, prefixes, *others):
        group = honest(model, prefixes, *others)
        logits = group.logits.clone()
        logits[-1, 5] = torch.nan
        return replace(group, logits=logits)

    monkeypatch.setattr(ia_mech.collect.job, "prefill", broken)
    with pytest.raises(UserError, match=r"logits are not numbers for the context of .* in float32"):
        collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    assert len(Run.open(tmp_path / "run").contexts) == 0
