"""A run on disk: what lies where, what a reader gets, and the digest."""

import json
import pickletools
import re
import shlex
import shutil
import warnings
import zipfile
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from runs import (
    CONTEXTS,
    LAYERS,
    RECORD,
    ROWS,
    WIDTH,
    chat,
    files_under,
    first_part,
    planted,
    residuals_of,
    shifted,
    with_column,
    write_by_hand,
)
from safetensors import safe_open
from shell import call

from ia_mech.collect.command import build_parser, settings_of
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.rates.__main__ import main as rates
from ia_mech.report.__main__ import main as report
from ia_mech.run import Run, RunWriter, layout, reader
from ia_mech.settings import Settings

# -- the folder ---------------------------------------------------------------------------------


def test_the_folder_holds_what_is_documented_and_nothing_else(merged):
    expected = ["run.json", "manifests/contexts-00000.json", "README.md"]
    expected += ["contexts/part-00000.parquet", "generations/part-00000.parquet"]
    expected += ["header_logits/00000.safetensors"]
    expected += ["residuals/00000.safetensors"]
    assert files_under(merged.path) == sorted(expected)
    assert merged.complete
    assert merged.counts == {"responses": 0, "contexts": CONTEXTS}
    assert [*merged.positions] == list(chat().position_names) and merged.layers == range(LAYERS)
    assert merged.settings["temperatures"] == [0.7, 1.0] == merged.score_temperatures
    assert [session["machine"] for session in merged.sessions] == ["planted"]


def test_safetensors_open_by_themselves(merged):
    with safe_open(merged.path / "residuals/00000.safetensors", "pt") as tensors:
        assert sorted(tensors.keys()) == [f"layer_{layer:02d}" for layer in range(LAYERS)]
        shape = tensors.get_slice("layer_03").get_shape()
        assert shape == [CONTEXTS, len(merged.positions), WIDTH]
        metadata = json.loads(tensors.metadata()["names"])
    assert metadata["positions"] == [*merged.positions]
    assert metadata["contexts"] == merged.contexts["context_id"].tolist()
    with safe_open(merged.path / "header_logits/00000.safetensors", "pt") as tensors:
        assert json.loads(tensors.metadata()["names"])["contexts"] == metadata["contexts"]
        assert tensors.get_slice("shifted").get_shape() == [CONTEXTS, merged.model["vocab"]]
        assert tensors.get_slice("shifted").get_dtype() == "F16"


def test_nothing_in_a_run_is_a_pickle(parted):
    magic = {".parquet": b"PAR1", ".json": b"{", ".md": b"---\n"}
    for name in files_under(parted.path):
        path = parted.path / name
        content = path.read_bytes()
        assert content.startswith(magic.get(path.suffix, b""))
        assert not zipfile.is_zipfile(path)  # what torch.save writes
        with pytest.raises((ValueError, IndexError)):
            list(pickletools.genops(content))


# -- reading ------------------------------------------------------------------------------------


def test_rows_are_in_the_order_of_the_run_whatever_the_parts(parted, by_hand):
    assert parted.contexts["order"].tolist() == list(range(CONTEXTS))
    rows = parted.generations[["order", "temperature", "sampled_tokens", "sample"]]
    assert list(rows.itertuples(index=False, name=None)) == [
        (order, *row) for order in range(CONTEXTS) for row in ROWS
    ]
    assert by_hand.generations["text"].tolist() == [
        f"{order} {row}" for order in range(8) for row in ("0.0 0", "0.7 0", "1.0 0", "1.0 1")
    ]


def test_residuals_are_the_stored_tensors_with_the_axes_that_were_asked_for(by_hand):
    """A context whose template lacks a position has NaN there."""
    stored = torch.stack([residuals_of(order) for order in range(8)])
    torch.testing.assert_close(by_hand.residuals(), stored, rtol=0, atol=0, equal_nan=True)
    for layer in by_hand.layers:
        found = by_hand.residuals(layer)
        torch.testing.assert_close(found, stored[:, layer], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(by_hand.residuals(layer, "header_last"), stored[:, layer, 1])
    assert torch.equal(by_hand.residuals(position="header_last"), stored[:, :, 1])
    missing = by_hand.residuals(0, "response_end").isnan().all(1)
    assert missing.nonzero()[:, 0].tolist() == [1, 4, 7]


def test_layers_count_from_the_end_too_and_lists_keep_their_axis(merged):
    every = merged.residuals()
    names = list(merged.positions)
    assert every.shape == (CONTEXTS, LAYERS, len(names), WIDTH)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    for layer in (-1, np.int64(-1), LAYERS - 1):
        torch.testing.assert_close(merged.residuals(layer), every[:, -1], **same)
    torch.testing.assert_close(merged.residuals([-1, 0]), every[:, [-1, 0]], **same)
    torch.testing.assert_close(merged.residuals(range(2), names[4]), every[:, :2, 4], **same)
    found = merged.residuals(3, position=[names[4], names[0]])
    torch.testing.assert_close(found, every[:, 3, [4, 0]], **same)


def test_states_come_in_the_order_of_a_frame_of_turns(parted):
    every = parted.residuals(-1, "header_last")
    for frame in (parted.generations, parted.turns):
        turns = frame.sample(frac=1, random_state=0)
        found = parted.residuals(-1, "header_last", turns=turns)
        assert torch.equal(found, every[turns["order"].to_numpy(copy=True)])
        assert parted.residuals(turns=turns[:2]).shape[:2] == (2, LAYERS)
    with pytest.raises(UserError, match="has no context 'nosuch'; give turns of this run alone"):
        parted.residuals(turns=turns.assign(context_id="nosuch"))
    for wrong in (parted.generations["text"], parted.generations[["text"]]):
        with pytest.raises(UserError, match="a data frame with the column context_id; give rows"):
            parted.residuals(turns=wrong)


def test_positions_are_shown_with_their_tokens(merged, siblings, by_hand):
    tokens = {"query_end": None, "response_end": None, "turn_end": "<|im_end|>"}
    tokens |= {"turn_separator": "\n", "header_0": "<|im_start|>"}
    assert {name: merged.positions[name] for name in tokens} == tokens
    assert list(merged.positions.values())[-1] == "\n"
    shown = f"layers 0 … {LAYERS - 1}; positions query_end, response_end, turn_end '<|im_end|>', "
    assert shown in repr(merged)
    for name, text in siblings.positions.items():  # as the main job wrote them
        ids = [
            context.token_ids[context.positions[name]]
            for context in siblings.contexts.itertuples()
            if context.positions[name] is not None
        ]
        assert text == (None if name.endswith(("y_end", "e_end")) else siblings.decode(ids[:1]))
    with pytest.raises(UserError, match=r"'turn_end' was not kept .* give one of response_end, he"):
        by_hand.residuals(0, "turn_end")


def test_a_layer_is_read_without_the_others_and_unknown_ones_are_refused(by_hand, monkeypatch):
    asked = []

    @contextmanager
    def recorded(file, framework):
        with safe_open(file, framework) as tensors:
            yield SimpleNamespace(get_slice=lambda x: asked.append(x) or tensors.get_slice(x))

    given = r"give whole numbers: 0 \(embeddings\) … 1, or -1 \(the last\) … -2"
    for layer in (2, -3, 0.5, "x", slice(0, 1), [0, 2]):
        with pytest.raises(UserError, match=rf"by-hand has no layer .*; {given}"):
            by_hand.residuals(layer, "header_last")
    with pytest.raises(UserError, match="by-hand has no layer '15'"):  # not '1'
        by_hand.residuals("15")
    for position in ("query_end", 3, ["header_last", "query_end"]):
        with pytest.raises(UserError, match=r"was not kept .* response_end, header_last '.n'"):
            by_hand.residuals(0, position)
    for nothing in ({"layer": []}, {"position": []}):
        with pytest.raises(UserError, match="empty list; name a layer and a position"):
            by_hand.residuals(**nothing)
    both = by_hand.residuals(position="header_last")
    monkeypatch.setattr(reader, "safe_open", recorded)
    assert torch.equal(by_hand.residuals(1, "header_last"), both[:, 1])
    assert {*asked} == {"layer_01"}


def test_a_run_without_its_tensors_is_read_but_for_these(merged, run, capfd):
    (run.path / "residuals/00000.safetensors").unlink()
    found = Run.open(run.path)
    pd.testing.assert_frame_equal(found.generations, merged.generations)
    pd.testing.assert_frame_equal(found.contexts, merged.contexts)
    again = rf"is missing; .* compute the part again with: {re.escape(found.command)}$"
    with pytest.raises(UserError, match=f"residuals/00000.safetensors {again}"):
        found.residuals(layer=1)
    shutil.rmtree(run.path / "header_logits")
    away = "header_logits lacks all 1 files that were written there; mount its disk or bring"
    with pytest.raises(UserError, match=away):
        found.header_logits()
    for command, words in ((judge, ["run"]), (rates, []), (report, [])):
        done = call(lambda more: command([*words, *more]), [str(run.path)], capfd)  # noqa: B023
        assert done.status == 0, done.err
    assert (run.path / "report.html").stat().st_size > 10_000


def test_a_run_knows_the_command_that_makes_it(tmp_path, run):
    settings = {
        "limit": None,
        "temperatures": (0.5, 1.0),
        "system": "Be nice, don't",
        "unfinished": True,
    }
    settings |= {
        "template_option": {"a": False, "b": "x y"},
        "model": "my model",
        "dtype": "float16",
    }
    command = Settings(**settings).command(tmp_path)

    def asked(command: str) -> Settings:
        words = shlex.split(command)
        return settings_of(build_parser().parse_args(words[words.index("sample") + 1 :]))

    assert asked(command) == Settings(**settings)
    assert command.endswith(f" --out {tmp_path}") and asked(run.command).to_dict() == run.settings
    assert Settings().command(tmp_path).endswith(f"ia-mech sample --out {tmp_path}")


def test_a_run_without_a_finished_part_says_so(tmp_path):
    RunWriter(tmp_path / "run", RECORD).close()
    run = Run.open(tmp_path / "run", unfinished=True)
    assert not run.complete and run.verify() == []
    for ask in (
        lambda: run.contexts,
        lambda: run.generations,
        lambda: run.residuals(0, "header_last"),
        run.header_logits,
        run.digest,
    ):
        with pytest.raises(UserError, match=r"run holds no finished part yet; let the run go on"):
            ask()


def test_turns_name_the_generations(merged):
    turns, generations = Run(merged.path).turns, Run(merged.path).generations
    assert {*turns} == {*layout.NAMES, *layout.PLACE}
    plain = turns.astype({name: generations[name].dtype for name in layout.NAMES})
    pd.testing.assert_frame_equal(plain, generations[list(turns.columns)])
    for name in layout.NAMES:
        assert list(turns[name].cat.categories) == sorted(set(generations[name].dropna()))


def test_windows_hold_a_part_each_and_together_the_run(parted):
    run = Run(parted.path)
    windows = list(run.windows(["context_id", "messages"], ["context_id", "text"]))
    assert len(windows) == 6 and "generations" not in vars(run)
    for contexts, turns in windows:
        assert contexts["context_id"].tolist() == turns["context_id"].unique().tolist()
    rows = pd.concat([turns for _, turns in windows])
    assert rows.index.tolist() == list(range(len(run.generations)))
    assert rows["text"].tolist() == run.generations["text"].tolist()


def test_a_column_that_a_run_lacks_is_named(merged):
    for read in (merged, Run(merged.path)):
        with pytest.raises(UserError, match=r"generations/part-00000.parquet has no column 'txt'"):
            next(read.windows((), ["txt"]))


def test_token_ids_are_read_by_the_runs_own_tokenizer(siblings, tokenizer):
    ids = siblings.generations["token_ids"]
    texts = siblings.decode(ids)
    assert texts == [tokenizer.decode(one.tolist()) for one in ids] and any(texts)
    assert siblings.decode(ids.iloc[0]) == texts[0] and siblings.decode([]) == ""
    assert siblings.tokenizer().get_vocab() == tokenizer.get_vocab()
    for wrong in ("hello", 5, [-1], [10**9], [1.5]):
        with pytest.raises(UserError, match=r"give run\.generations\['token_ids'\]"):
            siblings.decode(wrong)


def test_the_likeliest_first_tokens_are_those_of_the_softmax(siblings):
    at, temperatures = 5, (0.5, 1.0, 2.0)
    table = siblings.top_tokens(siblings.contexts["context_id"].iloc[at], temperatures, k=3)
    logits = siblings.header_logits()[at].double()
    order = logits.argsort(descending=True)[:3]
    assert table["token_id"].tolist() == order.tolist()
    assert table["token"].tolist() == [siblings.decode([token]) for token in order]
    for temperature in temperatures:
        expected = (logits / temperature).softmax(-1)[order]
        assert table[temperature].to_numpy() == pytest.approx(expected.numpy(), rel=1e-5)
    usual = siblings.top_tokens(siblings.contexts["context_id"].iloc[at])
    assert list(usual) == ["token_id", "token", *siblings.settings["temperatures"]]
    assert len(usual) == 5
    with pytest.raises(UserError, match=r"give a context_id of run\.contexts"):
        siblings.top_tokens("nosuch")
    with pytest.raises(UserError, match="from 1 up"):
        siblings.top_tokens(siblings.contexts["context_id"].iloc[0], k=0)
    with pytest.raises(UserError, match=r"give \(0\.7, 1\.0\)"):
        siblings.top_tokens(siblings.contexts["context_id"].iloc[0], 0.7)
    with pytest.raises(UserError, match=r"a row of run\.contexts"):
        siblings.header_logits()["q1"]


def test_metadata_are_columns(merged):
    stored = merged.contexts.set_index("context_id")["metadata"].map(json.loads)
    assert merged.metadata.index.tolist() == stored.index.tolist()
    rows = {id_: row.dropna().to_dict() for id_, row in merged.metadata.iterrows()}
    assert rows == stored.to_dict() and merged.metadata.shape[1] > 1


def test_a_gap_in_a_field_changes_no_value(merged):
    run = Run.open(merged.path)
    large = [2**53, 2**53 + 1, None]
    fields = [{"n": n, "ok": None if n is None else n % 2 == 0, "big": 2**70} for n in large]
    run.contexts = run.contexts.head(3).assign(metadata=[json.dumps(one) for one in fields])
    assert [str(kind) for kind in run.metadata.dtypes] == ["Int64", "boolean", "object"]
    assert run.metadata["n"].tolist()[:2] == large[:2]
    beside = merged.turns.join(run.metadata.add_prefix("data."), on="context_id")
    assert len(beside) == len(merged.turns) and beside["data.n"].max() == 2**53 + 1
    assert run.groups["n"].tolist() == [str(2**53), str(2**53 + 1), "–"]


# -- header logits ------------------------------------------------------------------------------


def _realistic_logits() -> torch.Tensor:
    """``[2, 49152]``: most tokens in a broad heap, a few likely ones far above it; one context with
    a clear favourite and one without."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 49_152, generator=generator) * 2.8 - 2
    for row, top in enumerate((19.0, 12.0)):
        likely = torch.randperm(49_152, generator=generator)[:400]
        logits[row, likely] = top - 2.2 * torch.arange(1, 401).log()
    return logits


def _total_variation(log_probs: torch.Tensor, logits: torch.Tensor, temperature: float) -> float:
    assert log_probs.dtype == torch.float32 and log_probs.shape == logits.shape
    expected = (logits.double() / temperature).softmax(-1)
    return float((log_probs.double().exp() - expected).abs().sum() / 2)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_full_header_logits_give_the_distribution_at_any_temperature(tmp_path, temperature):
    logits = _realistic_logits()
    kept = first_part(tmp_path, shifted(logits)).header_logits()
    assert len(kept) == 2
    for index, row in enumerate(logits):
        log_probs = kept.log_probs(index, temperature)
        assert _total_variation(log_probs, row, temperature) < 1e-3
        torch.testing.assert_close(kept[index], row - row.max(), rtol=2**-11, atol=1e-6)
        assert kept[index].max() == 0
    assert [float(row.max()) for row in kept] == [0, 0]  # it can be iterated over


def test_header_logits_of_no_context_and_below_their_precision(parted):
    kept = parted.header_logits()
    for read in (kept.stored, kept.__getitem__, kept.log_probs):
        for index in (-1, CONTEXTS, 99):
            with pytest.raises(UserError, match=f"none of number {index}; give 0 … {CONTEXTS - 1}"):
                read(index)
    with pytest.warns(UserWarning, match=r"at T = 0.29 may be off by more than 1e-3"):
        kept.log_probs(0, 0.29)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.log_probs(0, 0.3)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="has no distribution"):
            kept.log_probs(0, temperature)


def test_a_run_without_header_logits_says_so(tmp_path):
    run = planted(tmp_path / "run", [2], header_logits="none")
    with pytest.raises(UserError, match="run has no header logits; sample with --header-logits"):
        run.header_logits()
    assert len(run.digest()) == 64


# -- the digest ---------------------------------------------------------------------------------


def test_the_digest_ignores_parts_and_manifests(merged, parted, tmp_path):
    assert len(merged.parts("contexts")) == 1 and len(parted.parts("contexts")) == 6
    assert merged.digest() == parted.digest()
    moved = Run.open(shutil.copytree(parted.path, tmp_path / "elsewhere"))
    assert moved.digest() == parted.digest()


def _last_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The first finite number of a tensor, and no other, changed in its last bit."""
    changed = tensor.clone().reshape(-1)
    at = int(changed.isfinite().nonzero()[0])
    bits = changed.view(torch.int16 if tensor.dtype == torch.float16 else torch.int32)
    bits[at] ^= 1
    return changed.reshape(tensor.shape)


def test_the_digest_changes_with_any_one_value(by_hand, tmp_path):
    def column(table: int, name: str, value):
        return lambda s: s.__setitem__(table, with_column(name, value)(s[table]))

    def moved(first: str, second: str):
        def change(stored) -> None:
            texts = [first, second, *stored[1]["text"].to_pylist()[2:]]
            at = stored[1].column_names.index("text")
            stored[1] = stored[1].set_column(at, "text", [texts])

        return change

    changes = {
        "flag": column(0, "real_follow_up_greedy", True),
        "false": column(0, "real_follow_up_greedy", False),  # it was null
        "zero": column(0, "first_token_entropy", 0.0),  # it was null
        "empty": column(0, "real_follow_up", ""),  # it was null
        "messages": column(0, "messages", [{"role": "user", "content": ""}]),
        "positions": column(0, "positions", {"response_end": 3, "header_last": None}),
        "text": column(1, "text", "another"),
        "text moved": moved("ab", "c"),
        "text moved on": moved("a", "bc"),
        "text moved whole": moved("abc", ""),
        "no logprobs": column(1, "logprobs_raw", []),
        "logprobs": column(1, "logprobs_raw", [0.5]),
        "cut elsewhere": column(1, "logprobs_raw", [0.0]),
        "logit": lambda s: s.__setitem__(2, _last_bit(s[2])),
        "residual": lambda s: s.__setitem__(3, _last_bit(s[3])),
    }
    digests = {
        name: write_by_hand(tmp_path / name, change).digest() for name, change in changes.items()
    }
    digests["none"] = by_hand.digest()
    assert len(set(digests.values())) == len(digests)
