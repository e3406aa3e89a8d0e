"""Likelihoods in a run: every stored one against one plain forward pass over the whole sequence;
refused contrasts, resuming, the user's candidates, the command line.
"""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
import scored
import tiny
from conftest import Silent
from shell import call, files

from ia_mech.chat.format import ChatFormat
from ia_mech.collect import command as command_line
from ia_mech.collect.identity import build_chat, eos_ids
from ia_mech.collect.job import collect
from ia_mech.likelihood.scorer import NO_SWAP_SOURCE, Scorer, scored_temperatures
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run
from ia_mech.settings import Settings

LN2 = np.log(2)
SETTINGS = Settings(temperatures=(0.7, 5.0), samples=2, max_new_tokens=6, batch_rows=15)
TEMPERATURES = scored_temperatures(SETTINGS.temperatures)


@pytest.fixture(scope="module")
def subject(tokenizer) -> Subject:
    """The tiny Llama, which ends a turn at many tokens: some of its few generations end then."""
    model = copy.deepcopy(tiny.model("llama", len(tokenizer)))
    model.generation_config.eos_token_id = [2, *range(100, 220)]
    return Subject(ModelSpec(name="tiny-llama"), model, tokenizer, weights_hash(model))


@pytest.fixture(scope="module")
def chat(subject) -> ChatFormat:
    ids = eos_ids(subject.model.generation_config, subject.model.config)
    return build_chat(SETTINGS, subject.tokenizer, ids)


def sampled(subject, folder, name: str = "run", **given) -> Run:
    data = scored.dataset(folder / "chats.jsonl")
    asked = {"contrasts": True, "swaps": 4} | given
    settings = replace(SETTINGS, dataset=data, limit="all", **asked)
    return collect(settings, subject, folder / name, Silent())


@pytest.fixture(scope="module")
def run(subject, tmp_path_factory) -> Run:
    return sampled(subject, tmp_path_factory.mktemp("scored"))


def messages(run: Run, name: str) -> list[dict]:
    row = run.contexts.set_index("context_id").loc[name]
    return [dict(m) for m in row["messages"]]


def contexts_of(run: Run, chat: ChatFormat, row) -> dict[str, list]:
    """Ids of everything that a context's turns were scored after."""
    own = messages(run, row["context_id"])

    def after(response: str) -> list[int]:
        return chat.context([*own[:-1], {"role": "assistant", "content": response}]).ids

    return {
        "given": [chat.context(own).ids],
        "empty": [after("")],
        "header": [chat.opening(own)],
        "swapped": [
            after(messages(run, lender)[-1]["content"])
            for lender in ([] if row["swapped_from"] is None else row["swapped_from"])
        ],
    }


def expected_contrasts(model, after: dict[str, list], ids: list[int], tokens: int) -> dict:
    """Columns of a turn's contrasts, by forward passes; ``tokens`` of its ids are its content."""
    columns = {}
    for end, kept in (("", tokens), ("_with_end", len(ids))):
        if end and kept == tokens:  # there is no turn-end
            continue
        sums = {
            kind: [scored.logprobs(model, context, ids)[:kept].sum() for context in contexts]
            for kind, contexts in after.items()
        }
        given = sums["given"][0]
        mean = np.log(np.mean(np.exp(np.array(sums["swapped"]) - given))) + given
        columns |= {
            f"logprob_empty{end}": sums["empty"][0],
            f"logprob_header{end}": sums["header"][0],
            f"logprob_swapped{end}": sums["swapped"],
            f"response_contrast_bits{end}": (given - mean) / LN2,
            f"empty_contrast_bits{end}": (given - sums["empty"][0]) / LN2,
            f"header_contrast_bits{end}": (given - sums["header"][0]) / LN2,
        }
    return columns


def referenced(run: Run) -> pd.DataFrame:
    return run.contexts[run.contexts["reference_logprob"].notna()]


# -- against forward passes ---------------------------------------------------------------------


def test_the_data_has_what_can_go_wrong(run):
    """Lengths far apart, a context without a reference, and few others to lend responses."""
    assert run.contexts["context_tokens"].max() > 3 * run.contexts["context_tokens"].min()
    assert len(referenced(run)) == len(run.contexts) - 1
    assert referenced(run)["swapped_from"].map(len).tolist() == [4] * 6 + [1] * 2


def test_references_equal_a_full_forward_pass(run, subject, chat):
    for _, row in referenced(run).iterrows():
        after = contexts_of(run, chat, row)
        ids = [*row["reference_token_ids"], chat.closing_id]
        assert row["token_ids"].tolist() == after["given"][0]
        full = scored.logprobs(subject.model, after["given"][0], ids)
        np.testing.assert_allclose(row["reference_logprobs_raw"], full, **scored.nats(1))
        np.testing.assert_allclose(
            row["reference_logprob"], full[:-1].sum(), **scored.nats(len(ids))
        )
        np.testing.assert_allclose(
            row["reference_logprob_with_end"], full.sum(), **scored.nats(len(ids))
        )
        bits = -full[:-1].sum() / LN2 / len(row["reference"].encode())
        size = len(row["reference"].encode())
        close = scored.bits(len(ids))["atol"] / size
        np.testing.assert_allclose(row["reference_bits_per_byte"], bits, rtol=0, atol=close)
        for name, value in expected_contrasts(subject.model, after, ids, len(ids) - 1).items():
            np.testing.assert_allclose(
                row[f"reference_{name}"], value, **scored.bits(len(ids)), err_msg=name
            )


def test_candidates_equal_a_full_forward_pass_at_every_temperature(run, subject, chat):
    assert run.record["identity"]["score_temperatures"] == list(TEMPERATURES)
    for _, row in referenced(run).iterrows():
        own = messages(run, row["context_id"])
        context = chat.context(own)
        for one in row["candidates"]:
            ids = [*chat.reference_ids(own, context, one["text"]), chat.closing_id]
            assert one["tokens"] == len(ids) - 1
            for at, temperature in enumerate(TEMPERATURES):
                full = scored.logprobs(subject.model, context.ids, ids, temperature)
                sums, close = (full[:-1].sum(), full.sum()), scored.nats(len(ids), temperature)
                found = [one[f"logprob_tempered{end}"][at] for end in ("", "_with_end")]
                np.testing.assert_allclose(found, sums, **close)
                if temperature == 1.0:
                    found = [one[f"logprob{end}"] for end in ("", "_with_end")]
                    np.testing.assert_allclose(found, sums, **close)
        for name in ("logprob", "logprob_tempered_with_end", "response_contrast_bits"):
            np.testing.assert_array_equal(row[f"reference_{name}"], row["candidates"][0][name])


def test_another_conversations_reference_is_contrasted_as_the_own_one_is(run, subject, chat):
    seen = 0
    for _, row in referenced(run).iterrows():
        own = messages(run, row["context_id"])
        for one in row["candidates"]:
            if one["name"] == "reference":
                continue
            if one["name"] != "other_reference":
                assert np.isnan(one["response_contrast_bits"] or np.nan), one["name"]
                continue
            ids = chat.reference_ids(own, chat.context(own), one["text"])
            ids = [*ids, chat.closing_id]
            after = contexts_of(run, chat, row)
            found = expected_contrasts(subject.model, after, ids, len(ids) - 1)
            for name in ("response_contrast_bits", "response_contrast_bits_with_end"):
                np.testing.assert_allclose(one[name], found[name], **scored.bits(len(ids)))
            lender = run.contexts.set_index("context_id").loc[one["lender"]]
            assert lender["reference"] == one["text"]
            assert lender["dataset"] == row["dataset"]
            assert one["lender"] not in {row["context_id"], *row["swapped_from"]}
            seen += 1
    assert seen == 6


def test_lenders_are_those_that_the_seed_draws(run, subject):
    rows = [
        (order, scored.conversation(row), None)
        for order, (_, row) in enumerate(run.contexts.iterrows())
    ]
    donors = SwapSources.of(rows, subject.tokenizer, SETTINGS.seed)
    for order, row in referenced(run).iterrows():
        lent = donors.responses(order, 4)
        assert row["swapped_from"].tolist() == [d.id for d in lent]
        reference = donors.reference(order, lent)
        lenders = [one["lender"] for one in row["candidates"] if one["lender"] is not None]
        assert lenders == ([] if reference is None else [reference.id])


# -- what must not matter -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gemma3", "gpt_oss"])
def test_other_templates_are_scored_after_their_own_contexts(family, tmp_path):
    subject = tiny.subject("llama", families.build(family))
    data = scored.dataset(tmp_path / "chats.jsonl", scored.CONVERSATIONS[:3])
    settings = Settings(
        dataset=data, limit="all", temperatures=(), max_new_tokens=1, contrasts=True, swaps=2
    )
    run = collect(settings, subject, tmp_path / "run", Silent())
    chat = build_chat(settings, subject.tokenizer)
    closing = [] if chat.closing_id is None else [chat.closing_id]
    for _, row in referenced(run).iterrows():
        ids = [*row["reference_token_ids"], *closing]
        found = expected_contrasts(
            subject.model, contexts_of(run, chat, row), ids, len(ids) - len(closing)
        )
        assert len(found) == (12 if closing else 6)
        for name, value in found.items():
            np.testing.assert_allclose(
                row[f"reference_{name}"], value, **scored.bits(len(ids)), err_msg=name
            )


PLAIN = scored.CONVERSATIONS[:5]


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(
        dataset=scored.dataset(tmp_path / "chats.jsonl", PLAIN),
        limit="all",
        temperatures=(1.0,),
        samples=1,
        max_new_tokens=4,
        batch_rows=4,
        contrasts=True,
        swaps=2,
    )


def with_template(family: str, template: str) -> Subject:
    tokenizer = copy.deepcopy(families.build(family))
    tokenizer.chat_template = template + families.template(family)
    return tiny.subject("llama", tokenizer)


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
    settings, tmp_path, progress, kind
):
    subject = with_template("smollm2", REFUSALS[kind])
    run = collect(settings, subject, tmp_path / "run", progress)
    assert run.complete and len(run.contexts) == len(PLAIN)
    assert [line for line in progress.lines if "not scored" in line] == [
        f"not scored everywhere: {SAID[kind]}: {PROBLEMS[kind]}"
    ]
    assert run.sessions[-1]["contrasts_refused"] == {SAID[kind]: PROBLEMS[kind]}
    frame = run.contexts[run.contexts["reference_logprob"].notna()]
    other = {"empty": "header", "header": "empty"}[kind]
    for name in (f"logprob_{kind}", f"{kind}_contrast_bits"):
        assert frame[f"reference_{name}"].isna().all()
        assert frame[f"reference_{name}_with_end"].isna().all()
    for name in ("response_contrast_bits", f"{other}_contrast_bits"):
        assert frame[f"reference_{name}"].notna().all()


def test_a_system_message_in_the_first_user_turn_leaves_that_header_out(tmp_path, progress):
    """Of the conversation that has one; the others' headers are there."""
    data = scored.dataset(tmp_path / "chats.jsonl", [*PLAIN, scored.CONVERSATIONS[5]])
    subject = tiny.subject("llama", families.build("gemma3"))
    settings = Settings(
        dataset=data, limit="all", temperatures=(), max_new_tokens=2, contrasts=True, swaps=1
    )
    run = collect(settings, subject, tmp_path / "run", progress)
    rows = run.contexts.set_index("context_id")
    rows = rows[rows["reference_logprob"].notna()]
    assert rows.index[rows["reference_logprob_header"].isna()].tolist() == ["c5"]
    assert rows["reference_logprob_empty"].notna().all()
    assert (
        len([line for line in progress.lines if "not scored everywhere: bare header" in line]) == 1
    )
    assert list(run.sessions[-1]["contrasts_refused"]) == ["bare header"]


def test_where_nobody_lends_a_response_it_is_said(settings, tiny_subject, tmp_path, progress):
    run = collect(replace(settings, limit=1), tiny_subject, tmp_path / "run", progress)
    assert [line for line in progress.lines if "not scored" in line] == [
        f"not scored everywhere: swapped response: {NO_SWAP_SOURCE}"
    ]
    assert run.sessions[-1]["contrasts_refused"] == {"swapped response": NO_SWAP_SOURCE}
    assert run.contexts["reference_response_contrast_bits"].isna().all()
    progress.lines.clear()
    collect(replace(settings, limit=1, swaps=0), tiny_subject, tmp_path / "none-asked", progress)
    assert not any("swapped" in line for line in progress.lines)


# -- going on -----------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_to_the_same_digest(
    settings, tiny_subject, tmp_path, monkeypatch
):
    """Interrupted while turns are scored; every attempt finishes one more part."""
    own = own_candidates(tmp_path / "own.jsonl", {"name": "w", "text": "Who?", "id": "c1"})
    settings = replace(settings, candidates=own, response="generate", max_response_tokens=3)
    settings = replace(settings, batch_rows=2)
    expected = collect(settings, tiny_subject, tmp_path / "whole", Silent()).digest()
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
                collect(settings, tiny_subject, out, Silent())
    assert len(Run.open(out).contexts) == 2  # a part each
    assert collect(settings, tiny_subject, out, Silent()).digest() == expected


# -- the user's candidates ----------------------------------------------------------------------


def own_candidates(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# -- the command line ---------------------------------------------------------------------------


@pytest.fixture
def sample(tiny_model_dir, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    data = scored.dataset(tmp_path / "chats.jsonl", PLAIN)
    words = ["--model", tiny_model_dir, "--dataset", data, "--limit", "all", "--samples", "1"]
    words += ["--temperatures", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "run")]

    return lambda *more: call(command_line.main, [*words, *map(str, more)], capfd)


def test_the_command_line_takes_candidates_and_swaps(sample, tmp_path, tiny_subject):
    """With responses that the model writes: they are lent, in place of those of the data."""
    rows = {"name": "all", "text": " Why so?\n"}, {"name": "why", "text": "Why?", "id": "c4"}
    file = own_candidates(tmp_path / "own.jsonl", *rows)
    words = ("--candidates", file, "--contrasts", "--swaps", 1)
    words += ("--response", "generate", "--max-response-tokens", 5)
    run = sample(*words).run
    identity = run.record["identity"]
    assert identity["candidates"] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert set(referenced(run)["swapped_from"].map(len)) == {1}
    assert set(run.contexts["response_policy"]) == {"generated"}
    chat, contexts = build_chat(SETTINGS, tiny_subject.tokenizer), run.contexts
    for _, row in contexts[contexts["reference_logprob"].notna()].iterrows():
        found = {one["name"]: one for one in row["candidates"]}
        assert ("why" in found) == (row["context_id"] == "c4")
        own = [dict(m) for m in row["messages"]]
        context = chat.context(own)
        ids = [*chat.reference_ids(own, context, "Why so?"), chat.closing_id]
        expected = scored.logprobs(tiny_subject.model, context.ids, ids).sum()
        why = found["all"]["logprob_with_end"]
        np.testing.assert_allclose(why, expected, **scored.nats(len(ids)))
        (lender,) = row["swapped_from"]
        lent = dict(contexts.set_index("context_id").loc[lender, "messages"][-1])
        ids = [*row["reference_token_ids"], chat.closing_id]
        expected = scored.logprobs(
            tiny_subject.model, chat.context([*own[:-1], lent]).ids, ids
        ).sum()
        (swapped,) = row["reference_logprob_swapped_with_end"]
        np.testing.assert_allclose(swapped, expected, **scored.nats(len(ids)))
    again = sample(*words)
    assert again.status == 0 and "was finished before" in again.err


OF_C4 = {"name": "why", "text": "Why?", "id": "c4"}
UNUSABLE = {
    "an unknown conversation": (
        [OF_C4 | {"id": "c9"}], (),
        "--candidates names conversations that the run hasn't: c9; give ids of this dataset",
    ),
    "beyond the limit": ([OF_C4], ("--limit", 4), "hasn't: c4; give ids"),
    "a reserved name": ([OF_C4 | {"name": "query"}], ("--dry-run",), "that every context has"),
    "swaps": ([OF_C4], ("--swaps", "-1"), "is not a whole number from 0 up"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "words", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_candidates_that_cannot_be_used_are_refused_in_one_line(
    sample, tmp_path, rows, words, said
):
    file = own_candidates(tmp_path / "own.jsonl", *rows)
    before = files(tmp_path)
    outcome = sample("--candidates", file, *words)
    assert outcome.status == 2 and outcome.err.count("\n") == 1 and said in outcome.err
    assert files(tmp_path) == before and not (tmp_path / "run").exists()
    assert not list(tmp_path.rglob(".ia_mech*"))
