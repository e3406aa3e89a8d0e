"""Estimates of likelihood on frames made by hand, against shares and means worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from experiments.likelihood import show as figures
from experiments.likelihood import show as screen
from experiments.likelihood.analyse import estimates
from experiments.likelihood.read import Scored

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


def generation(source: str, context: str, bits: float, genuine: float, **changes) -> dict:
    return {
        "run": "r",
        "dataset": "chats",
        "source": source,
        "context_id": context,
        "tokens": 5,
        "finish_reason": "turn_end",
        "temperature": 1.0,
        "genuine": genuine,
        "response_contrast_bits": bits,
        "empty_contrast_bits": NAN,
        "header_contrast_bits": NAN,
    } | changes


def scored(references, candidates=(), generations=()) -> Scored:
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
    written = pd.DataFrame(list(generations), columns=None if generations else ["dataset"])
    return Scored([], TEMPERATURES, frame, curve, rivals, written, None, [])


def rows(found: pd.DataFrame, quantity: str, of: str = "", **changes) -> pd.DataFrame:
    asked = {"dataset": "chats", "quantity": quantity, "of": of} | changes
    for name, value in asked.items():
        found = found[found[name] == value]
    return found


def value(found: pd.DataFrame, quantity: str, of: str = "", **changes) -> float:
    return rows(found, quantity, of, **changes)["value"].item()


def of(*given, **more) -> pd.DataFrame:
    return estimates(scored(*given, **more), resamples=200)


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


def test_references_that_greedy_decoding_writes_all_have_no_rank_where_it_leaves():
    found = of([REFERENCES[2]])
    assert rows(found, "median rank where greedy leaves").empty
    assert np.isnan(value(found, "probability where greedy leaves"))
    assert value(found, "greedy writes it") == 1.0


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


def test_how_often_a_turn_is_likeliest_after_its_own_response():
    worse = {"likeliest": 0.0, "chance": 1 / 3, "response, mean of logs": -1.0}
    references = [
        reference("s0", [-3, -2, -1]),
        reference("s1", [-3, -2, -1], contrasts=CONTRASTS | worse),
        reference("s2", [-3, -2, -1], contrasts=CONTRASTS | dict.fromkeys(worse, NAN)),
    ]
    control = [candidate(0, "other_reference", [-3, -2, -1], **worse)]
    found = of(references, control)
    for turn, share, chance, turns in (
        ("reference", 0.5, (1 / 5 + 1 / 3) / 2, 2),
        ("other_reference", 0.0, 1 / 3, 1),
    ):
        likeliest = rows(found, "likeliest after its response", turn)
        assert (likeliest["value"].item(), likeliest["rows"].item()) == (share, turns)
        by_chance = value(found, "likeliest after its response, by chance", turn)
        assert by_chance == pytest.approx(chance)
    assert value(found, "contrast, bits", "response, mean of logs") == 1.5
    assert value(found, "placebo's contrast, bits", "response, mean of logs") == -0.5
    assert value(found, "contrast less control's, bits", "response, mean of logs") == 5.0


def test_without_another_reference_there_is_no_control():
    found = of(REFERENCES, [candidate(0, "query", [-1, -1, -1])])
    assert set(found[found["quantity"] == "contrast, bits"]["of"]) == {
        "response",
        "response, mean of logs",
        "empty",
    }
    assert not found["quantity"].str.contains("control").any()


def test_controls_stay_with_their_own_dataset():
    references = [
        reference("s0", [-3, -2, -1]),
        reference(
            "t0",
            [-3, -2, -1],
            dataset="maths",
            contrasts=CONTRASTS | {"response_contrast_bits": 7.0},
        ),
    ]
    control = [
        candidate(at, "other_reference", [-3, -2, -1], bits=bits)
        for at, bits in ((0, 1.0), (1, 2.0))
    ]
    found = of(references, control)
    differences = {
        dataset: value(found, "contrast less control's, bits", "response", dataset=dataset)
        for dataset in ("chats", "maths", "(all)")
    }
    assert differences == {"chats": 2.0, "maths": 5.0, "(all)": 3.5}


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


def test_rivals_of_other_datasets_do_not_count():
    references = [*REFERENCES[:1], reference("t0", [-5, -5, -5], dataset="maths")]
    rivals = [candidate(0, "query", [-1, -1, -1]), candidate(1, "query", [-9, -9, -9])]
    found = of(references, rivals)
    beats = {
        dataset: value(found, "reference beats", "query", dataset=dataset, temperature=1.0)
        for dataset in ("chats", "maths", "(all)")
    }
    assert beats == {"chats": 0.0, "maths": 1.0, "(all)": 0.5}


# -- generations --------------------------------------------------------------------------------


WRITTEN = [
    generation("s0", "a", 5.0, 1.0),
    generation("s0", "a", 4.0, 0.0),
    generation("s0", "a", 6.0, 0.0),
    generation("s1", "b", 1.0, 1.0),
    generation("s1", "b", 1.0, 0.0),
    generation("s2", "c", 9.0, 1.0),
    generation("s3", "d", 2.0, 0.0),
    generation("s3", "d", 3.0, NAN),
]
BETWEEN, WITHIN = "AUROC of genuine, between sources", "AUROC of genuine, within contexts"
BITS = "response, bits"


def test_contrasts_of_generations_by_what_the_judge_says():
    found = of(REFERENCES, generations=WRITTEN)
    name = "generations' contrast, bits"
    assert value(found, name, "response", temperature=1.0) == pytest.approx(31 / 8)
    assert value(found, name, "response, genuine") == pytest.approx((5 + 1 + 9) / 3)
    assert value(found, name, "response, not genuine") == pytest.approx((4 + 6 + 1 + 2) / 4)
    assert rows(found, name, "empty").empty


def test_auroc_between_sources_compares_turns_of_different_sources():
    """s0: 5 beats 1 and 2; s1: 1 loses to 4, 6 and 2; s2: 9 beats all four."""
    found = of(REFERENCES, generations=WRITTEN)
    assert value(found, BETWEEN, BITS) == pytest.approx(6 / 9)
    assert rows(found, BETWEEN, BITS)["rows"].item() == 7


def test_contrasts_of_generations_per_token():
    written = [row | {"tokens": 2 + at} for at, row in enumerate(WRITTEN)]
    written[0] |= {"finish_reason": "length", "tokens": 1}
    written[7] |= {"tokens": 1}  # a turn-end alone
    found = of(REFERENCES, generations=written)
    pace = [5 / 1, 4 / 2, 6 / 3, 1 / 4, 1 / 5, 9 / 6, 2 / 7]
    name = "generations' contrast, bits per token"
    assert value(found, name, "response") == pytest.approx(np.mean(pace))
    assert rows(found, name, "response")["rows"].item() == 7
    # 5 beats the three others' 1/5 and 2/7; 1/4 beats 2/7? no; 1.5 beats 1/5 and 2/7.
    assert value(found, BETWEEN, "response, bits per token") == pytest.approx((2 + 0 + 2) / 9)


def test_auroc_within_contexts_compares_pairs_of_one_context():
    """Context a: 5 beats 4 and loses to 6; b: a tie; c and d have no pair."""
    found = rows(of(REFERENCES, generations=WRITTEN), WITHIN, BITS)
    assert found["value"].item() == pytest.approx((1 + 0.5) / 3)
    assert found["rows"].item() == 5 and found["sources"].item() == 2


def test_temperatures_are_kept_apart():
    warm = [row | {"temperature": 2.0, "genuine": 1.0 - row["genuine"]} for row in WRITTEN]
    found = of(REFERENCES, generations=[*WRITTEN, *warm])
    one, two = (value(found, WITHIN, BITS, temperature=t) for t in (1.0, 2.0))
    assert one == pytest.approx(1.5 / 3) and two == pytest.approx(1 - one)


def test_labels_of_one_kind_have_no_auroc():
    for label in (0.0, 1.0, NAN):
        found = of(REFERENCES, generations=[row | {"genuine": label} for row in WRITTEN])
        assert not found["quantity"].str.startswith("AUROC").any()
        assert value(found, "generations' contrast, bits", "response") == pytest.approx(31 / 8)


def test_contexts_of_two_datasets_that_share_an_id_are_not_compared():
    """Ids are unique within a run only: two files may both number their rows."""
    written = [
        generation("s0", "q1", 5.0, 1.0),
        generation("s0", "q1", 1.0, 0.0),
        generation("t0", "q1", 9.0, 0.0, dataset="maths"),
        generation("t0", "q1", 10.0, 1.0, dataset="maths"),
    ]
    found = of([*REFERENCES, reference("t0", [-1, -1, -1], dataset="maths")], generations=written)
    shares = {
        dataset: value(found, WITHIN, BITS, dataset=dataset)
        for dataset in ("chats", "maths", "(all)")
    }
    assert shares == {"chats": 1.0, "maths": 1.0, "(all)": 1.0}


# -- the same numbers shown ---------------------------------------------------------------------


def test_everything_that_was_estimated_can_be_shown_and_drawn(capsys):
    rivals = [candidate(at, "other_reference", [-9, -9, -9], bits=1.0) for at in range(4)]
    found = of(REFERENCES, rivals, generations=WRITTEN)
    screen.show(found, ["a note with [brackets]"], 0.9)
    out = capsys.readouterr().out
    for title in (
        "real follow-ups", "bits in favour", "likelier than", "per token", "generations' contrast",
        "between sources", "within contexts",
    ):  # fmt: skip
        assert title in out
    assert "(90% intervals over sources)" in out and "…" not in out
    assert "a note with [brackets]" in out and "0.50" in out
    assert figures.temperature_curve(found, "t").axes[0].get_legend_handles_labels()[1] == ["chats"]
    labels = [tick.get_text() for tick in figures.contrasts(found, "t").axes[0].get_yticklabels()]
    assert labels == ["response", "response, mean of logs", "empty"]


def test_a_single_turn_of_a_single_source_is_shown_without_intervals(capsys):
    found = of(REFERENCES[:1])
    screen.show(found, [], 0.95)
    assert "[–]" in capsys.readouterr().out
    figures.temperature_curve(found, "t")
    figures.contrasts(found, "t")
