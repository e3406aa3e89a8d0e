"""Reaction information in the terminal and as figures."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reaction.analyse import INFORMATION, LESS, SAME_QUERIES
from experiments.reaction.read import ALTERNATIVES, ASSISTANT, COMPLETE, SAME_CONTENT, Arm
from experiments.tables import print_plan, tables_of
from ia_mech.cli import one_line
from ia_mech.display import COLOURS, coloured, draw_line, draw_points, new_axes
from ia_mech.estimates import together
from ia_mech.results import Table, label_of

MOST = 5  # turns shown at either end
LEGEND = (
    "readable: by one reader of all turns; presence: bits gained over no response; differ: share "
    "of pairs of greedy turns. Bits show that turns depend on the response, not that they are apt "
    "or that the model is aware of it; alike responses (a maths answer) leave few to tell."
)


def plan(arm: Arm, contexts: dict[str, int], requests: str) -> None:
    """What ``--dry-run`` prints: queries, turns and tokens.

    Args:
        arm: the runs' own turns.
        contexts: how many contexts each control would have.
        requests: what paraphrases would take; empty without any.
    """
    prefilled = sum(len(ids) for query in arm.queries for ids in query.token_ids)
    tokens = int(arm.turns["token_ids"].map(len).sum()) * (arm.responses + 1)
    share = len(arm.turns) / sum(len(query.contexts) for query in arm.queries)
    lines = {
        "queries": f"{len(arm.queries)}, {arm.responses} responses to each",
        "turns": f"{len(arm.turns)}, scored after {arm.responses + 1} contexts each",
        "tokens to prefill": str(prefilled),
        "tokens to score": str(tokens),
    }
    for name, count in contexts.items():
        lines[name] = f"{count} contexts to sample {count * share:.0f} turns after, then to score"
    if requests:
        lines["paraphrases"] = f"{requests}, before what is kept"
    print_plan(lines)


def written(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns as they are written: with ``source_id`` in place of the key that holds across
    datasets."""
    named = turns["source"].str.partition("\x1f")[2]
    return turns.drop(columns=["source"]).assign(source_id=named)


def tables(estimates: pd.DataFrame, turns: pd.DataFrame, level: float) -> list[Table]:
    """The headline table, what was copied, and the turns with most and least bits."""
    main = estimates[estimates["of"] == ALTERNATIVES]
    most = main["responses"].max()
    whole = main[(main["responses"] == most) & main["token"].isna()]
    title = (
        f"bits that a turn tells about which of {most} responses it followed "
        f"(at most {np.log2(most):.2f}; {100 * level:g}% intervals over queries)"
    )
    columns = {
        INFORMATION: ("I_K", 2),
        "readable bits": ("readable", 2),
        "identified": (f"identified (chance {1 / most:.2g})", 2),
        "presence, bits": ("presence", 1),
        "greedy turns that differ": ("differ", 2),
    }
    index = ("dataset", "temperature")
    found = tables_of(title, whole, columns, index=index, legend=LEGEND)
    for name, title, base in (
        (COMPLETE, "complete responses alone", "all responses"),
        (SAME_CONTENT, f"control: {SAME_CONTENT}", ALTERNATIVES),
        (ASSISTANT, f"control: {ASSISTANT}", ALTERNATIVES),
    ):
        mine = estimates[estimates["of"] == name]
        columns = {SAME_QUERIES: (base, 2), INFORMATION: (name, 2), LESS: ("difference", 2)}
        title += f", {mine['responses'].max()} contexts a query"
        if name == COMPLETE:
            title += f", {mine['sources'].max()} queries"
        found += tables_of(title, mine, columns, index=index)
    copied = estimates[estimates["quantity"].isin(["copy bits", "beyond copy, bits"])]
    last = copied[copied["of"] == copied["of"].iloc[-1]] if len(copied) else copied
    columns = {"copy bits": ("copied", 2), "beyond copy, bits": ("beyond (at most)", 2)}
    found += tables_of("of these, told by copied words", last, columns, index=index)
    sampled = turns[turns["reaction_bits"].notna()].sort_values("reaction_bits", kind="stable")
    for title, rows in (
        ("turns with most bits", sampled.iloc[::-1].head(MOST)),
        ("turns with fewest bits", sampled.head(MOST)),
    ):
        lines = [
            [one_line(context, 40), label_of(at, "temperature"), f"{bits:.2f}", one_line(text, 140)]
            for context, at, bits, text in rows[
                ["context_id", "temperature", "reaction_bits", "text"]
            ].itertuples(index=False)
        ]
        found.append(Table(title, ["context", "T", "bits", "turn"], lines))
    return found


def figures(estimates: pd.DataFrame, model: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    made = {
        "information": by_temperature(estimates, f"{model} · reaction bits"),
        "responses": by_responses(estimates, f"{model} · fewer responses"),
    }
    if (estimates["quantity"] == "bits by token").any():
        made["tokens"] = by_token(estimates, f"{model} · bits by token")
    return made


def by_temperature(estimates: pd.DataFrame, title: str) -> Figure:
    """I_K against temperature, with placebo, the assistant's header, and the ceiling of each."""
    figure, axes = new_axes(title, "temperature (0 = greedy)", "bits of a turn", (8, 4))
    found = together(estimates)
    most = found["responses"].max()
    whole = found[found["quantity"] == INFORMATION]
    main = whole[(whole["of"] == ALTERNATIVES) & (whole["responses"] == most)]
    lines = [(f"{most} responses", main, COLOURS[0])]
    for name, colour in ((SAME_CONTENT, COLOURS[1]), (ASSISTANT, COLOURS[2])):
        mine = whole[whole["of"] == name]
        if len(mine):
            lines.append((f"{name}, {mine['responses'].max()} contexts", mine, colour))
    fewer = found[found["quantity"] == SAME_QUERIES]
    fewer = fewer[fewer["of"] == SAME_CONTENT]
    if len(fewer):
        label = f"{fewer['responses'].max()} responses, the control's queries"
        lines.insert(1, (label, fewer, COLOURS[5]))
    held = found[found["quantity"] == "readable bits"]
    lines.append(("readable by one reader", held, COLOURS[6]))
    for label, rows, colour in lines:
        draw_points(axes, rows["temperature"], rows, fmt="o-", color=colour, label=label)
    controls = whole.loc[whole["of"].isin([SAME_CONTENT, ASSISTANT]), "responses"]
    for count, style in zip(sorted({most, *controls}, reverse=True), (":", "--"), strict=False):
        axes.axhline(np.log2(count), color="0.3", lw=0.8, ls=style, label=f"ceiling of {count}")
    axes.axhline(0, color="0.3", lw=0.8)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def by_responses(estimates: pd.DataFrame, title: str) -> Figure:
    """I_K′ against K′, a line per temperature; dotted: log₂ K′."""
    figure, axes = new_axes(title, "responses", "bits of a turn", (5, 4))
    found = together(estimates)
    rows = found[(found["quantity"] == INFORMATION) & (found["of"] == ALTERNATIVES)]
    _lines(axes, rows, "responses")
    counts = sorted(rows["responses"].unique())
    axes.plot(counts, np.log2(counts), color="0.3", lw=0.8, ls=":", label="ceiling")
    axes.legend()
    return figure


def by_token(estimates: pd.DataFrame, title: str) -> Figure:
    """Bits that each token of the turn adds, a line per temperature."""
    figure, axes = new_axes(title, "token of the turn", "bits that it adds")
    rows = together(estimates)
    _lines(axes, rows[rows["quantity"] == "bits by token"], "token")
    axes.axhline(0, color="0.3", lw=0.8)
    axes.legend()
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, against: str) -> None:
    """A line per temperature with its interval as a band, against a column of numbers."""
    rows = rows.sort_values(against, kind="stable")
    for colour, (temperature, mine) in coloured(rows, "temperature"):
        draw_line(axes, mine[against], mine, colour, f"T = {temperature:g}")
