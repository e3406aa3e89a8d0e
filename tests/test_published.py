"""The numbers of docs/results and of README's findings, made again from docs/results/data.

Every table and every sentence with a number is written here, and has to stand on its page; no other
decimal, percentage or interval may stand there. ``±`` is half of a 95% interval: Student's, over
queries. The judge's labels are by fits without a turn's query, so its errors on labelled turns
are those on others. Only pandas, NumPy and SciPy compute, but for the two parts of a rise, whose
method is tested in test_stats_decomposition.py.

    PYTHONPATH=tests python -c "import test_published as p; p.show()"     prints what pages hold
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.moved_mass import half_moved
from ia_mech.run.sources import split_source
from ia_mech.stats import corrected_labels, corrected_mean, decomposed_difference, dyadic_mean

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
SMOL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"
MATHS = f"{QWEN}-maths"  # other GSM8K queries than those of the study
GEMMA_NEW = "gemma-3-270m-new"  # Qwen's conversations, by a model that saw no chats
NEW, SMOL_NEW = f"{QWEN}-new", f"{SMOL}-new"  # queries that no study had, and few tokens sampled
ALL = 40  # sampled tokens of a whole turn
DRAWN = {0: "none (greedy)", 1: "the first", 3: "the first three", ALL: "all"}
VECTORS = {"unsteered": "without a vector", "permuted": "control", "follow-ups": "vector"}
MODELS, SETS = (QWEN, SMOL), (QWEN, MATHS, SMOL)
SHORT = {QWEN: "Qwen", MATHS: "Qwen, maths", SMOL: "SmolLM2"}
LAYERS = {SMOL: 30, QWEN: 28}
HOT = 0.7
REPEATS = ["repeats_query", "repeats_response"]
OUT_OF_ROLE = [*REPEATS, "speaks_as_assistant"]
OWN, WRONG, SIBLING = "own", "wrong_conversation", "sibling"  # where a turn is shown
# What is asked of each query: rates by (where, temperature), with their signs.
GREEDY, SAMPLED = {(OWN, 0.0): 1}, {(OWN, HOT): 1}
GREEDY_WRONG, SAMPLED_WRONG = {(WRONG, 0.0): 1}, {(WRONG, HOT): 1}
RISE = {(OWN, HOT): 1, (OWN, 0.0): -1}
BEYOND_WRONG = RISE | {(WRONG, HOT): -1, (WRONG, 0.0): 1}
BEYOND_SIBLINGS = {(OWN, HOT): 1, (SIBLING, HOT): -1}


@cache
def table(model: str, name: str) -> pd.DataFrame:
    found = pd.read_parquet(RESULTS / "data" / model / f"{name}.parquet")
    if "temperature" in found:
        found["temperature"] = found["temperature"].astype(float).round(3)
    return found


# -- numbers ---------------------------------------------------------------------------------------

Ends = tuple[float, float, float]  # a value, and its interval's ends


def around(ends: Ends, digits: int, sign: bool = False, scale: float = 1.0) -> str:
    """A value ± half of its interval."""
    value, low, high = (scale * one for one in ends)
    value = round(value, digits) or 0.0
    text = f"{value:{'+' if sign and value else ''}.{digits}f} ± {(high - low) / 2:.{digits}f}"
    return text.replace("-", "−")


def student(values: Iterable[float]) -> Ends:
    """The mean of one value a query, with Student's 95% interval."""
    x = np.asarray(list(values), dtype=float)
    x = x[~np.isnan(x)]
    reach = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
    return x.mean(), x.mean() - reach, x.mean() + reach


def percent(values: Iterable[float]) -> str:
    return around(student(values), 0, scale=100)


def change(values: Iterable[float]) -> str:
    """A difference of shares, in points of 100."""
    return around(student(values), 1, sign=True, scale=100)


def amount(values: Iterable[float]) -> str:
    return around(student(values), 2)


def more(values: Iterable[float]) -> str:
    return around(student(values), 2, sign=True)


# -- turns -----------------------------------------------------------------------------------------


@cache
def judged(model: str) -> pd.DataFrame:
    turns = table(model, "turns").merge(table(model, "contexts"))
    return turns.assign(out_of_role=turns["category"].isin(OUT_OF_ROLE).astype(float))


@cache
def verdicts(model: str) -> pd.DataFrame:
    """The judge's, of all turns: ``query`` is the one that a turn is shown after."""
    turns, query = judged(model), table(model, "contexts").set_index("context")["query"]
    after = {OWN: ("follow_up", "context"), SIBLING: ("follow_up_after_siblings", "context")}
    after[WRONG] = "follow_up_after_wrong", "wrong"
    columns = [
        turns[["temperature", "out_of_role", "dataset"]].assign(
            where=where, follow_up=turns[name], query=turns[shown].map(query)
        )
        for where, (name, shown) in after.items()
    ]
    return pd.concat(columns, ignore_index=True)


@cache
def read(model: str) -> pd.DataFrame:
    """The annotated turns: by annotators (``follow_up``, ``out_of_role``), and by the judge
    (``judge``), whose fit never saw a turn's query."""
    labels = table(model, "labels").merge(table(model, "contexts")[["context", "query"]])
    labels["follow_up"] = (labels["category"] == "follow_up").astype(float)
    labels["judge"] = (labels["judged"] == "follow_up").astype(float)
    labels["out_of_role"] = labels["category"].isin(OUT_OF_ROLE).astype(float)
    return labels.rename(columns={"kind": "where"})


def of_queries(
    turns: pd.DataFrame, asked: dict[tuple[str, float], int], what: str = "follow_up"
) -> pd.Series:
    """Of each query, the rates that are asked for, with their signs, added up."""
    rates = turns.groupby(["query", "where", "temperature"])[what].mean().unstack([1, 2])
    return sum(sign * rates[cell] for cell, sign in asked.items())


def by_judge(model: str, asked: dict, what: str = "follow_up", dataset: str = "") -> pd.Series:
    turns = verdicts(model)
    turns = turns[turns["dataset"] == dataset] if dataset else turns
    return of_queries(turns, asked, what)


def by_readers(model: str, asked: dict, what: str = "follow_up") -> pd.Series:
    return of_queries(read(model), asked, what)


def corrected(model: str, asked: dict) -> Ends:
    """The judge's value of all turns, corrected by its errors on the labelled ones: as
    ``ia_mech.stats.prediction_powered`` (Angelopoulos, Duchi & Zrnic 2023, arXiv:2311.01453), of
    values per query, since a rise is a difference of rates."""
    every, truth = by_judge(model, asked), by_readers(model, asked)
    there = of_queries(read(model), asked, "judge")
    assert set(truth.index) <= set(every.index)
    k = len(truth)

    def influence(values: pd.Series) -> pd.Series:
        return ((values - values.mean()) / len(values)).reindex(every.index).fillna(0.0)

    gap = influence(every) - influence(there)
    weight = np.clip(-(influence(truth) * gap).sum() / (gap**2).sum(), 0, 1)
    value = truth.mean() + weight * (every.mean() - there.mean())
    error = np.sqrt(((influence(truth) + weight * gap) ** 2).sum() * k / (k - 1))
    reach = stats.t.ppf(0.975, k - 1) * error
    return value, value - reach, value + reach


def kappa(a: np.ndarray, b: np.ndarray) -> float:
    """Cohen's, of two columns of 0 and 1."""
    by_chance = a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean())
    return ((a == b).mean() - by_chance) / (1 - by_chance)


def agreement(models: Sequence[str]) -> str:
    """κ of judge and annotators on turns after their own responses; the jackknife over queries."""
    rows = pd.concat([read(m).assign(query=m + read(m)["query"]) for m in models])
    rows = rows[rows["where"] == OWN]
    a, b, query = (rows[of].to_numpy() for of in ("follow_up", "judge", "query"))
    whole, names = kappa(a, b), np.unique(query)
    without = np.array([kappa(a[query != one], b[query != one]) for one in names])
    n = len(names)
    reach = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((without - whole) ** 2).sum())
    return around((whole, whole - reach, whole + reach), 2)


def two_readers() -> str:
    """κ of two annotators of the same turn."""
    twice = pd.concat([read(m) for m in SETS]).dropna(subset="second_reading")
    second = (twice["second_reading"] == "follow_up").astype(float)
    assert len(twice) == 408
    return f"{kappa(twice['follow_up'].to_numpy(), second.to_numpy()):.2f}"


def queries(model: str) -> int:
    return table(model, "contexts")["query"].nunique()


def gate(turns: pd.DataFrame) -> str:
    """Are more than twice as many turns follow-ups as after a wrong conversation?"""
    own, wrong = (turns[turns["where"] == of].groupby("query")["follow_up"] for of in (OWN, WRONG))
    _, low, high = student(own.mean() - 2 * wrong.mean())
    return "passes" if low > 0 else "fails" if high < 0 else "is undecided"


def part(turns: pd.DataFrame, name: str) -> str:
    """Of the rise of follow-ups: what fewer turns out of role bring (``mix``), and what more
    follow-ups among the others bring (``rest``)."""
    own = turns[turns["where"] == OWN]
    out, heated = own["out_of_role"], own["temperature"] > 0
    one = getattr(decomposed_difference(own["follow_up"], out, heated, own["query"]), name)
    return around((one.value, one.low, one.high), 1, sign=True, scale=100)


def right() -> pd.Series:
    """Sampled follow-ups after right responses minus those after wrong ones, of maths queries."""
    turns = judged(MATHS)
    of = turns[turns["temperature"] > 0].groupby(["query", "right"])["follow_up"].mean().unstack()
    return of[1.0] - of[0.0]


# -- sites -----------------------------------------------------------------------------------------


def site(model: str, name: str, t: float = HOT, layer: int = -1, what: str = "bits") -> pd.Series:
    """Of each query what turns tell when only this site is from their response."""
    bits = table(model, "bits")
    mine = (bits["site"] == name) & (bits["layer"] == layer) & (bits["temperature"] == t)
    return bits[mine].set_index("query")[what].sort_index()


# -- tables ----------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(("| " + " | ".join(line) + " |").replace("|  |", "| |") for line in lines)


def by_three(model: str, asked: dict, show: Callable[[Iterable[float]], str]) -> list[str]:
    """By the judge, corrected, and by the annotators."""
    sign = min(asked.values()) < 0
    middle = around(corrected(model, asked), 1 if sign else 0, sign=sign, scale=100)
    return [show(by_judge(model, asked)), middle, show(by_readers(model, asked))]


def tight(text: str) -> str:
    """For tables of many columns."""
    return text.replace(" ± ", "±")


def how_often() -> str:
    head = ["of 100"]
    for name in SHORT.values():
        head += [f"{name}, judge", "corrected", "language model"]
    rows = []
    for label, asked in (
        ("greedy", GREEDY),
        ("sampled", SAMPLED),
        ("greedy, after a wrong conversation", GREEDY_WRONG),
        ("sampled, after a wrong conversation", SAMPLED_WRONG),
        ("**rise beyond wrong conversations**", BEYOND_WRONG),
    ):
        show = change if min(asked.values()) < 0 else percent
        cells = [one for m in SETS for one in by_three(m, asked, show)]
        rows.append([label, *(f"**{c}**" if label.startswith("**") else c for c in cells)])
    return tight(markdown(head, rows))


def roles() -> str:
    head = ["of 100"]
    for name in SHORT.values():
        head += [f"{name}, judge", "language model"]
    rows = []
    for label, asked in (
        ("greedy turns out of role", GREEDY),
        ("sampled turns out of role", SAMPLED),
    ):
        cells = [
            (by_judge(m, asked, "out_of_role"), by_readers(m, asked, "out_of_role")) for m in SETS
        ]
        rows.append([label, *(percent(one) for both in cells for one in both)])
    for label, name in (
        ("rise by staying in role", "mix"),
        ("rise by following up once in role", "rest"),
    ):
        cells = [part(turns(m), name) for m in SETS for turns in (verdicts, read)]
        rows.append([label, *cells])
    return tight(markdown(head, rows))


def where() -> str:
    """Turns of the run rescored, and turns newly written, with a part from their response."""
    names = {QWEN: "Qwen", SMOL: "SmolLM2"}
    columns = [(m, of) for m in MODELS for of in ("", "written: ")]
    head = ["from the turn's own response"]
    for m, of in columns:
        kind = "written" if of else "rescored"
        head.append(f"{names[m]}, {len(site(m, of + 'own context'))} queries, {kind}")
    labels = {"own context": "everything", "query": "the query (check)"}
    rows = [
        [labels.get(name, f"the {name}"), *(amount(site(m, of + name)) for m, of in columns)]
        for name in ("own context", "response", "header", "query")
    ]
    return markdown(head, rows)


def datasets(model: str) -> str:
    """By the judge: of a kind of query, few turns are labelled."""
    head = ["of 100, after queries of", "greedy", "sampled", "rise beyond wrong conversations"]
    rows = [
        [
            name,
            percent(by_judge(model, GREEDY, dataset=name)),
            percent(by_judge(model, SAMPLED, dataset=name)),
            change(by_judge(model, BEYOND_WRONG, dataset=name)),
        ]
        for name in ("builtin", "gsm8k", "ifbench", "mt-bench")
    ]
    return markdown(head, rows)


def sites(model: str) -> str:
    labels, rows = {"own context": "everything", "query": "the query (check)"}, []
    for name in ("own context", "response", "header", "query"):
        bits = [amount(site(model, name, t)) for t in (0.0, HOT)]
        rows.append([labels.get(name, f"the {name}"), *bits])
    return markdown(["from the turn's own response", "greedy", "sampled"], rows)


def windows(model: str) -> str:
    bits = table(model, "bits")
    whole, rows = site(model, "response, computed on"), []
    for first in sorted(set(bits.loc[bits["site"] == "response, layers", "layer"])):
        alone = amount(site(model, "response, layers", layer=first))
        lost = more(site(model, "response, other layers", layer=first) - whole)
        rows.append([f"{first}–{min(first + 3, LAYERS[model])}", alone, lost])
    return markdown(["layers", "bits with these alone", "change without these"], rows)


def blocks() -> str:
    found = table(SMOL, "parts")
    labels = {"one block": "all before it", "blocks of 16": "its block of 16"}
    labels |= {"blocks of 4": "its block of 4", "blocks of 1": "itself alone"}
    labels["16 random tokens"] = "16 random tokens (control)"
    bits = {name: found.loc[found["site"] == f"response, {name}", "bits"] for name in labels}
    rows = [[label, amount(bits[name])] for name, label in labels.items()]
    return markdown(["a token of the response sees", "bits"], rows)


# -- how much the first token holds ----------------------------------------------------------------


BOTH = ("category", "second_reading")  # the labels of two annotators


@cache
def new_turns(model: str = NEW, readings: tuple[str, ...] = BOTH) -> pd.DataFrame:
    """Turns after new queries, a row for each annotator: ``sampled`` (how many of the first tokens;
    ALL of all), ``follow_up`` and ``in_role``, 1 or 0, and whether this annotator calls the greedy
    turn of the context a follow-up (``greedy``)."""
    turns, found = table(model, "turns"), []
    for name in readings:
        one = turns.assign(label=turns[name]).dropna(subset="label")
        one["follow_up"] = (one["label"] == "follow_up").astype(float)
        one["in_role"] = (~one["label"].isin(OUT_OF_ROLE)).astype(float)
        greedy = one[one["sampled"] == 0].set_index("context")["follow_up"]
        found.append(one.assign(greedy=one["context"].map(greedy), annotator=name))
    return pd.concat(found, ignore_index=True)


def at(count: int, what: str = "follow_up", turns: pd.DataFrame | None = None) -> pd.Series:
    """Of each query, the rate among turns with so many sampled tokens, the mean of annotators."""
    turns = new_turns() if turns is None else turns
    return turns[turns["sampled"] == count].groupby("context")[what].mean()


def where_greedy(is_one: int, readings: tuple[str, ...] = BOTH) -> pd.DataFrame:
    turns = new_turns(readings=readings)
    return turns[turns["greedy"] == is_one]


def once_in_role(count: int) -> Ends:
    """Follow-ups among turns in role: a ratio of means, by the delta method over queries."""
    return ratio_of(at(count), at(count, "in_role"))


def ratio_of(over: pd.Series, under: pd.Series) -> Ends:
    ratio = over.mean() / under.mean()
    value, low, high = student((over - ratio * under) / under.mean())
    return ratio + value, ratio + low, ratio + high


def by_sampled() -> str:
    wrong, rows = table(NEW, "wrong"), []
    head = ["of 100", "follow-ups", "in role", "follow-ups once in role"]
    head += ["where the greedy turn is none", "where it is one", "after a wrong conversation"]
    for count, name in DRAWN.items():
        mine = wrong[wrong["sampled"] == count]
        counted = sum((mine[one] == "follow_up").mean() for one in BOTH) / 2
        row = [name, percent(at(count)), percent(at(count, "in_role"))]
        row.append(around(once_in_role(count), 0, scale=100))
        row += [percent(at(count, turns=where_greedy(one))) if count else "" for one in (0, 1)]
        rows.append([*row, f"{100 * counted:.0f} (of {len(mine)})"])
    return markdown(head, rows)


def rises() -> str:
    rows = []
    for count, name in list(DRAWN.items())[1:]:
        parts = [change(at(count, what) - at(0, what)) for what in ("follow_up", "in_role")]
        rows.append([name, *parts])
    return markdown(["minus greedy, points of 100", "follow-ups", "in role"], rows)


def by_kind(rise: pd.Series) -> list[str]:
    """A rise of follow-ups after each kind of query."""
    kind = table(NEW, "contexts").set_index("context")["dataset"]
    return [change(rise[kind[rise.index] == name]) for name in ("builtin", "ifbench", "mt-bench")]


def third() -> pd.Series:
    """What one sampled token brings in role, minus a third of what all bring."""
    greedy = at(0, "in_role")
    return at(1, "in_role") - greedy - (at(ALL, "in_role") - greedy) / 3


def change_of_ratio() -> str:
    """Follow-ups among turns in role, with all tokens sampled minus greedy, in points of 100."""
    parts = [(at(count), at(count, "in_role")) for count in (ALL, 0)]
    ratios = [over.mean() / under.mean() for over, under in parts]
    each = [
        (over - ratio * under) / under.mean()
        for (over, under), ratio in zip(parts, ratios, strict=True)
    ]
    _, low, high = student(each[0] - each[1])
    value = ratios[0] - ratios[1]
    return around((value, value + low, value + high), 1, sign=True, scale=100)


def first_masses(model: str = NEW) -> pd.DataFrame:
    """A row per context, by the judge: the follow-up ``mass``, that ``in_role``, what is
    ``covered``, and whether the ``greedy`` turn is a follow-up."""
    tokens = table(model, "first_tokens")
    follows = tokens["category"] == "follow_up"
    inside = ~tokens["category"].isin(OUT_OF_ROLE)
    parts = {"mass": follows, "in_role": inside, "covered": tokens["p"] > 0}
    held = {
        name: (tokens["p"] * one).groupby(tokens["context"]).sum() for name, one in parts.items()
    }
    greedy = follows[tokens["greedy"]].astype(float)
    return pd.DataFrame(held).assign(greedy=greedy.set_axis(tokens["context"][tokens["greedy"]]))


def corrected_masses() -> pd.DataFrame:
    """A row per context: its follow-up ``mass``, corrected by an annotator's labels of some first
    tokens' turns, whether there is one (``annotated``), and whether the judge calls the ``greedy``
    turn a follow-up."""
    tokens = table(NEW, "first_tokens")
    noted = tokens["annotated"].notna()
    labels = corrected_labels(
        (tokens["category"] == "follow_up").astype(float),
        tokens["category"],
        (tokens["annotated"] == "follow_up").astype(float).where(noted),
        tokens["context"],
        inclusion=tokens["inclusion"],
        worth=tokens["p"],
    )
    found = pd.DataFrame({"mass": tokens["p"] * labels, "annotated": noted})
    each = found.groupby(tokens["context"]).agg({"mass": "sum", "annotated": "any"})
    return each.assign(greedy=first_masses()["greedy"])


def of_corrected(of: pd.DataFrame) -> str:
    mean_of = corrected_mean(of["mass"], of["annotated"], of.index)
    return around((mean_of.value, mean_of.low, mean_of.high), 2)


def openings() -> str:
    """The first tokens that add most to the mass, and how much they add together."""
    tokens = table(NEW, "first_tokens")
    carried = tokens["p"] * (tokens["category"] == "follow_up")
    adds = carried.groupby(tokens["opening"]).sum().nlargest(4) / tokens["context"].nunique()
    *names, last = (f"`{name[1:-1]}`" for name in adds.index)
    return f"{', '.join(names)} and {last} add {adds.sum():.2f} of it"


def moved_masses(model: str = NEW) -> pd.DataFrame:
    """Of recipients and layers: ``moved`` (high minus low donor), and two equal donors'
    difference (``equal``)."""
    found = table(model, "layers")
    pairs = {"moved": ("high", "low"), "equal": ("equal a", "equal b")}
    pairs |= {"in_role": ("in role high", "in role low")}
    return found.assign(**{name: found[a] - found[b] for name, (a, b) in pairs.items()})


def of_covered(model: str = NEW) -> Ends:
    """How much the high and the low donor's own distributions differ, as shares of what they give
    the recipient's openings."""
    found = table(model, "layers")
    last = found[found["layer"] == found["layer"].max()]
    shares = [last[arm] / last[f"probability of the openings {arm}"] for arm in ("high", "low")]
    return over_pairs(last.assign(moved=shares[0] - shares[1]), "moved")


def by_site(model: str, donors: str = "sites") -> dict[str, list[Ends]]:
    """Of each part of the context whose keys and values are a donor's: how far the mass moves from
    the low to the high donor, that as a share of what the recipient's first tokens hold, and the
    difference of two equal donors."""
    found = {}
    for name, one in table(model, donors).groupby("term"):
        shares = [one[arm] / one[f"probability of the openings {arm}"] for arm in ("high", "low")]
        one = one.assign(moved=one["high"] - one["low"], share=shares[0] - shares[1])
        one = one.assign(equal=one["equal a"] - one["equal b"])
        found[name] = [over_pairs(one, what) for what in ("moved", "share", "equal")]
    return found


def over_pairs(cell: pd.DataFrame, name: str) -> Ends:
    """A mean with its interval over recipients' and donors' queries."""
    donors = ("equal a", "equal b") if name == "equal" else ("high", "low")
    queries = [cell["source"], *(cell[f"query {arm}"] for arm in donors)]
    found = dyadic_mean(cell[name], *queries)
    return found.value, found.low, found.high


def by_layer() -> str:
    found, rows = moved_masses(), []
    for layer in (8, 12, 16, 20, 24, 28):
        cell = found[found["layer"] == layer]
        each = [
            around(over_pairs(cell, name), 2, sign=True) for name in ("moved", "in_role", "equal")
        ]
        rows.append([str(layer), *each])
    return markdown(["after layer", "high minus low", "in role", "two equal donors"], rows)


def under_vector(
    term: str, what: str = "follow_up", model: str = SMOL_NEW, *, wrong: bool = False
) -> pd.Series:
    """Of each query, the greedy turn under a vector: whether it is a follow-up or in role, the mean
    of annotators, or a mass. Wrong: those turns that were shown after a wrong conversation."""
    turns = table(model, "vector")
    turns = turns[turns["term"] == term]
    if "shown" in turns:
        turns = turns[(turns["shown"] != turns["context"]) == wrong]
    turns = turns.set_index("context").sort_index()
    labels = [turns[one] for one in BOTH if one in turns]
    if what == "follow_up":
        return sum((one == "follow_up").astype(float) for one in labels) / len(labels)
    if what == "in_role":
        return sum((~one.isin(OUT_OF_ROLE)).astype(float) for one in labels) / len(labels)
    return turns[what]


def steered() -> str:
    """Qwen's greedy turns under vectors."""
    rows = []
    for term, name in VECTORS.items():
        of = partial(under_vector, term, model=NEW)
        row = [name, percent(of()), percent(of("in_role")), amount(of("follow-up mass"))]
        ratio = around(ratio_of(of(), of("in_role")), 0, scale=100)
        wrong = of(wrong=True)
        counted = f"{100 * wrong.mean():.0f} (of {len(wrong)})" if len(wrong) else ""
        rows.append([*row[:3], ratio, row[3], counted])
    head = ["of 100 greedy turns", "follow-ups", "in role", "follow-ups once in role"]
    return markdown([*head, "follow-up mass", "after a wrong conversation"], rows)


def from_none() -> pd.Series:
    """Whether greedy turns under the vector are follow-ups where that without one is none."""
    turns = table(NEW, "vector")
    turns = turns[turns["shown"] == turns["context"]].set_index("context")
    found = []
    for one in BOTH:
        says = {
            term: (own[one] == "follow_up").astype(float) for term, own in turns.groupby("term")
        }
        found.append(says["follow-ups"][says["unsteered"] == 0])
    return pd.concat(found).groupby(level=0).mean()


def apart() -> str:
    """By how much the donors' own masses differ, by their own openings."""
    found, own = table(NEW, "layers").drop_duplicates("source"), first_masses()["mass"]
    named = {
        split_source(one)[1]: one for one in set(found["query high"]) | set(found["query low"])
    }
    mass = {source: own[query] for query, source in named.items()}
    return mean(found["query high"].map(mass) - found["query low"].map(mass))


def first_half() -> int:
    """The layer from which on more than half is moved, on average."""
    mean_of = moved_masses().groupby("layer")["moved"].mean()
    above = mean_of > mean_of.iloc[-1] / 2
    return int(above[::-1].cumprod()[::-1].idxmax())


def parts_of_layers() -> Iterable[tuple[tuple[str, int], pd.DataFrame]]:
    """Recipients by component and layer (−1: all together), as in ``layers``."""
    return table(NEW, "components").groupby(["component", "layer"])


def half_from() -> list[int]:
    """The confidence set of the layer from which on more than half is moved."""
    set_of = half_moved(table(NEW, "layers"), "", 0.95)
    return [row.names["layer"] for row in set_of if row.estimate.value > 0.05]


# -- sentences -------------------------------------------------------------------------------------


def folded(text: str) -> str:
    return " ".join(text.split())


def mean(values: pd.Series, digits: int = 2) -> str:
    return f"{values.mean():.{digits}f}"


def found_sentences(short: bool) -> list[str]:
    """What was found: in README's few words, or as compare.md opens."""
    asked = GREEDY, SAMPLED, GREEDY_WRONG, SAMPLED_WRONG
    readers = [mean(100 * by_readers(QWEN, one), 0) for one in asked]
    out = [by_readers(QWEN, t, "out_of_role") for t in (GREEDY, SAMPLED)]
    in_role = read(QWEN)[(read(QWEN)["where"] == OWN) & (read(QWEN)["out_of_role"] == 0)]
    within = [mean(100 * of, 0) for _, of in in_role.groupby("temperature")["follow_up"]]
    parts = ("own context", "response", "header")
    all_q, own_q, head_q = (amount(site(QWEN, f"written: {name}")) for name in parts)
    low, high = (f"{100 * end:.0f}" for end in student(by_readers(QWEN, BEYOND_WRONG))[1:])
    steered = [
        mean(100 * under_vector(term, model=NEW), 0)
        for term in ("unsteered", "follow-ups", "permuted")
    ]
    brief = f"""
    {readers[0]}% of its greedy turns and {readers[1]}% of those sampled at T = 0.7 are follow-ups
    ({len(by_readers(QWEN, GREEDY))} queries). Net of the rise after wrong conversations, these are
    {mean(100 * by_readers(QWEN, BEYOND_WRONG), 0)} points more (95% interval: {low} to {high}).
    Among turns in role, {within[0]}% of the greedy and {within[1]}% of the sampled ones are
    follow-ups.

    it raises Qwen's from {steered[0]}% to {steered[1]}%; one learned from shuffled labels leaves
    them at {steered[2]}% ({len(at(0))} other queries, half to learn from; MT-bench's alone show no
    rise).

    Sampled turns of Qwen tell {all_q} bits about which of three responses they followed (at most
    1.58). If all else comes from another response, the response's keys and values alone tell
    {own_q}, the user header's {head_q}."""
    said = f"""{readers[0]}% of Qwen2.5-Coder-1.5B's greedy user turns are follow-ups, and
    {readers[1]}% of its sampled turns are; in SmolLM2-135M no rise is shown.

    {mean(100 * out[0], 0)}% of Qwen's greedy turns are *out of role* (they repeat the conversation
    or speak as the assistant), and {mean(100 * out[1], 0)}% of its sampled turns are.

    A turn depends on the keys and values of its response, and hardly on the user header's.

    With the first token alone sampled, {100 * (at(1) - at(0)).mean():+.1f} of
    {100 * (at(ALL) - at(0)).mean():+.1f} points of Qwen's rise after new queries are there already:

    Among Qwen's turns in role, the language model calls {within[0]}% of the greedy ones
    follow-ups, and {within[1]}% of the sampled ones."""
    return [folded(one) for one in (brief if short else said).split("\n\n")]


def sentences() -> dict[str, list[str]]:
    """Other sentences with numbers, of each page of results."""
    gates = [[gate(by(m)) for m in SETS] for by in (verdicts, read)]
    assert gates == [["passes"] * 3, ["passes", "is undecided", "passes"]]
    verified = 100 * table(MATHS, "contexts")["right"]
    each = [agreement([m]) for m in SETS]
    there = of_queries(read(QWEN), BEYOND_WRONG, "judge"), by_readers(QWEN, BEYOND_WRONG)
    first = of_queries(read(QWEN), GREEDY, "judge") - by_readers(QWEN, GREEDY)
    falls = (
        change(by_judge(SMOL, BEYOND_WRONG)),
        change(of_queries(read(SMOL), BEYOND_WRONG, "judge")),
    )
    sampled = [by_three(m, BEYOND_SIBLINGS, change) for m in SETS]
    both = f"""Judge and language model agree with κ {agreement(SETS)} on turns after their own
    responses (Qwen {each[0]}, maths {each[1]}, SmolLM2 {each[2]}), two readings of one turn with
    {two_readers()}.

    **Where they differ.** On the turns that the language model labelled, the judge's rise in Qwen
    is {change(there[0])}. That is {change(there[0] - there[1])} more than by its labels, since the
    judge misses follow-ups among greedy turns ({change(first)}). On all turns the judge says that
    the rate of SmolLM2 falls ({falls[0]}); on those with a label it doesn't ({falls[1]}).

    **Siblings** are other responses to the same query. Sampled turns are follow-ups more often
    after their own response than after siblings in SmolLM2 ({sampled[2][0]}; corrected
    {sampled[2][1]}), hardly in Qwen ({sampled[0][0]}; {sampled[0][1]})."""
    qwen = f"""{mean(verified, 0)}% of Qwen's responses to the maths queries are right. That turns
    after these are follow-ups more often isn't shown ({change(right())})."""
    tells = amount(site(SMOL, "header", 0.0, what="first_bits"))
    first_token = f"""A greedy turn's first token, sampled from the header's last state, tells
    {tells} bits."""
    twice = table(NEW, "turns").dropna(subset="second_reading")
    labels = twice.drop_duplicates(["context", "text"])
    said = [(labels[name] == "follow_up").astype(float).to_numpy() for name in (*BOTH, "judged")]
    held, none, is_one = first_masses(), where_greedy(0), where_greedy(1)
    small = {n: at(n, turns=new_turns(SMOL_NEW, ("category",))) for n in (0, ALL)}
    layers, cells = half_from(), moved_masses()
    ends = cells.groupby("layer")["moved"].mean()
    ratio, kinds = ends / ends.iloc[-1], by_kind(at(1) - at(0))
    last = around(over_pairs(cells[cells["layer"] == 28], "moved"), 2, sign=True)
    added = {key: one.assign(moved=one["high"] - one["low"]) for key, one in parts_of_layers()}
    adds = {key: around(over_pairs(one, "moved"), 2, sign=True) for key, one in added.items()}
    builtin = cells["source"].map(lambda one: split_source(one)[0]) == "builtin"
    at_end = around(over_pairs(cells[builtin & (cells["layer"] == 28)], "moved"), 2, sign=True)
    agreed = [f"{kappa(said[0], other):.2f}" for other in said[1:]]
    noted, mended = table(NEW, "first_tokens").dropna(subset="annotated"), corrected_masses()
    follows = {one: (noted[one] == "follow_up").astype(float).to_numpy() for one in noted}
    later = [percent(at(n, turns=new_turns(readings=BOTH[:1]))) for n in (2, 5, 8)]
    under = table(NEW, "vector").drop_duplicates(["shown", "text"])
    both_say = f"{kappa(*((under[one] == 'follow_up').to_numpy(float) for one in BOTH)):.2f}"
    vector, control = (partial(under_vector, t, model=NEW) for t in ("follow-ups", "permuted"))
    over_control = by_kind(vector() - control())
    at_7 = {t: of.set_index("context") for t, of in table(NEW, "vector_layer_7").groupby("term")}
    judged_at_7 = {t: (of["judged"] == "follow_up").astype(float) for t, of in at_7.items()}
    part, of_qwen = (
        {name: [around(one, 2, sign=True) for one in each] for name, each in by_site(m).items()}
        for m in (SMOL_NEW, NEW)
    )
    (response,) = by_site(NEW)["response"][:1]
    small_siblings = around(by_site(SMOL, "siblings")["response"][0], 2, sign=True)
    small_queries = table(SMOL, "siblings")["source"].nunique()
    sibling = by_site(QWEN, "siblings")
    moved_by_sibling, of_sibling = sibling["response"][0], sibling["query and response"][0]
    same = around(sibling["response"][2], 2, sign=True)
    siblings = f"""Where the donors are other responses to the same query ({{}} of the first study's
    queries), it moves by {around(moved_by_sibling, 2, sign=True)}, nearly all of the
    {around(of_sibling, 2, sign=True)} by which their own first tokens differ; two siblings of
    nearly equal mass differ by {same}."""
    siblings = siblings.format(table(QWEN, "siblings")["source"].nunique())
    first = f"""One language model labelled {len(twice)} turns twice; numbers are means of
    both readings. These agree with κ {agreed[0]}, the judge with the first with κ {agreed[1]}.

    With one sampled token, follow-ups rise by {kinds[0]} after built-in queries, {kinds[1]} after
    IFBench's and {kinds[2]} after MT-bench's.

    1. With all tokens sampled, there are more follow-ups than among greedy turns: **yes**
    ({change(at(ALL) - at(0))}).

    2. So with one sampled token: **yes** ({change(at(1) - at(0))}).

    3. One sampled token keeps more turns in role, by more than a third of what all bring: **not
    shown** (more in role: {change(at(1, "in_role") - at(0, "in_role"))}; minus a third of what all
    bring: {change(third())}).

    4. Among turns in role follow-ups don't become more frequent by 10 points: **not shown**
    ({change_of_ratio()}).

    5. Where the greedy turn is none, one sampled token gives follow-ups to more than 15 of 100: 
    **not shown** ({around(student(at(1, turns=none)), 1, scale=100)}).

    6. Where it is one, one sampled token gives fewer follow-ups than all: **not shown**
    ({change(at(1, turns=is_one) - at(ALL, turns=is_one))}).

    7. Where the judge calls the greedy turn none, the mass is above 0.15: **yes**
    ({amount(held["mass"][held["greedy"] == 0])}; the first tokens cover {mean(held["covered"])} of
    the probability), and so if corrected by the language model's labels
    ({of_corrected(mended[mended["greedy"] == 0])}).

    8. The header's last state moves the mass by more than half of what the donors' own first tokens
    do in the last quarter of the layers, and by less than a tenth in the first half: **no** (shares
    after layers 22, 14 and 10: {ratio[22]:.2f}, {ratio[14]:.2f} and {ratio[10]:.2f}).

    9. In SmolLM2 the rate with all tokens sampled isn't above that of greedy turns by 10 points:
    **yes** ({change(small[ALL] - small[0])}, one reading, {len(small[0])} queries).

    10. Greedy turns under the vector are follow-ups more often than under the control: **yes**
    ({change(vector() - control())}).

    11. They are in role more often: **yes** ({change(vector("in_role") - control("in_role"))}).

    12. Where the greedy turn without a vector is none, more than 15 of 100 are follow-ups under the
    vector: **yes** ({around(student(from_none()), 1, scale=100)}).

    13. After wrong conversations turns under the vector count not more often than those under the
    control, by 5 points: **not shown** ({change(vector(wrong=True) - control(wrong=True))}).

    14. The mass is higher if the response's keys and values are those of a conversation of high
    rather than of low mass: **yes** ({around(response, 3, sign=True)}).

    15. So if the donors are responses to the same query, of highest and of lowest mass: **yes**
    ({around(moved_by_sibling, 3, sign=True)}).

    {siblings}

    Follow-ups rise by {over_control[0]} over the control after built-in queries,
    {over_control[1]} after IFBench's and {over_control[2]} after MT-bench's. Two readings agree
    with κ {both_say}.

    Of turns with two, five and eight sampled tokens, {later[0]}, {later[1]} and {later[2]} of 100
    are follow-ups (one reading).

    Taken as it is, more than half of the difference is moved from layer {first_half()} on (95%
    confidence set: {layers[0]} to {layers[-1]}). But part of it is how much of a distribution the
    recipient's first tokens hold. As a share of what they hold, the donors' own first tokens aren't
    shown to differ ({around(of_covered(), 2, sign=True)}): no layer is claimed.

    After layer 7 the vector does as much: the mass is
    {amount(at_7["follow-ups"]["follow-up mass"])} under it and
    {amount(at_7["permuted"]["follow-up mass"])} under the control, and by the judge
    {percent(judged_at_7["follow-ups"])} and {percent(judged_at_7["permuted"])} of 100 greedy turns
    are follow-ups ({change(judged_at_7["follow-ups"] - judged_at_7["permuted"])}).

    The follow-up mass: each of the likeliest first tokens (90% of the probability) is gone on from
    greedily, and the turn is judged. It is {amount(held["mass"])}; the first tokens {openings()}.
    Corrected by labels of {len(noted)} of these turns, chosen so that unlikely tokens are among
    them (two readings, κ {kappa(*(follows[one] for one in ("annotated", "second_reading"))):.2f}),
    it is {of_corrected(mended)}. Greedy turns have {mean(held["greedy"])} by the judge: corrected,
    the first token's share of the rise can't be told.

    What one layer's attention or MLP adds moves less: of these, attention in layer 22
    ({adds["attn", 22]}) and the MLPs of layers 19 and 20 ({adds["mlp", 19]} and {adds["mlp", 20]})
    are shown to move it, Holm-corrected; all MLPs together do ({adds["mlp", -1]}).

    If the response's keys and values are those of the donor, and what follows is computed anew, the
    mass moves by {of_qwen["response"][0]} ({of_qwen["response"][1]} as a share of what the
    recipient's first tokens hold). That is little, and two donors of equal mass differ by
    {of_qwen["response"][2]}. The query's move it by {of_qwen["query"][0]}, but as a share this
    isn't shown ({of_qwen["query"][1]}).

    What can be moved is little: {last}, though the donors' own masses differ by {apart()}. Most of
    that isn't in how likely first tokens are, but in what they lead to. After built-in queries
    alone nothing is shown ({at_end})."""
    base = new_turns(GEMMA_NEW, ("judged",))
    base = base[base["label"] != "cannot_assess"]
    rates = {(n, what): at(n, what, base) for n in (0, ALL) for what in ("follow_up", "in_role")}
    shown = [percent(one) for one in rates.values()]
    grown = [change(rates[ALL, what] - rates[0, what]) for what in ("follow_up", "in_role")]
    inside = base[(base["sampled"] == ALL) & (base["in_role"] == 1)]["follow_up"]
    first += f"""\n\n    After the same conversations, gemma-3-270m puts {shown[1]} of 100 greedy
    turns in role by the judge, and {shown[3]} with all tokens sampled ({grown[1]}). {shown[0]} and
    {shown[2]} are follow-ups ({grown[0]}), {100 * inside.mean():.0f} of 100 turns in role."""
    own = moved_masses(SMOL_NEW)
    donors = around(over_pairs(own[own["layer"] == 30], "moved"), 2, sign=True)
    masses = first_masses(SMOL_NEW)["mass"]
    not_there = f"""After {len(masses)} new queries its follow-up mass is {amount(masses)}. The
    header's last state isn't shown to move it after any layer; what can be moved isn't shown to be
    above 0 ({donors})."""
    of_parts = f"""The response does: if its keys and values are those of another conversation
    of high mass rather than of low mass, and what follows is computed anew, the mass moves by
    {part["response"][0]} ({part["response"][1]} as a share of what the recipient's first tokens
    hold; two equal donors: {part["response"][2]}). The query's move it by {part["query"][0]}
    ({part["query"][1]}), which is hardly shown. This wasn't among the claims. Where the donors are
    responses to the same query, nothing is shown ({small_siblings}, {small_queries} of the first
    study's queries)."""
    under = {t: under_vector(t) for t in ("unsteered", "follow-ups", "permuted")}
    moved_by = {t: mean(under_vector(t, "follow-up mass")) for t in under}
    inside = {t: under_vector(t, "in_role") for t in under}
    kl = table(SMOL_NEW, "vector").set_index("term").loc["follow-ups", "KL at the header"]
    rates = {term: percent(of) for term, of in under.items()}
    vector = f"""A vector is added to the header's last state after layer 15. It was learned, on
    other queries, to make those first tokens likely that lead to follow-ups. The control was
    learned from the same tokens with permuted labels; both move the first token's distribution by a
    KL of {mean(kl)} nats. The mass is {moved_by["follow-ups"]} under the vector,
    {moved_by["permuted"]} under the control and {moved_by["unsteered"]} without one.
    {rates["follow-ups"]}, {rates["permuted"]} and {rates["unsteered"]} of 100 greedy turns are
    follow-ups ({change(under["follow-ups"] - under["permuted"])} over the control,
    {len(under["permuted"])} queries, one reading, blind);
    {mean(100 * inside["follow-ups"], 0)}, and {mean(100 * inside["permuted"], 0)} under the
    control, are in role."""
    compare = [folded(one) for one in both.split("\n\n")]
    return {
        "compare": compare,
        SMOL: [folded(one) for one in (first_token, not_there, of_parts, vector)],
        QWEN: [folded(one) for one in f"{qwen}\n\n{first}".split("\n\n")],
    }


@cache
def pages() -> dict[str, list[str]]:
    """The tables and sentences of each page."""
    tables = {"compare": [how_often(), roles(), where()]}
    tables |= {m: [datasets(m), sites(m), windows(m)] for m in MODELS}
    tables[SMOL] += [blocks()]
    tables[QWEN] += [by_sampled(), rises(), steered(), by_layer()]
    found = {f"docs/results/{name}.md": tables[name] + sentences()[name] for name in tables}
    found["docs/results/compare.md"] += found_sentences(short=False)
    return {"README.md": found_sentences(short=True)} | found


def show() -> None:
    """Print all tables and sentences, to be put on the pages."""
    for page, mine in pages().items():
        print(f"\n# {page}\n", *mine, sep="\n\n")


# Decimals, percentages and intervals; not those in names, as of Qwen2.5-Coder-1.5B.
NUMBER = re.compile(r"(?<![\w.-])(?:[+−]?\d+\.\d+(?![\w.])|\d+%|[+−]?[\d.]+ ± [\d.]+)")
CONSTANTS = {"0.7", "1.58", "95%", "90%", "0.55"}  # 1.58: bits of three; κ of the earlier judge


@pytest.mark.parametrize("page", list(pages()))
def test_a_page_says_what_the_data_say_and_no_other_number(page):
    text = (ROOT / page).read_text("utf-8")
    if page == "README.md":
        text = text.partition("## What was found\n")[2].partition("\n## ")[0]
    text = folded(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    missing = [one for one in pages()[page] if folded(one) not in text]
    assert not missing, "\n\n".join(missing)
    for one in sorted(pages()[page], key=len, reverse=True):
        text = text.replace(folded(one), "")
    assert set(NUMBER.findall(text)) <= CONSTANTS


def test_verdicts_are_out_of_fold_and_the_same_in_both_tables():
    every = pd.concat([table(m, "contexts") for m in SETS])
    plain = every["query_text"].str.lower().str.replace(r"\W+", " ", regex=True).str.strip()
    assert (every.groupby(plain)["fold"].nunique() == 1).all()  # a query has one in all studies
    for m in SETS:
        turns = table(m, "turns").rename(columns={"context": "source_context"})
        both = read(m).merge(turns, on=["source_context", "temperature", "sample"])
        own = both[both["where"] == OWN]
        assert (own["judged"] == own["category_y"]).all()
        assert len(own) == (read(m)["where"] == OWN).sum()
        query = table(m, "contexts").set_index("context")["query"]
        assert (query[turns["wrong"]].to_numpy() != query[turns["source_context"]].to_numpy()).all()
