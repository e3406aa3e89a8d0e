"""What the rates report shows at a terminal: tables, what to know about them, turns to read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from ia_mech.cli import one_line, quoted
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, few_sources
from ia_mech.judge.decoys import CONVERSATION, RESPONSE
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, NAMES, SHORT
from ia_mech.judge.verdict import JUDGED, OUTCOMES
from ia_mech.rates.compute import MIN_ANNOTATED, MIN_ANNOTATED_SOURCES, POWER, comparisons
from ia_mech.rates.load import CUT_OFF, EVERY, FAILED, SUBJECT, Judged
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.stats import IMPOSSIBLE, Estimate

TESTS = {  # Paired.test
    "mover and sign flip": "the larger of that by sign flips of whole sources and of where MOVER's "
    "interval of two rates begins to leave out 0",
    "student and sign flip": "the larger of that by sign flips of whole sources and of Student's t",
    "sign flip": "sign flips of whole sources",
}


def notes_of(judged: Judged, estimates: pd.DataFrame) -> list[str]:
    """What has to be known to read the tables, each on a line."""
    quantities = set(estimates["quantity"])
    notes = [
        f"Δ: mean over sources; {_tests(estimates)}; detectable Δ: found with {POWER:.0%} power in "
        "one comparison, uncorrected. any of n: contexts with a genuine turn among n samples, "
        "unbiased over subsets (pass@k); (a/b): only a of b contexts have n samples that were "
        "assessed."
    ]
    if "cut_off" in quantities:
        notes.append(
            "†: after a response that was cut off, which is a different stimulus; rates are of all "
            "turns unless the column says complete responses."
        )
    # The table says of how many annotated turns a rate by labels alone is; bounds are no interval.
    intervals = estimates[~estimates["quantity"].isin(["follow_up_rate_bounds", "rate_annotated"])]
    of_judge = intervals["quantity"].str.startswith("judge_")
    named = intervals["dataset"].where(~of_judge, intervals["quantity"].str.replace("_", " "))
    notes += few_sources(intervals.assign(dataset=named))
    if judged.record.get("caveat"):
        notes.append(judged.record["caveat"])
    if estimates["method"].str.startswith(IMPOSSIBLE).any():
        notes.append(
            "– under Rogan & Gladen: the judge says genuine less often there than it errs that way "
            "elsewhere, so the assumption fails and no rate fits."
        )
    powered = estimates[estimates["quantity"] == "rate_prediction_powered"]
    absent = powered.loc[powered["value"].isna(), "method"].str.split(";").str[0]
    for reason in absent[~absent.str.startswith(IMPOSSIBLE)].unique():
        why = reason.removeprefix("undefined: ")
        notes.append(f"– under prediction-powered: {why}, so its errors there are unknown.")
    if "rate_rogan_gladen" in quantities:
        notes.append(
            "Rogan & Gladen assumes that the judge errs alike in all rows of a table, labelled or "
            f"not; the prediction-powered rate needs {MIN_ANNOTATED} annotated turns of "
            f"{MIN_ANNOTATED_SOURCES} sources in the very row, and labels of every run and stratum."
        )
    elif judged.annotator:
        notes.append(
            f"none of {judged.annotator}'s labels is of a turn that the judge assessed: no rate is "
            "corrected."
        )
    else:
        notes.append(
            "no annotations: a raw rate is only as good as the judge. To correct it, run python -m "
            f"ia_mech.judge export {quoted(judged.runs[0].path)}; fill the sheet in and import it."
        )
    return notes + judged.notes


def _tests(estimates: pd.DataFrame) -> str:
    """Which tests gave the p values, and how they were corrected."""
    own, pooled = comparisons(estimates)
    counts = estimates.loc[estimates["p"].notna(), "test"].value_counts(sort=False)
    if counts.empty:
        return "nothing could be tested"
    how = [TESTS.get(test, test) for test in counts.index]
    if len(counts) > 1:
        how = [f"{text} ({count})" for text, count in zip(how, counts, strict=True)]
    text = f"p: {', '.join(how)}, Holm-corrected over {own} comparison{'' if own == 1 else 's'}"
    return text + (f" and, as a family of its own, over the {pooled} of (all)" if pooled else "")


_FLOORS = {  # kinds of decoys: what the numbers beside them are
    CONVERSATION: "after their own conversation (rate) and another one (floor)",
    RESPONSE: "after their own response (rate) and another one to the same query (floor)",
}
CURVE = 5  # points of a reach curve that fit on a line


def print_rates(screen: Console, judged: Judged, estimates: pd.DataFrame) -> None:
    """The tables of every model and perturbation, then what has to be said of them.

    Args:
        screen: where to; it is widened to hold a table's intervals on one line.
        judged: what the estimates are of.
        estimates: the table of :func:`ia_mech.rates.compute.estimates`.
    """
    level = f"{estimates['level'].iloc[0] * 100:g}%"
    hashes = estimates.groupby("model")["weights_hash"].nunique()
    for (model, weights, perturbation), every in estimates.groupby(SUBJECT):
        own = every[(every["outcome"] == "genuine") & every["decoy"].isna()]
        figures = Lookup(own)
        name = one_line(model, 60)
        if hashes[model] > 1:
            name += f" ({weights})"
        if perturbation != "none":
            name += f" · perturbation {one_line(perturbation, 60)}"
        if judged.responses != EVERY:
            name += f" · after {judged.responses} responses"
        title = escape(f"{name} · judge {judged.gate}")
        _show(screen, _main_table(figures, f"[bold]{title}[/] ({level} intervals over sources)"))
        if figures.has("follow_up_rate_bounds"):
            _show(screen, _unassessed_table(figures, "turns that were not assessed: left out"))
        _show(screen, _profile_table(figures, "what the turns are: % of those assessed"))
        _say_absent(screen, figures)
        if max(figures.curve) > 1:
            _show(screen, _reach_table(figures, "contexts with a genuine turn among n samples"))
        if figures.annotated:
            _show(screen, _corrected_table(figures, "follow-up rate, corrected for judge errors"))
            _say_errors(screen, figures, judged.annotator)
        for outcome, gate in judged.gates.items():
            of_outcome = every[every["outcome"] == outcome]
            for kind, what in _FLOORS.items():
                if (of_outcome["decoy"] == kind).any():
                    title = (
                        f"[bold]{escape(f'{name} · judge {gate}')}[/]\n{OUTCOMES[outcome]} {what}"
                    )
                    _show(screen, _floor_table(of_outcome, kind, title))
    for sentence in dict.fromkeys(gate.sentence for gate in judged.gates.values()):
        screen.print(escape(f"{sentence}."), style="bold", soft_wrap=True)
    for note in notes_of(judged, estimates):
        screen.print(escape(note), soft_wrap=True)


class Lookup:
    """The estimates of one model and perturbation, found by what they are of.

    Attributes:
        lines: (dataset, temperature) of every line of a table, in order.
        curves: likewise, of the reach curves; temperature None is all of them.
        curve: the n that any curve has; [0] without curves.
        categories: those with a turn in any line, in the rubric's order.
        annotated: whether there are labels to correct rates by.
    """

    def __init__(self, estimates: pd.DataFrame) -> None:
        self._frame = estimates
        keys = estimates[["dataset", "temperature", "quantity", "category", "n_samples"]]
        keys = keys.astype(object).where(keys.notna(), None).itertuples(index=False, name=None)
        self._rows = dict(zip(keys, estimates.itertuples(index=False), strict=True))
        self.lines = self._places("follow_up_rate")
        self.curves = self._places("reach")
        self.curve = sorted({n for *_, n in self._rows if n is not None}) or [0]
        profile = estimates[(estimates["quantity"] == "category_share") & (estimates["events"] > 0)]
        self.categories = [name for name in ASSESSED if name in set(profile["category"])]
        self.annotated = self.has("rate_rogan_gladen")

    def _places(self, quantity: str) -> list[tuple[str, float | None]]:
        return list(dict.fromkeys((d, t) for d, t, name, *_ in self._rows if name == quantity))

    def get(
        self,
        dataset: str,
        temperature: float | None,
        quantity: str,
        category: str | None = None,
        n: int | None = None,
    ) -> Any:
        """The row, with the table's columns as attributes; None if there is none."""
        return self._rows.get((dataset, temperature, quantity, category, n))

    def overall(self, quantity: str) -> Any:
        """A figure of all datasets and temperatures together."""
        return self._rows[ALL, None, quantity, None, None]

    def has(self, quantity: str) -> bool:
        return bool((self._frame["quantity"] == quantity).any())

    def farthest(self, dataset: str, temperature: float | None) -> Any:
        """Reach at the largest n there is."""
        found = (self.get(dataset, temperature, "reach", n=n) for n in reversed(self.curve))
        return next((row for row in found if row is not None), None)

    def undefined(self, quantity: str) -> str | None:
        """Why none of a quantity's rows has a value; None if one has."""
        found = self._frame[self._frame["quantity"] == quantity]
        if found["value"].notna().any():
            return None
        return found["method"].iloc[0].split(";")[0]


# -- tables ---------------------------------------------------------------------------------------


def _main_table(figures: Lookup, title: str) -> Table:
    cut = figures.has("cut_off")
    most = {row.n_samples for place in figures.lines if (row := figures.farthest(*place))}
    names = ["contexts", "turns", "follow-up rate", "complete responses" if cut else None]
    names += ["Δ from greedy", "Holm p", "detect-\nable Δ"]
    names += [f"any of {most.copy().pop()}" if len(most) == 1 else "any of n samples"]
    table = _table(title, [name for name in names if name])
    for dataset, temperature, first in _lines(figures.lines):
        every, rate, complete, cut_off, difference, size = (
            figures.get(dataset, temperature, quantity)
            for quantity in (
                *(FAILED, "follow_up_rate", "follow_up_rate_complete", "cut_off"),
                *("difference_from_greedy", "detectable_difference"),
            )
        )
        cells = [
            str(every.contexts),
            str(every.rows) + (f" († {cut_off.events})" if cut_off else ""),
            _estimate(rate),
        ]
        if cut:
            complete = complete or rate
            cells.append(f"{_estimate(complete)} of {complete.rows}")
        reach = figures.farthest(dataset, temperature)
        cells += [
            _signed(difference) if difference else "–",
            _p(difference.p_holm) if difference else "–",
            f"{size.value:.2f}" if size and not np.isnan(size.value) else "–",
            _reach(figures, reach) + (f" of {reach.n_samples}" if reach and len(most) > 1 else ""),
        ]
        _add(table, dataset, temperature, first, cells)
    return table


def _floor_table(estimates: pd.DataFrame, kind: str, title: str) -> Table:
    """The rate of all turns; and of turns with decoys of one kind their rate, floor and excess, at
    every temperature and over all of them."""
    table = _table(title, ["all turns", "decoys", "rate", "floor", "excess"])
    quantities = ("follow_up_rate", "decoyed_rate", "floor", "excess")
    found = {
        (row.dataset, None if np.isnan(row.temperature) else row.temperature, row.quantity): row
        for row in estimates.itertuples(index=False)
        if row.quantity in quantities and (pd.isna(row.decoy) or row.decoy == kind)
    }
    places = [(dataset, temperature) for dataset, temperature, name in found if name == "excess"]
    counts = Counter(dataset for dataset, _ in places)
    # Over all temperatures says the same as the only one.
    shown = [(dataset, at) for dataset, at in places if at is not None or counts[dataset] > 2]
    for dataset, temperature, first in _lines(shown):
        rate = found.get((dataset, temperature, "follow_up_rate"))  # none over all temperatures
        own, floor, excess = (found[dataset, temperature, name] for name in quantities[1:])
        cells = [_estimate(rate) if rate else "–", str(excess.rows)]
        cells += [f"{own.value:.2f}", f"{floor.value:.2f}", _signed(excess)]
        _add(table, dataset, temperature, first, cells)
    return table


def _unassessed_table(figures: Lookup, title: str) -> Table:
    """Lines where the judge couldn't assess some turns or failed on them."""
    table = _table(title, ["turns", "can't assess", "judge failed", "rate if none … all genuine"])
    there = [at for at in figures.lines if figures.get(*at, "follow_up_rate_bounds")]
    for dataset, temperature, first in _lines(there):
        bounds = figures.get(dataset, temperature, "follow_up_rate_bounds")
        counts = [figures.get(dataset, temperature, name) for name in (CANNOT_ASSESS, FAILED)]
        cells = [str(bounds.rows), *(str(row.events) for row in counts)]
        cells.append(f"{bounds.low:.2f} … {bounds.high:.2f}")
        _add(table, dataset, temperature, first, cells)
    return table


def _profile_table(figures: Lookup, title: str) -> Table:
    found = figures.categories
    table = _table(title, [SHORT[name] for name in found])
    for dataset, temperature, first in _lines(figures.lines):
        shares = [figures.get(dataset, temperature, "category_share", name) for name in found]
        _add(table, dataset, temperature, first, [_percent(share) for share in shares])
    return table


def _reach_table(figures: Lookup, title: str) -> Table:
    own = max((r.n_samples for at in figures.lines if (r := figures.farthest(*at))), default=1)
    points = curve_points(own, max(figures.curve))
    table = _table(title, [f"n = {n}" for n in points])
    for dataset, temperature, first in _lines(figures.curves):
        found = [figures.get(dataset, temperature, "reach", n=n) for n in points]
        _add(table, dataset, temperature, first, [_reach(figures, row) for row in found])
    return table


def _reach(figures: Lookup, row: Any | None) -> str:
    """The estimate; where some contexts have fewer samples than n, how many it is of."""
    if row is None:
        return "–"
    temperature = None if np.isnan(row.temperature) else row.temperature
    contexts = figures.get(row.dataset, temperature, "reach", n=1).contexts
    fewer = f" ({row.contexts}/{contexts})" if row.contexts < contexts else ""
    return _estimate(row) + fewer


def _corrected_table(figures: Lookup, title: str) -> Table:
    table = _table(
        title, ["by the judge", "by the labels alone", "Rogan & Gladen", "prediction-powered"]
    )
    for dataset, temperature, first in _lines(figures.lines):
        found = [
            figures.get(dataset, temperature, quantity)
            for quantity in (
                *("follow_up_rate", "rate_annotated"),
                *("rate_rogan_gladen", "rate_prediction_powered"),
            )
        ]
        cells = [_estimate(row) if row else "–" for row in found]
        if found[1] and not np.isnan(found[1].value):
            cells[1] += f" of {found[1].rows}"
        _add(table, dataset, temperature, first, cells)
    return table


def curve_points(own: int, most: int) -> list[int]:
    """A few n to show a curve at: the most samples at one temperature, the most of all, and powers
    of two, of which the smallest go first. n = 1 is the follow-up rate."""
    powers = [2**i for i in range(1, 32) if 2**i < most and 2**i != own]
    ends = sorted({own, most})
    return sorted([*ends, *powers[max(0, len(powers) + len(ends) - CURVE) :]])


def _table(title: str, names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("dataset", no_wrap=True)
    for name in ("T", *names):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(
    table: Table, dataset: str, temperature: float | None, first: bool, cells: list[str]
) -> None:
    if first and table.row_count:
        table.add_section()
    at = "all" if temperature is None else f"{temperature:g}" if temperature else "greedy"
    table.add_row(escape(one_line(dataset, 30)) if first else "", at, *cells)


def _show(screen: Console, table: Table) -> None:
    wide = screen.options.update(width=1000)
    screen.width = max(screen.width, Measurement.get(screen, wide, table).maximum)
    screen.print(table)


def _lines(pairs: Sequence[tuple]) -> list[tuple[str, float | None, bool]]:
    """(dataset, temperature, whether the dataset has to be named on this line)."""
    return [(d, t, i == 0 or pairs[i - 1][0] != d) for i, (d, t) in enumerate(pairs)]


# -- cells ----------------------------------------------------------------------------------------


def _estimate(row: Any) -> str:
    """``0.42 [0.31, 0.55]``."""
    return Estimate(row.value, row.low, row.high, row.sources).text()


def _signed(row: Any) -> str:
    """``+0.12 [-0.02, +0.25]``."""
    if np.isnan(row.value):
        return "–"
    value, low, high = (x + 0.0 if abs(x) >= 0.005 else 0.0 for x in (row.value, row.low, row.high))
    ends = "–" if np.isnan(row.low) else f"{low:+.2f}, {high:+.2f}"
    return f"{value:+.2f} [{ends}]"


def _p(p: float) -> str:
    return "–" if np.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def _percent(row: Any) -> str:
    """The share, and its interval on a second line: eight of them stand side by side."""

    def text(share: float) -> str:
        percent = 100 * share
        return f"{percent:.1f}" if 0 < percent < 9.95 else f"{percent:.0f}"

    if np.isnan(row.value):
        return "–"
    return f"{text(row.value)}\n" + (
        "[–]" if np.isnan(row.low) else f"[{text(row.low)}–{text(row.high)}]"
    )


# -- notes ----------------------------------------------------------------------------------------


def _say_absent(screen: Console, figures: Lookup) -> None:
    absent = [name for name in ASSESSED if name not in figures.categories]
    if absent:
        screen.print(f"none is {', '.join(absent)}", soft_wrap=True)


def _say_errors(screen: Console, figures: Lookup, annotator: str | None) -> None:
    found = [figures.overall(f"judge_{name}") for name in ("sensitivity", "specificity")]
    turns = sum(row.rows for row in found)
    texts = [
        f"{name} {_estimate(row)} ({row.rows} turns)"
        for name, row in zip(("sensitivity", "specificity"), found, strict=True)
    ]
    line = f"against {annotator}'s labels of {turns} turns: {', '.join(texts)}"
    undefined = figures.undefined("rate_rogan_gladen")
    line += f"; Rogan & Gladen: {undefined}" if undefined else ""
    screen.print(escape(line + "."), soft_wrap=True)


# -- turns to read --------------------------------------------------------------------------------


def examples_by_category(
    run: Run, judge: str, per_category: int = 3, seed: int = 0, *, responses: str = EVERY
) -> pd.DataFrame:
    """Turns of every category that the judge found, drawn by a seeded generator.

    The turns of a category are shuffled; turns of a source that isn't there yet come first, then
    those whose text isn't, so that one prompt or one loop doesn't fill a category. A category's
    draw doesn't depend on what other categories hold.

    Args:
        run: a judged run.
        judge: whose verdicts (the first of repeated ones).
        per_category: how many at most.
        seed: of the draw.
        responses: after which responses the turns come: ``all``, ``complete`` or ``cut-off`` ones.

    Returns:
        Rows of ``run.generations`` with ``category``, ``rationale``, ``query`` and ``response``, in
        the order of the rubric.

    Raises:
        UserError: no such judge has judged this run, or not these turns.
    """
    verdicts = run.labels.judgements(judge)
    verdicts = verdicts[(verdicts["repeat"] == 0) & (verdicts["status"] == JUDGED)]
    turns = run.generations.merge(verdicts[[*KEY, "category", "rationale"]], on=list(KEY))
    if len(turns) != len(verdicts):
        raise UserError(
            f"the verdicts of {judge!r} are not of the turns of {run.path}",
            f"judge it again: {run.labels.command('judgements', judge)}",
        )
    if responses != EVERY:
        cut_off = turns["response_cut_off"].fillna(False).astype(bool)
        turns = turns[cut_off == (responses == CUT_OFF)]
    drawn = []
    for number, category in enumerate(NAMES):
        of = turns[turns["category"] == category]
        shuffled = of.iloc[np.random.default_rng([seed, number]).permutation(len(of))]
        drawn.append(_varied(shuffled, per_category))
    found = pd.concat(drawn)
    messages = found["context_id"].map(run.contexts.set_index("context_id")["messages"])
    for name, at in (("query", -2), ("response", -1)):
        found[name] = [message[at]["content"] for message in messages]
    return found


def _varied(turns: pd.DataFrame, count: int) -> pd.DataFrame:
    """The first turns of as many sources, then of as many texts, then any."""
    chosen: list[int] = []
    for same in ("source_id", "text", None):
        for at in range(len(turns)):
            if len(chosen) == count or at in chosen:
                continue
            if same is None or turns[same].iloc[at] not in set(turns[same].iloc[chosen]):
                chosen.append(at)
    return turns.iloc[chosen]


def print_examples(screen: Console, examples: pd.DataFrame, judge: str, of: str = "") -> None:
    """Show examples, each on five lines.

    Args:
        screen: where to.
        examples: of :func:`examples_by_category`.
        judge: who labelled them, with its gate.
        of: the run, where several are shown.
    """
    heading = f"examples of {escape(one_line(of))}" if of else "examples"
    screen.print(
        f"\n[bold]{heading}[/] · judge {escape(judge)} (drawn by seed, not chosen)", soft_wrap=True
    )
    for category, turns in examples.groupby("category", sort=False):
        screen.print(f"[bold]{category}[/]")
        for turn in turns.itertuples():
            temperature = f"T = {turn.temperature:g}" if turn.temperature else "greedy"
            flag = " † cut off" if turn.response_cut_off else ""
            for line in (
                f"  {_text(turn.context_id, 40)} · {temperature}",
                f"    query:     {_text(turn.query, 90)}",
                f"    response:  {_text(turn.response, 90)}{flag}",
                f"    [bold]user turn:[/] {_text(turn.text, 160) or '(empty)'}",
                f"    because:   {_text(turn.rationale or '', 160) or '–'}",
            ):
                screen.print(line, soft_wrap=True)


def _text(text: str, width: int) -> str:
    return escape(one_line(text, width))
