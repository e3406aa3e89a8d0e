"""The follow-up mass, against probabilities and greedy turns that are computed by other means."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import families
import numpy as np
import pandas as pd
import pytest
import scored
import tiny
from conftest import Silent
from contract import full_logits
from judging import FakeJudge
from runs import rewritten, sampled, unfinished, with_settings
from shell import call, refusal

from experiments import mass
from experiments.mass import AFTER_WRONG, FIRST, GREEDY, LESS, RATE, REST, SHARE, WHOLE
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE
from ia_mech.judge.judging import label_run
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, FOLLOW_UP, OUT_OF_ROLE
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.judge.verdict import Verdict
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.rates.compute import rates
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings

T, COVERED, TOKENS, SAMPLES = 0.7, 0.8, 4, 32
KINDS = (FOLLOW_UP, "generic", "repeats_response", FOLLOW_UP, CANNOT_ASSESS, "repeats_query")
DECODED = {"temperatures": (T,), "max_new_tokens": TOKENS, "header_logits": "none", "limit": None}


def kind_of(text: str) -> str:
    """The planted label of a turn."""
    return KINDS[crc32(text.encode()) % len(KINDS)]


class ByText(FakeJudge):
    def __init__(self) -> None:
        super().__init__(lambda item, repeat: Verdict(kind_of(item.turn)), paid=False)


@pytest.fixture(autouse=True)
def _judged_by_text(monkeypatch):
    monkeypatch.setattr("experiments.arms.builtin_judge", ByText)


def judged(settings: Settings, subject: Subject, folder: Path) -> Run:
    run = sampled(settings, subject, folder, Silent())
    label_run(run, ByText(), "by_text", Silent())
    return run


@pytest.fixture(scope="module")
def placed(tiny_subject, tiny_model_dir) -> Subject:
    """The tiny model, by the name of its folder."""
    return replace(tiny_subject, spec=ModelSpec(tiny_model_dir))


@pytest.fixture(scope="module")
def used(placed, tmp_path_factory) -> Run:
    """Turns with one sampled token, and with all; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("mass")
    data = scored.dataset(folder / "chats.jsonl")
    how = {"model": placed.spec.name, "dataset": data, "samples": SAMPLES} | DECODED
    return judged(Settings(**how, sampled_tokens=(1, "all")), placed, folder / "run")


@pytest.fixture(scope="module")
def out(used, tmp_path_factory) -> Path:
    """The folder of its follow-up mass."""
    folder = tmp_path_factory.mktemp("result") / "mass"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.arms.builtin_judge", ByText)
        assert mass.main(words_for(used, folder)) == 0
    return folder


def words_for(run: Run, folder: Path, share: float = COVERED) -> list[str]:
    return [str(run.path), "--share", str(share), "--resamples", "200", "--out", str(folder)]


@pytest.fixture(scope="module")
def slow(used, placed, out) -> pd.DataFrame:
    """What :func:`experiments.mass.masses` should find, from plain passes and plain generation."""
    model, named = placed.model, Run.open(out / mass.TURNS / "run").generations
    texts = dict(zip(map(tuple, named["token_ids"]), named["text"], strict=True))
    stops = [int(i) for i in used.record["identity"]["chat"]["stop_ids"]]
    rows = []
    for context in used.contexts.itertuples():
        ids = [int(i) for i in context.token_ids]
        p = (full_logits(model, ids, [0])[-1].double() / T).softmax(-1)
        held, row = 0.0, {"context_id": context.context_id, "turns": {}}
        totals = dict.fromkeys((SHARE, IN_ROLE, "assessed"), 0.0)
        for token in p.argsort(descending=True)[:40].tolist():
            turn = [token]
            while turn[-1] not in stops and len(turn) < TOKENS:
                turn.append(int(full_logits(model, ids + turn, [0])[-1].argmax()))
            row["turns"][token] = turn
            kind = kind_of(texts[tuple(turn)])
            if not totals["assessed"] and held == 0:
                row[f"{GREEDY} {SHARE}"] = float(kind == FOLLOW_UP)
            totals[SHARE] += p[token].item() * (kind == FOLLOW_UP)
            totals["assessed"] += p[token].item() * (kind in ASSESSED)
            totals[IN_ROLE] += p[token].item() * (kind in ASSESSED and kind not in OUT_OF_ROLE)
            held += p[token].item()
            if held >= COVERED:
                break
        row |= {f"{FIRST} {of}": totals[of] for of in (SHARE, IN_ROLE)}
        rows.append(row | {REST: 1 - totals["assessed"]})
    return pd.DataFrame(rows).set_index("context_id")


def test_each_context_s_mass_is_the_sum_over_its_first_tokens(out, slow):
    found = pd.read_parquet(out / "contexts.parquet").set_index("context_id")
    assert set(found.index) == set(slow.index)
    for name in (f"{FIRST} {SHARE}", f"{FIRST} {IN_ROLE}", REST):
        wanted = slow[name].reindex(found.index).to_numpy(float)
        np.testing.assert_allclose(found[name].to_numpy(float), wanted, atol=1e-3, err_msg=name)
    assert (slow[REST] > 1 - COVERED).any()  # some turns can't be assessed


def estimate(out: Path, quantity: str, decoding: str = "", term: str = mass.EVERY) -> pd.Series:
    rows = pd.read_parquet(out / "estimates.parquet")
    rows = rows[(rows["quantity"] == quantity) & (rows["decoding"] == decoding)]
    rows = rows[rows["term"] == term]
    rows = rows[rows["dataset"] == "(all)"]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def test_estimates_are_means_over_contexts_and_once_in_role_is_their_ratio(out):
    each = pd.read_parquet(out / "contexts.parquet")
    each = each[each[f"{GREEDY} {SHARE}"].notna()]
    share, rest = each[f"{FIRST} {SHARE}"], 1 - each[REST]
    role = each[f"{FIRST} {IN_ROLE}"] / rest
    assert estimate(out, RATE, FIRST)["value"] == pytest.approx(share.mean())
    of = mass.OF_COVERED
    assert estimate(out, RATE, of)["value"] == pytest.approx((share / rest).mean())
    assert estimate(out, IN_ROLE, of)["value"] == pytest.approx(role.mean())
    once = (share / rest).sum() / role.sum()
    assert estimate(out, ONCE_IN_ROLE, of)["value"] == pytest.approx(once)
    found = pd.read_parquet(out / "estimates.parquet")  # uncovered tokens may be in role, too
    assert set(found.loc[found["decoding"] == FIRST, "quantity"]) == {RATE, REST, AFTER_WRONG}
    assert estimate(out, REST, FIRST)["value"] == pytest.approx(each[REST].mean())
    less = (share / (1 - each[REST]) - each[f"{GREEDY} {SHARE}"]).mean()
    assert estimate(out, RATE + LESS, mass.OF_COVERED)["value"] == pytest.approx(less)
    rise = estimate(out, RATE + LESS, WHOLE)
    assert rise["low"] < 0 < rise["high"]  # it isn't shown: no share of it is said
    every = pd.read_parquet(out / "estimates.parquet")
    assert mass.HELD not in set(every["quantity"])
    none = share[each[f"{GREEDY} {SHARE}"] == 0]
    assert estimate(out, RATE, FIRST, mass.NONE)["value"] == pytest.approx(none.mean())


def annotate(place: Path, turns: int, truth) -> Run:
    """Have a sheet of a run of first tokens filled in by "anna", each turn by its text."""
    run = Run.open(place / mass.TURNS / "run")
    sheet = export_sheet(run, turns)
    rows = [row | {"category": truth(row["user_turn"])} for row in sheet.rows]
    write_sheet(run, sheet, place / "sheet")
    pd.DataFrame(rows).to_csv(place / "filled.csv", index=False)
    import_sheet(run, place / "filled.csv", "anna")
    return run


def other_kind(text: str) -> str:
    """What an annotator calls a turn: some of the judge's follow-ups are none."""
    wrong = kind_of(text) == FOLLOW_UP and crc32(text.encode()) % 3 == 0
    return "repeats_query" if wrong else kind_of(text)


def test_labels_of_all_first_tokens_give_the_annotator_s_mass(used, out, tmp_path, monkeypatch):
    again = Path(shutil.copytree(out, tmp_path / "mass"))
    tokens = mass.first_tokens(Run.open(again / mass.TURNS / "run"), "by_text")
    annotate(again, len(tokens), other_kind)
    assert mass.main([*words_for(used, again), "--annotator", "anna"]) == 0
    note = "anna's labels don't correct the masses: it takes 30 of 10 queries"
    assert any(note in one for one in json.loads((again / "result.json").read_text())["notes"])
    monkeypatch.setattr("experiments.mass.MIN_ANNOTATED_SOURCES", 5)
    assert mass.main([*words_for(used, again), "--annotator", "anna"]) == 0
    truth = tokens["text"].map(other_kind)
    held = {RATE: truth == FOLLOW_UP, IN_ROLE: truth.isin(ASSESSED) & ~truth.isin(OUT_OF_ROLE)}
    greedy = tokens[tokens["greedy"] & tokens[SHARE].notna()]
    kept = tokens["context_id"].isin(greedy["context_id"])
    covered = (tokens["p"] * truth.isin(ASSESSED))[kept].groupby(tokens["context_id"]).sum()
    for quantity, of in held.items():
        by_context = (tokens["p"] * of)[kept].groupby(tokens["context_id"]).sum()
        wanted = {GREEDY: of[greedy.index].mean(), mass.OF_COVERED: (by_context / covered).mean()}
        wanted |= {FIRST: by_context.mean()} if quantity == RATE else {}
        for decoding, value in wanted.items():
            found = estimate(again, quantity, f"{decoding}{mass.CORRECTED}")
            assert found["value"] == pytest.approx(value)
            assert estimate(again, quantity, decoding).equals(estimate(out, quantity, decoding))
    result = json.loads((again / "result.json").read_text())
    labels = int(truth.isin(ASSESSED).sum())
    assert f"Corrected by {labels} labels of anna." in result["sentence"]
    told = estimate(again, RATE, FIRST + mass.CORRECTED)["value"]
    assert f"T = 0.7 is {told:.2f} [" in result["sentence"]
    assert "anna" in result["about"]["labellers"]


def test_likely_first_tokens_are_drawn_for_annotation_more_often(out):
    run = Run.open(out / mass.TURNS / "run")
    p = np.exp(run.generations["logprob_tempered"].astype(float))
    sheet = export_sheet(run, 40)
    keys = run.turns[list(KEY)].astype({"context_id": object})
    named = {tuple(key): row for row, key in enumerate(keys.itertuples(index=False))}
    chance = {}
    for place in sheet.key["items"].values():
        if "decoy" in place:
            continue
        assert place["temperature"] > 0  # the greedy turn stands there as a first token's
        row = named[tuple(place[name] for name in KEY)]
        chance.setdefault(place["stratum"], place["inclusion_probability"])
        low, high = mass_of(place["stratum"])
        assert low <= p[row] < high
    assert sum(of["rows"] for of in sheet.key["strata"].values()) == (keys["temperature"] > 0).sum()
    by_size = [chance[name] for name in sorted(chance, key=mass_of)]
    assert by_size == sorted(by_size) and by_size[0] < by_size[-1]


def mass_of(stratum: str) -> tuple[float, float]:
    """The least and the largest probability of a stratum."""
    ends = [1 / int(text) for text in re.findall(r"1/(\d+)", stratum)]
    return (0, *ends) if stratum.startswith("p <") else (*ends, 2)[:2]


def test_turns_with_one_drawn_token_are_those_and_as_often_follow_ups(used, out, slow):
    turns, drawn = used.generations, read_runs([used], "by_text", sampled_tokens=1).turns
    turns = turns[(turns["temperature"] > 0) & (turns["sampled_tokens"] == 1)]
    named = Run.open(out / mass.TURNS / "run").generations
    named = named[named["temperature"] > 0]
    written = {(one.context_id, one.token_ids[0]): [*one.token_ids] for one in named.itertuples()}
    checked = 0
    for one in turns.itertuples():
        for known in (written.get((one.context_id, one.token_ids[0])),
                      slow["turns"][one.context_id].get(int(one.token_ids[0]))):  # fmt: skip
            if known is not None:
                assert [*one.token_ids] == known
                checked += 1
    assert checked > len(turns)
    (counted,) = rates(drawn[drawn["temperature"] > 0])
    held, rest = (estimate(out, name, FIRST)["value"] for name in (RATE, REST))
    error = 3 * 0.5 / np.sqrt(len(turns))
    assert held - error < counted.estimate.value < held + rest + error


def test_a_dry_run_says_how_many_turns_there_are(used, placed, tmp_path, capfd):
    """By the header's logits, if the run has kept them; else how many there are at most."""
    words = [*words_for(used, tmp_path / "no", 0.3), "--dry-run"]
    assert (
        "9 conversations to sample about 41 user turns after each"
        in call(mass.main, words, capfd).out
    )
    kept = replace(
        Settings.read(used.settings | {"dataset": str(used.path.parent / "chats.jsonl")}),
        header_logits="full", sampled_tokens=("all",), samples=1,
    )  # fmt: skip
    run, counts = judged(kept, placed, tmp_path / "run"), []
    for ids in run.contexts["token_ids"]:
        p = (full_logits(placed.model, [*map(int, ids)], [0])[-1] / T).softmax(-1)
        counts.append(1 + int((p.sort(descending=True).values.cumsum(0) < 0.3).sum()))
    assert max(counts) < 40
    said = f"9 conversations to sample about {1 + round(np.mean(counts))} user turns after each"
    words = [*words_for(run, tmp_path / "no", 0.3), "--dry-run"]
    assert said in call(mass.main, words, capfd).out


def test_its_tables_fit_a_terminal(out):
    for table in json.loads((out / "result.json").read_text())["tables"]:
        assert len(table["columns"]) <= 8
        cells = [table["columns"], *table["rows"]]
        widths = [max(map(len, column)) + 3 for column in zip(*cells, strict=True)]
        assert sum(widths) < 150, table["title"]


def test_a_killed_one_goes_on_to_the_same_numbers(used, out, tmp_path):
    again = Path(shutil.copytree(out, tmp_path / "mass"))
    shutil.rmtree(again / mass.TURNS / "run" / "judgements")
    unfinished(Run.open(again / mass.TURNS / "run", unfinished=True))
    assert mass.main(words_for(used, again)) == 0
    one, other = (pd.read_parquet(place / "estimates.parquet") for place in (out, again))
    pd.testing.assert_frame_equal(one, other)


THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize(
    "how", [{"opening": "Thanks. But"}, {"chat_template": "plain"}, {"thinking": "keep"}]
)
def test_the_first_tokens_follow_the_run_s_own_contexts(how, placed, tmp_path, capfd):
    subject = placed
    if "thinking" in how:
        tokenizer = families.build("qwen3_5")
        model = tiny.fresh("llama", vocab_size=len(tokenizer))
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        name = ModelSpec(str(tmp_path / "model"))
        subject = Subject(name, model, tokenizer, weights_hash(model))
    data = [{"query": f"What is {n}?", "response": THOUGHT, "real_follow_up": None} for n in "ab"]
    given = {"model": subject.spec.name, "samples": 1} | DECODED | how
    given["dataset"] = scored.dataset(tmp_path / "chats.jsonl", data)
    run = judged(Settings.read(given), subject, tmp_path / "run")
    outcome = call(mass.main, words_for(run, tmp_path / "mass"), capfd)
    assert outcome.status == 0, outcome.err
    named = Run.open(tmp_path / "mass" / mass.TURNS / "run")
    for one, other in zip(run.contexts["token_ids"], named.contexts["token_ids"], strict=True):
        assert [*one] == [*other]
    greedy = [frame[frame["temperature"] == 0] for frame in (run.generations, named.generations)]
    assert greedy[0]["text"].tolist() == greedy[1]["text"].tolist()


def test_turns_of_a_steered_model_are_refused(used, tmp_path, capfd):
    copy = Path(shutil.copytree(used.path, tmp_path / "run"))
    run = rewritten(copy, "run.json", with_settings(intervention="v.safetensors"))
    line = refusal(call(mass.main, words_for(run, tmp_path / "mass"), capfd))
    assert "was sampled under --intervention" in line
