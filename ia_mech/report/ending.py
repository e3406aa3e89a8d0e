"""What ``ia-mech report`` prints: the follow-up rate in one sentence, and three turns to see."""

from collections.abc import Iterator, Sequence

from ia_mech.judge.shown import RULE, labelled_turns, lines_of
from ia_mech.run import Run
from ia_mech.run.layout import UNPERTURBED

TURNS = 3
LISTED = 3  # most temperatures that are named one by one


def ending(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """The lines to print: each judged run's sentence, by its first judge, and turns of the first
    run."""
    judged = [(run, name) for run, name in zip(runs, names, strict=True) if run.labels.judges]
    for run, name in judged:
        yield (f"{name}: " if len(runs) > 1 else "") + sentence(run, run.labels.judges[0])
    for run, _ in judged[:1]:
        turns = labelled_turns(run, run.labels.judges[0], TURNS)
        yield f"\nTurns with their labels ({RULE}):"
        yield from lines_of(turns)


def sentence(run: Run, judge: str) -> str:
    """How many turns a judge calls follow-ups, greedy and sampled, of those that it could assess;
    turns after perturbed contexts are left out."""
    rows = run.labelled(judge, texts=False)
    rows = rows[(rows["perturbation"] == UNPERTURBED) & rows["follow_up"].notna()]
    if rows.empty:
        return f"Judge {judge} could assess no turn."
    contexts, queries = rows["context_id"].nunique(), rows["source"].nunique()
    after = f"After {contexts} conversations"
    if queries < contexts:
        after = f"After {contexts} responses to {queries} queries"
    counts = rows.groupby("temperature")["follow_up"].agg(["sum", "count"]).astype(int)
    parts = [
        f"the greedy user turn is a follow-up {yes} time{'' if yes == 1 else 's'} of {of}"
        for t, yes, of in counts.itertuples()
        if t == 0
    ]
    sampled = counts[counts.index > 0]
    if len(sampled) > LISTED:
        at = f"at {len(sampled)} temperatures from {sampled.index.min():g} to "
        at += f"{sampled.index.max():g} it is in {sampled['sum'].sum()} of "
        parts.append(f"sampled {at}{sampled['count'].sum()}")
    elif len(sampled):
        listed = [f"at T = {t:g} {{}}in {yes} of {of}" for t, yes, of in sampled.itertuples()]
        listed = [one.format("it is " if at == 0 else "") for at, one in enumerate(listed)]
        parts.append("sampled " + ", ".join(listed))
    return f"{after}, {'; '.join(parts)} (judge: {judge})."
