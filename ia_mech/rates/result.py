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
from ia_mech.rates import figures, latent
from ia_mech.rates.compute import MIN_ANNOTATED, MIN_ANNOTATED_SOURCES, RELIABILITY_TURNS, estimates
from ia_mech.rates.evidence import DEPENDENT, doubts, without_response
from ia_mech.rates.fit import highest, marked
from ia_mech.rates.gate import RULE, Gate, named
from ia_mech.rates.load import EVERY, QUESTION, SUBJECT, JudgedTurns, matching
from ia_mech.results import Result, Table, about_runs, cell_of, table_of
from ia_mech.run.labels import KEY
from ia_mech.run.queries import conversations_text
from ia_mech.stats import LEAST_SHOWN

Columns = dict[str, tuple[str, int | str]]  # of a table: which estimates → head and format
LINES = ("model", "perturbation", "dataset", "temperature")
NO_VALUE = "–"  # what Run.groups calls rows without the field
OWN, THERE, LESS = "follow-ups", "follow-ups there", "difference"  # heads of columns
FOLLOW_UPS: Columns = {
    "follow_up": ("follow-ups", 2),
    "floor": ("after a wrong conversation", 2),
    "difference": ("minus greedy", "+.2f"),
}
OTHERS: Columns = {
    "rate_complete": ("follow-ups after complete responses", 2),
    DEPENDENT: ("dependent follow-ups", 2),
    "unfinished": ("after unfinished responses", 2),
}
LEGENDS = {
    "floor": "After a wrong conversation: how often the judge calls the same turns follow-ups if "
    "it is shown them after a conversation of another query.",
    "difference": "p: of a sign-flip test, paired by query, Holm-corrected.",
    DEPENDENT: "Dependent: follow-ups that are likelier after their own response than after all "
    "its siblings together (ia-mech reaction). With K responses to a query, at most 1 in K turns "
    "that depend on no response would count.",
}


def result(judged: JudgedTurns, *, level: float = 0.95, seed: int = 0) -> Result:
    """The rates of runs by one judge; see :func:`ia_mech.rates.compute.estimates`. Gates are always
    decided at 95%."""
    rows = estimates(judged, level=level, seed=seed)
    whole = pd.concat([all_datasets(of) for _, of in rows.groupby(SUBJECT, sort=False)])
    each = rows[rows["dataset"] != ALL]
    gates = [*judged.by_model.values()]
    names = {str(run.path): run.name for run in judged.runs}
    turns = judged.turns[["run", *KEY, "follow_up", DEPENDENT]]
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
            _sentence(judged, of, each[matching(each, _subject(of))], level)
            for _, of in whole.groupby(SUBJECT, sort=False)
        ),
        estimates=rows,
        tables=_tables(rows, whole, gates, level, judged.by),
        figures=_figures(whole, each, judged),
        notes=_notes(judged, rows),
        data={"turns": turns},
    )


def result_on(
    judged: JudgedTurns, kind: str, gates: Sequence[Gate], settings: dict[str, Any], **said: Any
) -> Result:
    """A result of this kind on judged runs, with ``gates`` as its control and ``settings`` as what
    it depends on."""
    shown = "" if judged.responses == EVERY else f"-{judged.responses}"
    shown += "-pooled" if len(judged.runs) > 1 else ""
    shown += "" if judged.by is None else f"-by-{quote(judged.by, safe='')}"
    shown += "" if judged.sampled_tokens is None else f"-sampled-{judged.sampled_tokens}"
    labellers = judged.judge, settings.get("annotator")
    known = judged.record.get("caveat", "").rstrip(".")
    counts = [without_response(run, judged.judge) for run in judged.runs]
    beside = [f"but {one}" for one in counts if one]
    control = [f"{'; '.join([*(gate.short for gate in gates), *beside])}."]
    if len(judged.runs) == 1 and judged.responses == EVERY and judged.sampled_tokens is None:
        control += doubts(judged.runs[0], judged.judge)
    control += [sentence for gate in gates for sentence in gate.details]
    control += [f"{known[0].upper()}{known[1:]}."] if known else []
    made = Result(
        name=f"rates-{judged.judge}{kind.removeprefix('rates')}{shown}",
        control=" ".join(control),
        about={
            "kind": kind,
            **about_runs(judged.runs, [name for name in labellers if name]),
            "judge": judged.judge,
            "gate": judged.gate.word,
            "settings": settings
            | {"responses": judged.responses, "by": judged.by}
            | {"sampled_tokens": judged.sampled_tokens},
        },
        **said,
    )
    return marked(made, judged.record)


def _subject(rows: pd.DataFrame) -> dict[str, Any]:
    """The model and perturbation that rows are of."""
    return {name: rows[name].iloc[0] for name in SUBJECT}


def _sentence(judged: JudgedTurns, of: pd.DataFrame, groups: pd.DataFrame, level: float) -> str:
    """What was found of one model and perturbation.

    Args:
        judged: what rates are computed from.
        of: its estimates, those of all datasets together.
        groups: its estimates by dataset, or by the field that was asked for.
        level: of the intervals.
    """
    first = of.iloc[0]
    turns = judged.turns[matching(judged.turns, _subject(of))]
    gate = judged.by_model[first["model"], first["weights_hash"]]
    plain = of[(of["quantity"] == "rate") & (of["outcome"] == "follow_up")]
    # Above the judge's fit, only if there are no other sampled turns.
    lowest = plain.loc[plain["temperature"] > 0, "temperature"].min()
    plain = plain[~(plain["temperature"] > max(highest(judged.record), lowest))]
    perturbed = "" if first["perturbation"] == "none" else f" ({one_line(first['perturbation'])})"
    whose = f"user turns of {one_line(first['model'])}{perturbed} are follow-ups"
    rates: list[str] = []
    for row in plain.itertuples():
        share = "" if estimate_of(row).few else f" ({cell_of(row)})"
        at = f"at T = {row.temperature:g}" if row.temperature else "greedy"
        counts = f"{row.events} of {row.rows}"
        if rates:
            rates.append(f"{at}, {counts}{share}")
        elif row.temperature:
            rates.append(f"{counts} {whose} {at}{share}")
        else:
            rates.append(f"{counts} {at} {whose}{share}")
    sources = turns["source"].nunique()
    few = ", so few that all numbers are rough" if sources < FEW_SOURCES else ""
    said = [f"By {named(judged.judge)}, {'; '.join(rates)}."]
    if judged.by is not None:
        said.insert(0, _by_group(one_line(judged.by, 40), groups))
    conversations = conversations_text(turns["context"].nunique(), sources)
    unassessed = int(turns["follow_up"].isna().sum())
    lacking = f" ({unassessed} of them not assessed)" if unassessed else ""
    pooled = f" of {len(judged.runs)} runs" if len(judged.runs) > 1 else ""
    pooled += f" and {data} datasets" if pooled and (data := turns["dataset"].nunique()) > 1 else ""
    said.append(f"These are {len(turns)} turns{lacking} in {conversations}{pooled}{few}.")
    if foreign := turns["context"][turns["context"].isin(judged.foreign)].nunique():
        verb = "doesn't" if foreign == 1 else "don't"
        said.append(
            f"{foreign} of the conversations {verb} look English, and the built-in judge was "
            "fitted on English: don't rely on its labels there."
        )
    if (count := judged.sampled_tokens) is not None:
        some = "token is" if count == 1 else f"{count} tokens are"
        said.append(f"In each sampled turn, the first {some} sampled and the rest is greedy.")
    if turns["unfinished"].any():
        said.append(f"{turns['unfinished'].mean():.0%} of the turns follow an unfinished response.")
    said += [latent.verdict(of, level, highest(judged.record)), _reaction(gate, judged)]
    return " ".join(filter(None, said))


def _by_group(field: str, rows: pd.DataFrame) -> str:
    """The lowest and the highest rate by a field of the data, of greedy turns if there are any.
    Groups of too few queries for an interval are not compared."""
    rates = rows[(rows["quantity"] == "rate") & (rows["outcome"] == "follow_up")]
    rates = rates[rates["rows"] > 0]  # a group of which no turn could be assessed has no rate
    t = rates["temperature"].min()
    rates = rates[rates["temperature"] == t].sort_values("value", kind="stable")
    if len(rates) < 2:
        return f"All turns have the same {field}."
    turns = f"turns at T = {t:g}" if t else "greedy turns"
    groups, rates = len(rates), rates[rates["sources"] >= LEAST_SHOWN]
    small = groups - len(rates)
    few = f"{small} of {groups} groups have fewer than {LEAST_SHOWN} queries"
    if len(rates) < 2:
        return f"By {field}, no two groups can be compared: {few}."
    aside = f" ({few}: too few to compare)" if small else ""
    if rates["value"].nunique() == 1:
        counts = f"{rates['events'].sum()} of {rates['rows'].sum()} in all"
        return (
            f"By {field}, {rates['value'].iloc[0]:.2f} of {turns} are follow-ups in each of "
            f"{len(rates)} groups, {counts}{aside}."
        )
    ends = []
    for end in rates["value"].min(), rates["value"].max():
        tied = rates[rates["value"] == end]
        whose = f"{field} = {one_line(tied['dataset'].iloc[0], 40)}"
        ends.append(
            f"{cell_of(next(tied.itertuples()))} ({whose})"
            if len(tied) == 1
            else f"{end:.2f} ({len(tied)} groups, such as {whose})"
        )
    return f"By {field}, {ends[0]} to {ends[1]} of {turns} are follow-ups{aside}."


def _reaction(gate: Gate, judged: JudgedTurns) -> str:
    """Whether turns react to the response that they followed, which siblings alone can tell."""
    siblings = gate.siblings
    if siblings is None or not siblings.decoys:
        if any(without_response(run, judged.judge) for run in judged.runs):
            return ""
        return (
            "These rates don't say whether turns need their response. ia-mech perturbations RUN "
            "--conditions remove tells, and so do several responses to each query (sample with "
            "--response generate --responses 4)."
        )
    beyond = siblings.beyond.text(sign=True)
    if gate.reacts:
        return (
            "Over all temperatures together, turns react to their own response: they are "
            f"follow-ups to it more often than to another response to the same query, by {beyond}."
        )
    return (
        "It isn't shown that turns react to their own response: the follow-up rate minus the rate "
        f"after siblings, other responses to the same query, is {beyond}."
    )


# -- tables ---------------------------------------------------------------------------------------


def _tables(
    rows: pd.DataFrame, whole: pd.DataFrame, gates: list[Gate], level: float, by: str | None
) -> list[Table]:
    """The rates first, by the field that was asked for; then all other tables."""
    of_turns, each = rows[rows["decoy"].isna()], rows[rows["dataset"] != ALL]
    intervals = f"({100 * level:g}% intervals over queries)"
    tables = [_rate_table(f"follow-up rates {intervals}", whole, FOLLOW_UPS)]
    if by is not None:
        field = one_line(by, 40)
        table = _rate_table(f"follow-up rates by {field} {intervals}", each, FOLLOW_UPS, every=True)
        columns = [field if name == "dataset" else name for name in table.columns]
        if NO_VALUE in set(each["dataset"]):
            table = replace(
                table, legend=f"{NO_VALUE}: rows of the data without it. {table.legend}"
            )
        tables.insert(0, replace(table, columns=columns))
    elif each["dataset"].nunique() > 1:
        tables.append(_rate_table("rates by dataset", each, FOLLOW_UPS | OTHERS, full=True))
    tables += [
        _rate_table(f"further rates {intervals}", whole, OTHERS, full=True),
        _gate_table(gates),
        _rise_table(whole),
        *(_floor_table(rows, kind) for kind in DECOY_KINDS),
        _variance_table(of_turns),
        *_profile_tables(of_turns),
        _pass_at_k_table(of_turns),
        _corrected_table(of_turns),
    ]
    return [table for table in tables if table.rows]


def _rate_table(
    title: str, rows: pd.DataFrame, heads: Columns, *, every: bool = False, full: bool = False
) -> Table:
    """A line per temperature; ``every``: lines name their dataset, even where there is one.

    Where a line's turns are of too few queries for an interval, none of its numbers has one, though
    wrong conversations are of further queries.
    """
    floor = rows["quantity"] == "floor"
    floor &= (rows["decoy"] == WRONG) & rows["temperature"].notna()
    own = rows[rows["decoy"].isna() | floor].sort_values(list(LINES), kind="stable")
    of_outcome = own["quantity"] == "rate"
    own = own.assign(key=own["outcome"].where(of_outcome, own["quantity"]))
    queries = own["sources"].where(own["key"] == "follow_up")
    queries = queries.groupby([own[name] for name in LINES], dropna=False).transform("max")
    own["sources"] = own["sources"].clip(upper=queries.fillna(own["sources"])).astype(int)
    there = {own_name for own_name in set(own["key"]) if own_name in heads}
    legend = " ".join(text for name, text in LEGENDS.items() if name in there)
    lines = LINES if own["dataset"].nunique() > 1 or not every else (*LINES, "dataset")
    return table_of(title, own, heads, lines, key="key", rows="turns", legend=legend, full=full)


def _gate_table(gates: list[Gate]) -> Table:
    rows = []
    for gate in gates:
        for one in (gate, gate.siblings):
            if one is not None and one.decoys:
                name = f"{one.model} · follow-ups" if one.model else "follow-ups"
                numbers = [f"{one.rate:.2f}", f"{one.floor:.2f}", one.beyond.text(sign=True)]
                rows.append([name, AFTER[one.kind], str(one.decoys), *numbers, one.verdict])
    return Table(
        "the judge's control: the same turns, shown after a wrong conversation or a sibling",
        ["counted", "shown after", "times shown", OWN, THERE, LESS, "control"],
        rows,
        f"Control: {RULE}, failed if it is shown to be less, else undecided. After a sibling, "
        "another response to the same query, the rate need only be shown to be above that there.",
        full=True,
    )


def _rise_table(whole: pd.DataFrame) -> Table:
    rows = whole[whole["quantity"].isin(latent.PARTS)].assign(decoy=None)
    heads: Columns = {
        latent.RISE: ("rise beyond wrong conversations", "+.2f"),
        latent.ROLE: ("part: staying in role", "+.2f"),
        latent.REST: ("part: following up in role", "+.2f"),
        latent.BEYOND: ("rise beyond siblings", "+.2f"),
    }
    legend = (
        "Rise beyond wrong conversations: how much the follow-up rate rises from greedy turns to "
        "those at T, minus how much it rises after wrong conversations. Siblings: other responses "
        "to the same query. In role: by the judge's label, the turn neither repeats the "
        "conversation nor speaks as the assistant. p: Holm-corrected."
    )
    title = "are follow-ups latent? how their rate rises from greedy to sampled turns"
    return table_of(title, rows, heads, LINES, rows="turns (greedy, too)", legend=legend)


def _variance_table(of_turns: pd.DataFrame) -> Table:
    heads: Columns = {
        "variance_between_queries": ("between queries", 3),
        "variance_between_responses": ("between responses to a query", 3),
        "reliability": (f"reliability at {RELIABILITY_TURNS} turns", 2),
    }
    legend = (
        "Variances of the follow-up rate. Reliability: how much of the variance of rates over "
        f"{RELIABILITY_TURNS} turns lies between responses to one query. No predictor can explain "
        "more of it."
    )
    pooled = all_datasets(of_turns) if len(of_turns) else of_turns
    title = "how much follow-up rates differ between queries, and between responses to one query"
    return table_of(title, pooled, heads, LINES, rows="turns", legend=legend)


def _floor_table(rows: pd.DataFrame, kind: str) -> Table:
    own = rows[rows["decoy"] == kind]
    heads: Columns = {
        "rate_after_own": (OWN, 2),
        "floor": (THERE, 2),
        "beyond": (LESS, "+.2f"),
    }
    title = f"follow-ups among turns that are shown after {AFTER[kind]}"
    return table_of(title, own, heads, LINES, rows="times shown", pooled="all", full=True)


def _profile_tables(of_turns: pd.DataFrame) -> list[Table]:
    """Columns of categories that no turn has are left out."""
    some = of_turns[of_turns["events"] > 0]
    shares = of_turns[of_turns["quantity"] == "category_share"]
    there = set(some["category"])
    names = [name for name in shares["category"].unique() if name in there]
    categories: Columns = {name: (heading(name), 2) for name in names}
    title = "what the turns are: shares of those that the judge could assess"
    lost: Columns = {"cannot_assess": ("can't assess", 2), "failed": ("judge failed", 2)}
    return [
        table_of(title, shares, categories, LINES, key="category", rows="turns", full=True),
        table_of("turns that are left out of rates", some, lost, LINES, rows="turns", full=True),
    ]


def _pass_at_k_table(of_turns: pd.DataFrame) -> Table:
    rows = of_turns[of_turns["quantity"] == "pass_at_k"]
    most = rows["n_samples"].max()
    rows = rows[rows["n_samples"].isin({2, 4, 8, 16, 32, most} - {1})]
    rows = rows.assign(key="k = " + rows["n_samples"].astype(str))
    heads: Columns = {name: (name, 2) for name in rows["key"].unique()}
    title = "pass@k: share of conversations with a follow-up among k sampled turns"
    legend = "The mean over all choices of k turns, of conversations with at least k sampled turns."
    options: dict[str, Any] = {"rows": "conversations", "key": "key", "full": True}
    return table_of(title, rows, heads, LINES, legend=legend, **options)


def _corrected_table(of_turns: pd.DataFrame) -> Table:
    """Beside the judge's rates, where there are corrected ones."""
    powered = of_turns[of_turns["quantity"] == "rate_prediction_powered"]
    rates = of_turns[(of_turns["quantity"] == "rate") & (of_turns["outcome"] == "follow_up")]
    both = pd.concat([powered, rates if len(powered) else rates[:0]])
    both = both.sort_values(list(LINES), kind="stable")
    heads: Columns = {"rate": ("by the judge", 2), "rate_prediction_powered": ("corrected", 2)}
    return table_of(
        "follow-up rate, corrected by labels", both, heads, LINES, rows="turns", full=True
    )


def _figures(whole: pd.DataFrame, each: pd.DataFrame, judged: JudgedTurns) -> dict:
    """Of each model and perturbation: by the field that was asked for, rates, categories."""
    drawings, last = {}, {}
    for number, (subject, of) in enumerate(whole.groupby(SUBJECT, sort=False), start=1):
        model, weights, perturbation = subject
        gate = judged.by_model[model, weights]
        more = "" if perturbation == "none" else f", {perturbation}"
        name = f"{one_line(model, 40)}{more}"
        numbered = "" if number == 1 else f"-{number}"
        if judged.by is not None:
            field, own = one_line(judged.by, 40), each[matching(each, _subject(of))]
            drawings[f"by field{numbered}"] = figures.draw_by(
                own, figures.gate_title(f"{name}, by {field}", gate)
            )
            name += f", all values of {field} together"
        title, fit = figures.gate_title(name, gate), highest(judged.record)
        last[f"rates{numbered}"] = figures.draw_rates(of, title, fit)
        last[f"categories{numbered}"] = figures.draw_categories(of, title, fit)
    return drawings | last


# -- notes ----------------------------------------------------------------------------------------


def _notes(judged: JudgedTurns, rows: pd.DataFrame) -> list[str]:
    notes = []
    tested = rows[rows["p"].notna() & (rows["quantity"] == "difference")]
    if len(tested):
        pooled = int((tested["dataset"] == ALL).sum())
        family = f" by dataset, and over {pooled} of all datasets together" if pooled else ""
        unequal = (
            ", or from the interval if that p is larger, because greedy and sampled turns differ "
            "in number"
            if tested["test"].str.contains("and").any()
            else ""
        )
        compared = len(tested) - pooled
        corrected = f"; Holm-corrected over {compared} comparisons{family}" * (compared > 1)
        notes.append(
            "Minus greedy: the mean over queries, paired by query. Its p is from a "
            f"sign-flip permutation test{unequal}{corrected}. Intervals are not corrected."
        )
    notes += few_sources(rows)
    powered = rows[rows["quantity"] == "rate_prediction_powered"]
    for reason in powered.loc[powered["value"].isna(), "method"].str.split(";").str[0].unique():
        notes.append(f"Some rates can't be corrected: {reason.removeprefix('undefined: ')}.")
    if judged.annotator and powered.empty:
        notes.append(
            f"no rate is corrected by {judged.annotator}'s labels: a row of the table needs "
            f"{MIN_ANNOTATED} labelled turns of {MIN_ANNOTATED_SOURCES} queries."
        )
    elif not judged.annotator:
        notes.append(
            "these rates are uncorrected: nobody labelled turns by hand (ia-mech annotate export)."
        )
    return notes + judged.notes
