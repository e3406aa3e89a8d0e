"""The score of grounding: by hand, and what ships against the study."""

import pandas as pd
import pytest

from benchmarks import grounding as study
from ia_mech.judge.rules import RulesJudge, grounding
from ia_mech.judge.rules.grounding import rarest_shared
from ia_mech.judge.verdict import GROUNDED_P, Item

QUERY = "How do I keep basil alive indoors? I have $1250."
RESPONSE = "Water it when the soil is dry to the first knuckle, and pinch off Osei's 12 buds."
RANKS = {"water": 1, "soil": 2, "basil": 3}


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ("And the water?", (1, "water")),
        ("Watering the soil, or the basil?", (3, "basil")),  # from the query; stems, not words
        ("Why the knuckles, not the soil?", (4, "knuckles")),  # no common word: one rank more
        ("Is Osei's soil dry?", (4, "osei's")),
        ("So 12 is enough when it is off?", (0, "")),  # small numbers and function words
        ("Is 1250 enough?", (4, "1250")),
        ("Is 1,250 enough? Tulips?", (0, "")),
        ("", (0, "")),
    ],
)
def test_the_score_is_of_the_rarest_word_that_both_have(turn, found):
    assert rarest_shared(Item(QUERY, RESPONSE, turn), RANKS) == found


def test_a_verdict_has_the_score_and_its_evidence():
    judge = RulesJudge()
    quoted = judge.verdict(Item(QUERY, RESPONSE, "Why to the first knuckle?"))
    assert quoted.grounding == len(grounding.ranks()) + 1 and "'knuckle'" in quoted.rationale
    for query, response in (("", "Dogs bark."), ("Dogs?", "")):
        assert judge.verdict(Item(query, response, "Why to the first knuckle?")).grounding == 0
    assert 0 < judge.verdict(Item(QUERY, RESPONSE, "How much water?")).grounding < quoted.grounding
    assert judge.verdict(Item(QUERY, RESPONSE, "Как сохранить базилик?")).grounding is None


def test_the_floor_holds_in_a_data_set_absent_from_the_calibration():
    scores = pd.read_parquet(study.SCORES)
    for name in ("builtin", "gsm8k", "ifbench", "mtbench"):
        decoys = study.one_per_source(scores, name)
        tested = study.with_p_values(scores[scores["set"] == name], decoys)
        for part in (study.CALIBRATION, study.TEST):
            turns = tested[tested["part"] == part]
            assert turns.loc[turns["kind"] == study.WRONG, "small"].mean() <= GROUNDED_P
            assert turns.loc[turns["kind"] == study.OWN, "small"].mean() > 0.3
        bare = tested[tested["part"] == study.BARE]
        assert len(bare) == 480 and bare["small"].mean() <= GROUNDED_P
