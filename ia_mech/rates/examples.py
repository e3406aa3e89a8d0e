"""User turns to read: a few of every category, drawn and not picked."""

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.verdict import JUDGED
from ia_mech.rates.pool import CUT_OFF, EVERY
from ia_mech.run import Run
from ia_mech.run.labels import KEY


@dataclass(frozen=True)
class Example:
    """A judged user turn with what it answers."""

    context_id: str
    source_id: str
    dataset: str
    temperature: float
    sample: int
    cut_off: bool
    query: str
    response: str
    turn: str
    rationale: str


def examples_by_category(
    run: Run, judge: str, per_category: int = 3, seed: int = 0, *, responses: str = EVERY
) -> dict[str, list[Example]]:
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
        Category to its examples, in the order of the rubric; categories without any are left out.

    Raises:
        UserError: no such judge has judged this run, or not these turns.
    """
    verdicts = run.labels.judgements(judge)
    verdicts = verdicts[(verdicts["repeat"] == 0) & (verdicts["status"] == JUDGED)]
    turns = run.generations.merge(verdicts[[*KEY, "category", "rationale"]], on=list(KEY))
    if len(turns) != len(verdicts):
        raise UserError(
            f"the verdicts of {judge!r} are not of the turns of {run.path}",
            f"judge it again: python -m ia_mech.judge run {run.path} --name {judge} --replace",
        )
    if responses != EVERY:
        cut_off = turns["response_cut_off"].fillna(False).astype(bool)
        turns = turns[cut_off == (responses == CUT_OFF)]
    messages = run.contexts.set_index("context_id")["messages"]
    found = {}
    for number, category in enumerate(NAMES):
        of = turns[turns["category"] == category]
        order = np.random.default_rng([seed, number]).permutation(len(of))
        chosen = _varied(of.iloc[order], per_category)
        if chosen:
            found[category] = [_example(turn, messages[turn.context_id]) for turn in chosen]
    return found


def _varied(turns, count: int) -> list:
    """The first turns of as many sources, then of as many texts, then any."""
    rest, chosen = list(turns.itertuples(index=False)), []
    for same in ("source_id", "text", None):
        left = []
        for turn in rest:
            known = same and getattr(turn, same) in {getattr(c, same) for c in chosen}
            (left if known or len(chosen) >= count else chosen).append(turn)
        rest = left
    return chosen


def _example(turn, messages) -> Example:
    return Example(
        context_id=turn.context_id,
        source_id=turn.source_id,
        dataset=turn.dataset,
        temperature=turn.temperature,
        sample=turn.sample,
        cut_off=bool(turn.response_cut_off),
        query=messages[-2]["content"],
        response=messages[-1]["content"],
        turn=turn.text,
        rationale=turn.rationale or "",
    )


def print_examples(console: Console, examples: dict[str, list[Example]], of: str = "") -> None:
    """Show examples, each on four lines; ``of`` names the run where several are shown."""
    heading = f"examples of {escape(one_line(of))}" if of else "examples"
    console.print(f"\n[bold]{heading}[/] (drawn by seed, not chosen)", soft_wrap=True)
    for category, turns in examples.items():
        console.print(f"[bold]{category}[/]")
        for example in turns:
            temperature = f"T = {example.temperature:g}" if example.temperature else "greedy"
            flag = " † cut off" if example.cut_off else ""
            for line in (
                f"  {_text(example.context_id, 40)} · {temperature}",
                f"    query:     {_text(example.query, 90)}",
                f"    response:  {_text(example.response, 90)}{flag}",
                f"    [bold]user turn:[/] {_text(example.turn, 160) or '(empty)'}",
                f"    because:   {_text(example.rationale, 160) or '–'}",
            ):
                console.print(line, soft_wrap=True)


def _text(text: str, width: int) -> str:
    return escape(one_line(text, width))
