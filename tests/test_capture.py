"""``ia-mech capture``: what it adds to a run, and how a run gives it back."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from contract import VECTOR, relative_l2
from runs import sampled
from test_probes_dataset import plant
from test_thinking_run import subject  # noqa: F401

from ia_mech.collect.capture import Wanted, capture, main
from ia_mech.display import Quiet
from ia_mech.engine.installed import install
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings
from probes.dataset import read

SETTINGS = Settings(
    limit=4,
    temperatures=(0.7, 1.0),
    samples=2,
    max_new_tokens=5,
    sampled_tokens=(1, "all"),
    batch_rows=4,
)
TOKENS = ["turn:0..2", "header:-1", "response:-1", "context:7"]


@pytest.fixture(scope="module")
def kept(tiny_subject, tmp_path_factory) -> Run:
    install(tiny_subject.model)
    run = sampled(SETTINGS, tiny_subject, tmp_path_factory.mktemp("kept") / "run")
    capture(Wanted(run, TOKENS, [2, 4], ["resid", "attn"]), tiny_subject, Quiet())
    return Run.open(run.path)


@torch.inference_mode()
def test_a_turns_states_are_those_of_a_plain_pass_over_context_and_turn(kept, tiny_subject):
    greedy = kept.generations.query("temperature == 0").set_index("context_id")["token_ids"]
    found = kept.residuals(2, tokens=TOKENS)
    assert found.shape == (4, 6, 32) and len(kept.parts("states")) > 1
    for row, context in kept.contexts.iterrows():
        ids, turn = list(context["token_ids"]), list(greedy[context["context_id"]])
        end = context["positions"]["response_end"]
        out = tiny_subject.model(torch.tensor([ids + turn]), output_hidden_states=True)
        for column, at in enumerate([*range(len(ids), len(ids) + 3), len(ids) - 1, end, 7]):
            own = found[row, column]
            if at < len(ids) + len(turn):
                assert relative_l2(own, out.hidden_states[2][0, at]) < VECTOR
            else:
                assert own.isnan().all()
    header = kept.residuals([2, 4], "header_last")
    assert relative_l2(kept.residuals([2, 4], tokens="header:-1"), header) < VECTOR
    assert kept.residuals(4, tokens="turn:0", component="attn").shape == (4, 32)


@torch.inference_mode()
@pytest.mark.parametrize("opening", [None, "Thanks. You"])
def test_sampled_turns_have_states_of_their_own(subject, opening, tmp_path):  # noqa: F811
    """After a template that thinks, too; an opening is the context's."""
    settings = replace(SETTINGS, limit=4, opening=opening, response="generate")
    settings = replace(settings, unfinished=True, max_response_tokens=9)
    run = sampled(settings, subject, tmp_path / "run")
    some = run.generations.query("temperature == 1 and sample == 0").sample(frac=1, random_state=1)
    assert some["sampled_tokens"].nunique() == 2
    capture(Wanted(run, ["turn:1", "context:-1"], [2], ["resid"], [1.0], 1), subject, Quiet())
    run = Run.open(run.path)
    found = run.residuals(2, tokens=["turn:1", "context:-1"], turns=some)
    contexts = run.contexts.set_index("context_id")["token_ids"]
    for own, turn in zip(found, some.itertuples(), strict=True):
        ids, more = list(contexts[turn.context_id]), list(turn.token_ids)
        whole = subject.model(torch.tensor([ids + more]), output_hidden_states=True)
        states = whole.hidden_states[2][0]
        assert relative_l2(own[1], states[len(ids) - 1]) < VECTOR
        wanted = states[len(ids) + 1] if len(more) > 1 else None
        assert own[0].isnan().all() if wanted is None else relative_l2(own[0], wanted) < VECTOR
    assert run.captured_layers("turn:1") == [2] and run.captured_layers("turn:1", "mlp") == []
    assert relative_l2(run.residuals(2, tokens="context:-1", turns=some), found[:, 1]) < VECTOR
    with pytest.raises(UserError, match=r"for 8 of 16 turns; add it .* --temperature 1"):
        run.residuals(2, tokens="turn:1", turns=run.generations.query("temperature == 1"))


def test_probes_read_captured_states_of_the_turns_that_count(kept, tiny_subject, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(kept.path, folder)
    wanted = Wanted(Run(folder), ["turn:0..1", "header:-1"], [2, 4], ["attn"], [None])
    capture(wanted, tiny_subject, Quiet())
    run = plant(Run.open(folder), lambda _, t, sample, k: "follow_up" if sample else "new_topic")
    found = read([folder], tokens=["turn:0", "turn:1"], component="attn")
    assert list(found.layers) == [2, 4] and found.positions == ["turn:0", "turn:1"]
    turns = run.generations.query("temperature > 0")
    turns = turns[run.drawn(turns) & (turns["token_ids"].map(len) > 1)]
    for column in KEY:
        assert found.contexts[column].tolist() == turns[column].tolist()
    assert found.contexts["positives"].tolist() == turns["sample"].tolist()
    assert set(found.contexts["trials"]) == {1}
    own = run.residuals(4, tokens="turn:1", component="attn", turns=turns)
    assert np.array_equal(found.at(4, "turn:1"), own.numpy())
    for text, ids in zip(found.contexts["text"], turns["token_ids"], strict=True):
        assert text.endswith(f" token{ids[0]} token{ids[1]}")
    capture(Wanted(Run(folder), ["query:0"], [2, 4], ["attn"]), tiny_subject, Quiet())
    apart = read([folder], tokens=["turn:0", "query:0"], component="attn")  # in other files
    assert list(apart.layers) == [2, 4] and len(apart.contexts) == len(apart.at(4, "query:0"))
    assert np.array_equal(apart.at(2, "turn:0")[: len(turns)], found.at(2, "turn:0"))
    both = Run(folder).residuals([2, 4], tokens=["query:0", "header:-1"], component="attn")
    each = [
        Run(folder).residuals([2, 4], tokens=x, component="attn") for x in ("query:0", "header:-1")
    ]
    assert torch.equal(both, torch.stack(each, 2))
    context = read([folder], tokens=["header:-1"], component="attn")
    assert context.contexts["trials"].tolist() == [4] * 4
    own = run.residuals(2, tokens="header:-1", component="attn")
    assert np.array_equal(context.at(2, "header:-1"), own.numpy())
    for how, said in (
        ({"component": "mlp"}, "add it with: ia-mech capture .* --component mlp"),
        ({"within": "source"}, "compares responses, not turns"),
        ({"positions": ["header_last"]}, "together"),
    ):
        with pytest.raises(UserError, match=said):
            read([folder], tokens=["turn:0"], **how)


def test_what_was_captured_is_kept_and_what_was_lost_is_computed_again(
    kept, tiny_subject, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(kept.path, folder)
    wanted = Wanted(Run(folder), TOKENS, [2, 4], ["attn", "resid"])
    files = sorted((folder / "states").glob("*"))
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    assert len(Run(folder).verify()) == 1
    with pytest.raises(UserError, match="capture it again"):
        Run(folder).residuals(2, tokens=TOKENS)
    capture(wanted, tiny_subject, Quiet())
    assert files[0].read_bytes() == before[files[0]][1] and Run(folder).verify() == []
    assert all(file.stat().st_mtime_ns == before[file][0] for file in files[1:])
    assert Run(folder).digest() == kept.digest() and Run(folder).sessions == kept.sessions


def test_refusals(kept, tiny_subject, capsys):
    for words in (["turn"], ["turn:3..1"], ["nosuch:0"], ["turn:-1..1"]):
        with pytest.raises(UserError, match="names no tokens"):
            Wanted(kept, words, [1], ["resid"])
    with pytest.raises(UserError, match="layer 0 is the embeddings"):
        Wanted(kept, TOKENS, [0], ["mlp"])
    with pytest.raises(UserError, match=r"ia-mech capture .* --component mlp"):
        kept.residuals(2, tokens="turn:0", component="mlp")
    with pytest.raises(UserError, match=r"--component resid --temperature 0.7 1$"):
        kept.residuals(2, tokens="turn:0", turns=kept.generations)
    with pytest.raises(UserError, match="turns have no column temperature"):
        kept.residuals(2, tokens="turn:0", turns=kept.contexts)
    with pytest.raises(UserError, match=r"at temperature 0.3; give some of 0 0.7 1"):
        Wanted(kept, TOKENS, [1], ["resid"], [0.3])
    with pytest.raises(UserError, match="no position="):
        kept.residuals(2, component="attn")
    other = replace(tiny_subject, weights_hash="0")
    with pytest.raises(UserError, match="has the weights 0 now"):
        capture(Wanted(kept, TOKENS, [1], ["resid"]), other, Quiet())
    dry = [str(kept.path), "--tokens", "turn:0", "--layers", "1", "--dry-run"]
    assert main(dry) == main([*dry, "--temperature", "all"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["4", "36"]
