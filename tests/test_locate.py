"""Where bits come from, in transformers whose only route is known; the command on a tiny run."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import scored
import torch
from shell import call, refusal

from experiments import outcome
from experiments.change import (
    AFTER_RESPONSE,
    HEADER,
    OWN,
    QUERY,
    RESPONSE,
    RESPONSE_AND_HEADER,
    SITES,
    Cell,
    Whole,
)
from experiments.experiment import Model
from experiments.locate import (
    ALL_LAYERS,
    BAND_SITES,
    BANDS,
    BLOCK_SITES,
    BLOCKS,
    FIRST_BITS,
    HEADER_FIRST,
    HEADER_LAST,
    LATER_BITS,
    LESS_RANDOM,
    LESS_WHOLE,
    MAY_BE_MOST,
    RANDOM_SITES,
    WINDOW,
    WITHOUT_WINDOW,
    WRITTEN,
    Locate,
    cells_of,
    estimates,
    layer_windows,
    main,
    token_estimates,
    window_size,
)
from experiments.outcome import (
    FIRST_SCORES,
    SCORES,
    SiblingContexts,
    bits_by_cell,
    placed_in,
    query_bits_of,
    with_own_scores,
)
from experiments.shown import estimates_of
from ia_mech.chat.format import ChatFormat
from ia_mech.likelihood.carried import CEILING, bits_by_query

QUERIES = 8
OPTIONS = {"level": 0.95, "resamples": 200, "seed": 0}


def cells_with_own(*maps) -> list[Cell]:
    """As the outcome takes them: with the whole own context."""
    return [Cell(OWN, Whole(), every=True), *cells_of(*maps)]


@pytest.fixture(scope="module", autouse=True)
def _short_turns():
    """Turns that are written after hybrids needn't be longer than those that are given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "TOKENS", 6)
        yield


@pytest.mark.parametrize("family", ["smollm2", "mistral", "nemotron_mini", "apriel"])
def test_the_header_s_place_is_counted_from_the_response_s_end(family):
    """In ``mistral`` it is one token; in the last two white space stands before the turn end."""
    chat = ChatFormat(families.build(family))
    query = {"role": "user", "content": "Why?"}
    dialogue = [query, {"role": "assistant", "content": "It is blue."}]
    start, stop, places = placed_in(chat, dialogue)
    first, end = places["header_0"], places["header_last"] + 1
    ids = chat.context(dialogue).ids
    assert chat.template.decode(ids[start:stop]).strip() == "It is blue."
    assert ids[stop + first : stop + end] == chat.header_ids and stop + end == len(ids)
    assert ids[stop:] == chat.tail_ids
    assert placed_in(chat, [query, {"role": "assistant", "content": ""}]) is None


def unit(query: int, react: bool = True, behind: int | None = None) -> SiblingContexts:
    """A query with four responses that name themselves, and turns that repeat that name, or another
    one. So many tokens are behind the name; none given: it is anywhere."""
    rng = np.random.default_rng([query, 5])
    contexts = [
        planted.context(
            name,
            length,
            int(rng.integers(length)) if behind is None else length - 1 - behind,
            query=3 + query % 3,
        )
        for name, length in enumerate(planted.lengths(query))
    ]
    names = range(planted.NAMES)
    said = [k if react else int(rng.integers(planted.NAMES)) for k in names]
    at, stop = contexts[0].positions, contexts[0].response.stop
    return SiblingContexts(
        source=f"q{query}",
        dataset="planted",
        tokens=0,
        contexts=[tuple(one.ids) for one in contexts],
        starts=[one.response.start for one in contexts],
        stops=[one.response.stop for one in contexts],
        places={name: at[name] - stop for name in planted.POSITIONS},
        context_ids=[f"q{query}-{name}" for name in names],
        turns=[(k, 1.0, 0, planted.turn(name, 4)) for k, name in enumerate(said)],
        recipients=[(query + i) % planted.NAMES for i in range(2)],
        cells=cells_with_own(["windows", "states", *["written"] * react], planted.DEPTH),
        mapped=1.0,
    )


@cache  # no test changes the rows
def measured(through_header: bool, react: bool = True, queries: int = QUERIES) -> pd.DataFrame:
    model = Model(
        SimpleNamespace(model=planted.model(through_header)), SimpleNamespace(stop_ids=[], text=str)
    )
    parts = []
    for query in range(queries):
        rows = unit(query, react).rows(model)
        parts.append(rows.assign(source=f"q{query}"))
    return pd.concat(parts, ignore_index=True)


def carried(rows: pd.DataFrame) -> dict:
    """Mean bits by site, and by site and layer in maps."""
    return {
        (site, layer) if layer >= 0 else site: query_bits_of(cell, 0).bits.mean()
        for (site, layer), cell in with_own_scores(rows).groupby(["site", "layer"])
    }


@pytest.mark.parametrize("through_header", [True, False])
def test_the_planted_route_carries_all_that_is_expressed_and_no_other_site_anything(through_header):
    # Those without the header's route are used again.
    rows = measured(True, queries=6) if through_header else measured(False)
    found = carried(rows[~rows["site"].isin(WRITTEN)])
    assert found[OWN] > 1.0
    routes = {HEADER, AFTER_RESPONSE} if through_header else {RESPONSE}
    for site in SITES:
        wanted = found[OWN] if site in routes else 0.0
        assert found[site] == pytest.approx(wanted, abs=0.02), site
    # What follows is computed anew: the window whose block reads the response carries everything,
    # and all others together nothing. Of a third of the turns, so that β stays a little smaller.
    assert found[ALL_LAYERS] == pytest.approx(found[OWN], abs=0.06)
    reads = planted.WRITE if through_header else planted.READ
    for window in layer_windows(planted.DEPTH):
        inside, outside = (found[OWN], 0.0) if reads in window else (0.0, found[OWN])
        assert found[WINDOW, window[0]] == pytest.approx(inside, abs=0.06)
        assert found[WITHOUT_WINDOW, window[0]] == pytest.approx(outside, abs=0.06)
    for site in (HEADER_FIRST, HEADER_LAST):  # the name is written into the token between these
        assert found[site, window_size(planted.DEPTH)] == pytest.approx(0.0, abs=0.02)
    assert (rows["text"].notna() == rows["site"].isin(WRITTEN)).all()  # such as "(3, 3, 3)"
    # Greedy turns that the model writes after a hybrid tell the response that its route is of.
    told = carried(rows[rows["site"].isin(WRITTEN) & (rows["temperature"] == 0)])
    routes = {OWN, RESPONSE_AND_HEADER, HEADER if through_header else RESPONSE}
    for site, bits in told.items():
        assert (bits > 1.0) if site.removeprefix("written: ") in routes else (bits < 0.02), site


def mapped(units: list[SiblingContexts], maps: list[str], through_header: bool) -> pd.DataFrame:
    """Scores of one map alone, with one recipient a query."""
    model = Model(
        SimpleNamespace(model=planted.model(through_header)), SimpleNamespace(stop_ids=[], text=str)
    )
    parts = []
    for query, one in enumerate(units):
        one = replace(one, cells=cells_with_own(maps, planted.DEPTH), recipients=one.recipients[:1])
        parts.append(one.rows(model).assign(source=f"q{query}"))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    ("through_header", "behind", "band"), [(False, 0, 0), (False, 2, 1), (True, 2, 1)]
)
def test_the_band_that_holds_the_name_carries_everything_and_no_other_anything(
    through_header, behind, band
):
    units = [unit(query, behind=behind) for query in range(2)]
    found = carried(mapped(units, [BANDS], through_header))
    bands = list(BAND_SITES)[:2]  # no response has more than 7 tokens
    assert {*BAND_SITES} & {*found} == {*bands}
    for number, site in enumerate(bands):
        wanted = found[ALL_LAYERS] if number == band else 0.0
        assert found[site] == pytest.approx(wanted, abs=0.06), site


@pytest.mark.parametrize("through_header", [True, False])
def test_a_turn_that_reads_a_word_reads_it_in_blocks_of_one_token(through_header):
    """No token of these responses holds more than itself."""
    found = carried(mapped([unit(query) for query in range(2)], [BLOCKS], through_header))
    for site in (ALL_LAYERS, *BLOCK_SITES, *RANDOM_SITES):
        assert found[site] == pytest.approx(found[OWN], abs=0.06), site


def composed(query: int) -> SiblingContexts:
    """The last token of a response gathers its name, which stands five tokens or more before; a
    turn reads it there, since no token of the header gathers anything."""
    tail = [planted.END, planted.SEPARATOR, planted.HEADER, planted.HEADER + 2]
    before = [planted.BOS, *[planted.FILLER] * (3 + query % 3)]
    contexts = [
        (*before, planted.NAME + name, *[planted.FILLER] * length, planted.HEADER + 1, *tail)
        for name, length in enumerate(planted.lengths(query))
    ]
    starts, stops = [len(before)] * planted.NAMES, [len(ids) - len(tail) for ids in contexts]
    return replace(
        unit(query),
        contexts=contexts,
        starts=starts,
        stops=stops,
        places={"header_0": 2, "header_last": 3},
    )


@cache  # no test changes the rows
def composed_rows() -> pd.DataFrame:
    return mapped([composed(query) for query in range(QUERIES)], [BLOCKS], through_header=True)


def test_what_a_turn_reads_that_tokens_composed_dies_in_small_blocks_alone():
    found = carried(composed_rows())
    assert found[OWN] > 1
    for site, mask in BLOCK_SITES.items():
        wanted = 0.0 if mask.width in (1, 4) else found[OWN]
        assert found[site] == pytest.approx(wanted, abs=0.06), site
    few, all_of_them = RANDOM_SITES  # such a short response is seen whole: no damage by fewer keys
    assert found[all_of_them] == pytest.approx(found[OWN], abs=0.06)
    assert 0.0 < found[few] < found[OWN]


def test_a_band_is_as_many_tokens_in_place_of_as_many_at_the_same_distance():
    lengths, prompt = [200, 5, 150, 1], 10
    contexts = [tuple(range(1000 * n, 1000 * n + prompt + k)) for n, k in enumerate(lengths)]
    one = SimpleNamespace(
        contexts=contexts, starts=[prompt] * 4, stops=[prompt + k for k in lengths]
    )

    def made(recipient: int, donor: int, site: str) -> list[int]:
        of = BAND_SITES[site].hybrid(one, recipient, donor)
        return [contexts[x.context][at] for x in of.pieces for at in range(x.start, x.stop)]

    own, first = list(contexts[0]), list(BAND_SITES)
    assert made(0, 2, first[0]) == [*own[:-1], contexts[2][-1]]
    assert made(0, 2, first[2]) == own[:-32] + list(contexts[2][-32:-8]) + own[-8:]
    # Of five tokens all but the last, and then none.
    assert made(0, 1, first[1]) == own[:-5] + list(contexts[1][-5:-1]) + own[-1:]
    assert made(0, 1, first[2]) == own and made(0, 3, first[1]) == own
    assert made(1, 0, first[4]) == list(contexts[1]) and made(0, 1, first[4]) == own
    # Without a limit, as many before the last 128 as both have.
    assert made(0, 2, first[4]) == own[:-150] + list(contexts[2][prompt:-128]) + own[-128:]


def test_first_tokens_tell_by_the_header_what_later_ones_tell_by_the_response(monkeypatch):
    """A model whose last header token reads the response, as the turn's own tokens do."""
    made = planted.model(through_header=False)
    table = made.model.embed_tokens.weight
    with torch.no_grad():
        table[planted.HEADER + 2] = table[planted.OPENER]
    monkeypatch.setattr(planted, "model", lambda through_header: made)
    monkeypatch.setattr(planted, "turn", lambda name, length: (planted.ECHO + name,) * length)
    model = Model(SimpleNamespace(model=made), None)
    parts = [
        replace(unit(query), cells=cells_with_own([], planted.DEPTH))
        .rows(model)
        .assign(source=f"q{query}")
        for query in range(4)
    ]
    rows = with_own_scores(pd.concat(parts, ignore_index=True))
    found = {
        (row.quantity, row.names["term"]): row.estimate.value
        for row in token_estimates(rows, OPTIONS)
        if row.names["temperature"] == 1.0
    }
    for quantity, site in ((FIRST_BITS, HEADER), (LATER_BITS, RESPONSE)):
        expressed = found[quantity, OWN]
        assert expressed > 0.5
        for other in SITES:
            carries = other == site or {other, site} == {AFTER_RESPONSE, HEADER}
            wanted = expressed if carries else 0.0
            assert found[quantity, other] == pytest.approx(wanted, abs=0.02), (quantity, other)


def test_what_blocks_keep_is_compared_with_the_whole_and_with_as_many_random_tokens():
    rows = with_own_scores(composed_rows())
    found = {
        (row.quantity, row.names["term"]): row
        for row in estimates(bits_by_cell(rows, 0), OPTIONS)
        if row.names["temperature"] == 1.0
    }
    bits = {site: found["bits", site].estimate.value for site in (*BLOCK_SITES, *RANDOM_SITES)}
    assert {site for quantity, site in found if quantity == LESS_RANDOM} == {
        site for site, mask in BLOCK_SITES.items() if mask.width in (4, 16)
    }
    of_four, of_sixteen = (found[LESS_RANDOM, f"response, blocks of {width}"] for width in (4, 16))
    less = bits["response, blocks of 4"] - bits["response, 4 random tokens"]
    assert of_four.estimate.value == pytest.approx(less) and of_four.p_holm < 0.05
    assert of_sixteen.estimate.value == pytest.approx(0, abs=0.06)
    less = found[LESS_WHOLE, "response, blocks of 1"]
    assert less.estimate.high < -1 and less.p_holm < 0.05


def test_turns_that_do_not_react_tell_nothing_and_no_site_carries_anything():
    """The turn repeats a name that was drawn by itself: held-out bits are 0 or below."""
    found = carried(measured(through_header=True, react=False, queries=6))
    assert max(found.values()) < 0.15


def test_estimates_have_the_share_the_test_and_the_set_of_windows():
    rows = with_own_scores(measured(through_header=False))
    found = estimates(bits_by_cell(rows, 0), OPTIONS)
    sampled = {
        (row.quantity, row.names["term"]): row for row in found
        if np.isnan(row.names["temperature"])
    }  # fmt: skip
    share = {site: sampled["share of expressed", site].estimate.value for site in SITES}
    assert share[RESPONSE] == pytest.approx(1.0, abs=0.02)
    assert share[HEADER] == pytest.approx(0.0, abs=0.02)
    own, query = sampled["own is likeliest", OWN], sampled["own is likeliest", QUERY]
    assert own.estimate.value == pytest.approx(1) and own.p < 0.05
    assert query.estimate.value == pytest.approx(1 / 3) and query.p > 0.05
    for quantity in ("bits, minus the query's", "own is likeliest, minus the query's"):
        assert sampled[quantity, RESPONSE].p_holm < 0.05 < sampled[quantity, HEADER].p_holm
    cells = {
        (row.quantity, row.names["term"], row.names.get("layer")): row.estimate.value
        for row in found if row.names["temperature"] == 1.0
    }  # fmt: skip
    for window in layer_windows(planted.DEPTH):
        less = cells["bits", WITHOUT_WINDOW, window[0]] - cells["bits", ALL_LAYERS, None]
        at = "bits, minus the whole response's", WITHOUT_WINDOW, window[0]
        assert cells[at] == pytest.approx(less) and (cells[at] < -1.0) == (planted.READ in window)
    p = {row.names["layer"]: row.estimate.value for row in found if row.quantity == MAY_BE_MOST}
    assert p.keys() == {window[0] for window in layer_windows(planted.DEPTH)}
    assert [layer for layer, one in p.items() if one > 0.05] == [planted.READ]


def test_told_is_the_information_of_turns_that_are_drawn_from_their_scores():
    """2,000 queries whose turns are drawn from the candidates' likelihoods: Monte-Carlo bits."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, size=(2000, 3, 6))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores, own, queries = [], [], []
    for query, table in enumerate(logp):
        for k in range(3):
            scores.append(table[:, rng.choice(6, p=np.exp(table[k]))])
            own.append(k)
            queries.append(query)
    exact = (np.exp(logp) * (logp - np.log(np.exp(logp).mean(1, keepdims=True)))).sum(-1).mean()
    found = bits_by_query(np.array(scores), np.array(own), queries)
    error = found.bits.std() / np.sqrt(2000)
    assert found.bits.mean() == pytest.approx(exact / np.log(2), abs=4 * error)
    assert found.hits.mean() > 0.45 and found.bits.max() <= CEILING


def test_the_command_measures_expressed_as_full_passes_do(siblings, tiny_subject, tmp_path, capfd):
    out = tmp_path / "out"
    words = [str(siblings.path), "--out", str(out), "--queries", "3", "--resamples", "100"]
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    assert " of 1.58 bits about which of 3 responses they followed" in outcome.out
    rows = pd.read_parquet(out / "rows.parquet")
    maps = {WINDOW, WITHOUT_WINDOW, ALL_LAYERS, HEADER_FIRST, HEADER_LAST}
    assert set(rows["site"]) - {*BAND_SITES} == {OWN, *SITES, *maps, *WRITTEN}
    assert {*BAND_SITES} & {*rows["site"]}
    query = next(one for one in siblings.queries() if one.source in set(rows["source"]))
    own = rows[(rows["site"] == OWN) & (rows["source"] == query.source)]
    turns = query.turns.set_index(["followed", "sample", "temperature"])["token_ids"]
    for row in own.itertuples():
        turn = turns[row.followed, 0, row.temperature]
        candidates = [j for j in range(4) if j != row.recipient]
        assert candidates[row.own] == row.followed
        for number, j in enumerate(candidates):
            each = scored.logprobs(tiny_subject.model, list(query.token_ids[j]), list(turn))
            within = scored.nats(len(turn))["atol"]
            assert getattr(row, f"score_{number}") == pytest.approx(each.sum(), abs=within)
            assert getattr(row, f"first_{number}") == pytest.approx(each[0], abs=within)


def test_blocks_are_refused_where_layers_are_recurrent(siblings, monkeypatch, capfd):
    monkeypatch.setattr("ia_mech.engine.splice.layer_kinds", lambda config: ["linear_attention"])
    line = refusal(call(main, [str(siblings.path), "--maps", "blocks"], capfd))
    assert line.startswith("--maps blocks: ") and "has recurrent layers" in line


def test_too_few_queries_are_refused_and_what_was_not_fitted_is_left_out(siblings, capfd):
    line = refusal(call(main, [str(siblings.path), "--queries", "2"], capfd))
    assert line.startswith("2 queries have 4 different responses") and "takes 3" in line
    rows = with_own_scores(constructed({OWN: 1.0})).assign(**dict.fromkeys(FIRST_SCORES, 0.0))
    rows[[f"own_{name}" for name in FIRST_SCORES]] = 0.0
    found = [*token_estimates(rows, {"level": 0.95, "resamples": 100, "seed": 0})]
    assert {one.quantity for one in found} == {LATER_BITS}


# -- what is said, of constructed scores -----------------------------------------------------------


def constructed(nats: dict, queries: int = 60, seed: int = 0, noise: float = 0.7) -> pd.DataFrame:
    """Scores of turns at T = 1 by site, or by site and layer. A turn is likelier after the response
    that it followed by so many nats on average, with noise; a header's scores have none."""
    rng, parts = np.random.default_rng(seed), []
    strength = rng.exponential(size=queries).repeat(3)
    for key, mean in nats.items():
        site, layer = key if isinstance(key, tuple) else (key, -1)
        quiet = site == HEADER
        scores = rng.normal(0, 0 if quiet else noise, (3 * queries, 3))
        own = np.tile(np.arange(3), queries)
        each = 1.0 if quiet else strength * rng.exponential(size=3 * queries)
        scores[np.arange(3 * queries), own] += mean * each
        rows = pd.DataFrame(scores, columns=SCORES)
        rows[FIRST_SCORES] = scores
        names = {"site": site, "layer": layer, "recipient": 0, "followed": own + 1, "own": own}
        names |= {"source": np.repeat([f"q{n:03d}" for n in range(queries)], 3), "sample": 0}
        parts.append(rows.assign(temperature=1.0, **names))
    return pd.concat(parts, ignore_index=True)


def sentence(rows: pd.DataFrame, layers: int = 32) -> str:
    run = SimpleNamespace(model={"name": "m", "layers": layers})
    args = SimpleNamespace(level=0.95, resamples=400, seed=0, outcome="bits")
    one = Locate.asked(args)([run], args, Path())
    return one.conclude(estimates_of(one.estimate(rows), Locate.columns, 0.95)).sentence


WHOLE = {OWN: 3.0, AFTER_RESPONSE: 0.0, RESPONSE: 2.8, HEADER: 0.0, QUERY: 0.0, ALL_LAYERS: 2.8}


def test_equal_windows_are_not_told_apart_and_unequal_ones_are_named():
    """Eight equal windows were named in 12 of 12 studies when each was tested against 0 alone."""
    starts = range(1, 33, 4)
    equal = [
        sentence(constructed(WHOLE | {(WINDOW, at): 0.9 for at in starts}, seed=seed))
        for seed in range(12)
    ]
    apart = [said for said in equal if "layers can't be told apart" not in said]
    assert len(apart) <= 2  # of 12 at 5%, more have a chance of 1 in 50
    nats = {(WINDOW, at): 2.0 if at in (9, 13, 25) else 0.1 for at in starts}
    assert "layers that may carry most are 9–16 and 25–28" in sentence(constructed(WHOLE | nats))
    nothing = sentence(constructed(WHOLE | {(WINDOW, at): 0.0 for at in starts}))
    assert "layers" not in nothing


def test_a_site_of_few_bits_is_said_to_move_likelihoods_little_with_both_numbers():
    """A tenth of a nat, always in the right direction: the own candidate is always likeliest."""
    said = sentence(constructed(WHOLE | {OWN: 20.0, HEADER: 0.1}))
    assert "the header's move likelihoods little (0.0" in said
    assert "own likeliest 1.00 [" in said and "next to nothing" not in said


def test_a_site_is_enough_for_bits_and_without_it_others_are_lost():
    """Both ways carry all: either is enough, and nothing is lost without one of them."""
    said = sentence(constructed(WHOLE | {AFTER_RESPONSE: 2.8}))
    enough = re.search(r"The response's keys and values are enough for ([-\d.]+) \[", said)
    lost = re.search(r"without them (-?[\d.]+) \[", said)
    assert float(enough[1]) > 0.5 and abs(float(lost[1])) < 0.2
    assert "through" not in said
    said = sentence(constructed(WHOLE))
    assert float(re.search(r"without them (-?[\d.]+) \[", said)[1]) > 0.5
