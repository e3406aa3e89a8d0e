"""Whether follow-ups are latent, as rates say it, of planted verdicts."""

import numpy as np
import pandas as pd
import pytest

from ia_mech.estimates import frame_of, holm_corrected
from ia_mech.rates.compute import NAMES, differences
from ia_mech.rates.latent import BEYOND, REST, RISE, ROLE, conclusion, rises, verdict
from ia_mech.stats import holm


def decoys(
    outside: tuple[float, float], rates: tuple[float, float], queries: int = 80, temperatures=(0.7,)
) -> pd.DataFrame:
    """A turn in four is greedy. Shares of turns out of role, none of them follow_up, and rates of
    the others, greedy and sampled; after a wrong conversation a tenth of all is follow_up."""
    rng = np.random.default_rng(0)
    each = np.concatenate([[0.0], np.repeat(temperatures, 3)])
    rows = pd.DataFrame({"temperature": np.tile(each, 4 * queries), "decoy": "wrong_conversation"})
    rows["source"] = np.repeat(np.arange(queries), 4 * len(each))
    heated = (rows["temperature"] > 0).astype(int)
    away = rng.random(len(rows)) < np.array(outside)[heated]
    follow_up = ~away & (rng.random(len(rows)) < np.array(rates)[heated])
    floor = rng.random(len(rows)) < 0.1
    return rows.assign(
        out_of_role=away.astype(float),
        own_follow_up=follow_up.astype(float),
        follow_up=floor.astype(float),
    )


def estimated(rows: pd.DataFrame) -> pd.DataFrame:
    found = holm_corrected(
        rises(rows, {"model": "m", "gate": "undecided"}), lambda row: row.quantity
    )
    return frame_of(found, NAMES)


def test_a_rise_that_is_fewer_turns_out_of_role():
    rows = estimated(decoys((0.5, 0.1), (0.5, 0.5)))
    assert rows["quantity"].tolist() == [RISE, ROLE, REST]
    rise, role, rest = rows["value"]
    assert rise == pytest.approx(role + rest) and role == pytest.approx(0.2, abs=0.04)
    said = verdict(rows)
    assert (
        said.startswith("It is shown that sampling")
        and ": the rise from greedy to T = 0.7, " in said
    )
    assert f"Of this rise, {role:+.2f} [" in said
    assert "would have been shown" in said and "another response" not in said


def test_fewer_copies_are_said_to_be_staying_in_role():
    """Of turns in role 0.65 are follow-ups, greedy or sampled, and copies go from half to a
    quarter."""
    rows = estimated(decoys((0.5, 0.25), (0.65, 0.65), queries=500))
    rise, role, rest = (
        f"{one.value:+.2f} [{one.low:+.2f}, {one.high:+.2f}]" for one in rows.itertuples()
    )
    assert rows["value"].tolist() == pytest.approx([0.1625, 0.1625, 0.0], abs=0.03)
    said = verdict(rows)
    assert f", is {rise} (p < 0.001). Of this rise, {role} comes from more turns in role" in said
    assert f"and {rest} (0.0" in said and "shown with 80% power) from" in said


def test_turns_that_stay_in_role_more_often_and_follow_up_less_are_said_so():
    rows = estimated(decoys((0.8, 0.1), (0.9, 0.5), queries=200)).set_index("quantity")
    assert rows["value"][ROLE] > 0 > rows["value"][REST]
    assert (rows["p"][[RISE, REST]] < 0.05).all()
    said = verdict(rows.reset_index())
    assert said.startswith("It is shown") and "would have been shown" not in said


def test_a_rise_among_the_turns_in_role():
    rows = estimated(decoys((0.3, 0.3), (0.2, 0.5)))
    assert rows["value"][2] == pytest.approx(0.21, abs=0.04)
    said = verdict(rows)
    assert said.startswith("It is shown") and rows["p"][2] < 0.05
    fewer = verdict(estimated(decoys((0.3, 0.3), (0.5, 0.2))))
    assert fewer.startswith(
        "It is shown that sampling makes follow-ups fewer: the rise from greedy to T = "
    )
    falls = estimated(decoys((0.3, 0.3), (0.5, 0.2)))
    failed = verdict(falls.assign(gate="failed"))  # the judge can't tell what it counts
    assert "Of this rise" in fewer and "Of this rise" not in failed
    assert failed.startswith("It isn't shown that sampling brings out")
    higher = falls[falls["quantity"] == RISE].assign(quantity="difference", value=0.1)
    said = verdict(pd.concat([falls, higher], ignore_index=True))  # only the control rises more
    assert said.startswith("It isn't shown that sampling brings out")


def test_a_rise_beyond_siblings_is_told_where_there_are_any():
    own = decoys((0.3, 0.3), (0.2, 0.5))
    alike = own.assign(decoy="sibling", follow_up=own["own_follow_up"])
    rows = estimated(pd.concat([own, alike]))
    assert rows["quantity"].tolist() == [RISE, ROLE, REST, BEYOND]
    beyond = "shown that the rate rises more than the rate after siblings"
    assert rows["value"][3] == 0 and f"It isn't {beyond}" in verdict(rows)
    fewer = alike.assign(follow_up=alike["follow_up"] * (alike["temperature"] == 0))
    assert f"It is {beyond}" in verdict(estimated(pd.concat([own, fewer])))


def test_of_several_temperatures_the_best_is_corrected_for_all():
    rows = decoys((0.3, 0.3), (0.2, 0.5), temperatures=(0.7, 1.0))
    hot = rows["temperature"] == 1
    found = estimated(rows.assign(own_follow_up=rows["own_follow_up"].where(~hot, 0.0)))
    rise = found[found["quantity"] == RISE].set_index("temperature")
    assert np.allclose(rise["p_holm"], holm(rise["p"]))
    assert "from greedy to T = 0.7, the best of 2 temperatures, " in verdict(found)
    plain = rise.loc[0.7].to_frame().T.assign(quantity="difference", temperature=0.7)

    def concluded(value: float, p: float) -> str:
        both = (one.assign(value=value, p_holm=p) for one in (found, plain))
        said = conclusion(pd.concat(both, ignore_index=True))
        moves = "rises" if value > 0 else "falls"
        assert f": the rate {moves} by {abs(value):.2f} [" in said
        return said.partition(": ")[0]

    sampling = "Sampling at T = 0.7"
    shown = "It isn't shown that sampling at T = 0.7"
    assert concluded(0.3, 0.01) == f"{sampling} brings out follow-ups that greedy decoding hides"
    assert concluded(0.3, 0.5) == f"{shown} brings out more"
    assert concluded(-0.3, 0.01) == f"{sampling} makes follow-ups fewer"
    assert conclusion(found.assign(gate="failed")).startswith("Most of what this judge calls")


def test_a_temperature_within_the_judges_fit_is_told_even_if_another_rises_more():
    rows = decoys((0.3, 0.3), (0.2, 0.4), temperatures=(0.7, 1.0))
    hot = rows["temperature"] == 1
    found = estimated(rows.assign(own_follow_up=rows["own_follow_up"].where(~hot, 1.0)))
    assert "from greedy to T = 1, the best of 2" in verdict(found)
    assert "from greedy to T = 0.7, minus that" in verdict(found, fit=0.7)
    assert "from greedy to T = 1, the best of 2" in verdict(found, fit=0.5)


def test_the_largest_rise_that_is_shown_counts():
    """Not a larger one that isn't: it may be of fewer turns."""
    rows = decoys((0.3, 0.3), (0.2, 0.4), temperatures=(0.7, 1.0))
    rows = rows[(rows["temperature"] < 1) | (rows["source"] < 4)]
    found = estimated(rows)
    rise = found[found["quantity"] == RISE].set_index("temperature")
    found.loc[found["temperature"] == 1, "value"] = 0.9
    assert rise["p_holm"][0.7] < 0.05 < rise["p_holm"][1.0]
    said = verdict(found)
    assert said.startswith("It is shown") and "to T = 0.7" in said


def test_a_rate_that_doesnt_rise_itself_isnt_latent():
    """Its floor falls, so that the rise beyond it is larger."""
    rows = estimated(decoys((0.3, 0.3), (0.2, 0.5)))
    of = {"quantity": "difference", "temperature": 0.7}
    for value, word in ((0.01, "It is shown"), (-0.01, "It isn't shown")):
        found = pd.concat([rows, pd.DataFrame([of | {"value": value}])], ignore_index=True)
        assert verdict(found).startswith(word)
        but = "But sampled turns aren't follow-ups more often than greedy ones."
        assert (but in verdict(found)) == (value < 0)


def test_a_rise_isnt_latent_where_the_gate_fails():
    rows = estimated(decoys((0.3, 0.3), (0.2, 0.5))).assign(gate="failed")
    said = verdict(rows)
    assert said.startswith("It isn't shown")
    assert "Most of what this judge calls follow-ups fits wrong conversations, too." in said


def test_where_nothing_counts_after_wrong_conversations_the_rise_is_that_of_the_rate():
    rows = decoys((0.3, 0.3), (0.2, 0.5), queries=20).assign(follow_up=0.0)
    (rise,) = (one for one in rises(rows, {}) if one.quantity == RISE)
    plain = rows.assign(outcome=rows["own_follow_up"])
    (rate,) = differences(plain, ["temperature"], {"temperature": 0}, outcome="outcome")
    assert (rise.estimate, rise.p, rise.test) == (rate.estimate, rate.p, rate.test)


def test_what_cant_be_told_isnt():
    rows = decoys((0.3, 0.3), (0.2, 0.5))
    for lacking in (rows[rows["temperature"] > 0], rows[rows["temperature"] == 0]):
        assert verdict(estimated(lacking)) == ""
    assert verdict(estimated(rows.assign(decoy="sibling"))) == ""
    nothing = verdict(estimated(rows.assign(own_follow_up=0.0, follow_up=0.0)))  # no follow-up
    assert nothing.startswith("It isn't shown") and "nan" not in nothing
    assert ", is +0.00 [-0.04, +0.04] (0.05 would have been shown with 80% power)" in nothing
    plain = estimated(rows.assign(out_of_role=np.nan))  # a rubric without such categories
    assert plain["quantity"].tolist() == [RISE]
    assert "in role" not in verdict(plain)
