"""The numbers of README's findings and of docs/results, made again from docs/results/data.

Every table of the pages is written here, character by character, and has to stand on its page.
Only pandas, NumPy and SciPy compute, but for the two parts of a rise, which are the project's and
are compared with a plain jackknife. Intervals are Student's over queries, of means (or differences)
of each query.

    PYTHONPATH=tests python -c "import test_published as p; p.show()"     prints all tables
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ia_mech.estimates import frame_of, holm_corrected
from ia_mech.rates.compute import NAMES
from ia_mech.rates.latent import rises, verdict
from ia_mech.run.sources import split_source
from ia_mech.stats import Decomposition, decomposed_difference

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
SMOL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"
MATHS = f"{QWEN}-maths"  # other GSM8K queries than those of the study
MODELS = (SMOL, QWEN)
HOT = 0.7


@cache
def table(model: str, name: str) -> pd.DataFrame:
    found = pd.read_parquet(RESULTS / "data" / model / f"{name}.parquet")
    if "temperature" in found:
        found["temperature"] = found["temperature"].astype(float).round(3)
    return found


# -- numbers ---------------------------------------------------------------------------------------


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def shown(value: float, low: float, high: float, digits: int = 2, sign: bool = False) -> str:
    ends = f"[{number(low, digits, sign)}, {number(high, digits, sign)}]"
    return f"{number(value, digits, sign)} {ends}"


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean and Student's 95% interval of one value a query."""
    x = np.asarray(list(values), dtype=float)
    x = x[~np.isnan(x)]
    reach = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
    return x.mean(), x.mean() - reach, x.mean() + reach


def points(ends: Iterable[float], sign: bool = False, digits: int = 0) -> str:
    """An estimate as points, with half of its interval's width."""
    value, low, high = (100 * one for one in ends)
    whole = round(value, digits) or 0.0
    first = f"{whole:{'+' if sign and whole else ''}.{digits}f}"
    return f"{first} ± {(high - low) / 2:.{digits}f}".replace("-", "−")


def mean(values: Iterable[float], digits: int = 2) -> str:
    return shown(*interval(values), digits)


def change(values: Iterable[float], digits: int = 2) -> str:
    return shown(*interval(values), digits, sign=True)


@cache
def by_query(model: str) -> pd.DataFrame:
    """Means of each query's turns: columns (quantity, temperature)."""
    turns = table(model, "turns").merge(table(model, "contexts")[["context", "query", "dataset"]])
    turns["beyond siblings"] = turns["follow_up"] - turns["follow_up_after_siblings"]
    turns["beyond another"] = turns["follow_up"] - turns["follow_up_after_wrong"]
    turns["after another"] = turns["follow_up_after_wrong"]
    columns = ["follow_up", "after another", "beyond siblings", "beyond another"]
    return turns.groupby(["dataset", "query", "temperature"])[columns].mean().unstack()


def components(model: str) -> tuple[tuple, tuple, tuple]:
    """Variances of sampled follow-ups between queries and between responses to one, and the
    reliability of rates over 16 turns: pairs of turns with different sample numbers, jackknife."""
    turns = table(model, "turns").merge(table(model, "contexts")[["context", "query"]])
    rows = []
    for _, one in turns[turns["temperature"] > 0].groupby("query"):
        x = one.pivot_table(index="context", columns="sample", values="follow_up", dropna=False)
        v, n = np.nan_to_num(x.to_numpy(float)), (~np.isnan(x.to_numpy(float))).astype(float)

        def pairs(a: np.ndarray) -> np.ndarray:
            one, response, noise = (a**2).sum(), (a.sum(1) ** 2).sum(), (a.sum(0) ** 2).sum()
            return np.array([response - one, a.sum() ** 2 - response - noise + one, noise - one])

        same, other, shared = pairs(v) / pairs(n)
        rows.append((v.sum() / n.sum(), same, other, shared, (v**2).sum() / n.sum()))
    m, same, other, shared, square = np.array(rows).T
    k = len(m)

    def jackknife(whole: float, without: np.ndarray) -> tuple[float, float, float]:
        error = np.sqrt((k - 1) / k * ((without - without.mean()) ** 2).sum())
        reach = stats.t.ppf(0.975, k - 1) * error
        return whole, whole - reach, whole + reach

    def products(total: float | np.ndarray, squares: float | np.ndarray, n: int):
        return (total**2 - squares) / (n * (n - 1))

    whole = other.mean() - products(m.sum(), (m**2).sum(), k)
    out = (other.sum() - other) / (k - 1)
    out = out - products(m.sum() - m, (m**2).sum() - m**2, k - 1)
    between = jackknife(whole, out)
    sib = same - other
    responses = jackknife(sib.mean(), (sib.sum() - sib) / (k - 1))
    noise = ((square - same).mean() - (shared - other).mean()) / 16
    return between, responses, tuple(max(v, 0) / (max(v, 0) + noise) for v in responses)


def site(model: str, name: str, t: float, layer: int = -1, what: str = "bits") -> pd.Series:
    """Of each query what a site tells."""
    bits = table(model, "bits")
    mine = (bits["site"] == name) & (bits["layer"] == layer) & (bits["temperature"] == t)
    return bits[mine].set_index("query")[what].sort_index()


@cache
def auroc_parts(model: str, column: str) -> np.ndarray:
    """Of each query, pairs of an accepted and another turn that a probe orders rightly, and all
    pairs; both turns are after responses to it, and tested in one fold."""
    probes, rows = table(model, "probes"), []
    for _, one in probes.groupby(["fold", "source"]):
        yes = one["positives"].to_numpy(float)
        no = one["trials"].to_numpy(float) - yes
        score = yes / (yes + no) if column == "observed" else one[column].to_numpy(float)
        weight = np.outer(yes, no)
        np.fill_diagonal(weight, 0)
        gap = score[:, None] - score[None, :]
        right = weight[gap > 1e-7].sum() + weight[abs(gap) <= 1e-7].sum() / 2
        rows.append((right, weight.sum()))
    return np.array(rows)


def linearised(value: float, residuals: np.ndarray, pairs: float) -> tuple[float, float, float]:
    """A quotient with Student's interval from what each query adds to it."""
    k = len(residuals)
    reach = stats.t.ppf(0.975, k - 1) * np.sqrt(k / (k - 1) * (residuals**2).sum()) / pairs
    return value, value - reach, value + reach


def auroc(model: str, column: str) -> tuple[float, float, float]:
    """How often a probe orders two turns after responses to one query rightly."""
    right, pairs = auroc_parts(model, column).T
    value = right.sum() / pairs.sum()
    return linearised(value, right - value * pairs, pairs.sum())


def auroc_less(model: str, column: str, other: str) -> tuple[float, float, float]:
    """The difference of two such numbers, paired by query."""
    (right, pairs), (less, _) = auroc_parts(model, column).T, auroc_parts(model, other).T
    value, base = right.sum() / pairs.sum(), less.sum() / pairs.sum()
    return linearised(value - base, right - value * pairs - less + base * pairs, pairs.sum())


def ordered(score: np.ndarray, turns: np.ndarray, query: np.ndarray) -> float:
    """How often scores ``[contexts]`` order two of ``turns`` ``[contexts, samples]`` rightly."""
    right = pairs = 0.0
    for one in np.unique(query):
        mine = query == one
        yes, no = turns[mine].sum(1), (1 - turns[mine]).sum(1)
        weight = np.outer(yes, no)
        np.fill_diagonal(weight, 0)
        gap = score[mine][:, None] - score[mine][None, :]
        right += weight[gap > 1e-9].sum() + weight[abs(gap) <= 1e-9].sum() / 2
        pairs += weight.sum()
    return right / pairs


def halves(model: str) -> str:
    """How well rates of half of the turns order siblings by the other half: a mean of 10 draws."""
    probes = table(model, "probes").set_index("context_id")
    turns = table(model, "turns")
    turns = turns[(turns["temperature"] > 0) & turns["context"].isin(probes.index)]
    wide = turns.pivot_table(index="context", columns="sample", values="follow_up").fillna(0.0)
    query = pd.factorize(probes.loc[wide.index, "source"].astype(str))[0]
    x, rng, found = wide.to_numpy(), np.random.default_rng(0), []
    for _ in range(10):
        drawn = rng.permutation(x.shape[1])
        found.append(ordered(x[:, drawn[:8]].mean(1), x[:, drawn[8:]], query))
    return number(float(np.mean(found)))


# -- tables ----------------------------------------------------------------------------------------

Row = tuple[str, Callable[[str], str]]
Count = Callable[[str], int]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def queries(model: str) -> int:
    return table(model, "contexts")["query"].nunique()


def accepted(model: str, what: str, t: float, dataset: str | None = None) -> pd.Series:
    found = by_query(model) if dataset is None else by_query(model).xs(dataset, level="dataset")
    return found[what][t]


def rise(model: str, what: str, dataset: str | None = None) -> pd.Series:
    return accepted(model, what, HOT, dataset) - accepted(model, what, 0.0, dataset)


JUDGED: list[Row] = [
    ("greedy", lambda m: mean(accepted(m, "follow_up", 0.0))),
    ("T = 0.7", lambda m: mean(accepted(m, "follow_up", HOT))),
    ("rise from greedy to T = 0.7", lambda m: change(rise(m, "follow_up"))),
    (
        "rise, beyond turns shown after a wrong conversation",
        lambda m: change(rise(m, "beyond another")),
    ),
    ("beyond sibling responses, greedy", lambda m: change(accepted(m, "beyond siblings", 0.0))),
    ("beyond sibling responses, T = 0.7", lambda m: change(accepted(m, "beyond siblings", HOT))),
]
WRITTEN: list[Row] = [
    ("greedy", lambda m: mean(wrote(m, "own context", 0.0))),
    ("T = 0.7", lambda m: mean(wrote(m, "own context", HOT))),
    ("rise from greedy to T = 0.7", lambda m: change(written_rise(m, "own context"))),
    ("T = 0.7, response and header from it", lambda m: mean(wrote(m, "response and header", HOT))),
    ("rise", lambda m: change(written_rise(m, "response and header"))),
    ("T = 0.7, the response alone", lambda m: mean(wrote(m, "response", HOT))),
    ("rise", lambda m: change(written_rise(m, "response"))),
    ("T = 0.7, the header alone", lambda m: mean(wrote(m, "header", HOT))),
    ("T = 0.7, the query alone (check)", lambda m: mean(wrote(m, "query", HOT))),
]
READ: list[Row] = [
    ("best states, chosen in nested folds", lambda m: shown(*auroc(m, "log_odds"))),
    ("words of query and response", lambda m: shown(*auroc(m, "control:text"))),
    ("lengths", lambda m: shown(*auroc(m, "control:lengths"))),
    (
        "the first token's distribution (the last state)",
        lambda m: shown(*auroc(m, "control:output")),
    ),
    ("output, words and ends of query and response", lambda m: shown(*auroc(m, "base"))),
    ("these and the best states", lambda m: shown(*auroc(m, "full"))),
]
AGAIN = "the same turns, shown after a wrong conversation"
HEADLINES: list[Row] = [
    (
        "greedy follow-ups by the judge as follow-ups",
        lambda m: points(interval(accepted(m, "follow_up", 0.0))),
    ),
    (AGAIN, lambda m: points(interval(accepted(m, "after another", 0.0)))),
    ("turns sampled at T = 0.7", lambda m: points(interval(accepted(m, "follow_up", HOT)))),
    (AGAIN, lambda m: points(interval(accepted(m, "after another", HOT)))),
    (
        "**rise from greedy to sampled turns, less that after a wrong conversation**",
        lambda m: f"**{points(interval(rise(m, 'beyond another')), True, 1)}**",
    ),
    (
        "rise beyond siblings: less that of the same turns after another response to the query",
        lambda m: f"{points(interval(rise(m, 'beyond siblings')), True, 1)} (not shown)",
    ),
    ("greedy turns that are *out of role*", lambda m: points(interval(outside(m)[0.0]))),
    ("sampled turns that are *out of role*", lambda m: points(interval(outside(m)[HOT]))),
    (
        "*gate*: more than twice as many accepted as after a wrong conversation",
        lambda m: gate(m),
    ),
]
DATASETS = ("builtin", "gsm8k", "ifbench", "mt-bench")
SITES = ("own context", "response", "after the response", "header", "query")
OUT_OF_ROLE = ["repeats_query", "repeats_response", "speaks_as_assistant"]
PARTS = {
    "response, computed on": "whole response",
    "response, last token": "last token",
    "response, tokens 2–8 from its end": "tokens 2–8 from its end",
    "response, tokens 9–32 from its end": "tokens 9–32",
    "response, tokens 33–128 from its end": "tokens 33–128",
    "response, tokens before these": "tokens before these",
    "response, one block": "whole, in one block",
    "response, blocks of 16": "whole, in blocks of 16",
    "response, blocks of 4": "whole, in blocks of 4",
    "response, blocks of 1": "whole, in blocks of 1",
    "response, 16 random tokens": "whole, 16 random tokens in sight",
}
PLACES = {
    "turn_end": "turn end",
    "turn_separator": "separator",
    "header": "all of the header",
    "header_last": "the header's last token",
}
CATEGORIES = {
    "follow_up": "follow_up",
    "repeats_query": "repeats query",
    "repeats_response": "repeats response",
    "speaks_as_assistant": "speaks as assistant",
    "new_topic": "new topic",
    "degenerate": "degenerate",
}


def side_by_side(what: str, rows: Sequence[Row], count: Callable[[str], int]) -> str:
    """Both models in one table."""
    head = [what, f"SmolLM2, {count(SMOL)} queries", f"Qwen, {count(QWEN)} queries"]
    return markdown(head, ([label, *(make(m) for m in MODELS)] for label, make in rows))


def judged(rows: Sequence[Row] = JUDGED) -> str:
    return side_by_side("follow-ups by the judge", rows, queries)


def told(rows: Sequence[Row] = WRITTEN) -> str:
    count = lambda m: len(wrote(m, "own context", HOT))  # noqa: E731
    return side_by_side("bits about the response, of at most 1.58", rows, count)


def hits(model: str, part: str, t: float) -> pd.Series:
    """Of each query, turns that the model wrote whose own response is the likeliest of three."""
    return site(model, f"written: {part}", t, what="hits")


def outside(model: str) -> pd.DataFrame:
    """Of each query and temperature, the share of turns out of role."""
    turns = judged_turns(model)
    away = turns["category"].isin(OUT_OF_ROLE)
    return away.groupby([turns["query"], turns["temperature"]]).mean().unstack()


def gate(model: str) -> str:
    """Whether turns are accepted more than twice as often as after a wrong conversation."""
    of = by_query(model)
    turns = judged_turns(model).groupby(["query", "temperature"]).size().unstack()
    margin = sum(
        (of[("follow_up", t)] - 2 * of[("after another", t)]).droplevel(0) * turns[t]
        for t in (0.0, HOT)
    )
    _, low, high = interval(margin / turns.sum(axis=1))
    return "passed" if low > 0 else "failed" if high < 0 else "undecided"


def greedy_margin() -> str:
    """What the gate would say of Qwen's greedy turns alone: their rate less twice the floor."""
    of = by_query(QWEN)
    return change(of[("follow_up", 0.0)] - 2 * of[("after another", 0.0)])


def headlines() -> list[str]:
    """README's table."""
    names = {
        QWEN: "Qwen2.5-Coder-1.5B, {} queries",
        MATHS: "Qwen, {} other queries, all maths",
        SMOL: "SmolLM2-135M, {} queries",
    }
    head = ["in points of 100", *(name.format(queries(m)) for m, name in names.items())]
    return [markdown(head, [[label, *(make(m) for m in names)] for label, make in HEADLINES])]


def parts_of_rise(
    turns: pd.DataFrame, value: str, outside: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray, int]:
    """The rise of a value of turns as a sum: fewer sampled turns are out of role, and turns of
    either kind have more of it; the latter of turns in role, and of those out of it. With standard
    errors by the jackknife over queries, and their number. ``outside``: categories out of role."""
    plain = (~turns["category"].isin(outside or OUT_OF_ROLE)).astype(float)
    columns = {"all": turns[value], "plain": plain, "of plain": turns[value] * plain}
    known = turns[["query", "temperature"]].assign(**columns).dropna()
    of = known.groupby(["query", "temperature"]).mean().unstack().to_numpy()

    def parts(means: np.ndarray) -> np.ndarray:
        whole, plain, of_plain = means.reshape(3, 2)
        kinds = np.array([plain, 1 - plain])  # shares at T = 0 and 0.7
        earned = np.array([of_plain, whole - of_plain]) / kinds
        moved = (np.diff(kinds)[:, 0] * earned.mean(1)).sum()
        return np.array([moved, np.diff(whole)[0] - moved, *np.diff(earned)[:, 0] * kinds.mean(1)])

    k = len(of)
    without = np.array([parts(np.delete(of, i, 0).mean(0)) for i in range(k)])
    error = np.sqrt((k - 1) / k * ((without - without.mean(0)) ** 2).sum(0))
    return parts(of.mean(0)), error, k


def decomposed(turns: pd.DataFrame, value: str) -> Decomposition:
    """The rise of a value of turns, as ``ia-mech rates`` decomposes it."""
    columns = turns[value], turns["category"].isin(OUT_OF_ROLE), turns["temperature"] > 0
    return decomposed_difference(*columns, turns["query"])


def rests_of(model: str) -> list[float]:
    """What is left of the rise beyond a wrong conversation, by each definition of out of role."""
    at = 2 if model == QWEN else 5
    rows = [re.findall(r"([+−]\d\.\d\d) \[", row) for row in hangs_on().splitlines()[2:]]
    return [float(row[at].replace("−", "-")) for row in rows]


def split(turns: pd.DataFrame, value: str) -> list[str]:
    """The parts of :func:`parts_of_rise` with intervals: the first two as ``ia-mech rates`` has
    them, the others by the plain jackknife."""
    own = decomposed(turns, value)
    found, errors, k = parts_of_rise(turns, value)
    assert np.allclose([own.mix.value, own.rest.value], found[:2], atol=1e-9)
    reach = stats.t.ppf(0.975, k - 1) * errors
    kinds = [shown(v, v - r, v + r, sign=True) for v, r in zip(found, reach, strict=True)][2:]
    return [
        own.mix.text(sign=True).replace("-", "−"),
        own.rest.text(sign=True).replace("-", "−"),
        *kinds,
    ]


@cache
def judged_turns(model: str) -> pd.DataFrame:
    columns = ["context", "query", "dataset", "right"]
    turns = table(model, "turns").merge(table(model, "contexts")[columns])
    turns["beyond"] = turns["follow_up"] - turns["follow_up_after_wrong"]
    return turns


@cache
def picked_turns(model: str, queries: str = "all") -> pd.DataFrame:
    """Turns of the run whose likelihood was scored after all four responses: in how many of the
    three pairs of siblings the own response is the likeliest of three, by all tokens
    (``picked``) and by those from the second on (``picked later``).

    ``queries``: all, the ``first`` ones, in which the rise was seen, or the ``others``.
    """
    scores = table(model, "scores").merge(judged_turns(model))
    if queries != "all":
        seen = map(split_source, table(model, "bits")["query"].unique())
        first = scores["query"].isin([query for _, query in seen])
        scores = scores[first if queries == "first" else ~first].copy()
    own = scores["context"].str[-1].astype(int).to_numpy()
    others = scores[[f"others_{k}" for k in range(4)]].to_numpy()
    first = scores[[f"first_{k}" for k in range(4)]].to_numpy()
    for name, each in {"picked": first + others, "picked later": others}.items():
        mine = each[np.arange(len(own)), own]
        below = (each < mine[:, None]).sum(1)  # siblings that are less likely
        scores[name] = below * (below - 1) / 2 / 3
    return scores


# Of three siblings n are the same as the turn: for each pair of siblings, whether its two are.
PAIRS = [list(combinations([1] * n + [0] * (3 - n), 2)) for n in range(4)]
KINDS: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "all": lambda turns: turns["query"].notna(),
    "out of role": lambda turns: turns["category"].isin(OUT_OF_ROLE),
    "in role": lambda turns: ~turns["category"].isin(OUT_OF_ROLE),
    "follow_up": lambda turns: turns["follow_up"] == 1,
}


def same_texts(model: str) -> pd.Series:
    """Of each query, how often a reader who knows all greedy turns names the response of one: it is
    sure, but where two of the three turned out the same."""
    turns = judged_turns(model)
    greedy = turns[(turns["temperature"] == 0) & turns["query"].isin(picked_turns(model)["query"])]
    alike = greedy.groupby(["query", "text"])["text"].transform("size").to_numpy() - 1
    odds = [1, 1 / 2, 1 / 3]  # with none, one or both of two siblings the same
    greedy = greedy.assign(named=[np.mean([odds[a + b] for a, b in PAIRS[n]]) for n in alike])
    return greedy.groupby("query")["named"].mean()


def picks(
    model: str, kind: str = "all", what: str = "picked", queries: str = "all"
) -> pd.DataFrame:
    """Of each query and temperature, in turns of a kind."""
    turns = picked_turns(model, queries)
    turns = turns[KINDS[kind](turns)]
    return turns.groupby(["query", "temperature"])[what].mean().unstack()


def more_picks(
    model: str, kind: str = "all", what: str = "picked", queries: str = "all"
) -> pd.Series:
    """The rise from greedy to sampled turns, of queries that have both."""
    of = picks(model, kind, what, queries).dropna()
    return of[HOT] - of[0.0]


def fit_others(model: str) -> tuple[float, float]:
    """Of sampled follow-ups, shares accepted after a wrong conversation and after siblings."""
    turns = table(model, "turns")
    mine = turns[(turns["temperature"] > 0) & (turns["follow_up"] == 1)]
    return mine["follow_up_after_wrong"].mean(), mine["follow_up_after_siblings"].mean()


def written_rise(model: str, part: str) -> pd.Series:
    return wrote(model, part, HOT) - wrote(model, part, 0.0)


def wrote(model: str, part: str, t: float) -> pd.Series:
    """Bits of turns that the model wrote where only a part of the context is from a response."""
    return site(model, f"written: {part}", t)


def read() -> str:
    count = lambda m: table(m, "probes")["source"].nunique()  # noqa: E731
    return side_by_side("siblings ordered rightly by (chance: 0.50)", READ, count)


def variances() -> str:
    found = {m: components(m) for m in MODELS}
    names = (
        "variance of the rate between queries",
        "variance between responses to one query",
        "reliability of rates over 16 turns, among siblings",
    )
    rows = [
        [name, *(shown(*found[m][i], 3 if i < 2 else 2) for m in MODELS)]
        for i, name in enumerate(names)
    ]
    return markdown(["", "SmolLM2", "Qwen"], rows)


def datasets(model: str) -> str:
    head = ["queries of", "greedy", "T = 0.7", "rise", "rise beyond a wrong conversation"]
    head += ["beyond siblings, greedy", "T = 0.7"]
    rows = [
        [
            name,
            mean(accepted(model, "follow_up", 0.0, name)),
            mean(accepted(model, "follow_up", HOT, name)),
            change(rise(model, "follow_up", name)),
            change(rise(model, "beyond another", name)),
            change(accepted(model, "beyond siblings", 0.0, name)),
            change(accepted(model, "beyond siblings", HOT, name)),
        ]
        for name in DATASETS
    ]
    return markdown(head, rows)


def categories() -> str:
    rows = []
    for name, label in CATEGORIES.items():
        cells = []
        for model in MODELS:
            turns = table(model, "turns")
            share = (turns["category"] == name).groupby(turns["temperature"]).mean()
            cells += [number(share[0.0]), number(share[HOT])]
        rows.append([label, *cells])
    head = ["", "SmolLM2, greedy", "T = 0.7", "Qwen, greedy", "T = 0.7"]
    return markdown(head, rows)


def sites(model: str) -> str:
    """What is expressed and carried; where first tokens were scored, they count, and are shown."""
    firsts = "first_bits" in table(model, "bits")
    bits, hits = ("whole_bits", "whole_hits") if firsts else ("bits", "hits")
    rows = []
    for name in SITES:
        label = {"own context": "everything (expressed)", "query": "the query (control)"}.get(
            name, f"the {name}" if name != "after the response" else "all tokens after it"
        )
        greedy, hot = site(model, name, 0.0, what=bits), site(model, name, HOT, what=bits)
        row = [label, mean(greedy), mean(hot), change(hot - greedy)]
        row.append(mean(site(model, name, HOT, what=hits)))
        if firsts:
            row += [mean(site(model, name, t, what="first_bits")) for t in (0.0, HOT)]
            row.append(mean(site(model, name, HOT)))
        rows.append(row)
    head = ["what is the candidate's", "greedy", "T = 0.7", "T = 0.7 less greedy"]
    head.append("own likeliest, T = 0.7")
    if firsts:
        head += ["first tokens, greedy", "first tokens, T = 0.7", "later tokens, T = 0.7"]
    return markdown(head, rows)


def windows(model: str) -> str:
    bits = table(model, "bits")
    layers = sorted(set(bits.loc[bits["site"] == "response, layers", "layer"]))
    last = {SMOL: 30, QWEN: 28}[model]
    whole = site(model, "response, computed on", HOT)
    rows = []
    for first in layers:
        alone = site(model, "response, layers", HOT, first)
        hits = site(model, "response, layers", HOT, first, "hits")
        lost = site(model, "response, other layers", HOT, first) - whole
        rows.append([f"{first}–{min(first + 3, last)}", mean(alone), mean(hits), change(lost)])
    return markdown(["layers", "put in alone", "own likeliest", "change if left out"], rows)


def written(model: str) -> str:
    rows = []
    for name in ("own context", "response and header", "response", "header", "query"):
        key = f"written: {name}"
        row = [name, mean(site(model, key, 0.0)), mean(site(model, key, 0.0, what="hits"))]
        rows.append([*row, mean(site(model, key, HOT)), mean(site(model, key, HOT, what="hits"))])
    head = ["the candidate's", "greedy: bits", "own likeliest", "T = 0.7: bits", "own likeliest"]
    return markdown(head, rows)


def vectors(model: str) -> str:
    """Excess over siblings of greedy turns under learned vectors, paired by query."""
    found = table(model, "vectors")
    found = found[found["temperature"] == 0]
    excess = found.pivot_table(index="source", columns=["layer", "term"], values=EXCESS)
    rate = found.pivot_table(index="source", columns=["layer", "term"], values="follow_up")
    plain = (excess.columns.get_level_values("layer").min(), "unsteered")
    rows = [["none", "", mean(rate[plain]), change(excess[plain]), "", ""]]
    for layer in sorted(set(excess.columns.get_level_values("layer")) - {plain[0]}):
        for term in ("own", "siblings"):
            mine = excess[(layer, term)]
            less = change(mine - excess[(layer, "siblings")]) if term == "own" else ""
            cells = [mean(rate[(layer, term)]), change(mine), change(mine - excess[plain]), less]
            rows.append([str(layer), term, *cells])
    head = ["after layer", "learned from turns after", "follow_up", "beyond siblings"]
    return markdown([*head, "less without a vector", "less the siblings' vector"], rows)


EXCESS = "excess over siblings"


def rates_to_the_original(model: str) -> pd.DataFrame:
    """Of each query, by condition and temperature."""
    turns = table(model, "changes")
    turns = turns.assign(query=turns["context_id"].str.replace(r"/r\d.*", "", regex=True))
    return turns.pivot_table(
        index="query", columns=["condition", "temperature"], values="follow_up_to_original"
    )


def changes(model: str) -> str:
    wide, rows = rates_to_the_original(model), []
    for name in ("none", "remove", "truncate", "generic_question"):
        row = [name.replace("_", " ")]
        for t in (0.0, HOT):
            less = change(wide[(name, t)] - wide[("none", t)]) if name != "none" else ""
            row += [mean(wide[(name, t)]), less]
        rows.append(row)
    return markdown(["", "greedy", "less unchanged", "T = 0.7", "less unchanged"], rows)


def parts(model: str) -> str:
    """What parts of the response carry, and the response in blocks."""
    found = table(model, "parts")
    rows = []
    for name, label in PARTS.items():
        mine = found[found["site"] == name]
        rows.append([label, mean(mine["bits"]), mean(mine["hits"])])
    return markdown(["the candidate's", "bits, T = 0.7", "own likeliest"], rows)


def exchanged(model: str) -> str:
    """By how much a state of a donor with a high share moves the recipient's more than that of one
    with a low share."""
    found = table(model, "interchange")
    found = found.assign(moved=found["high"] - found["low"])
    wide = found.pivot_table(index="source", columns=["term", "layer"], values="moved")
    layers = sorted(found["layer"].unique())
    rows = [
        [label, *(change(wide[(term, layer)]) for layer in layers)]
        for term, label in PLACES.items()
    ]
    return markdown(["state put in", *(f"after layer {layer}" for layer in layers)], rows)


def elicited(model: str) -> str:
    columns = ["follow-ups", "follow-ups after siblings", EXCESS]
    wide = table(model, "elicit").pivot_table(index="source", columns="arm", values=columns)
    rows = []
    for arm in table(model, "elicit")["arm"].drop_duplicates():
        excess = wide[(EXCESS, arm)]
        less = change(excess - wide[(EXCESS, "greedy")]) if arm != "greedy" else ""
        after = mean(wide[("follow-ups after siblings", arm)])
        rows.append([arm, mean(wide[("follow-ups", arm)]), after, change(excess), less])
    return markdown(["arm", "follow-ups", "after siblings", "excess", "less greedy's"], rows)


def of_maths(turns: pd.DataFrame) -> pd.DataFrame:
    return turns[turns["dataset"] == "gsm8k"]


def maths_picks(model: str, kind: str = "all") -> pd.DataFrame:
    """Of each GSM8K query and temperature: how often the own response is the likeliest of three."""
    turns = of_maths(picked_turns(model))
    turns = turns[KINDS[kind](turns)]
    return turns.groupby(["query", "temperature"])["picked"].mean().unstack()


def repeats_alone() -> str:
    """What turns in role make of maths' rise of picks, if repeats alone are out of role."""
    found, errors, k = parts_of_rise(picked_turns(MATHS), "picked", OUT_OF_ROLE[:2])
    reach = stats.t.ppf(0.975, k - 1) * errors[2]
    return shown(found[2], found[2] - reach, found[2] + reach, sign=True)


def is_refusal(turns: pd.DataFrame) -> pd.Series:
    return turns["text"].str.contains("can't assist|cannot assist|can't help")


def apologises(turns: pd.DataFrame) -> pd.Series:
    return turns["text"].str.strip().str.startswith(("I'm sorry", "I’m sorry", "I am sorry"))


def without_apologies() -> dict[str, str]:
    """Of greedy follow-ups those that open so, and acceptance of all turns less theirs; as a
    control, of SmolLM2's without the opening that most of these have."""
    found = {}
    for model in (QWEN, MATHS, SMOL):
        turns = judged_turns(model)
        greedy = (turns["follow_up"] == 1) & (turns["temperature"] == 0)
        opening = turns["text"].str.split().str[:3].str.join(" ")
        if model == SMOL:
            assert opening[greedy].mode().item() == "What is the"
        left_out = opening == "What is the" if model == SMOL else apologises(turns)
        found[f"of accepted {model}"] = f"{left_out[greedy].mean():.2f}"
        for what in ("follow_up", "beyond"):
            rest = turns.assign(rest=turns[what] * ~left_out)
            of = rest.groupby(["query", "temperature"])["rest"].mean().unstack()
            found[f"{what} {model}"] = mean(of[0.0]) + mean(of[HOT]) + change(of[HOT] - of[0.0])
    return found


def first_words(model: str) -> tuple[float, float]:
    """Of turns sampled where the greedy one isn't accepted: by how much the accepted share of
    contexts of the upper quarter exceeds that of the lower one, in turns that didn't choose them;
    and as told by the turns' first words, with the shares that these have after other queries."""
    turns = judged_turns(model)
    refused = turns[(turns["temperature"] == 0) & (turns["follow_up"] == 0)]["context"]
    drawn = turns[(turns["temperature"] > 0) & turns["context"].isin(refused)]
    drawn = drawn.dropna(subset=["follow_up"])
    drawn = drawn.assign(word=drawn["text"].str.split().str[0].fillna(""), one=1.0)
    both = ["follow_up", "one"]
    others = drawn.groupby("word")[both].transform("sum")
    others -= drawn.groupby(["query", "word"])[both].transform("sum")
    seen = others["one"] + 2  # two more of the mean share, for words that are rare
    drawn = drawn.assign(told=(others["follow_up"] + 2 * drawn["follow_up"].mean()) / seen)
    halves = [drawn[drawn["sample"] % 2 == odd].groupby("context") for odd in (0, 1)]
    chosen, rest = halves[0]["follow_up"].mean(), halves[1][["follow_up", "told"]].mean()
    rest = rest.join(chosen.rename("chosen"), how="inner")
    low, high = rest["chosen"].quantile([0.25, 0.75])
    ends = rest[rest["chosen"] >= high].mean() - rest[rest["chosen"] <= low].mean()
    return ends["follow_up"], ends["told"]


def hangs_on() -> str:
    """The parts of Qwen's rise, by what counts as out of role."""
    rows = []
    for name, outside, left_out, sorry in (
        ("repeats, or speaks as the assistant", OUT_OF_ROLE, False, False),
        ("repeats alone", OUT_OF_ROLE[:2], False, False),
        ("the first, without refusals", OUT_OF_ROLE, True, False),
        ("the first, and turns that open “I'm sorry”", OUT_OF_ROLE, False, True),
    ):
        cells = [name]
        for model in (QWEN, MATHS):
            turns = judged_turns(model)
            turns = turns[~(is_refusal(turns) & left_out)]
            kind = turns["category"].isin(outside) | (apologises(turns) & sorry)
            heated = turns["temperature"] > 0
            found = decomposed_difference(turns["beyond"], kind, heated, turns["query"])
            parts = (found.difference, found.mix, found.rest)
            cells += [one.text(sign=True).replace("-", "−") for one in parts]
        rows.append(cells)
    parts = ("rise", "fewer out of role", "all else")
    head = [f"{where}: {part}" for where in ("study", "maths") for part in parts]
    return markdown(["out of role", *head], rows)


def maths() -> str:
    """What was seen after GSM8K's queries, and the same on queries that weren't looked at."""
    counted = ("follow_up", "beyond another", "beyond siblings")
    names = ("rise", "rise beyond a wrong conversation", "rise beyond siblings")
    rises = [
        (n, lambda m, w=w: change(rise(m, w, "gsm8k"))) for n, w in zip(names, counted, strict=True)
    ]
    rest = [(n, lambda m, i=i: split(of_maths(judged_turns(m)), "beyond")[i]) for i, n in PARTS_OF]
    told = [(n, lambda m, i=i: split(of_maths(picked_turns(m)), "picked")[i]) for i, n in PICKS_OF]
    rows: list[Row] = [
        ("accepted, greedy", lambda m: mean(accepted(m, "follow_up", 0.0, "gsm8k"))),
        ("accepted, T = 0.7", lambda m: mean(accepted(m, "follow_up", HOT, "gsm8k"))),
        *rises[:2],
        *rest,
        rises[2],
        ("own response the likeliest of three, greedy", lambda m: mean(maths_picks(m)[0.0])),
        ("the same, T = 0.7", lambda m: mean(maths_picks(m)[HOT])),
        ("rise", lambda m: change((of := maths_picks(m))[HOT] - of[0.0])),
        *told,
    ]
    counts = [of_maths(judged_turns(m))["query"].nunique() for m in (QWEN, MATHS)]
    head = ["", f"first {counts[0]} queries", f"{counts[1]} others"]
    return markdown(head, [[name, make(QWEN), make(MATHS)] for name, make in rows])


@cache
def tables() -> dict[str, list[str]]:
    """The tables of each page."""
    both = [judged(), hangs_on(), told(), maths(), whole_turns(), again(), variances(), read()]
    found = {"docs/results/compare.md": both, "README.md": headlines()}
    for model in MODELS:
        mine = [datasets(model), categories(), sites(model), windows(model), written(model)]
        found[f"docs/results/{model}.md"] = mine
    own = [parts, exchanged, vectors, changes, elicited]
    found[f"docs/results/{SMOL}.md"] += [make(SMOL) for make in own]
    return found


def moved_again() -> str:
    """The cell that the first queries showed, on others: moved, by equal donors, the donors'."""
    again = table(SMOL, "interchange_again")
    new = again[~again["source"].isin(table(SMOL, "interchange")["source"])]
    pairs = (("high", "low"), ("equal a", "equal b"), ("own high", "own low"))
    moved, equal, own = (new[one] - new[other] for one, other in pairs)
    return "".join(map(change, (moved, equal, own, moved - equal)))


def written_picks(model: str) -> str:
    greedy, hot = (hits(model, "own context", t) for t in (0.0, HOT))
    return mean(greedy) + mean(hot) + change(hot - greedy)


PARTS_OF = ((0, "of it, fewer out of role"), (1, "of it, all else"))
PICKS_OF = ((0, "of it, fewer out of role"), (2, "of it, in role"), (3, "of it, out of role"))
SUMS = (
    "of it, fewer out of role",
    "of it, all else",
    "of these, in role",
    "of these, out of role",
)


def again() -> str:
    """The rise where it was seen, and on other queries."""
    halves = [(model, queries) for model in MODELS for queries in ("first", "others")]
    names = {SMOL: "SmolLM2", QWEN: "Qwen"}
    counts = [picked_turns(*half)["query"].nunique() for half in halves]
    head = [f"{names[m]}, {q} ({n})" for (m, q), n in zip(halves, counts, strict=True)]
    rows = [["rise", *(change(more_picks(m, queries=q)) for m, q in halves)]]
    for at, name in enumerate(SUMS):
        rows.append([name, *(split(picked_turns(*half), "picked")[at] for half in halves)])
    return markdown(["", *head], rows)


def whole_turns() -> str:
    """Picks of whole turns, all and by kind; how far less copying makes the rise."""
    rows: list[Row] = []
    for kind in KINDS:
        name = {"all": "all turns"}.get(kind, kind)
        rows.append((f"{name}, greedy", lambda m, k=kind: mean(picks(m, k)[0.0])))
        rows.append((f"{name}, T = 0.7", lambda m, k=kind: mean(picks(m, k)[HOT])))
        rows.append(("rise", lambda m, k=kind: change(more_picks(m, k))))
    for at, name in enumerate(SUMS):
        rows.insert(3 + at, (name, lambda m, n=at: split(picked_turns(m), "picked")[n]))
    count: Count = lambda m: picked_turns(m)["query"].nunique()  # noqa: E731
    return side_by_side("likelier after its own response than after two others", rows, count)


@cache
def in_words() -> dict[str, str]:
    """Intervals that stand in sentences."""
    own, header, query = (site(QWEN, name, HOT) for name in ("own context", "header", "query"))

    def added(model: str, t: float) -> str:
        both = site(model, "written: response and header", t)
        return mean(both - site(model, "written: response", t))

    def rest_of_context(t: float) -> str:
        """What neither response nor header is."""
        return change(wrote(QWEN, "own context", t) - wrote(QWEN, "response and header", t))

    def more(what: str) -> str:
        return mean(rise(QWEN, what) - rise(SMOL, what))  # of queries that both have

    header_picks, query_picks = hits(QWEN, "header", HOT), hits(QWEN, "query", HOT)
    smol = site(SMOL, "own context", HOT) / 10 - site(SMOL, "header", HOT)
    cells = table(SMOL, "interchange").set_index(["term", "layer"])
    last = cells.loc[("header_last", 27)]
    turns = judged_turns(QWEN)
    others = turns[~turns["category"].isin(OUT_OF_ROLE)].groupby(["query", "temperature"])
    rest, beyond = (others[of].mean().unstack().dropna() for of in ("follow_up", "beyond"))
    of = table(SMOL, "parts").pivot_table(index="query", columns="site", values="bits")
    near, far = of["response, blocks of 16"], of["response, 16 random tokens"]
    sampled = judged_turns(MATHS)
    sampled = sampled[sampled["temperature"] > 0]
    right = sampled.groupby(["query", "right"])["follow_up"].mean().unstack().dropna()
    put = table(MATHS, "interchange")
    removed = rates_to_the_original(SMOL)
    return {
        "repeats_alone": repeats_alone(),
        "greedy_margin": greedy_margin(),
        **without_apologies(),
        "maths_siblings": change(rise(MATHS, "beyond siblings"), 3),
        "put": "".join(
            change(put[one] - put[other])
            for one, other in (("high", "low"), ("equal a", "equal b"), ("own high", "own low"))
        ),
        "put_less_own": change(put["high"] - put["unchanged"])
        + change(put["low"] - put["unchanged"]),
        "without_response": change(removed[("remove", HOT)] - removed[("remove", 0.0)]),
        "put_again": "".join(
            change((put[one] - put[other])[~put["first"]])
            for one, other in (("high", "low"), ("own high", "own low"))
        ),
        "rest": mean(rest[0.0]) + mean(rest[HOT]) + change(rest[HOT] - rest[0.0]),
        "again": moved_again(),
        "right": change(right[1.0] - right[0.0]),
        "split": "".join(one for m in MODELS for one in split(judged_turns(m), "beyond")[:2]),
        "written_picks": "".join(map(written_picks, MODELS)),
        "same": "".join(mean(same_texts(m)) for m in MODELS),
        "later": "".join(change(more_picks(m, "all", "picked later")) for m in MODELS)
        + change(more_picks(QWEN, "all", "picked later", "others")),
        "states_less_output": shown(*auroc_less(QWEN, "log_odds", "control:output"), sign=True),
        "states_less_words_q": shown(*auroc_less(QWEN, "log_odds", "control:text"), sign=True),
        "states_less_output_s": shown(*auroc_less(SMOL, "log_odds", "control:output"), sign=True),
        "siblings_rise": change(rise(QWEN, "beyond siblings")),
        "near": change(near - far),
        "further": change(near - of["response, one block"]),
        "few_near": change(of["response, blocks of 4"] - far),
        "donors": change(last["own high"] - last["own low"]),
        "moved": change(last["high"] - last["low"]),
        "equal_donors": change(last["equal a"] - last["equal b"]),
        "q_rise": mean(own - site(QWEN, "own context", 0.0)),
        "q_rise_written": mean(written_rise(QWEN, "own context")),
        "rest_of_context": rest_of_context(HOT) + rest_of_context(0.0),
        "rest_beyond": change(beyond[HOT] - beyond[0.0]),
        "gsm8k": "".join(change(accepted(QWEN, "beyond another", t, "gsm8k")) for t in (0.0, HOT)),
        "hits_of_both": "".join(
            change(hits(m, "header", t) - hits(m, "query", t))
            for m, t in ((QWEN, HOT), (QWEN, 0.0), (SMOL, 0.0))
        ),
        "header_less_query": mean(header - query),
        "tenth": mean(own / 10 - header),
        "smol_tenth": mean(smol),
        "header_adds": added(QWEN, 0.0),
        "header_adds_hot": added(QWEN, HOT),
        "smol_adds": added(SMOL, 0.0),
        "header_hits": mean(header_picks - query_picks),
        "w_alone": mean(site(QWEN, "written: response", HOT)),
        "w_both": mean(site(QWEN, "written: response and header", HOT)),
        "raw_more": more("follow_up"),
        "rise_more": more("beyond another"),
        "output_less_text": shown(*auroc_less(QWEN, "control:output", "control:text")),
        "output_less_lengths": shown(*auroc_less(QWEN, "control:output", "control:lengths")),
        "states_less_words": shown(*auroc_less(SMOL, "log_odds", "control:text"), sign=True),
    }


# Of runs whose data aren't here: cut-off responses, 59 queries on a CPU, no response.
ELSEWHERE = ["0.75 [0.52, 0.94]", "0.81 [0.65, 0.97]", "0.12 [0.07, 0.18]", "0.30 [0.24, 0.37]"]
PAGES = ["README.md", "docs/results/compare.md", *(f"docs/results/{m}.md" for m in MODELS)]
INTERVAL = re.compile(r"[+−]?\d\.\d+ \[[+−]?\d\.\d+, [+−]?\d\.\d+\]")


def show() -> None:
    """Print all tables, to be put on the pages."""
    for page, mine in tables().items():
        print(f"\n# {page}\n", *mine, sep="\n\n")
    print("\n# in words\n", *in_words().items(), sep="\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_data_say(page):
    text = (ROOT / page).read_text("utf-8")
    for one in tables()[page]:
        assert one in text, one
    made = INTERVAL.findall("\n".join([*chain(*tables().values()), *in_words().values()]))
    of_study = re.split("^## (?:As a judge|Other runs)$", text, flags=re.MULTILINE)[0]
    for one in INTERVAL.findall(of_study):
        assert one in made or one in ELSEWHERE, one


def test_what_rates_themselves_could_tell_is_said():
    text = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    half, other = map(halves, MODELS)
    assert f"rates of 8 turns order the *other* 8 with {half} and {other}" in text


def test_how_often_accepted_turns_fit_others_is_said():
    page, readme = (
        " ".join(path.read_text("utf-8").split())
        for path in (RESULTS / "compare.md", ROOT / "README.md")
    )
    (far, near), (smol_far, smol_near) = (fit_others(model) for model in (QWEN, SMOL))
    both = f"(SmolLM2: {smol_near:.2f} and {smol_far:.2f})"
    after = "are accepted after siblings, too, and"
    assert f"{near:.2f} {after} {far:.2f} after a wrong conversation {both}" in page
    text = (
        f"it accepts {100 * far:.0f}% after a wrong conversation, too, and {100 * near:.0f}% after"
    )
    assert text in readme


POINTS = re.compile(r"[+−]?\d+(?:\.\d)? ± \d+(?:\.\d)?")


def test_readme_says_in_points_what_the_data_say():
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    put, named = table(MATHS, "interchange"), maths_picks(MATHS)
    parts, errors, k = parts_of_rise(picked_turns(MATHS), "picked")
    in_role, reach = parts[2], stats.t.ppf(0.975, k - 1) * errors[2]
    said = {
        "The difference is **{}** (": interval(rise(QWEN, "beyond another")),
        "conversation with many follow-ups, {} points more": interval(put["high"] - put["low"]),
        "two conversations with equally many, {}.": interval(put["equal a"] - put["equal b"]),
        "own response, of three, is {} points higher": interval(named[HOT] - named[0.0]),
        "turns in role account for only {} of": (in_role, in_role - reach, in_role + reach),
        "queries of all kinds, held out: {}.)": interval(more_picks(QWEN, queries="others")),
    }
    shown = {text.format(points(ends)): text for text, ends in said.items()}
    assert [text for text in shown if text not in readme] == []
    made = POINTS.findall(" ".join([*shown, *headlines()]))
    assert [one for one in POINTS.findall(readme) if one not in made] == []
    for model in (QWEN, MATHS, SMOL):
        turns = judged_turns(model)
        assert not turns.loc[turns["category"].isin(OUT_OF_ROLE), "follow_up"].any()
    own, wrong = (100 * rise(QWEN, what).mean() for what in ("follow_up", "after another"))
    assert f"follow-ups, by {own:.0f} points of 100." in readme
    assert f"(another one of the same dataset), by {wrong:.0f}." in readme
    greedy = [turns[turns["temperature"] == 0] for turns in map(judged_turns, (QWEN, MATHS))]
    study, maths = (100 * is_refusal(turns).mean() for turns in greedy)
    assert (study, round(maths)) == (12.5, 35)
    assert "refuse are 12.5% of Qwen's, and 35% after maths" in readme
    sorry = without_apologies()[f"of accepted {MATHS}"]
    assert f"greedy turns after maths {100 * float(sorry):.0f}% open with" in readme


def test_the_lead_is_tried_as_was_said_beforehand():
    """Three claims, Holm's p of each; and how far the two sets of queries are apart."""
    page = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    rest, seen = (decomposed(of_maths(judged_turns(m)), "beyond") for m in (MATHS, QWEN))
    siblings, picked = rise(MATHS, "beyond siblings"), maths_picks(MATHS)
    picked = picked[HOT] - picked[0.0]
    p = [rest.p_rest] + [stats.ttest_1samp(one, 0).pvalue for one in (siblings, picked)]
    assert p[2] < p[0] < p[1]  # in the order of Holm's
    holm = 3 * p[2], 2 * p[0], max(p[1], 2 * p[0])
    assert [f"{one:.{n}f}" for one, n in zip(holm, (3, 2, 2), strict=True)] == [
        "0.001",
        "0.12",
        "0.12",
    ]
    assert "p = 0.12 corrected for three claims." in page
    assert "It is less than the first queries' (p = 0.006)" in page
    errors = [parts_of_rise(of_maths(judged_turns(m)), "beyond")[1][1] for m in (MATHS, QWEN)]
    apart = (seen.rest.value - rest.rest.value) / np.hypot(*errors)
    assert f"{2 * stats.norm.sf(apart):.3f}" == "0.006"
    assert f"{2.8 * siblings.sem():.3f} would have been shown." in page
    assert change(siblings, 3) in page
    right = table(MATHS, "contexts")["right"]
    assert (
        f"{100 * right.mean():.0f}% of Qwen's responses to the 168 GSM8K queries are right" in page
    )


def test_what_accepted_greedy_turns_are_is_said():
    page = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    found = without_apologies()
    study, after_maths = (found[f"of accepted {model}"] for model in (QWEN, MATHS))
    assert f"Of Qwen's greedy follow-ups {study} open with \"I'm sorry\", and {after_maths}" in page
    for model in (QWEN, MATHS):
        turns = judged_turns(model)
        greedy = turns[(turns["temperature"] == 0) & (turns["follow_up"] == 1) & apologises(turns)]
        assert greedy["text"].str.contains("not sure").mean() > 0.94
    assert 0.32 < float(study) < 0.35


def test_that_the_gate_fails_after_maths_is_said():
    page = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    rate, floor = judged_turns(MATHS)[["follow_up", "follow_up_after_wrong"]].mean()
    assert "between half and all of it in the study, between none and 60% after other maths" in page
    assert min(rests_of(QWEN)) < 0 and max(rests_of(QWEN)) == 0.05  # of 0.10
    assert min(rests_of(MATHS)) == 0.03 and max(rests_of(MATHS)) == 0.07  # of 0.07
    assert [gate(m) for m in (QWEN, MATHS, SMOL)] == ["undecided", "failed", "passed"]
    assert f"greedy turns alone it fails ({greedy_margin()}" in page
    assert f"as after another maths problem ({rate:.2f} and {floor:.2f})" in page


def test_the_verdict_that_a_page_reads_is_the_commands():
    """``rates``' own, of Qwen's published turns."""
    turns = judged_turns(QWEN)
    columns = {"temperature": "temperature", "source": "query", "own_follow_up": "follow_up"}
    rows = pd.DataFrame({name: turns[column] for name, column in columns.items()})
    rows["out_of_role"] = turns["category"].isin(OUT_OF_ROLE).astype(float)
    after = {"wrong_conversation": "follow_up_after_wrong", "sibling": "follow_up_after_siblings"}
    decoys = pd.concat([rows.assign(decoy=k, follow_up=turns[of]) for k, of in after.items()])
    found = holm_corrected(rises(decoys, {"gate": gate(QWEN)}), lambda row: row.quantity)
    page = " ".join((ROOT / "docs" / "study.md").read_text("utf-8").split())
    assert verdict(frame_of(found, NAMES)) in page


def test_what_first_words_tell_is_said():
    page = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    (whole, told), (smol, smol_told) = map(first_words, (MATHS, SMOL))
    assert f"differ by {whole:.2f} in the other half" in page
    assert f"tells {told:.2f} of that (in SmolLM2 {smol_told:.2f} of {smol:.2f})" in page


def test_how_weakly_the_rise_is_shown_is_said():
    page = " ".join((RESULTS / "compare.md").read_text("utf-8").split())
    found, others = (more_picks(QWEN, queries=which) for which in ("first", "others"))
    p, ranks = stats.ttest_1samp(found, 0).pvalue, stats.wilcoxon(found).pvalue
    assert f"(p = {p:.2f}, uncorrected; {ranks:.2f} by Wilcoxon's test)" in page
    apart = stats.ttest_ind(found, others, equal_var=False).pvalue
    assert f"(That Qwen's two differ isn't shown: p = {apart:.2f}; SmolLM2's do: p = 0.04." in page
    power = [f"{2.8 * more_picks(m, queries='others').sem():.2f}" for m in (QWEN, SMOL)]
    assert f"where {power[0]} would have been shown; SmolLM2's fall" in page
    assert f"where {power[1]} would have been. (That" in page
    both = [
        ", ".join(str(len(picks(m, kind).dropna())) for kind in list(KINDS)[1:]) for m in MODELS
    ]
    smol, qwen = (" and ".join(one.rsplit(", ", 1)) for one in both)
    assert f"{smol} of SmolLM2's and {qwen} of Qwen's" in page
