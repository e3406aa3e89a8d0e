"""A run on disk: what lies where, what a reader gets, and the digest."""

import json
import pickletools
import shutil
import warnings
import zipfile

import datasets
import pandas as pd
import pytest
import torch
from runs import (
    CONTEXTS,
    LAYERS,
    RECORD,
    files_under,
    first_unit,
    sampled,
    snapshot_in,
    with_column,
    write_by_hand,
)
from safetensors import safe_open

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.rows import stored_logits
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, layout

# -- the folder ---------------------------------------------------------------------------------


def test_the_folder_holds_what_is_documented_and_nothing_else(merged):
    part = merged._manifest["parts"][-1]["name"]
    expected = ["run.json", "manifest.json", "conversations.parquet", ".lock", "README.md"]
    expected += [f"contexts/part-{part}.parquet", f"generations/part-{part}.parquet"]
    expected += [f"header_logits/{part}.safetensors"]
    expected += [f"residuals/layer_{layer:02d}/{part}.safetensors" for layer in range(LAYERS)]
    assert files_under(merged.path) == sorted(expected)
    assert merged.complete
    chat = merged.record["identity"]["chat"]
    assert merged.positions == [
        *("query_end", "response_end", "turn_end", "turn_separator"),
        *(f"header_{i}" for i in range(len(chat["header_ids"]) - 1)),
        "header_last",
    ]
    assert merged.layers == range(LAYERS)
    assert merged.config["grid"] == {
        "temperatures": [0.7, 1.0],
        "samples": 2,
        "max_new_tokens": 6,
        "seed": 0,
    }
    assert merged.model["weights_hash"] and chat["template_hash"]


@pytest.mark.parametrize("kind", ["contexts", "generations"])
def test_parquet_opens_in_pandas_and_in_datasets(parted, kind, tmp_path):
    files = sorted(str(f) for f in (parted.path / kind).iterdir())
    theirs = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path)
    )
    frames = pd.concat([pd.read_parquet(f) for f in files])
    ours = parted.contexts if kind == "contexts" else parted.generations
    assert theirs.column_names == list(frames.columns) == list(ours.columns)
    assert len(theirs) == len(frames) == len(ours) == CONTEXTS * (1 if kind == "contexts" else 5)
    assert theirs["context_id"][:] == frames["context_id"].tolist()
    assert [list(ids) for ids in theirs["token_ids"]] == [list(i) for i in frames["token_ids"]]
    assert sorted(frames["context_id"]) == sorted(ours["context_id"])


def test_safetensors_open_by_themselves(merged):
    name = merged._parts[0]["name"]
    with safe_open(merged.path / f"residuals/layer_03/{name}.safetensors", "pt") as tensors:
        assert list(tensors.keys()) == ["residuals"]
        kept = tensors.get_slice("residuals")
        assert kept.get_shape() == [CONTEXTS, len(merged.positions), 32]
        assert kept.get_dtype() == "F32"
        metadata = {key: json.loads(text) for key, text in tensors.metadata().items()}
    assert metadata["positions"] == merged.positions
    stored = pd.read_parquet(merged.path / f"contexts/part-{name}.parquet")
    assert metadata["contexts"] == stored["context_id"].tolist()  # also after merging
    with safe_open(merged.path / f"header_logits/{name}.safetensors", "pt") as tensors:
        assert list(tensors.keys()) == ["shifted"]
        assert json.loads(tensors.metadata()["contexts"]) == metadata["contexts"]
        shape = tensors.get_slice("shifted").get_shape()
        assert shape == [CONTEXTS, merged.model["vocab"]]
        assert tensors.get_slice("shifted").get_dtype() == "F16"


def test_nothing_in_a_run_is_a_pickle(parted):
    magic = {".parquet": b"PAR1", ".json": b"{", ".md": b"---\n"}
    for name in files_under(parted.path):
        path = parted.path / name
        content = path.read_bytes()
        assert path.suffix in (".parquet", ".json", ".safetensors", ".md", "")
        assert content.startswith(magic.get(path.suffix, b""))
        assert not zipfile.is_zipfile(path)  # what torch.save writes
        with pytest.raises((ValueError, IndexError)):
            list(pickletools.genops(content))


# -- reading ------------------------------------------------------------------------------------


def test_units_are_sorted_by_length_and_contexts_come_back_in_order(parted):
    files = sorted((parted.path / "contexts").iterdir())
    stored = [order for f in files for order in pd.read_parquet(f)["order"]]
    lengths = parted.contexts["context_tokens"].tolist()
    assert stored == sorted(range(CONTEXTS), key=lambda i: (lengths[i], i)) != list(range(CONTEXTS))
    assert parted.contexts["order"].tolist() == list(range(CONTEXTS))
    assert parted.contexts.index.tolist() == list(range(CONTEXTS))


def test_generations_come_back_greedy_first_then_by_temperature_and_sample(parted, by_hand):
    grid = [(0.0, 0), (0.7, 0), (0.7, 1), (1.0, 0), (1.0, 1)]
    rows = parted.generations[["order", "temperature", "sample"]]
    assert list(rows.itertuples(index=False, name=None)) == [
        (order, *row) for order in range(CONTEXTS) for row in grid
    ]
    assert by_hand.generations["text"].tolist() == [
        f"{order} {row}" for order in range(8) for row in ("0.0 0", "0.7 0", "1.0 0", "1.0 1")
    ]


@pytest.mark.parametrize("name", ["merged", "parted"])
def test_residuals_are_the_stored_tensors_in_the_order_of_contexts(name, request):
    run = request.getfixturevalue(name)
    where = {
        order: (part["name"], row)
        for part in run._parts
        for row, order in enumerate(
            pd.read_parquet(run.path / f"contexts/part-{part['name']}.parquet")["order"]
        )
    }
    for layer in run.layers:
        for at, position in enumerate(run.positions):
            found = run.residuals(layer, position)
            assert found.shape == (CONTEXTS, 32)
            for order, (part, row) in where.items():
                file = run.path / f"residuals/layer_{layer:02d}/{part}.safetensors"
                with safe_open(file, "pt") as tensors:
                    expected = tensors.get_tensor("residuals")[row, at]
                assert torch.equal(found[order], expected)


def test_an_empty_response_has_no_response_end(tiny_subject, tmp_path):
    data = tmp_path / "chats.jsonl"
    rows = [{"query": "Who?", "response": "You."}, {"query": "Why?", "response": ""}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SampleConfig(dataset=str(data), grid=Grid((), 1, 2), positions=("response_end",))
    run = sampled(config, tiny_subject, tmp_path / "run")
    assert [p["response_end"] is None for p in run.contexts["positions"]] == [False, True]
    for layer in run.layers:
        missing = run.residuals(layer, "response_end").isnan()
        assert missing.all(1).tolist() == missing.any(1).tolist() == [False, True]


def test_a_layer_is_read_without_the_others(by_hand):
    for file in (by_hand.path / "residuals/layer_00").iterdir():
        file.unlink()
    assert by_hand.residuals(1, "header_last").shape == (8, 3)


def test_unknown_layers_and_positions_are_refused(by_hand):
    with pytest.raises(UserError, match=r"layer 2 is not in .*by-hand; give 0 … 1 \(0 = embedd"):
        by_hand.residuals(2, "header_last")
    with pytest.raises(UserError, match="layer -1 is not in"):
        by_hand.residuals(-1, "header_last")
    with pytest.raises(UserError, match=r"'query_end' was not kept .* response_end, header_last"):
        by_hand.residuals(0, "query_end")


def test_a_run_without_a_finished_part_says_so(tmp_path):
    RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "scratch")).close()
    run = Run.open(tmp_path / "run")
    assert not run.complete
    assert run.verify() == []
    for ask in (
        lambda: run.contexts,
        lambda: run.generations,
        lambda: run.residuals(0, "header_last"),
        run.header_logits,
        run.digest,
    ):
        with pytest.raises(UserError, match=r"run holds no finished part yet; let the run go on"):
            ask()


def test_what_is_not_a_run_is_refused(tmp_path, by_hand):
    with pytest.raises(UserError, match=r"nowhere is not a run \(no run.json\)"):
        Run.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is not a run \(no run.json\)"):
        Run.open(tmp_path / "empty")
    file = tmp_path / "file"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"file is not a run \(it is a file\)"):
        Run.open(file)

    manifest = by_hand.path / "manifest.json"
    whole = manifest.read_text()
    for text, problem in [
        ("{}", "manifest.json is damaged .it has no format"),
        ("[]", "manifest.json is damaged .it holds a list, not an object"),
        ("[" * 200_000, "manifest.json is damaged .its values are nested too deep"),
        (whole[:100], "manifest.json is damaged"),
        (whole.replace('"format": 2', '"format": 99'), "manifest.json has format 99, this version"),
    ]:
        manifest.write_text(text)
        with pytest.raises(UserError, match=problem):
            Run.open(by_hand.path)
        with pytest.raises(UserError, match=problem):
            RunWriter.resume(by_hand.path, RECORD)
    manifest.unlink()
    with pytest.raises(UserError, match=r"by-hand is not a run \(no manifest.json\)"):
        Run.open(by_hand.path)
    manifest.write_text(whole)
    RunWriter.resume(by_hand.path, RECORD).close()  # none of the refusals kept the lock
    Run.open(by_hand.path)


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
    kept = first_unit(tmp_path, header_logits=stored_logits(logits, "full")).header_logits()
    assert len(kept) == 2
    for index, row in enumerate((1, 0)):  # the unit holds the contexts 5 and 0, in this order
        log_probs = kept.log_probs(index, temperature)
        assert _total_variation(log_probs, logits[row], temperature) < 1e-3
        shifted = logits[row] - logits[row].max()
        torch.testing.assert_close(kept[index], shifted, rtol=2**-11, atol=1e-6)
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


def test_top_k_header_logits_are_exact_at_one_temperature(tmp_path):
    logits = _realistic_logits()
    stored = stored_logits(logits, "1000")
    assert {key: list(t.shape) for key, t in stored.items()} == {
        "values": [2, 1000],
        "indices": [2, 1000],
        "tail_mass": [2],
    }
    kept = first_unit(tmp_path, header_logits=stored, config="1000").header_logits()
    for index, row in enumerate((1, 0)):
        top = logits[row].topk(1000).indices
        found = kept.log_probs(index)
        expected = logits[row].double().softmax(-1)
        assert float((found[top].double().exp() - expected[top]).abs().sum()) / 2 < 1e-3
        mass = found.double().exp().sum()
        assert abs(float(mass - expected[top].sum())) < 1e-6
        assert mass < 1 - 1e-4  # there is a tail, and it isn't given to the others
        assert sorted((found > -torch.inf).nonzero()[:, 0].tolist()) == sorted(top.tolist())
        assert sorted((kept[index] > -torch.inf).nonzero()[:, 0].tolist()) == sorted(top.tolist())
        with pytest.raises(UserError, match="at T = 1 only; sample with --header-logits full"):
            kept.log_probs(index, 0.7)


def test_a_run_without_header_logits_says_so(tiny_subject, tmp_path):
    config = SampleConfig(limit=2, grid=Grid((), 1, 2), header_logits="none")
    run = sampled(config, tiny_subject, tmp_path / "run")
    assert not (run.path / "header_logits").exists()
    with pytest.raises(UserError, match="run has no header logits; sample with --header-logits"):
        run.header_logits()
    assert len(run.digest()) == 64


def test_header_logits_of_a_run_are_those_of_its_first_tokens(parted):
    """Greedy's first token is the largest logit, at the log-probability the run has for it."""
    kept = parted.header_logits()
    greedy = parted.generations[parted.generations["temperature"] == 0]
    assert len(kept) == CONTEXTS == len(greedy)
    for index, row in enumerate(greedy.itertuples()):
        assert kept[index][row.token_ids[0]] == 0
        assert abs(float(kept.log_probs(index)[row.token_ids[0]]) - row.logprobs_raw[0]) < 2e-3


# -- the digest ---------------------------------------------------------------------------------


def test_the_digest_ignores_the_layout(merged, parted, tmp_path):
    assert (len(merged._parts), len(parted._parts)) == (1, 6)
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
    changes = {
        "context": lambda s: s.__setitem__(0, with_column("reference_greedy", True)(s[0])),
        "text": lambda s: s.__setitem__(1, with_column("text", "another")(s[1])),
        "logprobs": lambda s: s.__setitem__(1, with_column("logprobs_raw", [0.5])(s[1])),
        "logit": lambda s: s.__setitem__(2, {"shifted": _last_bit(s[2]["shifted"])}),
        "residual": lambda s: s.__setitem__(3, _last_bit(s[3])),
    }
    digests = {
        name: write_by_hand(tmp_path / name, tmp_path / "scratch", change=change).digest()
        for name, change in changes.items()
    }
    digests["none"] = write_by_hand(tmp_path / "none", tmp_path / "scratch").digest()
    assert digests["none"] == by_hand.digest()
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_without_a_distribution_is_refused(merged, temperature):
    with pytest.raises(UserError, match="has no distribution"):
        merged.header_logits().log_probs(0, temperature)


def test_turns_name_the_generations(merged):
    turns, generations = Run(merged.path).turns, Run(merged.path).generations
    assert {*turns} == {*layout.NAMES, *layout.PLACE}
    plain = turns.astype({name: generations[name].dtype for name in layout.NAMES})
    pd.testing.assert_frame_equal(plain, generations[turns.columns])
    for name in layout.NAMES:
        assert list(turns[name].cat.categories) == sorted(set(generations[name].dropna()))
    read = Run(merged.path)
    read.generations  # noqa: B018 (read before)
    pd.testing.assert_frame_equal(read.turns, turns, check_categorical=False)


def test_windows_hold_a_part_each_and_together_the_run(parted):
    run, whole = Run(parted.path), Run(parted.path)
    windows = list(run.windows(["context_id", "messages"], ["context_id", "text", "token_ids"]))
    assert len(windows) == len(run.parts("contexts")) > 2 and "generations" not in vars(run)
    for contexts, turns in windows:
        assert len(contexts) == 2 and len(turns) == 2 * len(whole.turns) // CONTEXTS
        assert contexts["context_id"].tolist() == turns["context_id"].unique().tolist()
    rows = pd.concat([turns for _, turns in windows]).sort_index()
    assert rows.index.tolist() == list(range(len(whole.generations)))
    # Read already, or not: a column that an older run lacks is left out.
    for one in (run, whole):
        contexts, turns = next(one.windows(["no_such", "order"], ["no_such", "text"]))
        assert "no_such" not in {*contexts, *turns} and "order" in contexts and "text" in turns
    for name in ("context_id", "text"):
        assert rows[name].tolist() == whole.generations[name].tolist()
    assert [*map(list, rows["token_ids"])] == [*map(list, whole.generations["token_ids"])]
