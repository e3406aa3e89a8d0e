"""The main job where things get tight: memory, precision, and responses that can't be used."""

import copy
import platform
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

import ia_mech.collect.job
import ia_mech.collect.preflight
import ia_mech.engine.loop
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.collect.preflight import Size, Survey
from ia_mech.display import Quiet
from ia_mech.engine.plan import PREFILL_COST, RESCORE_COST, SCORE_COST, Grid
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import RunWriter, integrity, layout

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
    assert backed_off(run) == {"0.0": {"rows": 5}}
    assert backed_off(whole) == {}
    for a, b in zip(whole.generations.iloc, run.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4


def backed_off(run) -> dict[str, dict[str, int]]:
    """The limits that units were computed with, where these were lower than asked for."""
    parts = integrity.read_json(run.path / layout.MANIFEST)["parts"]
    return {unit: low for part in parts for unit, low in part.get("backed_off", {}).items()}


def test_each_unit_is_recorded_with_the_batches_that_it_was_computed_in(
    tiny_subject, tmp_path, progress, monkeypatch
):
    """Memory runs out in the second unit of three; the parts are merged at the end."""
    honest = ia_mech.engine.loop.decode_step

    def tight(model, state, token):
        if len(run_of) > 1 and len(token) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(model, state, token)

    run_contexts, run_of = ia_mech.collect.job._Job._run_contexts, []

    def counted(self, *arguments):
        run_of.append(arguments)
        return run_contexts(self, *arguments)

    monkeypatch.setattr(ia_mech.engine.loop, "decode_step", tight)
    monkeypatch.setattr(ia_mech.collect.job._Job, "_run_contexts", counted)
    monkeypatch.setattr(ia_mech.collect.preflight, "UNIT_BATCHES", 1)
    run = collect(replace(CONFIG, batch_rows=10), tiny_subject, tmp_path / "run", progress)
    parts = integrity.read_json(run.path / layout.MANIFEST)["parts"]
    assert parts[-1]["units"] == ["0.0", "0.1", "0.2"]
    assert backed_off(run) == {"0.1": {"rows": 5}, "0.2": {"rows": 5}}


def test_resuming_elsewhere_says_what_differs(tiny_subject, tmp_path, monkeypatch):
    def stopped(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ia_mech.collect.job._Job, "_write_contexts", stopped)
        with pytest.raises(KeyboardInterrupt):
            collect(CONFIG, tiny_subject, tmp_path / "run", Quiet())
    session = integrity.read_json(tmp_path / "run" / layout.MANIFEST)["sessions"][0]
    assert session["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert session["weights"] in ("plain", "reordered")
    honest = ia_mech.collect.job.machine

    def elsewhere(subject):
        return honest(subject) | {"threads": 64, "cpu_capability": "SSE"}

    monkeypatch.setattr(ia_mech.collect.job, "machine", elsewhere)
    lines: list[str] = []
    monkeypatch.setattr(Quiet, "say", lambda self, line: lines.append(line))
    assert collect(CONFIG, tiny_subject, tmp_path / "run", Quiet()).complete
    assert lines[0] == (
        f"note: threads {session['threads']} → 64, cpu_capability {session['cpu_capability']} → "
        "SSE since this run was last worked on; rows computed now may round differently"
    )


def test_what_an_older_version_did_not_record_is_not_called_different(
    tiny_subject, tmp_path, progress, monkeypatch
):
    def stopped(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ia_mech.collect.job._Job, "_write_contexts", stopped)
        patch.setattr(ia_mech.collect.job, "machine", lambda _: {"machine": platform.machine()})
        with pytest.raises(KeyboardInterrupt):
            collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    progress.lines.clear()
    collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    assert not [line for line in progress.lines if line.startswith("note:")]


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
    model = copy.deepcopy(tiny.model("llama", len(tokenizer))).to(dtype)
    subject = Subject(ModelSpec(name="half"), model, tokenizer, weights_hash(model))
    run = collect(CONFIG, subject, tmp_path / "run", progress)
    kept = run.residuals(3, "header_last")
    assert kept.dtype == dtype and not kept.isnan().any()
    assert run.model["dtype"] == str(dtype).removeprefix("torch.")
    assert np.isfinite(run.generations["logprob_raw"]).all()
    assert run.digest() == collect(CONFIG, subject, tmp_path / "again", progress).digest()


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
    sessions = integrity.read_json(run.path / layout.MANIFEST)["sessions"]
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
    parts = integrity.read_json(tmp_path / "run" / layout.MANIFEST)["parts"]
    assert [part["kind"] for part in parts] == ["conversations"]
    assert not list((tmp_path / "run").rglob("*.safetensors"))


class Bar(Quiet):
    """A progress that remembers what the bar showed: work done, of how much, and the note."""

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}
        self.shown: dict[str, list[tuple[int, str]]] = {}

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        self.phases[phase], self.shown[phase] = total, [(done, "")]

    def advance(self, steps: int = 1, note: str = "") -> None:
        shown = list(self.shown.values())[-1]
        shown.append((shown[-1][0] + steps, note))


@pytest.mark.parametrize("contrasts", [False, True])
def test_progress_counts_all_work_and_names_what_is_done(tiny_subject, tmp_path, contrasts):
    config = replace(
        CONFIG, limit=9, response="generate", max_response_tokens=12, contrasts=contrasts
    )
    bar = Bar()
    run = collect(config, tiny_subject, tmp_path / "run", bar)
    assert list(bar.phases) == ["responses", "user turns"]
    for phase, total in bar.phases.items():
        shares = [done / total for done, _ in bar.shown[phase]]
        assert shares == sorted(shares) and 0.97 <= shares[-1] <= 1
        assert len(set(shares)) > 10
        notes = [note for _, note in bar.shown[phase]]
        rows = len(run.contexts) * (1 if phase == "responses" else 5)
        assert notes[-1].startswith(f"{rows}/{rows} r")
        assert "tokens/s" in notes[-1]
        for doing in ("prefilling", "decoding", "writing"):
            assert any(doing in note for note in notes)
    assert any("scoring" in note for _, note in bar.shown["user turns"])


def test_a_run_that_goes_on_shows_what_was_done_before(tiny_subject, tmp_path, monkeypatch):
    honest, calls = RunWriter.add_contexts, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        honest(*arguments)

    config = replace(CONFIG, batch_rows=5, grid=Grid((0.7, 1.0), 2, 8))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunWriter, "add_contexts", interrupted)
        collect(config, tiny_subject, tmp_path / "run", Quiet())
    bar = Bar()
    collect(config, tiny_subject, tmp_path / "run", bar)
    total, shown = bar.phases["user turns"], bar.shown["user turns"]
    assert 0.3 * total < shown[0][0] < 0.7 * total  # a half of the contexts
    assert 0.97 * total <= shown[-1][0] <= total


def test_contrasts_are_computed_when_asked_for(tiny_subject, tmp_path):
    plain = collect(CONFIG, tiny_subject, tmp_path / "plain", Quiet()).contexts
    whole = collect(replace(CONFIG, contrasts=True), tiny_subject, tmp_path / "whole", Quiet())
    columns = [name for name in plain if "contrast" in name or "swapped" in name]
    assert len(columns) > 6
    assert plain[columns].isna().all(axis=None)
    assert whole.contexts["reference_response_contrast_bits"].notna().all()
    # The reference's own scores are the same, and it is its only candidate.
    for column in ("reference_logprobs_raw", "reference_logprob_tempered"):
        for a, b in zip(plain[column], whole.contexts[column], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    assert {len(one) for one in plain["candidates"]} == {1}
    assert plain["candidate_log_odds"].isna().all()


def test_the_work_on_a_context_counts_what_is_asked_for():
    contrasts = replace(CONFIG, contrasts=True, swaps=2)

    def cost(config, perturbed=False, turn=10, sources="cde"):
        sizes = [Size("d", source, 100, turn, 0, perturbed) for source in sources]
        return Survey({}, sizes, len(sizes)).costs(config)[0]

    rows, prefill = 5 * 8, PREFILL_COST * 100
    assert cost(CONFIG) == cost(contrasts, True) == rows + prefill + SCORE_COST * 10
    assert cost(CONFIG, turn=None) == cost(contrasts, turn=None) == rows + prefill
    # Rivals are about as long as context and reference; both references follow three contexts.
    rivals = SCORE_COST * (100 + 2 * 10 + 10)
    assert cost(contrasts) == rows + 4 * prefill + rivals + RESCORE_COST * 4 * 2 * 10
    # No more other contexts than there are conversations of other sources.
    assert cost(replace(contrasts, swaps=9)) == cost(contrasts)
    assert cost(contrasts, sources="ccd") == cost(replace(contrasts, swaps=1))
    both = replace(contrasts, score_generations=True)
    assert cost(both) == cost(contrasts) + RESCORE_COST * 4 * rows
