"""``ia-mech capture``: what it adds to a run, and how a run gives it back."""

import shutil
from dataclasses import replace

import pytest
import torch
from contract import VECTOR, relative_l2
from runs import sampled

from ia_mech.collect.capture import Wanted, capture, main
from ia_mech.display import Quiet
from ia_mech.engine.installed import install
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.settings import Settings

SETTINGS = Settings(limit=4, temperatures=(1.0,), samples=1, max_new_tokens=5, batch_rows=4)
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
    with pytest.raises(UserError, match="greedy turns alone"):
        kept.residuals(2, tokens="turn:0", turns=kept.generations)
    with pytest.raises(UserError, match="no position="):
        kept.residuals(2, component="attn")
    other = replace(tiny_subject, weights_hash="0")
    with pytest.raises(UserError, match="has the weights 0 now"):
        capture(Wanted(kept, TOKENS, [1], ["resid"]), other, Quiet())
    assert main([str(kept.path), "--tokens", "turn:0", "--layers", "1", "--dry-run"]) == 0
    assert "4 contexts" in capsys.readouterr().out
