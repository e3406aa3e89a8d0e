"""Likelihood of real follow-ups: what is read off runs, and the estimates by hand."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent
from runs import rewritten, with_settings
from shell import call

from experiments.likelihood.__main__ import main
from experiments.likelihood.analyse import estimates
from experiments.likelihood.read import References, Scored, read
from ia_mech.collect.job import collect
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.settings import Settings

DECODING = {"temperatures": (0.85, 1.0), "samples": 1, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def sampled(tiny_subject, tmp_path_factory):
    """Make a run in a folder of its own."""

    def make(conversations=scored.CONVERSATIONS, **options) -> Run:
        folder = tmp_path_factory.mktemp("likelihood")
        data = scored.dataset(folder / "chats.jsonl", conversations)
        options = DECODING | {"contrasts": True, "swaps": 2} | options
        settings = Settings(dataset=data, limit=None, **options)
        return collect(settings, tiny_subject, folder / "run", Silent())

    return make


@pytest.fixture(scope="module")
def plain(sampled) -> Run:
    """Tests leave it as it is."""
    return sampled()


@pytest.fixture
def copied(plain, tmp_path):
    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(plain.path, tmp_path / name))

    return make


# -- what is read -------------------------------------------------------------------------------


def test_how_a_turn_stands_among_swapped_responses_is_made_from_what_is_stored(plain):
    found = read([plain]).candidates
    own = found[found["name"] == "reference"]
    stored = plain.contexts[plain.contexts["reference_logprob"].notna()]
    several = 0
    for (_, one), (_, row) in zip(own.iterrows(), stored.iterrows(), strict=True):
        first, *rest = swapped = row["reference_logprob_swapped"].tolist()
        bits = (row["reference_logprob"] - sum(swapped) / len(swapped)) / np.log(2)
        assert one["response, mean of logs"] == pytest.approx(bits)
        assert one["likeliest"] == all(row["reference_logprob"] > value for value in swapped)
        assert one["chance"] == 1 / (1 + len(swapped))
        if rest:
            several += 1
            placebo = (first - sum(rest) / len(rest)) / np.log(2)
            assert one["placebo"] == pytest.approx(placebo)
    assert several > 1
    others = found[~found["name"].isin(["reference", "other_reference"])]
    assert others[["response, mean of logs", "placebo", "likeliest", "chance"]].isna().all(None)


def test_the_estimates_of_a_run_are_means_of_what_it_stores(plain):
    found = estimates(read([plain]), resamples=100)
    assert set(found["dataset"]) == {"plain", "odd", "(all)"}
    found = found[found["dataset"] == "(all)"]
    stored = plain.contexts[plain.contexts["reference_logprob"].notna()]
    curve = np.stack(stored["reference_logprob_tempered_with_end"].to_list()).mean(0)
    rows = found[found["quantity"] == "tempered log p"]
    np.testing.assert_allclose(rows["value"], curve)
    best = found[found["quantity"] == "best temperature"]["value"].item()
    assert best == rows["temperature"].to_numpy()[np.argmax(curve)]
    at_one = rows[rows["temperature"] == 1.0]["value"].item()
    np.testing.assert_allclose(at_one, stored["reference_logprob_with_end"].mean(), rtol=1e-6)
    values = found.set_index(["quantity", "of"])["value"]
    header = stored["reference_header_contrast_bits"].mean()
    np.testing.assert_allclose(values["contrast, bits", "header"], header)
    shares = [
        row["reference_logprob_with_end"] > one["logprob_with_end"]
        for _, row in stored.iterrows()
        for one in row["candidates"]
        if one["name"] == "query"
    ]
    beats = found[(found["quantity"] == "reference beats") & (found["of"] == "query")]
    assert beats[beats["temperature"] == 1.0]["value"].item() == pytest.approx(np.mean(shares))


def test_references_that_two_runs_score_in_the_same_contexts_are_refused(sampled, plain):
    again = sampled(contrasts=False, swaps=0, seed=1)
    with pytest.raises(UserError, match=r"score \d+ of the same follow-ups in the same contexts"):
        read([plain, again])


def test_what_a_reader_of_contrasts_has_to_know_is_noted(sampled, plain):
    own = sampled(response="generate", max_response_tokens=3, swaps=1)
    found = read([plain, own]).notes
    rows = own.contexts
    cut = int(rows.loc[rows["reference_logprob"].notna(), "response_cut_off"].sum())
    assert cut > 0
    for note, said in zip(found[:5], (
        f"{cut} of 16 follow-ups are scored after a response that was cut off",
        f"responses of {own.path.name} are the model's own",
        "2 of 16 contexts have fewer swapped responses than --swaps asked for",
        "no control in odd",
        "runs that were pooled differ in response, max_response_tokens, swaps.",
    ), strict=True):  # fmt: skip
        assert note.startswith(said)


def test_runs_without_contrasts_have_likelihoods_and_a_note(copied):
    run = rewritten(copied().path, "run.json", with_settings(contrasts=False))
    scores = read([run])
    plain = scores.candidates[scores.candidates["name"] == "reference"]
    plain = plain.assign(**dict.fromkeys([*CONTRASTS], NAN))
    alone = replace(scores, candidates=plain)
    found = estimates(alone, resamples=100)
    assert not found["quantity"].str.contains("contrast, bits|beats|likeliest after").any()
    assert found.loc[found["quantity"] == "log p", "value"].notna().all()
    assert scores.notes[0].startswith("no contrasts and rivals: they are scored where sampling has")
    assert not any("--swaps" in note or "no control" in note for note in scores.notes)


def test_a_run_of_one_follow_up_has_estimates_without_intervals(sampled):
    found = estimates(read([sampled(scored.CONVERSATIONS[:1], swaps=0)]), resamples=100)
    contrasts = found[found["quantity"] == "contrast, bits"]
    assert contrasts["of"].tolist() == ["empty", "header"]  # there is no other response
    assert contrasts["low"].isna().all() and set(contrasts["method"]) == {"one source"}


def test_runs_without_follow_ups_are_refused(sampled):
    with pytest.raises(UserError, match=r"^no context has a reference turn.*--followup-column"):
        read([sampled([scored.CONVERSATIONS[3]])])


def test_the_command_writes_what_is_estimated(copied, capfd):
    run = copied()
    outcome = call(main, [str(run.path), "--resamples", "100"], capfd)
    assert outcome.status == 0, outcome.err
    folder = run.path / "results" / "likelihood"
    assert sorted(p.name for p in folder.iterdir()) == [
        *("contrasts.pdf", "contrasts.png", "contrasts.svg", "estimates.parquet", "result.json"),
        *(f"temperature_curve.{kind}" for kind in ("pdf", "png", "svg")),
    ]
    found = pd.read_parquet(folder / "estimates.parquet")
    again = estimates(read([run]), resamples=100)
    assert found.pop("test").isna().all()
    pd.testing.assert_frame_equal(found, again.drop(columns="test"), check_dtype=False)
    for text in ("best T", "another's follow-up", "likelier than"):
        assert text in outcome.out


# -- on frames made by hand: shares and means worked out by hand -------------------------------

TEMPERATURES = np.array([0.5, 1.0, 2.0])
NAN = np.nan


CONTRASTS = {  # of a reference, against what stands in the response's place
    "response_contrast_bits": 3.0,
    "empty_contrast_bits": 2.0,
    "header_contrast_bits": NAN,
    "response, mean of logs": 4.0,
    "placebo": -0.5,
    "likeliest": 1.0,
    "chance": 0.2,
}


def reference(source: str, curve: list[float], **changes) -> dict:
    """A reference of two tokens whose log-probabilities by temperature are these."""
    return {
        "dataset": "chats",
        "source": source,
        "curve": np.array(curve, dtype=float),
        "reference_token_ids": np.array([5, 6]),
        "reference_bits_per_byte": 2.0,
        "reference_logprob": -10.0,
        "reference_logprob_with_end": -11.0,
        "reference_greedy": False,
        "reference_greedy_tokens": 0,
        "reference_greedy_left_rank": 4.0,
        "reference_greedy_left_prob": 0.25,
        "candidate_log_odds": 1.0,
        "contrasts": CONTRASTS,
    } | changes


def candidate(
    at: int, name: str, curve: list[float], logprob=-10.0, tokens=2, bits=NAN, **contrasts
) -> dict:
    """A candidate of the reference in that row; as a whole turn it is what the curve says."""
    return {
        "reference": at,
        "name": name,
        "curve": np.array(curve, dtype=float),
        "whole": curve[1],
        "logprob": logprob,
        "tokens": tokens,
        **dict.fromkeys(CONTRASTS, NAN),
        "response_contrast_bits": bits,
    } | contrasts


def by_hand(references, candidates=()) -> Scored:
    """As ``read`` gives it; references are their own candidates too."""
    frame = pd.DataFrame(references)
    curve = np.stack(frame.pop("curve").to_list())
    frame = frame.drop(columns="contrasts")
    own = [
        candidate(at, "reference", row["curve"].tolist(), row["reference_logprob"])
        | {"tokens": len(row["reference_token_ids"])}
        | row["contrasts"]
        for at, row in enumerate(references)
    ]
    rivals = pd.DataFrame([*own, *candidates])
    rivals["dataset"] = frame["dataset"].to_numpy()[rivals["reference"]]
    rivals["source"] = frame["source"].to_numpy()[rivals["reference"]]
    references = References(frame, TEMPERATURES, curve, {}, True)
    return Scored([], references, rivals, [])


def rows(found: pd.DataFrame, quantity: str, of: str = "", **changes) -> pd.DataFrame:
    asked = {"dataset": "chats", "quantity": quantity, "of": of} | changes
    for name, value in asked.items():
        found = found[found[name] == value]
    return found


def value(found: pd.DataFrame, quantity: str, of: str = "", **changes) -> float:
    return rows(found, quantity, of, **changes)["value"].item()


def of(*given) -> pd.DataFrame:
    return estimates(by_hand(*given), resamples=100)


# -- references ---------------------------------------------------------------------------------


REFERENCES = [
    reference("s0", [-30, -20, -24]),
    reference("s0", [-40, -22, -16], reference_logprob=-4.0, reference_bits_per_byte=4.0),
    reference(
        "s1",
        [-90, -30, -20],
        reference_token_ids=np.array([], dtype=int),
        reference_logprob=0.0,
        reference_logprob_with_end=-2.0,
        reference_bits_per_byte=NAN,
        reference_greedy=True,
        reference_greedy_left_rank=NAN,
        reference_greedy_left_prob=NAN,
    ),
    reference("s2", [-20, -12, -20], reference_greedy_tokens=2, reference_greedy_left_rank=100.0),
]


def test_means_are_over_turns_and_leave_out_what_an_empty_turn_has_not():
    found = of(REFERENCES)
    assert value(found, "bits per byte") == pytest.approx((2 + 4 + 2) / 3)
    assert value(found, "log p per token") == pytest.approx((-5 - 2 - 5) / 3)
    assert value(found, "log p") == pytest.approx((-10 - 4 + 0 - 10) / 4)
    assert value(found, "log p with turn-end") == pytest.approx((-11 - 11 - 2 - 11) / 4)
    assert value(found, "greedy writes it") == 0.25
    assert value(found, "tokens until greedy leaves") == 0.5
    assert value(found, "probability where greedy leaves") == 0.25
    assert value(found, "median rank where greedy leaves") == 4
    turns = {"bits per byte": 3, "log p": 4, "median rank where greedy leaves": 3}
    assert {name: rows(found, name)["rows"].item() for name in turns} == turns
    assert rows(found, "log p")["sources"].item() == 3
    assert rows(found, "log p")["temperature"].isna().all()


def test_the_best_temperature_is_where_the_mean_curve_is_highest():
    found = of(REFERENCES)
    curve = [
        value(found, "tempered log p", temperature=t)
        for t in TEMPERATURES  # each turn counts alike
    ]
    assert curve == pytest.approx([-180 / 4, -84 / 4, -80 / 4])
    assert value(found, "best temperature") == 2.0
    assert value(of(REFERENCES[:1]), "best temperature") == 1.0
    assert value(of(REFERENCES[2:]), "best temperature") == 2.0  # -20 before -21


def test_the_best_temperature_lies_between_points_of_the_grid():
    alike = [reference(f"s{i}", [-30, -20, -24]) for i in range(5)]
    best = rows(of(alike), "best temperature")
    assert best[["value", "low", "high"]].to_numpy().tolist() == [[1.0, 0.5, 2.0]]
    edge = rows(of([reference(f"s{i}", [-30, -20, -10]) for i in range(5)]), "best temperature")
    assert edge[["value", "low", "high"]].to_numpy().tolist() == [[2.0, 1.0, 2.0]]
    alone = rows(of(alike[:1]), "best temperature")
    assert np.isnan(alone["low"].item())


def test_several_datasets_are_reported_each_and_together():
    other = [reference("t0", [-1, -2, -3], dataset="maths", reference_bits_per_byte=1.0)]
    found = of([*REFERENCES, *other])
    assert set(found["dataset"]) == {"chats", "maths", "(all)"}
    assert value(found, "bits per byte", dataset="maths") == 1.0
    assert value(found, "bits per byte", dataset="(all)") == pytest.approx((2 + 4 + 2 + 1) / 4)
    assert value(found, "best temperature", dataset="maths") == 0.5
    assert set(of(REFERENCES)["dataset"]) == {"chats"}


# -- contrasts ----------------------------------------------------------------------------------


def test_contrasts_the_control_and_their_difference():
    references = [
        reference("s0", [-3, -2, -1], contrasts=CONTRASTS | {"response_contrast_bits": bits})
        for bits in (8, 2, 5)
    ]
    references[1]["reference_token_ids"] = np.array([1, 2, 3, 4])
    control = [
        candidate(0, "other_reference", [-3, -2, -1], bits=2.0),
        candidate(2, "other_reference", [-3, -2, -1], bits=-4.0),
        candidate(1, "query", [-3, -2, -1]),
    ]
    found = of(references, control)
    assert value(found, "contrast, bits", "response") == 5.0
    assert value(found, "contrast, bits per token", "response") == pytest.approx(
        (8 / 2 + 2 / 4 + 5 / 2) / 3
    )
    assert value(found, "contrast, bits", "empty") == 2.0
    assert rows(found, "contrast, bits", "header").empty  # none was made
    assert value(found, "control's contrast, bits", "response") == -1.0
    # Of the two contexts that have both: 8 - 2 and 5 + 4.
    assert value(found, "contrast less control's, bits", "response") == 7.5
    assert rows(found, "contrast less control's, bits", "response")["rows"].item() == 2
    assert rows(found, "control's contrast, bits", "empty").empty  # the control has none


# -- rivals -------------------------------------------------------------------------------------


def test_shares_of_contexts_where_the_reference_is_likelier():
    """Reference: whole -20, -22, -30, -12; per token -5, -2, none, -5."""
    rivals = [
        candidate(0, "query", [-31, -19, -25], logprob=-18.0, tokens=3),  # -6 per token
        candidate(1, "query", [-31, -23, -10], logprob=-1.0, tokens=1),  # -1
        candidate(2, "query", [-90, -31, -20], logprob=-1.0, tokens=1),
        candidate(3, "closing", [-90, -12, -90], logprob=-20.0, tokens=0),
    ]
    found = of(REFERENCES, rivals)
    beats = [value(found, "reference beats", "query", temperature=t) for t in TEMPERATURES]
    assert beats == pytest.approx([1 / 3, 2 / 3, 1 / 3])
    assert rows(found, "reference beats", "query", temperature=1.0)["rows"].item() == 3
    assert value(found, "reference beats per token", "query") == 0.5
    assert rows(found, "reference beats per token", "query")["rows"].item() == 2
    assert value(found, "reference beats", "closing", temperature=1.0) == 0.0  # a tie
    assert np.isnan(value(found, "reference beats per token", "closing"))
    assert value(found, "log-odds among candidates") == 1.0
