"""What ``ia-mech report`` prints: the follow-up rate in one sentence, and three turns to see."""

from collections.abc import Iterator, Sequence

from ia_mech.judge.shown import RULE, labelled_turns, lines_of
from ia_mech.rates.fit import highest, temperature
from ia_mech.run import Run
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.queries import conversations_text

TURNS = 3
LISTED = 3  # most temperatures that are named one by one


def ending(
    runs: Sequence[Run], names: Sequence[str], judges: Sequence[str | None]
) -> Iterator[str]:
    """The lines to print: each judged run's sentence, by its judge of ``judges``, and turns of the
    first run."""
    every = zip(runs, names, judges, strict=True)
    judged = [(run, name, judge) for run, name, judge in every if judge is not None]
    for run, name, judge in judged:
        yield (f"{name}: " if len(runs) > 1 else "") + sentence(run, judge)
    for run, _, judge in judged[:1]:
        turns = labelled_turns(run, judge, TURNS)
        yield f"\nTurns with their labels ({RULE}):"
        yield from lines_of(turns)


def sentence(run: Run, judge: str) -> str:
    """How many turns a judge calls follow-ups, greedy and sampled, of those that it could assess;
    turns after perturbed contexts are left out."""
    rows = run.labelled(judge, texts=False)
    rows = rows[(rows["perturbation"] == UNPERTURBED) & rows["follow_up"].notna()]
    if rows.empty:
        return f"Judge {judge} could assess no turn."
    fit = highest(run.labels.record("judgements", judge))
    counts = rows["context_id"].nunique(), rows["source"].nunique()
    after = f"After {conversations_text(*counts)}"
    counts = rows.groupby("temperature")["follow_up"].agg(["sum", "count"]).astype(int)
    parts = [f"{yes} of {of} greedy user turns" for t, yes, of in counts.itertuples() if t == 0]
    sampled = counts[counts.index > 0]
    if len(sampled) > LISTED:
        listed = [
            f"{sampled['sum'].sum()} of {sampled['count'].sum()} sampled at {len(sampled)} "
            f"temperatures from {temperature(sampled.index.min(), fit)} to "
            f"{temperature(sampled.index.max(), fit)}"
        ]
    else:
        listed = [
            f"{yes} of {of} sampled at T = {temperature(t, fit)}"
            for t, yes, of in sampled.itertuples()
        ]
    star = "; *: above its fit" if sampled.index.max() > fit else ""
    return f"{after}, follow-ups are {', '.join(parts + listed)} (judge: {judge}{star})."
