"""How far two columns of labels agree. Statistics and intervals are ``ia_mech.stats``'.

A row that one side abstained on (``cannot_assess``) or has no category of is counted and left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ia_mech.cli import one_line
from ia_mech.estimates import TidyEstimate
from ia_mech.judge.decoys import AFTER
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, Rubric
from ia_mech.results import Table
from ia_mech.stats import Estimate, balanced_accuracy, cluster_bootstrap, kappa_of, weighted_share

TEXTS = ("query", "response", "user_turn")


@dataclass(frozen=True)
class Comparison:
    """How far a prediction agrees with a truth (which may be another judge's labels).

    ``figures`` are, by (quantity, of), ``accuracy`` and ``kappa`` of ``categories``; these and
    ``balanced_accuracy`` of ``follow_up`` follow-ups against the rest (NaN unless the truth has
    both); ``precision`` and ``recall`` of each category, NaN where none was predicted so, or is so.
    """

    matched: int  # rows that have both
    apart: str  # how many of these are cannot_assess or without a category, in words
    n: int  # the rows compared
    weight: float  # about how many rows of the run these represent
    figures: dict[tuple[str, str], Estimate]
    confusion: np.ndarray  # [c, c] rows, truth down, prediction across
    rubric: Rubric  # that both labelled by


def compare(
    truth: Sequence[str | None] | pd.Series,
    prediction: Sequence[str | None] | pd.Series,
    sources: Iterable[Any],
    weights: ArrayLike | None = None,
    rubric: Rubric = BUILT_IN,
) -> Comparison:
    """Compare two columns of labels, ``[n]`` categories each (anything else where there is none).

    ``sources`` are the unit of the intervals; ``weights`` say how many rows each represents, as the
    inverse inclusion probability.
    """
    pairs = (("truth", truth), ("prediction", prediction))
    sides = {side: pd.Series(labels, dtype=object) for side, labels in pairs}
    assessed, size = rubric.assessed, len(rubric.assessed)
    t, p = (pd.Categorical(labels, assessed).codes.astype(int) for labels in sides.values())
    kept = (t >= 0) & (p >= 0)
    t, p = t[kept], p[kept]
    source = pd.Series(sources, dtype=object).to_numpy()[kept]
    weight = np.ones(len(t)) if weights is None else np.asarray(weights, dtype=float)[kept]
    follow_ups = np.isin(assessed, rubric.follow_ups)
    true, predicted = follow_ups[t], follow_ups[p]
    every = np.ones(len(t), dtype=bool)

    def share(event: np.ndarray, among: np.ndarray = every) -> Estimate:
        return weighted_share(event, among, source, weight)

    cells = t * size + p
    kappa, kappa_follow_up = _kappas(cells, source, weight, rubric)
    figures = {
        ("accuracy", "follow_up"): share(true == predicted),
        ("balanced_accuracy", "follow_up"): balanced_accuracy(true, predicted, source, weight),
        ("kappa", "follow_up"): kappa_follow_up,
        ("accuracy", "categories"): share(t == p),
        ("kappa", "categories"): kappa,
    }
    for code, name in enumerate(assessed):
        figures["precision", name] = share(t == code, p == code)
        figures["recall", name] = share(p == code, t == code)
    apart = {
        f"{reason} in the {side}": int(left_out.sum())
        for side, labels in sides.items()
        for reason, left_out in (
            (CANNOT_ASSESS, labels == CANNOT_ASSESS),
            ("no category", ~labels.isin(rubric.names)),
        )
    }
    return Comparison(
        matched=len(sides["truth"]),
        apart=", ".join(f"{reason} {count}" for reason, count in apart.items() if count),
        n=len(t),
        weight=float(weight.sum()),
        figures=figures,
        confusion=np.bincount(cells, minlength=size**2).reshape(size, size),
        rubric=rubric,
    )


def _kappas(
    cells: np.ndarray, sources: np.ndarray, weights: np.ndarray, rubric: Rubric
) -> list[Estimate]:
    """κ of the categories, and of follow-ups against the rest; ``[n]`` cells of the confusion."""
    names, size = rubric.assessed, len(rubric.assessed)
    follow_ups = np.isin(names, rubric.follow_ups)
    side = np.stack([follow_ups, ~follow_ups], axis=1)
    merge = np.kron(side, side).astype(
        float
    )  # cells of all categories into follow-ups and the rest

    def statistic(counts: np.ndarray) -> np.ndarray:
        two = (counts @ merge).reshape(-1, 2, 2)
        return np.stack([kappa_of(counts.reshape(-1, size, size)), kappa_of(two)], axis=1)

    return cluster_bootstrap(statistic, sources, cells, weights=weights, number=size**2)


def tables_of_pairs(
    pairs: Mapping[tuple[str, str], Comparison], shares: Sequence[TidyEstimate]
) -> list[Table]:
    """All pairs, what is called follow-ups, and in full each pair."""
    rows = []
    for (truth, name), pair in pairs.items():
        shown = [
            ("accuracy", "follow_up"),
            ("balanced_accuracy", "follow_up"),
            ("kappa", "follow_up"),
        ]
        figures = [pair.figures[figure].text() for figure in (*shown, ("kappa", "categories"))]
        names = f"{one_line(name)} / {one_line(truth)}"
        rows.append([names, str(pair.n), f"{pair.weight:.0f}", *figures])
    heads = ["pair", "n", "≈ turns", "agreement", "balanced accuracy", "κ", "κ of categories"]
    legend = (
        "follow-ups against the rest, but for the last column. n: turns that both put into "
        "a category; ≈ turns: how many of the run's these represent, by which figures are weighted"
    )
    tables = [Table("agreement (95% intervals over queries)", heads, rows, legend)]
    if any(share.quantity == "floor" for share in shares):
        contexts = {"": "their own conversation"} | AFTER
        lines = []
        for share in shares:
            kind = share.names.get("decoy", "")
            context = contexts[kind]
            name = one_line(share.names["prediction"])
            lines.append([name, context, str(share.rows), share.estimate.text()])
        heads = ["judge or annotator", "turns after", "n", "follow-ups"]
        tables.append(Table("share called follow-ups", heads, lines))
    for (truth, name), pair in pairs.items():
        tables += _pair_tables(f"{one_line(name)} against {one_line(truth)}", pair)
    return tables


def _pair_tables(title: str, pair: Comparison) -> list[Table]:
    """Precision and recall by category, and the confusion matrix in rows."""
    counts, names = pair.confusion, pair.rubric.assessed
    lines = [
        [name, str(counts[i].sum()), str(counts[:, i].sum())]
        + [pair.figures[quantity, name].text() for quantity in ("precision", "recall")]
        for i, name in enumerate(names)
    ]
    heads = ["category", "n truth", "n predicted", "precision", "recall"]
    apart = f"; left out: {pair.apart}" if pair.apart else ""
    # Columns go by number: eight names side by side fit no terminal.
    cells = [
        [f"{i + 1} {name}", *(str(count) if count else "·" for count in counts[i])]
        for i, name in enumerate(names)
    ]
    numbers = ["truth ↓   prediction →", *map(str, range(1, len(names) + 1))]
    about = f"{pair.n} of {pair.matched} turns{apart}"
    return [
        Table(title, heads, lines, about, full=True),
        Table(f"{title}: turns", numbers, cells, full=True),
    ]
