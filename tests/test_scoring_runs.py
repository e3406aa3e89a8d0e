"""Likelihoods in a run: refused contrasts, resuming, the user's candidates, the command line."""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
import scored
import tiny
from conftest import Silent
from shell import call, files, refusal

from ia_mech.collect import command as command_line
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine import plan
from ia_mech.engine.plan import Grid
from ia_mech.likelihood.scorer import NO_SWAP_SOURCE, Scorer
from ia_mech.models.load import Subject
from ia_mech.run import Run, layout

GRID = Grid((1.0,), 1, 4, 0)
PLAIN = scored.CONVERSATIONS[:5]


@pytest.fixture
def config(tmp_path) -> SampleConfig:
    data = scored.dataset(tmp_path / "chats.jsonl", PLAIN)
    return SampleConfig(dataset=data, limit=None, grid=GRID, batch_rows=4, contrasts=True, swaps=2)


def with_template(family: str, template: str) -> Subject:
    tokenizer = copy.deepcopy(families.build(family))
    tokenizer.chat_template = template + families.template(family)
    return tiny.subject("llama", tokenizer)


def session(run: Run) -> dict:
    return layout.read_json(run.path / layout.MANIFEST)["sessions"][-1]


# -- what a template refuses --------------------------------------------------------------------

REFUSALS = {
    "empty": "{%- for m in messages if m.role == 'assistant' and not m.content -%}"
    "{{- raise_exception('no empty answers') -}}{%- endfor -%}",
    "header": "{%- if messages | length == 1 and not add_generation_prompt -%}"
    "{{- raise_exception('nobody answers') -}}{%- endif -%}",
}
SAID = {"empty": "empty response", "header": "bare header"}
PROBLEMS = {
    "empty": "the chat template refuses the roles user/assistant/user (no empty answers)",
    "header": "the chat template refuses the roles user (nobody answers)",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_contrast_that_the_template_refuses_is_null_said_once_and_recorded(
    config, tmp_path, progress, kind
):
    subject = with_template("smollm2", REFUSALS[kind])
    config = replace(config, score_generations=True)
    run = collect(config, subject, tmp_path / "run", progress)
    assert run.complete and len(run.contexts) == len(PLAIN)
    assert [line for line in progress.lines if "not scored" in line] == [
        f"not scored everywhere: {SAID[kind]}: {PROBLEMS[kind]}"
    ]
    assert session(run)["contrasts_refused"] == {SAID[kind]: PROBLEMS[kind]}
    references = run.contexts[run.contexts["reference_logprob"].notna()]
    other = {"empty": "header", "header": "empty"}[kind]
    for frame, prefix in ((references, "reference_"), (run.generations, "")):
        for name in (f"logprob_{kind}", f"{kind}_contrast_bits"):
            assert frame[prefix + name].isna().all()
            assert frame[f"{prefix}{name}_with_end"].isna().all()
        for name in ("response_contrast_bits", f"{other}_contrast_bits"):
            assert frame[prefix + name].notna().all()


def test_a_system_message_in_the_first_user_turn_leaves_that_header_out(tmp_path, progress):
    """Of the conversation that has one; the others' headers are there."""
    data = scored.dataset(tmp_path / "chats.jsonl", [*PLAIN, scored.CONVERSATIONS[5]])
    subject = tiny.subject("llama", families.build("gemma3"))
    config = SampleConfig(dataset=data, limit=None, grid=Grid((), 1, 2), contrasts=True, swaps=1)
    run = collect(config, subject, tmp_path / "run", progress)
    rows = run.contexts.set_index("context_id")
    rows = rows[rows["reference_logprob"].notna()]
    assert rows.index[rows["reference_logprob_header"].isna()].tolist() == ["c5"]
    assert rows["reference_logprob_empty"].notna().all()
    assert (
        len([line for line in progress.lines if "not scored everywhere: bare header" in line]) == 1
    )
    assert list(session(run)["contrasts_refused"]) == ["bare header"]


def test_where_nobody_lends_a_response_it_is_said(config, tiny_subject, tmp_path, progress):
    run = collect(replace(config, limit=1), tiny_subject, tmp_path / "run", progress)
    assert [line for line in progress.lines if "not scored" in line] == [
        f"not scored everywhere: swapped response: {NO_SWAP_SOURCE}"
    ]
    assert session(run)["contrasts_refused"] == {"swapped response": NO_SWAP_SOURCE}
    assert run.contexts["reference_response_contrast_bits"].isna().all()
    progress.lines.clear()
    collect(replace(config, limit=1, swaps=0), tiny_subject, tmp_path / "none-asked", progress)
    assert not any("swapped" in line for line in progress.lines)


# -- responses that the model writes ------------------------------------------------------------


def test_written_responses_are_lent_and_replaced(config, tiny_subject, tmp_path):
    config = replace(config, response="generate", max_response_tokens=5)
    run = collect(config, tiny_subject, tmp_path / "run", Silent())
    rows = run.contexts.set_index("context_id")
    assert set(rows["response_policy"]) == {"generated"}
    row = rows.loc["c0"]
    chat = command_line_chat(config, tiny_subject)
    ids = [*row["reference_token_ids"], chat.closing_id]
    own = [dict(m) for m in row["messages"]]
    for lender, found in zip(
        row["swapped_from"], row["reference_logprob_swapped_with_end"], strict=True
    ):
        context = chat.context([*own[:-1], dict(rows.loc[lender, "messages"][-1])])
        expected = scored.logprobs(tiny_subject.model, context.ids, ids).sum()
        np.testing.assert_allclose(found, expected, **scored.nats(len(ids)))


def command_line_chat(config: SampleConfig, subject: Subject):
    from ia_mech.collect.identity import build_chat

    return build_chat(config, subject.tokenizer)


def test_few_contexts_are_computed_together_where_much_is_scored(
    config, tiny_subject, tmp_path, monkeypatch
):
    """So that a kill costs little; without contrasts the same work is more contexts."""
    together, honest = [], Scorer.add_contrasts

    def counted(self, contexts, scores, decoded):
        together.append(len(contexts))
        return honest(self, contexts, scores, decoded)

    monkeypatch.setattr(Scorer, "add_contrasts", counted)
    monkeypatch.setattr(plan, "CPU", replace(plan.CPU, unit_cost=1_000))
    wide = replace(config, batch_rows=1000)
    collect(wide, tiny_subject, tmp_path / "scored", Silent())
    assert max(together) < len(PLAIN) and sum(together) == len(PLAIN)
    together.clear()
    collect(replace(wide, contrasts=False), tiny_subject, tmp_path / "bare", Silent())
    assert together == [len(PLAIN)]


# -- going on -----------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_to_the_same_digest(config, tiny_subject, tmp_path, monkeypatch):
    """Interrupted while turns are scored; every attempt finishes one more unit."""
    monkeypatch.setattr(layout, "PART_CONTEXTS", 3)
    monkeypatch.setattr(plan, "CPU", replace(plan.CPU, unit_cost=1))
    own = tmp_path / "own.jsonl"
    own.write_text('{"name": "why", "text": "Why?"}\n{"name": "w", "text": "Who?", "id": "c1"}')
    config = replace(
        config, candidates=str(own), score_generations=True, response="generate",
        max_response_tokens=3,
    )  # fmt: skip
    expected = collect(config, tiny_subject, tmp_path / "whole", Silent()).digest()
    out, honest = tmp_path / "scoring", Scorer.add_contrasts
    for _ in range(2):
        calls = []

        def stopped(*arguments, calls=calls):
            calls.append(1)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return honest(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Scorer, "add_contrasts", stopped)
            with pytest.raises(KeyboardInterrupt):
                collect(config, tiny_subject, out, Silent())
    assert len(Run.open(out).contexts) == 2  # a unit each
    assert collect(config, tiny_subject, out, Silent()).digest() == expected


# -- the user's candidates ----------------------------------------------------------------------


def own_candidates(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_own_candidates_are_scored_beside_the_others(config, tiny_subject, tmp_path):
    everywhere = {"name": "why", "text": " Why so?\n"}
    one = {"name": "who", "text": "Who says so?", "id": "c1"}
    file = own_candidates(tmp_path / "own.jsonl", everywhere, one)
    run = collect(replace(config, candidates=file), tiny_subject, tmp_path / "run", Silent())
    identity = run.record["identity"]
    assert identity["candidates"] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert identity["config"]["candidates"] == file
    chat = command_line_chat(config, tiny_subject)
    for _, row in run.contexts[run.contexts["reference_logprob"].notna()].iterrows():
        found = {c["name"]: c for c in row["candidates"]}
        assert ("who" in found) == (row["context_id"] == "c1")
        assert found["why"]["text"] == "Why so?"
        own = [dict(m) for m in row["messages"]]
        context = chat.context(own)
        ids = [*chat.reference_ids(own, context, "Why so?"), chat.closing_id]
        expected = scored.logprobs(tiny_subject.model, context.ids, ids).sum()
        why = found["why"]["logprob_with_end"]
        np.testing.assert_allclose(why, expected, **scored.nats(len(ids)))
        rest = [c["logprob_with_end"] for c in row["candidates"][1:]]
        odds = row["reference_logprob_with_end"] - np.logaddexp.reduce(rest)
        np.testing.assert_allclose(row["candidate_log_odds"], odds, rtol=1e-9)


# -- the command line ---------------------------------------------------------------------------


@pytest.fixture
def sample(tiny_model_dir, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    data = scored.dataset(tmp_path / "chats.jsonl", PLAIN)
    words = ["--model", tiny_model_dir, "--dataset", data, "--limit", "all", "--samples", "1"]
    words += ["--temperatures", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "run")]

    return lambda *more: call(command_line.main, [*words, *map(str, more)], capfd)


def test_the_command_line_takes_candidates_swaps_and_generations(sample, tmp_path):
    file = own_candidates(tmp_path / "own.jsonl", {"name": "why", "text": "Why?", "id": "c4"})
    run = sample("--candidates", file, "--contrasts", "--swaps", 1, "--score-generations").run
    names = {
        row["context_id"]: [c["name"] for c in row["candidates"]]
        for _, row in run.contexts.iterrows()
        if row["candidates"] is not None
    }
    assert {name for name, found in names.items() if "why" in found} == {"c4"}
    assert set(run.contexts["swapped_from"].map(len)) == {1}
    assert run.generations["response_contrast_bits"].notna().all()
    again = sample("--candidates", file, "--contrasts", "--swaps", 1, "--score-generations")
    assert again.status == 0 and "was finished before" in again.err


UNUSABLE = {
    "an unknown conversation": (
        [{"name": "why", "text": "Why?", "id": "c9"}],
        "--candidates names conversations that the run hasn't: c9; give ids of this dataset",
    ),
    "a reserved name": ([{"name": "query", "text": "Why?"}], "a candidate that every context has"),
}


@pytest.mark.parametrize(("rows", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_candidates_that_cannot_be_used_are_refused_in_one_line(sample, tmp_path, rows, said):
    file = own_candidates(tmp_path / "own.jsonl", *rows)
    before = files(tmp_path)
    assert said in refusal(sample("--candidates", file))
    assert files(tmp_path) == before and not (tmp_path / "run").exists()
    assert not list(tmp_path.rglob(".ia_mech*"))


def test_candidates_of_conversations_beyond_the_limit_are_refused(sample, tmp_path):
    file = own_candidates(tmp_path / "own.jsonl", {"name": "why", "text": "Why?", "id": "c4"})
    line = refusal(sample("--candidates", file, "--limit", 4))
    assert "hasn't: c4" in line and "--limit all" in line


@pytest.mark.parametrize("words", [("--swaps", "-1"), ("--swaps", "some"), ("--swaps", "1.5")])
def test_a_number_of_swaps_that_cannot_be_is_refused(sample, words):
    outcome = sample(*words)
    assert outcome.status == 2 and outcome.err.count("\n") == 1
    assert "is not a whole number from 0 up" in outcome.err


def test_a_dry_run_refuses_candidates_that_the_run_would_refuse(sample, tmp_path):
    refusal(sample("--candidates", tmp_path / "none", "--dry-run"))
