"""What ``ia-mech report`` prints: how many turns are follow-ups, the control, and three turns."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ia_mech.cli import program, shell_word
from ia_mech.estimates import all_datasets
from ia_mech.judge.shown import labelled_turns, lines_of, rule
from ia_mech.rates.evidence import doubts, without_response
from ia_mech.rates.fit import highest, starred, temperature
from ia_mech.rates.gate import gate_of, named
from ia_mech.rates.latent import conclusion
from ia_mech.rates.load import EVERY, decoys_of
from ia_mech.results import read
from ia_mech.run import Run
from ia_mech.run.labels import BUILT_IN
from ia_mech.run.layout import UNPERTURBED

TURNS = 3
# By ia_mech/judge/builtin/CARD.md, of the judge fitted without the model's study.
ERRS = (
    "The built-in judge errs: with a model left out of its fit, it found 0.43 follow-ups where a "
    "language model found 0.49 (Qwen2.5-Coder-1.5B), and 0.36 for 0.41 (SmolLM2-135M). "
    "For a claim, label turns yourself ({}) or take another judge."
)
LISTED = 3  # most temperatures that are named one by one


def conclusions(
    runs: Sequence[Run],
    names: Sequence[str],
    judges: Sequence[str | None],
    folders: Sequence[Sequence[Path]],
) -> list[str]:
    """Of each judged run what was found, by its judge of ``judges``: in counts, and whether
    sampling brings out more follow-ups, as rates among its ``folders`` say."""
    found = []
    for run, name, judge, of_run in zip(runs, names, judges, folders, strict=True):
        if judge is not None:
            whose = f"{name}: " if len(runs) > 1 else ""
            found.append(f"{whose}{sentence(run, judge)} {_sampling(run, judge, of_run)}".strip())
    return found


def turns_shown(run: Run, judge: str) -> Iterator[str]:
    """The control, and the lines that show some turns of a run with their labels."""
    yield from control(run, judge)
    if counts := without_response(run, judge):
        yield f"{counts[0].upper()}{counts[1:]}."
    yield from doubts(run, judge)
    if judge == BUILT_IN and not run.labels.annotators:
        yield ERRS.format(f"{program('ia-mech')} annotate export {shell_word(run.path)}")
    yield ""
    turns = labelled_turns(run, judge, TURNS)
    yield f"Turns with their labels ({rule(turns)}):"
    yield from lines_of(turns)


def sentence(run: Run, judge: str) -> str:
    """How many turns a judge calls follow-ups, greedy and sampled, of those that it could assess.
    Turns after perturbed contexts are left out, and temperatures above the judge's fit if there are
    others."""
    rows = run.labelled(judge, texts=False)
    rows = rows[run.drawn(rows)]
    rows = rows[(rows["perturbation"] == UNPERTURBED) & rows["follow_up"].notna()]
    whose = named(judge)
    if rows.empty:
        return f"{whose[0].upper()}{whose[1:]} could assess no turn."
    fit = highest(run.labels.record("judgements", judge))
    counts = rows.groupby("temperature")["follow_up"].agg(["sum", "count"]).astype(int)
    parts = [f"{yes} of {of} greedy user turns" for t, yes, of in counts.itertuples() if t == 0]
    sampled = counts[counts.index > 0]
    sampled = sampled[sampled.index <= max(fit, sampled.index.min())]
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
    *first, last = parts + listed
    those = f"{', '.join(first)} and {last}" if first else last
    beyond = sampled.index.max() > fit
    star = f" (*: the judge was fitted on turns at T ≤ {fit:g})" if beyond else ""
    return f"By {whose}, {those} are follow-ups{star}."


def control(run: Run, judge: str) -> Iterator[str]:
    """The gate, with how many turns the judge calls follow-ups after a conversation of another
    query; nothing if it was shown none there."""
    turns = run.labelled(judge, texts=False)
    gate = gate_of(decoys_of(run, judge, turns, run.drawn(turns).to_numpy()), judge)
    if gate.decoys:
        yield f"{gate.short}."


def _sampling(run: Run, judge: str, folders: Sequence[Path]) -> str:
    """The conclusion of the run's rates by the judge; empty if there are none of today's labels."""
    whole = {"responses": EVERY, "by": None, "sampled_tokens": None}
    for result in map(read, folders):
        about = result.about
        if (about["kind"], about.get("identities")) != ("rates", [run.identity_digest]):
            continue
        today = about["labels"][run.identity_digest] == run.labels.digest(about["labellers"])
        if about["judge"] == judge and whole.items() <= about["settings"].items() and today:
            found = result.estimates
            found = all_datasets(found[found["perturbation"] == UNPERTURBED])
            fit = highest(run.labels.record("judgements", judge))
            return starred(conclusion(found, about["settings"]["level"], fit), fit)
    return ""
