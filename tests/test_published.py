"""The numbers of docs/results and of README's findings, made again from docs/results/data.

Every table and every sentence with a number is written here, and has to stand on its page; no other
decimal, percentage or interval may stand there. ``±`` is half of a 95% interval: Student's, over
queries. Only pandas, NumPy and SciPy compute, but for the two parts of a rise, whose method is
tested in test_stats_decomposition.py.

    PYTHONPATH=tests python -c "import test_published as p; p.show()"     prints what pages hold
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ia_mech.run.sources import split_source
from ia_mech.stats import Decomposition, decomposed_difference

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
SMOL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"
MATHS = f"{QWEN}-maths"  # other GSM8K queries than those of the study
MODELS, SETS = (QWEN, SMOL), (QWEN, MATHS, SMOL)
LAYERS = {SMOL: 30, QWEN: 28}
HOT = 0.7
REPEATS = ["repeats_query", "repeats_response"]
OUT_OF_ROLE = [*REPEATS, "speaks_as_assistant"]
EXCESS = "excess over siblings"


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
    turns["out of role"] = turns["category"].isin(OUT_OF_ROLE).astype(float)
    for name in ("wrong", "siblings"):
        turns[f"beyond {name}"] = turns["follow_up"] - turns[f"follow_up_after_{name}"]
    return turns


def rate(model: str, what: str, t: float, dataset: str | None = None) -> pd.Series:
    """Of each query, the mean of its turns at a temperature."""
    turns = judged(model)
    turns = turns if dataset is None else turns[turns["dataset"] == dataset]
    return turns[turns["temperature"] == t].groupby("query")[what].mean()


def rise(model: str, what: str, dataset: str | None = None) -> pd.Series:
    """From greedy to sampled turns."""
    return rate(model, what, HOT, dataset) - rate(model, what, 0.0, dataset)


def queries(model: str) -> int:
    return table(model, "contexts")["query"].nunique()


def gate(turns: pd.DataFrame) -> str:
    """Are more than twice as many turns follow-ups as after a wrong conversation?"""
    of = turns.groupby("query")[["follow_up", "follow_up_after_wrong"]].mean()
    _, low, high = student(of["follow_up"] - 2 * of["follow_up_after_wrong"])
    return "passes" if low > 0 else "fails" if high < 0 else "is undecided"


def parts(model: str, outside: Sequence[str] = OUT_OF_ROLE) -> Decomposition:
    """The rise beyond wrong conversations: by fewer turns out of role, and by all else."""
    turns = judged(model)
    kind, heated = turns["category"].isin(outside), turns["temperature"] > 0
    return decomposed_difference(turns["beyond wrong"], kind, heated, turns["query"])


def part(model: str, name: str, outside: Sequence[str] = OUT_OF_ROLE) -> str:
    one = getattr(parts(model, outside), name)
    return around((one.value, one.low, one.high), 1, sign=True, scale=100)


def picks(model: str, t: float) -> pd.Series:
    """Of each query, how often a turn is likelier after its own response than after two siblings,
    over the three pairs of siblings."""
    scores = table(model, "scores").merge(table(model, "contexts"))
    own = scores["context"].str[-1].astype(int).to_numpy()
    each = sum(scores[[f"{of}_{k}" for k in range(4)]].to_numpy() for of in ("first", "others"))
    below = (each < each[np.arange(len(own)), own][:, None]).sum(1)  # siblings less likely
    scores["picked"] = below * (below - 1) / 2 / 3
    return scores[scores["temperature"] == t].groupby("query")["picked"].mean()


def more_picks(model: str) -> pd.Series:
    return picks(model, HOT) - picks(model, 0.0)


def picks_elsewhere() -> pd.Series:
    """Qwen's rise of picks on the queries that its bits weren't measured on."""
    seen = [query for _, query in map(split_source, table(QWEN, "bits")["query"].unique())]
    return more_picks(QWEN).drop(seen)


def right() -> pd.Series:
    """Sampled follow-ups after right responses less those after wrong ones, of maths queries."""
    turns = judged(MATHS)
    of = turns[turns["temperature"] > 0].groupby(["query", "right"])["follow_up"].mean().unstack()
    return of[1.0] - of[0.0]


# -- sites and probes ------------------------------------------------------------------------------


def site(model: str, name: str, t: float = HOT, layer: int = -1, what: str = "bits") -> pd.Series:
    """Of each query what turns tell when only this site is from their response."""
    bits = table(model, "bits")
    mine = (bits["site"] == name) & (bits["layer"] == layer) & (bits["temperature"] == t)
    return bits[mine].set_index("query")[what].sort_index()


def ordered(score: np.ndarray, yes: np.ndarray, no: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Of each query, pairs of a follow-up and another turn, after two responses, that the scores of
    these order rightly; and all such pairs."""
    rows = []
    for one in np.unique(query):
        mine = query == one
        weight = np.outer(yes[mine], no[mine])
        np.fill_diagonal(weight, 0)
        gap = score[mine][:, None] - score[mine][None, :]
        tied = weight[abs(gap) <= 1e-7].sum()
        rows.append((weight[gap > 1e-7].sum() + tied / 2, weight.sum()))
    return np.array(rows).T


def auroc(model: str, column: str) -> str:
    """How often a held-out probe orders two turns after responses to one query rightly."""
    of = table(model, "probes")
    yes, no = of["positives"].to_numpy(float), (of["trials"] - of["positives"]).to_numpy(float)
    right, pairs = ordered(of[column].to_numpy(float), yes, no, of["source"].to_numpy(str))
    value, k = right.sum() / pairs.sum(), len(pairs)
    square = ((right - value * pairs) ** 2).sum() * k / (k - 1)
    reach = stats.t.ppf(0.975, k - 1) * np.sqrt(square) / pairs.sum()
    return around((value, value - reach, value + reach), 2)


def halves(model: str) -> str:
    """How well the rates of half of the turns order siblings by the other half: 10 draws' mean."""
    probes = table(model, "probes").set_index("context_id")
    turns = table(model, "turns")
    turns = turns[(turns["temperature"] > 0) & turns["context"].isin(probes.index)]
    wide = turns.pivot_table(index="context", columns="sample", values="follow_up").fillna(0.0)
    query, x = probes.loc[wide.index, "source"].to_numpy(str), wide.to_numpy()
    rng, found = np.random.default_rng(0), []
    for _ in range(10):
        drawn = rng.permutation(x.shape[1])
        seen, rest = x[:, drawn[:8]], x[:, drawn[8:]]
        sums = ordered(seen.mean(1), rest.sum(1), (1 - rest).sum(1), query).sum(1)
        found.append(sums[0] / sums[1])
    return f"{np.mean(found):.2f}"


def exchange(model: str, name: str = "interchange") -> pd.DataFrame:
    """Of each recipient, how the high and the low donor's states differ; two equal donors'; and the
    donors' own shares."""
    found = table(model, name)
    pairs = {"moved": ("high", "low"), "equal": ("equal a", "equal b")}
    pairs["donors"] = ("own high", "own low")
    return found.assign(**{of: found[one] - found[other] for of, (one, other) in pairs.items()})


def exchange_again() -> pd.DataFrame:
    """SmolLM2's one cell, on queries that didn't choose it."""
    again = exchange(SMOL, "interchange_again")
    return again[~again["source"].isin(table(SMOL, "interchange")["source"])]


# -- tables ----------------------------------------------------------------------------------------

Row = tuple[str, Callable[[str], str]]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(("| " + " | ".join(line) + " |").replace("|  |", "| |") for line in lines)


def across(what: str, rows: Sequence[Row], columns: dict[str, str]) -> str:
    """A column per model or set of queries."""
    body = [[label, *(make(m) for m in columns)] for label, make in rows]
    return markdown([what, *columns.values()], body)


def sets() -> dict[str, str]:
    names = {QWEN: "Qwen, {} queries", MATHS: "Qwen, {} others, all maths"}
    names[SMOL] = "SmolLM2, {} queries"
    return {m: name.format(queries(m)) for m, name in names.items()}


def how_often() -> str:
    rows: list[Row] = []
    for t, name in ((0.0, "greedy turns"), (HOT, "sampled turns")):
        rows += [
            (f"{name}: follow-ups", lambda m, t=t: percent(rate(m, "follow_up", t))),
            (
                "… after a wrong conversation",
                lambda m, t=t: percent(rate(m, "follow_up_after_wrong", t)),
            ),
            ("… after siblings", lambda m, t=t: percent(rate(m, "follow_up_after_siblings", t))),
        ]
    rows += [
        (
            "**rise beyond wrong conversations**",
            lambda m: f"**{change(rise(m, 'beyond wrong'))}**",
        ),
        ("rise beyond siblings", lambda m: change(rise(m, "beyond siblings"))),
        ("rise of likeliest own responses", lambda m: change(more_picks(m))),
    ]
    rows += [
        ("greedy turns out of role", lambda m: percent(rate(m, "out of role", 0.0))),
        ("sampled turns out of role", lambda m: percent(rate(m, "out of role", HOT))),
        ("**rise that fewer of these make**", lambda m: f"**{part(m, 'mix')}**"),
        ("… all else", lambda m: part(m, "rest")),
        ("rise that fewer turns that repeat make", lambda m: part(m, "mix", REPEATS)),
        ("… all else", lambda m: part(m, "rest", REPEATS)),
    ]
    return across("of 100", rows, sets())


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


def moved() -> str:
    rows = []
    for name, found in (
        ("Qwen after maths, layer 25 of {}, {} queries", exchange(MATHS)),
        ("SmolLM2, layer 27 of {}, {} queries", exchange_again()),
    ):
        model = QWEN if name.startswith("Qwen") else SMOL
        label = name.format(LAYERS[model], found["source"].nunique())
        rows.append([label, *(change(found[of]) for of in ("moved", "equal", "donors"))])
    return markdown(["points of 100", "high less low", "two equal donors", "donors' own"], rows)


def datasets(model: str) -> str:
    head = ["of 100, after queries of", "greedy", "sampled", "rise beyond wrong conversations"]
    head.append("sampled, beyond siblings")
    rows = [
        [
            name,
            percent(rate(model, "follow_up", 0.0, name)),
            percent(rate(model, "follow_up", HOT, name)),
            change(rise(model, "beyond wrong", name)),
            change(rate(model, "beyond siblings", HOT, name)),
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


def exchanged() -> str:
    found = exchange(SMOL)
    wide = found.pivot_table(index="source", columns=["term", "layer"], values="moved")
    layers = sorted(found["layer"].unique())
    places = {"header": "all of the header", "header_last": "its last token"}
    rows = [[name, *(change(wide[(of, at)]) for at in layers)] for of, name in places.items()]
    return markdown(["after layer", *map(str, layers)], rows)


def perturbed(condition: str) -> pd.Series:
    """Of each query, sampled turns that are follow-ups to the unchanged response."""
    turns = table(SMOL, "changes")
    turns = turns[(turns["temperature"] == HOT) & (turns["condition"] == condition)]
    query = turns["context_id"].str.replace(r"/r\d.*", "", regex=True)
    return turns.groupby(query)["follow_up_to_original"].mean()


def vectors() -> str:
    """Greedy turns under learned vectors, paired by query."""
    found = table(SMOL, "vectors")
    rates, excess = (
        found.pivot_table(index="source", columns=["term", "layer"], values=of)
        for of in ("follow-ups", EXCESS)
    )
    plain = ("unsteered", -1)
    rows = [["no vector", percent(rates[plain]), change(excess[plain]), ""]]
    for layer in sorted(set(found["layer"]) - {-1}):
        own = ("own", layer)
        less = change(excess[own] - excess[("siblings", layer)])
        rows.append([f"after layer {layer}", percent(rates[own]), change(excess[own]), less])
    return markdown(["of 100", "follow-ups", "beyond siblings", "less control vector"], rows)


def elicited() -> str:
    """Greedy turns as they are, after a prompt, and after an opening."""
    columns = ["follow-ups", EXCESS]
    wide = table(SMOL, "elicit").pivot_table(index="source", columns="arm", values=columns)
    rows = []
    for arm in ("greedy", "prompt, greedy", "opening, greedy"):
        excess = wide[(EXCESS, arm)]
        less = change(excess - wide[(EXCESS, "greedy")]) if arm != "greedy" else ""
        rows.append(
            [arm.removesuffix(", greedy"), percent(wide[("follow-ups", arm)]), change(excess), less]
        )
    return markdown(["of 100", "follow-ups", "beyond siblings", "rise of that"], rows)


# -- sentences -------------------------------------------------------------------------------------


def folded(text: str) -> str:
    return " ".join(text.split())


def mean(values: pd.Series, digits: int = 2) -> str:
    return f"{values.mean():.{digits}f}"


def found_sentences(short: bool) -> list[str]:
    """What was found: in README's few words, or as compare.md opens."""
    rises = [change(rise(m, "beyond wrong")) for m in SETS]
    own, wrong = (
        [mean(100 * rate(QWEN, what, t), 0) for t in (0.0, HOT)]
        for what in ("follow_up", "follow_up_after_wrong")
    )
    out = [percent(rate(QWEN, "out of role", t)) for t in (0.0, HOT)]
    (all_q, all_s), (own_q, own_s), (head_q, head_s), (new_q, new_s), (of_q, of_s) = (
        [mean(site(m, name)) for m in MODELS]
        for name in (
            "own context",
            "response",
            "header",
            "written: response",
            "written: own context",
        )
    )
    brief = f"""In Qwen2.5-Coder-1.5B the built-in judge calls {own[0]}% of greedy user turns
    follow-ups, and {own[1]}% of turns sampled at T = 0.7. It calls {wrong[0]}% and {wrong[1]}% of
    the same turns follow-ups when it is shown them after a wrong conversation, one of another
    query; beyond that the rise is {rises[0]} points ({queries(QWEN)} queries; {rises[1]} on
    {queries(MATHS)} of maths). SmolLM2-135M isn't shown to rise ({rises[2]}).

    By the judge's categories the rise is mostly role: {out[0]} of 100 greedy turns repeat the
    conversation or speak as the assistant, and {out[1]} of 100 sampled turns.

    What a sampled turn tells about its response is carried by the response's own keys and values
    ({own_q} of {all_q} bits in Qwen, of turns that are scored again), hardly by the user header's
    states ({head_q})."""
    said = f"""In Qwen2.5-Coder-1.5B the judge calls {own[0]}% of greedy user turns follow-ups, and
    {own[1]}% of turns sampled at T = 0.7. Of the same turns, shown after a wrong conversation (one
    of another query), it calls {wrong[0]}% and {wrong[1]}% follow-ups; beyond this floor the rise
    is {rises[0]} points ({queries(QWEN)} queries; {rises[1]} on {queries(MATHS)} others, all
    maths). SmolLM2-135M isn't shown to rise ({rises[2]}).

    By the judge's categories the rise is mostly role: {out[0]} of 100 greedy turns are out of role
    (they repeat the conversation or speak as the assistant), and {out[1]} of 100 sampled turns.
    That makes {part(QWEN, "mix")} points of the rise; all else makes {part(QWEN, "rest")}, which
    isn't shown to differ from 0.

    What a sampled turn tells about its response is carried by the response's own keys and values,
    hardly by the header's states. Turns were rescored after contexts of which one part is their
    own, and the rest is from another response to the same query: with the response's keys and
    values Qwen's turns keep {own_q} of {all_q} bits (SmolLM2's {own_s} of {all_s}), with the
    header's states {head_q} ({head_s}). Turns newly written after the response's keys and values
    keep {new_q} of {of_q} ({new_s} of {of_s})."""
    return [folded(one) for one in (brief if short else said).split("\n\n")]


def sentences() -> dict[str, list[str]]:
    """Other sentences with numbers, of each page of results."""
    qwen, own, smol = map(gate, map(judged, SETS))
    alone = gate(judged(QWEN)[judged(QWEN)["temperature"] == 0])
    elsewhere, verified = picks_elsewhere(), 100 * table(MATHS, "contexts")["right"]
    greedy = judged(MATHS)[judged(MATHS)["temperature"] == 0]
    refused = 100 * greedy["text"].str.contains("can't assist|cannot assist|can't help")
    follow_ups = greedy.loc[greedy["follow_up"] == 1, "text"].str.strip()
    sorry = 100 * follow_ups.str.startswith(("I'm sorry", "I’m sorry", "I am sorry"))
    assert own == alone
    states, output = ([auroc(m, of) for m in MODELS] for of in ("log_odds", "control:output"))
    known = [halves(m) for m in MODELS]
    both = f"""On SmolLM2 it {smol}; on Qwen it {qwen}; on Qwen after maths, and on Qwen's greedy
    turns alone, it {own}.

    After maths {mean(refused, 0)}% of Qwen's greedy turns refuse (the judge: they speak as the
    assistant), and {mean(sorry, 0)}% of its greedy follow-ups open with "I'm sorry".

    Qwen's rise of likeliest own responses was seen on some queries first; on the {len(elsewhere)}
    others of the study it is {change(elsewhere)}.

    {mean(verified, 0)}% of Qwen's responses to the maths queries are right. That turns after these
    are follow-ups more often isn't shown ({change(right())}).

    Of two responses to one query, neither with a greedy follow-up, a probe of the best states ranks
    the one with a sampled follow-up first in {states[0]} of pairs (SmolLM2: {states[1]}), the first
    token's distribution in {output[0]} ({output[1]}), half of the turns themselves in {known[0]}
    ({known[1]}); by chance it is 0.50."""
    tells = amount(site(SMOL, "header", 0.0, what="first_bits"))
    first = f"A greedy turn's first token, drawn from the header's last state, tells {tells} bits."
    none, remove, half, question = map(
        perturbed, ("none", "remove", "truncate", "generic_question")
    )
    without = f"""Without the response {percent(remove)} of 100 sampled turns fit it, not
    {percent(none)} (60 queries). With half of its sentences ({change(half - none)}), or a generic
    question at its end ({change(question - none)}), no change is shown."""
    compare = [folded(one) for one in both.split("\n\n")]
    return {"compare": compare, SMOL: [first, folded(without)], QWEN: []}


@cache
def pages() -> dict[str, list[str]]:
    """The tables and sentences of each page."""
    tables = {"compare": [how_often(), where(), moved()]}
    tables |= {m: [datasets(m), sites(m), windows(m)] for m in MODELS}
    tables[SMOL] += [blocks(), exchanged(), vectors(), elicited()]
    found = {f"docs/results/{name}.md": tables[name] + sentences()[name] for name in tables}
    found["docs/results/compare.md"] += found_sentences(short=False)
    return {"README.md": found_sentences(short=True)} | found


def show() -> None:
    """Print all tables and sentences, to be put on the pages."""
    for page, mine in pages().items():
        print(f"\n# {page}\n", *mine, sep="\n\n")


# Decimals, percentages and intervals; not those in names, as of Qwen2.5-Coder-1.5B.
NUMBER = re.compile(r"(?<![\w.-])(?:[+−]?\d+\.\d+(?![\w.])|\d+%|[+−]?[\d.]+ ± [\d.]+)")
CONSTANTS = {"0.7", "1.58", "95%"}  # 1.58 bits: one of three


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
