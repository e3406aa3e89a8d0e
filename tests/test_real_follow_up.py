"""What users really said next: the stored columns, by hand and against plain forward passes."""

import families
import numpy as np
import pytest
import scored
import tiny
from conftest import Silent
from runs import sampled

from ia_mech.collect.plan import build_chat
from ia_mech.engine.score import Scored
from ia_mech.likelihood.real_follow_up import (
    LN2,
    SCORED,
    real_follow_up_columns,
    scored_temperatures,
)
from ia_mech.run import layout
from ia_mech.settings import Settings

AT = (0.7, 5.0)


def of_logprobs(logprobs, *, ranks=None, greedy=None) -> Scored:
    count = len(logprobs)
    tempered = np.array(((-1.0, -2.0, -4.0), (-0.5, -0.25, -3.0)), dtype=np.float32)
    return Scored(
        logprobs_raw=np.array(logprobs, dtype=np.float32),
        logprobs_tempered=tempered[:, :count],
        ranks=np.array([1] * count if ranks is None else ranks),
        greedy=np.array([True] * count if greedy is None else greedy, dtype=bool),
    )


def columns(of: Scored, tokens: int, text: str = "Why so?", closed: bool = True) -> dict:
    return real_follow_up_columns(of, list(range(100, 100 + tokens)), text, closed)


def test_sums_are_without_the_turn_end_and_with_it():
    found = columns(of_logprobs([-0.5, -1.5, -4.0]), 2, text="Où ?")
    assert found["real_follow_up_token_ids"] == [100, 101]
    assert found["real_follow_up_logprobs_raw"].tolist() == [-0.5, -1.5, -4.0]
    assert found["real_follow_up_logprob"] == -2.0
    assert found["real_follow_up_logprob_with_end"] == -6.0
    assert found["real_follow_up_logprob_tempered"].tolist() == [-3.0, -0.75]
    assert found["real_follow_up_logprob_tempered_with_end"].tolist() == [-7.0, -3.75]
    assert found["real_follow_up_bits_per_byte"] == pytest.approx(2.0 / LN2 / 5)  # ù is two bytes
    assert found["real_follow_up_greedy"] is True and found["real_follow_up_greedy_tokens"] == 2
    assert (
        found["real_follow_up_greedy_left_rank"] is found["real_follow_up_greedy_left_prob"] is None
    )
    stored = [n for n in layout.contexts_schema([]).names if n.startswith("real_follow_up_")]
    assert sorted(found) == sorted(stored)
    logprobs = [-16777216.0, -1.0]  # in single precision the sum is the first
    assert columns(of_logprobs(logprobs), 2, closed=False)["real_follow_up_logprob"] == -16777217.0


def test_a_template_that_closes_turns_with_text_has_no_sum_with_the_end():
    found = columns(of_logprobs([-0.5, -1.5, -4.0]), 3, closed=False)
    assert found["real_follow_up_logprob"] == -6.0
    assert found["real_follow_up_logprob_tempered"].tolist() == [-7.0, -3.75]
    for name in ("logprob_with_end", "logprob_tempered_with_end"):
        assert found[f"real_follow_up_{name}"] is None


GREEDY = {
    "at once": ((0, 1, 1), (7, 1, 1), 0, 7, 0.5),
    "later": ((1, 0, 0), (1, 3, 9), 1, 3, 0.25),
    "at the turn-end": ((1, 1, 0), (1, 1, 2), 2, 2, 0.125),
    "at a tie": ((1, 0, 1), (1, 1, 1), 1, 1, 0.25),
}


@pytest.mark.parametrize(("greedy", "ranks", "tokens", "rank", "prob"), GREEDY.values(), ids=GREEDY)
def test_where_greedy_decoding_leaves(greedy, ranks, tokens, rank, prob):
    logprobs = np.log([1 / 2, 1 / 4, 1 / 8])
    found = columns(of_logprobs(logprobs, ranks=ranks, greedy=greedy), 2)
    assert found["real_follow_up_greedy"] is False
    assert found["real_follow_up_greedy_tokens"] == tokens
    assert found["real_follow_up_greedy_left_rank"] == rank
    assert found["real_follow_up_greedy_left_prob"] == pytest.approx(prob)
    assert found["real_follow_up_ranks"].tolist() == list(ranks)


@pytest.mark.parametrize("greedy", [True, False])
def test_an_empty_turn_has_a_turn_end_alone(greedy):
    found = columns(of_logprobs([-0.5], greedy=[greedy], ranks=[2 - greedy]), 0, text="")
    assert found["real_follow_up_token_ids"] == [] and found["real_follow_up_bits_per_byte"] is None
    assert (found["real_follow_up_logprob"], found["real_follow_up_logprob_with_end"]) == (
        0.0,
        -0.5,
    )
    assert found["real_follow_up_greedy"] is greedy and found["real_follow_up_greedy_tokens"] == 0
    assert found["real_follow_up_greedy_left_rank"] == (None if greedy else 2)


def test_turns_are_scored_at_twenty_temperatures_and_at_those_of_the_run():
    assert len(SCORED) == 20 and SCORED[0] == 0.1 and SCORED[-1] == 3.0
    assert scored_temperatures([]) == SCORED == tuple(sorted(SCORED))
    assert scored_temperatures([0.7, 1.0, 3.0]) == SCORED  # 0.7 is 0.7, not 0.7000000000000001
    assert scored_temperatures([5.0, 0.05, 0.72]) == tuple(sorted({*SCORED, 5.0, 0.05, 0.72}))


@pytest.mark.parametrize("family", ["smollm2", "exaone"])
def test_real_follow_ups_equal_a_full_forward_pass_at_every_temperature(family, tmp_path):
    subject = tiny.subject("llama", families.build(family))
    data = scored.dataset(tmp_path / "chats.jsonl")
    settings = Settings(dataset=data, limit="all", temperatures=AT, samples=1, max_new_tokens=1)
    run = sampled(settings, subject, tmp_path / "run", Silent())
    chat = build_chat(settings, subject.files)
    rows = run.contexts[run.contexts["real_follow_up_logprob"].notna()]
    assert len(rows) == len(run.contexts) - 1 and list(scored_temperatures(AT)) == [
        *run.record["identity"]["score_temperatures"]
    ]
    for _, row in rows.iterrows():
        one = scored.conversation(row)
        end = chat.turn_ids(one.messages, chat.context(one.messages), one.real_follow_up).end
        ids = [*row["real_follow_up_token_ids"], *end]
        full = scored.logprobs(subject.model, row["token_ids"].tolist(), ids)
        np.testing.assert_allclose(row["real_follow_up_logprobs_raw"], full, **scored.nats(1))
        content = full[: len(full) - len(end)].sum()
        np.testing.assert_allclose(row["real_follow_up_logprob"], content, **scored.nats(len(ids)))
        name = "real_follow_up_logprob_tempered" + ("_with_end" if end else "")
        for t, value in zip(run.score_temperatures, row[name], strict=True):
            wanted = scored.logprobs(subject.model, row["token_ids"].tolist(), ids, t).sum()
            np.testing.assert_allclose(value, wanted, **scored.nats(len(ids), t))
