"""Models whose next token depends on the last one alone, by a table: it is known where role and
content of a turn are decided, and the follow-up mass and sampled tokens tell them apart.

``!`` in a turn is out of role; ``+`` follows up. At T = 0.7 the likelier of two tokens has 0.6.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Silent
from judging import FakeJudge
from runs import sampled
from tiny import blank

from experiments import mass
from experiments.mass import FIRST, GREEDY, HELD, OF_COVERED, RATE, REST, WHOLE
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE, parts_of
from ia_mech.estimates import all_datasets
from ia_mech.judge.judging import label_run
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.judge.verdict import Verdict
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.rates.compute import rates
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.settings import Settings

T, LIKELY, LESS_LIKELY, QUERIES, SAMPLES = 0.7, 0.6, 0.4, 10, 100
END, OTHER = "<|im_end|>", ""  # OTHER: any token without a line of its own, such as the header's
UNLIKELY = -60.0  # the logit of all tokens that a line doesn't name
TABLES = {
    "role at the first token": {
        OTHER: {"!": LIKELY, "?": LESS_LIKELY},
        "?": {"+": 1.0},
        "!": {"-": 1.0},
    },
    "role at a later token": {
        OTHER: {"a": 1.0},
        "a": {"!": LIKELY, "?": LESS_LIKELY},
        "?": {"+": 1.0},
        "!": {"-": 1.0},
    },
    "content at the first token": {OTHER: {"-": LIKELY, "+": LESS_LIKELY}},
    "content at a later token": {OTHER: {"?": 1.0}, "?": {"-": LIKELY, "+": LESS_LIKELY}},
}
# Of greedy turns, of those with one sampled token and of those sampled as a whole: follow-ups, in
# role. Then the first token's share of the difference.
WANTED = {
    "role at the first token": ((0.0, 0.4, 0.4), (0.0, 0.4, 0.4), 1.0),
    "role at a later token": ((0.0, 0.0, 0.4), (0.0, 0.0, 0.4), 0.0),
    "content at the first token": ((0.0, 0.4, 0.4), (1.0, 1.0, 1.0), 1.0),
    "content at a later token": ((0.0, 0.0, 0.4), (1.0, 1.0, 1.0), 0.0),
}
ERROR = 3 * np.sqrt(LIKELY * LESS_LIKELY / (QUERIES * SAMPLES))  # of a sampled rate


class Marked(FakeJudge):
    def __init__(self) -> None:
        def say(item, repeat) -> Verdict:
            role = "generic" if "+" not in item.turn else FOLLOW_UP
            return Verdict("repeats_response" if "!" in item.turn else role)

        super().__init__(say, paid=False)


def planted(tiny: Subject, table: dict, folder: Path) -> Subject:
    """The model of a table, whose lines end with the turn where they name nothing."""
    model, find = blank(tiny.model), tiny.tokenizer.convert_tokens_to_ids
    with torch.no_grad():
        embedded, logits = model.model.embed_tokens.weight, model.lm_head.weight
        unit = model.config.hidden_size**-0.5  # a state's length after the norm is its inverse
        embedded[:, 0] = 1.0
        logits[:] = UNLIKELY * unit
        lines = {"+": {END: 1.0}, "-": {END: 1.0}} | table
        for dimension, (token, line) in enumerate(lines.items(), start=1):
            if token == OTHER:
                dimension = 0
            else:
                embedded[find(token), 0], embedded[find(token), dimension] = 0.0, 1.0
            for after, p in line.items():
                logits[find(after), dimension] = T * np.log(p) * unit
    model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return Subject(ModelSpec(str(folder)), model, tiny.tokenizer, weights_hash(model))


@pytest.fixture(scope="module", params=[*TABLES])
def made(request, tiny_subject, tmp_path_factory) -> SimpleNamespace:
    """A judged run of one model, with the estimates of its follow-up mass."""
    folder = tmp_path_factory.mktemp("role")
    subject = planted(tiny_subject, TABLES[request.param], folder / "model")
    data = folder / "chats.jsonl"
    rows = [{"id": f"c{i}", "query": f"{i}.", "response": "Yes."} for i in range(QUERIES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(data), limit=None, model=subject.spec.name, temperatures=(T,),
        samples=SAMPLES, sampled_tokens=(1, 2, "all"), max_new_tokens=4, header_logits="none",
    )  # fmt: skip
    run = sampled(settings, subject, folder / "run", Silent())
    label_run(run, Marked(), "marked", Silent())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.arms.builtin_judge", Marked)
        assert mass.main([str(run.path), "--resamples", "100", "--out", str(folder / "mass")]) == 0
    found = pd.read_parquet(folder / "mass" / "estimates.parquet")
    assert (folder / "mass" / "sampled.svg").is_file()
    return SimpleNamespace(
        run=run,
        wanted=WANTED[request.param],
        found=all_datasets(found[found["term"] == mass.EVERY]),
    )


def value(found: pd.DataFrame, quantity: str, decoding: str) -> float:
    rows = found[(found["quantity"] == quantity) & (found["decoding"] == decoding)]
    assert len(rows) == 1, rows
    return rows["value"].item()


def test_the_follow_up_mass_says_what_the_first_token_decides(made):
    follow_ups, role, held = made.wanted
    for number, decoding in enumerate((GREEDY, OF_COVERED, WHOLE)):
        error = ERROR if decoding == WHOLE else 1e-4
        found = [value(made.found, name, decoding) for name in (RATE, IN_ROLE)]
        assert found == pytest.approx([follow_ups[number], role[number]], abs=error)
        if role[number]:
            once = value(made.found, ONCE_IN_ROLE, decoding)
            assert once == pytest.approx(follow_ups[number] / role[number], abs=ERROR)
    assert value(made.found, RATE, FIRST) == pytest.approx(follow_ups[1], abs=1e-4)
    assert value(made.found, REST, FIRST) == pytest.approx(0, abs=1e-4)
    assert value(made.found, HELD, FIRST) == pytest.approx(held, abs=0.15)


def test_rates_by_sampled_tokens_say_at_which_token_it_is_decided(made):
    for drawn, wanted in ((1, made.wanted[0][1]), (2, LESS_LIKELY), (None, LESS_LIKELY)):
        judged = read_runs([made.run], "marked", NO_ANNOTATOR, sampled_tokens=drawn)
        turns = judged.turns[judged.turns["temperature"] > 0]
        (rate,) = rates(turns)
        assert rate.estimate.value == pytest.approx(wanted, abs=ERROR), drawn
        if drawn != 2:
            role = parts_of(turns, FOLLOW_UP)[IN_ROLE].mean()
            assert role == pytest.approx(made.wanted[1][drawn or 2], abs=ERROR), drawn
