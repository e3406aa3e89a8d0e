"""Ways from response to turn that are planted, one kind each."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from benchmarks.planted_locate import OPTIONS, measure_study
from benchmarks.planted_routes import GREEDY, ROUTES, SAMPLED
from experiments.change import (
    ALL_THREE,
    HEADER,
    HEADER_AND_STATE,
    OF_RECURRENT,
    OWN,
    QUERY,
    RESPONSE,
    RESPONSE_AND_STATE,
    STATE,
)
from experiments.locate import (
    ALL_LAYERS,
    FULL_LAYERS,
    LEFT_OUT,
    RESPONSE_AND_STATE_ON,
    STATE_ON,
    estimates,
)
from experiments.outcome import SCORES, bits_by_cell, query_bits_of

SITES = (OWN, RESPONSE, HEADER, QUERY)


@cache  # no test changes the rows
def rows_of(name: str, wordings: bool = False, queries: int = 4) -> pd.DataFrame:
    """What is measured where every turn that can follows its response, and no weight has noise."""
    kind = ROUTES[name]
    kind = replace(kind, follows=float(bool(kind.carries)), windows=kind.state)
    return measure_study(kind, 0, queries, 0.0, wordings=wordings)


def bits(rows: pd.DataFrame, temperature: float = SAMPLED) -> dict[str, float]:
    here = rows[rows["temperature"] == temperature]
    return {site: query_bits_of(here[here["site"] == site], 0).bits.mean() for site in SITES}


@pytest.mark.parametrize(
    "name",
    ["bag of words, unread", "redundant", "joint", "generic damage", "latent", "code, unread"],
)
def test_a_site_carries_what_reaches_the_turn_by_it_alone(name):
    rows = rows_of(name)
    found = bits(rows)
    for site in SITES:
        if site in ROUTES[name].carries:
            assert 0.9 * found[OWN] < found[site] <= found[OWN], site
        else:
            assert abs(found[site]) < 0.02, site
    assert found[OWN] > 1.0 if ROUTES[name].carries else found[OWN] < 0.02
    if ROUTES[name].gated:  # greedy turns lack the opening word
        assert max(bits(rows, GREEDY).values()) < 0.02


def test_a_turn_that_depends_on_the_response_by_the_recurrent_state_alone_is_said_to():
    rows = rows_of("recurrent state", queries=5)
    whole = {term: one for (term, _), one in bits_by_cell(rows, 0)[None].items()}
    expressed = whole[OWN].bits.mean()
    assert expressed > 1.0
    for site in (*SITES[1:], *OF_RECURRENT):
        having = {STATE, RESPONSE_AND_STATE, HEADER_AND_STATE, ALL_THREE}
        wanted = expressed if site in having else 0.0
        assert whole[site].bits.mean() == pytest.approx(wanted, abs=0.02), site
    found = {
        (row.quantity, row.names["term"]): row.estimate.value
        for row in estimates(bits_by_cell(rows, 0), OPTIONS)
        if np.isnan(row.names["temperature"])
    }
    for site in (RESPONSE, HEADER, STATE):
        wanted = expressed if site == STATE else 0.0
        assert found[LEFT_OUT, site] == pytest.approx(wanted, abs=0.03), site
    computed_on = {ALL_LAYERS: 0, FULL_LAYERS: 0, STATE_ON: expressed}
    for site, wanted in (computed_on | {RESPONSE_AND_STATE_ON: expressed}).items():
        carried = query_bits_of(rows[rows["site"] == site], 0).bits.mean()
        assert carried == pytest.approx(wanted, abs=0.06), site
    assert not {*OF_RECURRENT} & {*rows_of("redundant")["site"]}  # of a model without


def test_a_site_that_hardly_moves_the_turn_carries_hardly_anything():
    """Without a largest β a twentieth of the logits, always the right way, would carry all."""
    found = bits(rows_of("faint header"))
    assert found[RESPONSE] == pytest.approx(found[OWN], abs=0.02)
    assert 0 < found[HEADER] < 0.2 * found[OWN]


def test_what_a_splice_spoils_it_spoils_alike_after_all_candidates():
    rows = rows_of("generic damage")
    scores = {site: rows.loc[rows["site"] == site, SCORES].max(axis=1).mean() for site in SITES}
    assert scores[HEADER] < scores[OWN] - 4 and scores[RESPONSE] < scores[OWN] - 4  # nats


def test_wordings_of_one_content_tell_as_much_only_where_turns_tell_wordings():
    expressed = bits(rows_of("wording only"))[OWN]
    assert bits(rows_of("wording only", wordings=True))[OWN] == pytest.approx(expressed, abs=0.02)
    assert bits(rows_of("header", wordings=True))[OWN] == pytest.approx(0.0, abs=0.02)
