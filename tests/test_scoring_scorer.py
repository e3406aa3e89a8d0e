"""Every stored likelihood against one plain forward pass over the whole sequence.

Log-probabilities of a turn are held to 1e-4 nats. The largest difference seen is 1.2e-5 at T = 1,
of a turn of 190 tokens at -1161 nats (1e-8 of it), and 7e-6 in a reference's contrasts: rounding of
float32 logits, once for each token. A relative tolerance would say nothing of a contrast near 0; it
is added where temperatures below 1 magnify a logit's rounding (1.7e-4 of -6918 nats at T = 0.1).
"""

import copy

import families
import numpy as np
import pandas as pd
import pytest
import scored
import tiny
from conftest import Silent

from ia_mech.chat.format import ChatFormat
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.identity import build_chat, eos_ids
from ia_mech.collect.job import collect
from ia_mech.engine.plan import Grid
from ia_mech.likelihood.scorer import scored_temperatures
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run

LN2 = np.log(2)
GRID = Grid((0.7, 5.0), 2, 6, 0)
TEMPERATURES = scored_temperatures(GRID.temperatures)


@pytest.fixture(scope="module")
def subject(tokenizer) -> Subject:
    """The tiny Llama, which ends a turn at many tokens: some of its few generations end then."""
    model = copy.deepcopy(tiny.model("llama", len(tokenizer)))
    model.generation_config.eos_token_id = [2, *range(100, 220)]
    return Subject(ModelSpec(name="tiny-llama"), model, tokenizer, weights_hash(model))


@pytest.fixture(scope="module")
def chat(subject) -> ChatFormat:
    ids = eos_ids(subject.model.generation_config, subject.model.config)
    return build_chat(SampleConfig(), subject.tokenizer, ids)


def sampled(subject, folder, name: str = "run", **given) -> Run:
    data = scored.dataset(folder / "chats.jsonl")
    options = {"grid": GRID, "batch_rows": 15, "contrasts": True, "score_generations": True}
    options |= given
    config = SampleConfig(dataset=data, limit=None, **options)
    return collect(config, subject, folder / name, Silent())


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
    """Lengths far apart, a response that is empty, no reference, and turns with and without end."""
    assert run.contexts["context_tokens"].max() > 3 * run.contexts["context_tokens"].min()
    assert len(referenced(run)) == len(run.contexts) - 1
    counts = run.generations["finish_reason"].value_counts()
    assert counts["turn_end"] >= 5 and counts["length"] >= 5
    assert (run.generations["tokens"] == 1).any()  # a turn-end and nothing else
    assert run.contexts["swapped_from"].map(len).tolist() == [4] * 7 + [1] * 2


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
            ids = chat.reference_ids(own, context, one["text"])
            assert one["tokens"] == len(ids)
            for at, temperature in enumerate(TEMPERATURES):
                tokens = [*ids, chat.closing_id]
                full = scored.logprobs(subject.model, context.ids, tokens, temperature)
                close = scored.nats(len(tokens), temperature)
                content, whole = full[:-1].sum(), full.sum()
                np.testing.assert_allclose(one["logprob_tempered"][at], content, **close)
                np.testing.assert_allclose(one["logprob_tempered_with_end"][at], whole, **close)
                if temperature == 1.0:
                    np.testing.assert_allclose(one["logprob"], content, **close)
                    np.testing.assert_allclose(one["logprob_with_end"], whole, **close)
        reference = row["candidates"][0]
        assert reference["name"] == "reference" and reference["text"] == row["reference"]
        for end in ("", "_with_end"):
            names = (f"logprob{end}", f"logprob_tempered{end}", f"response_contrast_bits{end}")
            for name in names:
                np.testing.assert_array_equal(row[f"reference_{name}"], reference[name])


def test_generations_equal_a_full_forward_pass(run, subject, chat):
    contexts = run.contexts.set_index("context_id", drop=False)
    after = {name: contexts_of(run, chat, row) for name, row in contexts.iterrows()}
    for _, row in run.generations.iterrows():
        ids = row["token_ids"].tolist()
        tokens = len(ids) - (row["finish_reason"] == "turn_end")
        found = expected_contrasts(subject.model, after[row["context_id"]], ids, tokens)
        for name, value in found.items():
            np.testing.assert_allclose(row[name], value, **scored.bits(len(ids)), err_msg=name)
        if row["finish_reason"] == "length":  # it never ended, so there is nothing with its end
            ends = [name for name in run.generations.columns if name.endswith("_with_end")]
            assert len(ends) == 6 and row[ends].isna().all()
        elif tokens == 0:
            assert row["response_contrast_bits"] == row["empty_contrast_bits"] == 0.0
            assert row["logprob_swapped"].tolist() == [0.0] * len(row["logprob_swapped"])


def test_lenders_are_those_that_the_seed_draws(run, subject):
    rows = [
        (order, scored.conversation(row), None)
        for order, (_, row) in enumerate(run.contexts.iterrows())
    ]
    donors = SwapSources.of(rows, subject.tokenizer, GRID.seed)
    for order, row in run.contexts.iterrows():
        lent = donors.responses(order, 4)
        assert row["swapped_from"].tolist() == [d.id for d in lent]
        reference = donors.reference(order, lent)
        if row["candidates"] is not None:
            lenders = [one["lender"] for one in row["candidates"] if one["lender"] is not None]
            assert lenders == ([] if reference is None else [reference.id])


# -- what must not matter -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gemma3", "gpt_oss"])
def test_other_templates_are_scored_after_their_own_contexts(family, tmp_path):
    subject = tiny.subject("llama", families.build(family))
    data = scored.dataset(tmp_path / "chats.jsonl", scored.CONVERSATIONS[:3])
    config = SampleConfig(dataset=data, limit=None, grid=Grid((), 1, 1), contrasts=True, swaps=2)
    run = collect(config, subject, tmp_path / "run", Silent())
    chat = build_chat(config, subject.tokenizer)
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
