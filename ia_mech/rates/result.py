"""What the rates of runs say: one sentence with its control, tables, a figure and notes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pandas as pd

from ia_mech.cli import one_line
from ia_mech.estimates import ALL, FEW_SOURCES, all_datasets, estimate_of, few_sources
from ia_mech.judge.decoys import AFTER, DECOY_KINDS, WRONG
from ia_mech.judge.rubric import heading
from ia_mech.judge.verdict import OUTCOMES
from ia_mech.rates import figures, latent
from ia_mech.rates.compute import MIN_ANNOTATED, MIN_ANNOTATED_SOURCES, RELIABILITY_TURNS, estimates
from ia_mech.rates.evidence import DEPENDENT
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import EVERY, SUBJECT, JudgedTurns, matching
from ia_mech.results import Result, Table, about_runs, table_of
from ia_mech.run.labels import KEY

QUESTION = "How often are the user turns follow-ups?"
Columns = dict[str, tuple[str, int | str]]  # of a table: which estimates → head and format
LINES = ("model", "perturbation", "dataset", "temperature")


def result(judged: JudgedTurns, *, level: float = 0.95, seed: int = 0) -> Result:
    """The rates of runs by one judge; see :func:`ia_mech.rates.compute.estimates`. Gates are always
    decided at 95%."""
    rows = estimates(judged, level=level, seed=seed)
    whole = pd.concat([all_datasets(of) for _, of in rows.groupby(SUBJECT, sort=False)])
    gates = [gate for of in judged.by_model.values() for gate in of.values()]
    names = {str(run.path): run.name for run in judged.runs}
    turns = judged.turns[["run", *KEY, "follow_up", "grounded", DEPENDENT]]
    turns = turns.astype({"run": object, "context_id": object}).replace({"run": names})
    return result_on(
        judged,
        "rates",
        gates,
        {
            "judge": judged.record.get("identity", {}),
            "annotator": judged.annotator,
            "level": level,
            "seed": seed,
        },
        question=QUESTION if judged.by is None else f"{QUESTION[:-1]}, by {judged.by}?",
        sentence=" ".join(
            _sentence(judged, of, level) for _, of in whole.groupby(SUBJECT, sort=False)
        ),
        estimates=rows,
        tables=_tables(rows, whole, gates, level, judged.by),
        figures=_figures(whole, judged),
        notes=_notes(judged, rows),
        data={"turns": turns},
    )


def result_on(
    judged: JudgedTurns, kind: str, gates: Sequence[Gate], settings: dict[str, Any], **said: Any
) -> Result:
    """A result of this kind on judged runs, with ``gates`` as its control and ``settings`` as what
    it depends on."""
    shown = "" if judged.responses == EVERY else f"-{judged.responses}"
    shown += "" if judged.by is None else f"-by-{quote(judged.by, safe='')}"
    labellers = judged.judge, settings.get("annotator")
    known = judged.record.get("caveat", "").rstrip(".")
    control = [gate.sentence for gate in gates if gate.outcome == "follow_up"]
    control += [known[0].upper() + known[1:]] if known else []
    return Result(
        name=f"rates-{judged.judge}{kind.removeprefix('rates')}{shown}",
        control=" ".join(f"{one}." for one in control),
        about={
            "kind": kind,
            **about_runs(judged.runs, [name for name in labellers if name]),
            "judge": judged.judge,
            "gate": judged.gate.word,
            "settings": settings | {"responses": judged.responses, "by": judged.by},
        },
        **said,
    )


def _sentence(judged: JudgedTurns, of: pd.DataFrame, level: float) -> str:
    """What was found of one model and perturbation; ``of`` are its pooled rows."""
    first = of.iloc[0]
    turns = judged.turns[matching(judged.turns, {name: first[name] for name in SUBJECT})]
    gate = judged.by_model[first["model"], first["weights_hash"]]["follow_up"]
    plain = of[(of["quantity"] == "rate") & (of["outcome"] == "follow_up")]
    perturbed = "" if first["perturbation"] == "none" else f" ({one_line(first['perturbation'])})"
    whose = f"of {one_line(first['model'])}'s {{}} user turns{perturbed} are follow-ups"
    shares = [(estimate_of(row).text(), _at(row.temperature)) for row in plain.itertuples()]
    rates = [
        f"{shares[0][0]} {whose.format(shares[0][1])}",
        *(f"{share} at {at}" for share, at in shares[1:]),
    ]
    sources = turns["source"].nunique()
    apart = "" if judged.by is None else f"Rates by {judged.by} are in the table; together: "
    few = "Few queries: take all this as rough. " if sources < FEW_SOURCES else ""
    unfinished = f" {turns['unfinished'].mean():.0%} of them follow an unfinished response."
    return (
        f"{few}{apart}By judge {judged.judge}, {', '.join(rates)} ({len(turns)} turns from "
        f"{sources} queries). {latent.verdict(of, level)}".rstrip()
        + f"{unfinished if turns['unfinished'].any() else ''} {_reaction(gate)}"
    )


def _at(temperature: float) -> str:
    return f"T = {temperature:g}" if temperature else "greedy"


def _reaction(gate: Gate) -> str:
    """Whether turns react to the response that they followed, which siblings alone can tell."""
    siblings = gate.siblings
    if siblings is None or not siblings.decoys:
        return (
            "Whether turns react to their own response can't be told: no query has siblings "
            "(sample with --response generate --responses 4, too)."
        )
    excess = siblings.excess
    if gate.reacts:
        return (
            "Over all temperatures together, turns react to their own response: an excess over "
            f"siblings of {excess.text(sign=True)}, a lower bound."
        )
    return (
        "That turns react to their own response is not shown: an excess over siblings of "
        f"{excess.text(sign=True)}."
    )


# -- tables ---------------------------------------------------------------------------------------


def _tables(
    rows: pd.DataFrame, whole: pd.DataFrame, gates: list[Gate], level: float, by: str | None
) -> list[Table]:
    """The pooled rates and the gates, and rates by the field that was asked for; in full by
    dataset, floors, the profile, reach, corrected rates."""
    of_turns = rows[rows["decoy"].isna()]
    tables = [
        _rate_table(f"rates ({100 * level:g}% intervals over queries)", whole),
        _gate_table(gates),
        _rise_table(whole),
        *(_floor_table(rows, outcome, kind) for outcome in OUTCOMES for kind in DECOY_KINDS),
        _variance_table(of_turns),
        *_profile_tables(of_turns),
        _reach_table(of_turns),
        _corrected_table(of_turns),
    ]
    if (rows["dataset"] != whole["dataset"].iloc[0]).any():
        field = one_line(by or "dataset", 40)
        table = _rate_table(f"rates by {field}", rows, full=by is None)
        if by is not None:
            columns = [field if name == "dataset" else name for name in table.columns]
            table = replace(table, columns=columns, legend="–: rows of the data without it")
        tables.insert(2, table)
    return [table for table in tables if table.rows]


def _rate_table(title: str, rows: pd.DataFrame, *, full: bool = False) -> Table:
    """A line per temperature: rates of every outcome, the floor, and how far from greedy."""
    heads: Columns = {
        "follow_up": ("follow_up", 2),
        "floor": ("after a wrong conversation", 2),
        "excess": ("excess", "+.2f"),
        "rate_complete": ("after complete responses", 2),
        "grounded": ("and grounded", 2),
        DEPENDENT: ("and dependent", 2),
        "difference": ("Δ from greedy, Holm's p", "+.2f"),
    }
    floor = rows["quantity"].isin(["floor", "excess"]) & (rows["outcome"] == "follow_up")
    floor &= (rows["decoy"] == WRONG) & rows["temperature"].notna()
    own = rows[rows["decoy"].isna() | floor].sort_values(list(LINES), kind="stable")
    of_outcome = own["quantity"] == "rate"
    own = own.assign(key=own["outcome"].where(of_outcome, own["quantity"]))
    if full:
        heads["unfinished"] = ("unfinished", 2)
    legend = "after a wrong conversation: how often they are follow-ups there, the floor"
    if "grounded" in set(own["key"]):
        legend += "; grounded: with a word of the conversation that turns of others seldom share"
    return table_of(title, own, heads, LINES, key="key", rows="turns", legend=legend, full=full)


def _gate_table(gates: list[Gate]) -> Table:
    rows = []
    for gate in gates:
        for one in (gate, gate.siblings):
            if one is not None and one.decoys:
                name = OUTCOMES[one.outcome]
                if one.model:
                    name = f"{one.model} · {name}"
                numbers = [f"{one.rate:.2f}", f"{one.floor:.2f}", one.excess.text(sign=True)]
                rows.append([name, AFTER[one.kind], str(one.decoys), *numbers, one.verdict])
    return Table(
        "against decoys: turns held against what they did not follow",
        ["turns", "held against", "decoys", "rate", "floor", "excess", "gate"],
        rows,
        "gate: rate less twice the floor lies above 0 (a wrong conversation), or the excess does "
        "(a sibling); with few queries a floor that is seen as 0 may be larger, and is undecided",
    )


def _rise_table(whole: pd.DataFrame) -> Table:
    rows = whole[whole["quantity"].isin(latent.PARTS)].assign(decoy=None)
    heads: Columns = {
        latent.RISE: ("rise, Holm's p", "+.2f"),
        latent.ROLE: ("of it, fewer out of role", "+.2f"),
        latent.REST: ("of it, all else, p", "+.2f"),
        latent.BEYOND: ("rise beyond siblings, p", "+.2f"),
    }
    legend = (
        "rise: of the follow-up rate less that of the same turns after a wrong conversation, from "
        "greedy turns on. Out of role: the judge says that a turn repeats query or response, "
        "or speaks as the assistant. docs/statistics.md#latent"
    )
    title = "is awareness latent? how the excess rises from greedy turns on"
    if len(rows) and rows["sources"].max() < latent.LEAST:
        title = (
            f"how the excess rises from greedy turns on (no verdict: under {latent.LEAST} queries)"
        )
    return table_of(title, rows, heads, LINES, rows="turns, greedy too", legend=legend)


def _variance_table(of_turns: pd.DataFrame) -> Table:
    heads: Columns = {
        "variance_between_queries": ("between queries", 3),
        "variance_between_responses": ("between responses to one", 3),
        "reliability": (f"reliability at {RELIABILITY_TURNS} turns", 2),
    }
    legend = (
        "variances of the share of follow-ups; reliability: the share of the variance of rates "
        f"over {RELIABILITY_TURNS} turns that responses to one query make, which bounds what can "
        "be predicted of it"
    )
    pooled = all_datasets(of_turns) if len(of_turns) else of_turns
    title = "what the follow-up rate hangs on"
    return table_of(title, pooled, heads, LINES, rows="turns", legend=legend)


def _floor_table(rows: pd.DataFrame, outcome: str, kind: str) -> Table:
    own = rows[(rows["outcome"] == outcome) & (rows["decoy"] == kind)]
    heads: Columns = {
        "decoyed_rate": ("rate", 2),
        "floor": ("floor", 2),
        "excess": ("excess", "+.2f"),
    }
    title = f"{OUTCOMES[outcome]}: {AFTER[kind]}"
    return table_of(title, own, heads, LINES, rows="decoys", pooled="all", full=True)


def _profile_tables(of_turns: pd.DataFrame) -> list[Table]:
    """Columns of categories that no turn has are left out."""
    some = of_turns[of_turns["events"] > 0]
    shares = of_turns[of_turns["quantity"] == "category_share"]
    there = set(some["category"])
    names = [name for name in shares["category"].unique() if name in there]
    categories: Columns = {name: (heading(name), 2) for name in names}
    title = "what the turns are: shares of those assessed"
    lost: Columns = {"cannot_assess": ("can't assess", 2), "failed": ("judge failed", 2)}
    return [
        table_of(title, shares, categories, LINES, key="category", rows="turns", full=True),
        table_of("left out", some, lost, LINES, rows="turns", full=True),
    ]


def _reach_table(of_turns: pd.DataFrame) -> Table:
    reach = of_turns[of_turns["quantity"] == "reach"]
    most = reach["n_samples"].max()
    reach = reach[reach["n_samples"].isin({1, 2, 4, 8, 16, 32, most}) & (most > 1)]
    reach = reach.assign(key="n = " + reach["n_samples"].astype(str))
    heads: Columns = {name: (name, 2) for name in reach["key"].unique()}
    title = "contexts with a follow-up among n samples"
    legend = "unbiased over subsets of the samples (pass@k), of contexts with n of them"
    options: dict[str, Any] = {"rows": "contexts", "key": "key", "legend": legend, "full": True}
    return table_of(title, reach, heads, LINES, **options)


def _corrected_table(of_turns: pd.DataFrame) -> Table:
    """Beside the judge's rates, where there are corrected ones."""
    powered = of_turns[of_turns["quantity"] == "rate_prediction_powered"]
    rates = of_turns[(of_turns["quantity"] == "rate") & (of_turns["outcome"] == "follow_up")]
    both = pd.concat([powered, rates if len(powered) else rates[:0]])
    both = both.sort_values(list(LINES), kind="stable")
    heads: Columns = {"rate": ("by the judge", 2), "rate_prediction_powered": ("corrected", 2)}
    return table_of("rate, corrected by labels", both, heads, LINES, rows="turns", full=True)


def _figures(whole: pd.DataFrame, judged: JudgedTurns) -> dict:
    drawings = {}
    for number, (subject, of) in enumerate(whole.groupby(SUBJECT, sort=False), start=1):
        model, weights, perturbation = subject
        gate = judged.by_model[model, weights]["follow_up"]
        more = "" if perturbation == "none" else f", {perturbation}"
        title = f"{one_line(model, 40)}{more}\njudge {gate.judge}, gate over all T: {gate.word}"
        drawings["rates" if number == 1 else f"rates-{number}"] = figures.draw_rates(of, title)
    return drawings


# -- notes ----------------------------------------------------------------------------------------


def _notes(judged: JudgedTurns, rows: pd.DataFrame) -> list[str]:
    notes = []
    tested = rows[rows["p"].notna() & (rows["quantity"] == "difference")]
    if len(tested):
        pooled = int((tested["dataset"] == ALL).sum())
        family = f" by dataset, and over {pooled} of all together" if pooled else ""
        unequal = (
            ", or from the interval if that is larger, as greedy and sampled turns differ in number"
            if tested["test"].str.contains("and").any()
            else ""
        )
        compared = len(tested) - pooled
        corrected = f"; Holm-corrected over {compared} comparisons{family}" * (compared > 1)
        notes.append(
            "Δ: mean difference over queries, paired by query. p: from a sign-flip permutation "
            f"test{unequal}{corrected}. Intervals are not corrected."
        )
    if rows["outcome"].eq(DEPENDENT).any():
        notes.append(
            "dependent: a follow-up, and likelier after its own response than after all "
            "its siblings together (results of experiments.reaction). Of turns that depend on no "
            "response, at "
            "most 1 in K would pass, K the number of responses to a query."
        )
    notes += few_sources(rows)
    powered = rows[rows["quantity"] == "rate_prediction_powered"]
    for reason in powered.loc[powered["value"].isna(), "method"].str.split(";").str[0].unique():
        notes.append(f"Some rates can't be corrected: {reason.removeprefix('undefined: ')}.")
    if judged.annotator and powered.empty:
        notes.append(
            f"no rate is corrected by {judged.annotator}'s labels: that takes {MIN_ANNOTATED} "
            f"labelled turns of {MIN_ANNOTATED_SOURCES} queries in a row of the table."
        )
    elif not judged.annotator:
        notes.append(
            "no annotations: a rate is only as good as the judge. ia-mech annotate "
            "export makes a sheet of turns; filled in and imported, it corrects the rates."
        )
    return notes + judged.notes
