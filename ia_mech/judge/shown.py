"""Turns with their labels, as the terminal shows them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from ia_mech.cli import one_line
from ia_mech.judge.decoys import AFTER, DECOY_KINDS
from ia_mech.judge.restated import restates
from ia_mech.judge.rubric import Rubric, heading
from ia_mech.run import Run
from ia_mech.run.labelled import FAILED
from ia_mech.run.queries import exchange


@dataclass(frozen=True)
class Labelled:
    """A user turn, what it followed, and what a judge says of it."""

    context_id: str
    decoding: str  # ``Run.decoding``
    query: str
    response: str
    text: str
    category: str
    rationale: str


def labelled_turns(run: Run, judge: str, count: int) -> list[Labelled]:
    """At most so many turns with a judge's labels: of follow-ups, then of the commonest labels, the
    first turn after a query that isn't shown yet, or, where all are shown, the first of all.
    Follow-ups that may only restate their query are left out where there are others."""
    rows = run.labelled(judge, columns=["rationale"], texts=False)
    rows = rows.astype({"category": object, "source": str})
    rows = rows[rows["category"].notna() & (rows["category"] != FAILED)]
    restated = _restated(run, rows[rows["follow_up"] == 1].index)
    by_label = dict(list(rows.groupby("category")))

    def rank(name: str) -> tuple[bool, int]:
        return bool((by_label[name]["follow_up"] != 1).all()), -len(by_label[name])

    first: dict[int, str] = {}  # query by the place of the turn
    for name in sorted(by_label, key=rank)[:count]:
        own = by_label[name]["source"]
        plain = own[~own.index.isin(restated)]
        own = own if plain.empty else plain
        fresh = own[~own.isin(list(first.values()))]
        at = (own if fresh.empty else fresh).index[0]
        first[at] = own[at]
    chosen = rows.loc[list(first)]
    found: dict[int, Labelled] = {}
    for contexts, turns in run.windows(["context_id", "messages"], ["context_id", "text"]):
        messages = dict(zip(contexts["context_id"], contexts["messages"], strict=True))
        for at in turns.index.intersection(chosen.index):
            row, name = chosen.loc[at], turns.at[at, "context_id"]
            found[at] = Labelled(
                name,
                run.decoding(row["temperature"], row["sampled_tokens"]),
                *exchange(messages[name]),
                turns.at[at, "text"],
                str(row["category"]),
                row["rationale"] if isinstance(row["rationale"], str) else "",
            )
        if len(found) == len(chosen):
            break
    return [found[at] for at in chosen.index]


def _restated(run: Run, rows: pd.Index) -> list[int]:
    """Which of these turns :func:`~ia_mech.judge.restated.restates` suspects."""
    found = []
    for contexts, turns in run.windows(["context_id", "messages"], ["context_id", "text"]):
        of = zip(contexts["context_id"], contexts["messages"], strict=True)
        queries = {name: exchange(messages)[0] for name, messages in of}
        own = turns.loc[turns.index.intersection(rows)]
        suspects = map(restates, own["context_id"].map(queries), own["text"])
        found += own.index[list(suspects)].tolist()
    return found


def rule(turns: list[Labelled]) -> str:
    """Which turns :func:`labelled_turns` chose."""
    return f"one turn of each of the {len(turns)} commonest categories, follow-ups first"


def judged_text(items: pd.Series, decoys: pd.DataFrame) -> str:
    """How many turns and decoys were judged, and how many distinct items these are: a judge is
    asked once about each.

    Args:
        items: of the turns, the column ``item`` of judgements.
        decoys: the columns ``item`` and ``decoy`` of theirs.
    """
    distinct = pd.concat([items, decoys["item"]]).nunique()
    kinds = [AFTER[kind] for kind in DECOY_KINDS if (decoys["decoy"] == kind).any()]
    controls = f" + {len(decoys)} turns after {' or '.join(kinds)}" if kinds else ""
    return f"{len(items)} turns{controls}, {distinct} distinct"


def counts_of(categories: pd.Series, rubric: Rubric) -> str:
    """How many turns have each category, in the rubric's order."""
    counts = categories.value_counts()
    listed = [f"{heading(name)} {counts[name]}" for name in rubric.names if name in counts]
    return ", ".join(listed) or "none"


def lines_of(turns: list[Labelled], *, rationale: bool = False) -> Iterator[str]:
    """The lines that show these turns, if asked for with the judge's reasons."""
    for turn in turns:
        name = one_line(turn.context_id, 40)
        yield f"  {name} · {turn.decoding} → {one_line(heading(turn.category), 60)}"
        yield f"    query:     {one_line(turn.query, 90)}"
        yield f"    response:  {one_line(turn.response, 90)}"
        yield f"    user turn: {one_line(turn.text, 160) or '(nothing)'}"
        if rationale and turn.rationale:
            yield f"    judge:     {one_line(turn.rationale, 160)}"
