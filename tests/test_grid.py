"""Either outcome of either change, in models whose routes are known."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted_reaction
import pytest
import torch
from conftest import Silent
from judging import FakeJudge
from runs import sampled as made_run
from shell import call, refusal
from tiny import blank

from experiments import interchange, locate
from experiments.change import HEADER, OWN, QUERY, RESPONSE, Cell, Replaced, Whole
from experiments.control import MOVED, MOVED_PARTS
from experiments.experiment import Model
from experiments.locate import BITS, SHARE
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE, SiblingContexts
from ia_mech.judge.judging import label_run
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.judge.verdict import Verdict
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run
from ia_mech.settings import Settings

LETTERS = "zqxw"  # of responses: z or q set the role, x or w the content
BLOCK, QUERIES, SAMPLES = 3, 16, 32  # the block tells each token which letters there are
TOLD, IS_TURN = 5, 9  # dimensions: which letters there are, whether the token is a turn's first


def planted(small: Subject, folder) -> Subject:
    """A model whose turns have two tokens. The first is drawn by what the header's last state has
    of z and q: ``?`` is in role. The second is drawn by what that token itself reads of x and w in
    the response: ``+`` follows up."""
    model = blank(small.model)
    letters, (role, out), (follows, generic) = (
        [small.tokenizer.convert_tokens_to_ids(text) for text in texts]
        for texts in (LETTERS, "?!", "+-")
    )
    unit = model.config.hidden_size**-0.5
    with torch.no_grad():
        table, logits = model.model.embed_tokens.weight, model.lm_head.weight
        table[:, 0] = 1.0
        table[[role, out], IS_TURN] = 1e4
        attention = model.model.layers[BLOCK - 1].self_attn  # alike to all tokens before
        for number, token in enumerate(letters):
            table[token, 1 + number] = 1.0
            attention.v_proj.weight[number, 1 + number] = 1.0
            attention.o_proj.weight[TOLD + number, number] = 1e4
            logits[:, TOLD + number] = -50 * unit
        logits[[role, out], IS_TURN] = -200 * unit
        logits[[follows, generic], IS_TURN] = 200 * unit
        logits[[role, out, follows, generic], TOLD] = logits[
            [role, out, follows, generic], TOLD + 1
        ] = torch.tensor([0.0, 0.0, -50.0, -50.0]) * unit
        logits[role, TOLD], logits[role, TOLD + 1] = -0.3 * unit, -2.0 * unit
        logits[follows, TOLD + 2], logits[generic, TOLD + 2] = -47 * unit, -50 * unit
        logits[follows, TOLD + 3], logits[generic, TOLD + 3] = -50 * unit, -47 * unit
    model.save_pretrained(folder)
    small.tokenizer.save_pretrained(folder)
    return Subject(ModelSpec(str(folder)), model, small.tokenizer, weights_hash(model))


class Marked(FakeJudge):
    """Turns with ``?`` are in role, and follow up with ``+``."""

    def __init__(self) -> None:
        def say(item, repeat) -> Verdict:
            if "?" not in item.turn:
                return Verdict("repeats_response")
            return Verdict(FOLLOW_UP if "+" in item.turn else "generic")

        super().__init__(say, paid=False)


@pytest.fixture(scope="module")
def used(tiny_subject, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("grid")
    subject, data = planted(tiny_subject, folder / "model"), folder / "chats.jsonl"
    rows = [
        {
            "id": f"c{i}",
            "query": f"{i}.",
            "response": (LETTERS[i % 2] + LETTERS[2 + i // 2 % 2]) * 4,
        }
        for i in range(QUERIES)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(data), limit=None, model=subject.spec.name, temperatures=(0.7,),
        samples=SAMPLES, batch_rows=800, max_new_tokens=2,
    )  # fmt: skip
    run = made_run(settings, subject, folder / "run", Silent())
    label_run(run, Marked(), "marked", Silent())
    return run


@pytest.fixture
def moved(used, capfd, monkeypatch, tmp_path):
    """What a command finds to move: of the share, in role, and once in role, by cell."""
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)

    def run(command, *words) -> pd.DataFrame:
        out = tmp_path / "out"
        flags = ["--out", str(out), "--outcome", "follow-up", "--samples", "32", *words]
        outcome = call(command.main, [str(used.path), *flags], capfd)
        assert outcome.status == 0, outcome.err
        kept = Run.open(out / "turns" / "run")  # anyone can have these judged
        assert kept.labels.judges == ["marked"] and len(kept.turns)
        found = pd.read_parquet(out / "estimates.parquet")
        found = found[found["quantity"].isin([MOVED, *MOVED_PARTS.values()])]
        return found.set_index(["quantity", "term"])["value"]

    return run


def test_the_header_s_last_state_sets_the_role_and_not_the_content(moved):
    found = moved(interchange, "--tokens", "header_last", "--layers", "3")
    assert found[MOVED_PARTS[IN_ROLE], "header_last"] > 0.1
    assert found[MOVED, "header_last"] > 0.05
    assert abs(found[MOVED_PARTS[ONCE_IN_ROLE], "header_last"]) < 0.1


def test_the_response_s_keys_and_values_set_the_content_and_not_the_role(moved):
    found = moved(locate)
    assert found[MOVED_PARTS[IN_ROLE], RESPONSE] == 0
    assert found[MOVED_PARTS[ONCE_IN_ROLE], RESPONSE] > 0.15
    assert found[MOVED_PARTS[IN_ROLE], HEADER] > 0.1
    assert abs(found[MOVED_PARTS[ONCE_IN_ROLE], HEADER]) < 0.1
    assert found[MOVED, QUERY] == 0


def test_a_combination_that_makes_no_sense_is_refused_by_name(used, capfd):
    words = [str(used.path), "--outcome"]
    line = refusal(call(locate.main, [*words, "mass", "--samples", "8"], capfd))
    assert line.startswith("--samples is of --outcome follow-up")
    planned = call(locate.main, [*words, "follow-up", "--dry-run"], capfd).out
    assert f"go to {used.path}/results/locate-follow-up\n" in planned  # and bits to locate
    line = refusal(call(locate.main, [*words, "follow-up", "--maps", "bands"], capfd))
    assert line.startswith("--maps is of --outcome bits")


def test_bits_are_carried_by_the_state_that_a_name_is_written_into():
    """A block writes the response's name into one header token, a later one reads it there."""
    model = Model(SimpleNamespace(model=planted_reaction.model(True)), SimpleNamespace(stop_ids=[]))
    layers = range(1, planted_reaction.DEPTH)
    cells = [Cell(OWN, Whole(), every=True)]
    cells += [
        Cell(name, Replaced((name,), layer), layer, every=True)
        for name in (planted_reaction.WRITTEN, "header_last")
        for layer in layers
    ]
    parts = []
    for query in range(6):
        names = planted_reaction.lengths(query)
        contexts = [planted_reaction.context(k, length, 0) for k, length in enumerate(names)]
        stop = contexts[0].response.stop
        unit = SiblingContexts(
            f"q{query}", "planted", 0, [tuple(one.ids) for one in contexts],
            [one.response.start for one in contexts], [one.response.stop for one in contexts],
            {name: contexts[0].positions[name] - stop for name in planted_reaction.POSITIONS},
            list("abcd"), [(k, 1.0, 0, planted_reaction.turn(k, 4)) for k in range(4)],
            [query % 4], cells, 1.0,
        )  # fmt: skip
        parts.append(unit.rows(model).assign(source=f"q{query}"))
    options = {"level": 0.95, "resamples": 100, "seed": 0}
    args = SimpleNamespace(outcome="bits", **options)
    grid = interchange.Interchange.asked(args)([], args, Path())
    found = {
        (row.quantity, row.names["term"], row.names.get("layer")): row.estimate.value
        for row in grid.estimate(pd.concat(parts, ignore_index=True))
    }
    assert found[BITS, OWN, None] > 1
    for layer in layers:
        held = planted_reaction.WRITE <= layer < planted_reaction.READ
        wanted = found[BITS, OWN, None] if held else 0.0
        got = found[BITS, planted_reaction.WRITTEN, layer]
        assert got == pytest.approx(wanted, abs=0.06), layer
        assert found[BITS, "header_last", layer] == pytest.approx(0.0, abs=0.02)
    assert found[SHARE, planted_reaction.WRITTEN, 3] == pytest.approx(1, abs=0.05)
    assert not np.isnan(list(found.values())).any()
