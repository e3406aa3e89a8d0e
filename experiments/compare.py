"""How do models differ in how much their user turns depend on the response?

The numbers of several studies side by side, over the queries that all of them hold: the bits that
turns express, the bits that the response and the header carry, how much more often a judge calls
turns follow-ups to their own response than to another one, and which categories it gives them.
Differences from the first study are paired by query. Nothing else is computed: each study has
stored its numbers by query. Responses that differ more are easier to tell apart, so the headline
says whether the models followed the same ones.

Needs: two or more finished studies of the same queries. Cost: seconds.

    ia-mech compare cache/study-A cache/study-B
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.elicit import arm_name
from experiments.judged import arm_estimates
from experiments.locate import WINDOW
from experiments.shown import Bars, Drawing, Lines, headline, only, sentence_of, tables_of
from ia_mech.cli import Parser, path_of, run_command, tolerant_streams
from ia_mech.display import console, with_style
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.likelihood.carried import CEILING
from ia_mech.models.embedded import cache_dir
from ia_mech.results import Result, about_runs, folder_of, kind_of, read, refuse_place, show, write
from ia_mech.run import Run
from ia_mech.run.layout import RUN
from ia_mech.run.sources import sources_of

NAME = "compare"
BITS, EXCESS, SHARE = "bits", "excess over siblings", "share of turns"
SAMPLED = "sampled"
OPTIONS = {"level": 0.95, "resamples": 2000, "seed": 0}


def numbers_of(study: Path) -> pd.DataFrame:
    """The numbers of a study by query: ``quantity``, ``term`` (a site, a judge's category, or all
    turns), ``turns`` (``greedy``, ``sampled`` or an arm), ``source``, ``value``."""
    results = study / "run" / "results"
    elicited = results / "elicit" / "rows.parquet"  # --quick leaves it out
    if (study / RUN).is_file():
        raise UserError(
            f"{study} is a run, not a study",
            "give folders that ia-mech study has written; ia-mech report shows runs side by side",
        )
    if not kind_of(results / "study"):
        raise UserError(f"{study} is not a finished study", "make it with ia-mech study")
    bits = pd.read_parquet(results / "locate" / "queries.parquet")
    turns = bits["temperature"].map(turns_of)
    bits = bits.assign(quantity=BITS, turns=turns, value=bits["bits"])
    (judge,) = read(results / "study").about["labellers"]
    found = [bits, category_shares(Run.open(study / "run"), judge)]
    if elicited.is_file():
        arms = pd.read_parquet(elicited)
        found.append(
            arms.assign(quantity=EXCESS, term="turns", turns=arms["arm"], value=arms[EXCESS])
        )
    columns = ["quantity", "term", "turns", "source", "value"]
    return pd.concat([frame[columns] for frame in found], ignore_index=True)


def category_shares(run: Run, judge: str) -> pd.DataFrame:
    """The share of each category among the turns that a judge could assess, by query."""
    from ia_mech.judge.rubric import rubric_of

    rubric = rubric_of(run.labels.record("judgements", judge))
    labels = run.labelled(judge, texts=False)
    labels = labels[run.drawn(labels) & labels["follow_up"].notna()].astype(
        {"source": object, "category": object}
    )
    labels["turns"] = labels["temperature"].map(turns_of)
    counts = pd.crosstab([labels["turns"], labels["source"]], labels["category"], normalize="index")
    counts = counts.reindex(columns=list(rubric.assessed), fill_value=0.0)
    each = counts.rename_axis(["turns", "source"]).rename_axis("term", axis=1).stack()
    return each.rename("value").reset_index().assign(quantity=SHARE)


def turns_of(temperature: float) -> str:
    """How turns at a temperature are named; NaN is all sampled ones."""
    return SAMPLED if np.isnan(temperature) else arm_name(temperature)


def estimates(numbers: dict[str, pd.DataFrame]) -> Iterator[TidyEstimate]:
    """Each model's mean over the queries of which all models have this number, and its difference
    from the first model's."""
    bounds = {BITS: (-np.inf, CEILING), EXCESS: (-1.0, 1.0), SHARE: (0.0, 1.0)}
    by, less = ["term", "turns", "model"], {"less": {"model": next(iter(numbers))}}
    rows = pd.concat([frame.assign(model=model) for model, frame in numbers.items()])
    for (quantity, *_), own in rows.groupby(["quantity", "term", "turns"], sort=False):
        own = own[own.groupby("source")["model"].transform("nunique") == len(numbers)]
        if own.empty:  # a study doesn't have it
            continue
        own = own.rename(columns={"value": quantity})
        yield from arm_estimates(own, by, {quantity: bounds[quantity]}, less, OPTIONS, [SHARE])


def after_which(runs: Iterable[Run], queries: set[str]) -> str:
    """Whether the turns after these queries followed the same responses in all runs, in words."""
    responses = []
    for run in runs:
        said = [messages[-1]["content"] for messages in run.contexts["messages"]]
        pairs = zip(sources_of(run.contexts), said, strict=True)
        responses.append({pair for pair in pairs if pair[0] in queries})
    if all(one == responses[0] for one in responses):
        return "all after the same responses"
    return "each after its own responses, which alone can move bits"


def result(studies: Sequence[Path]) -> Result:
    """The comparison."""
    each = [numbers_of(study) for study in studies]
    runs = [Run.open(study / "run") for study in studies]
    models = [run.model["name"] for run in runs]
    if len(set(models)) < len(models):
        raise UserError(f"two studies are of {models[0]}", "give studies of different models")
    numbers = dict(zip(models, each, strict=True))
    shared = set.intersection(*(set(frame["source"]) for frame in numbers.values()))
    if len(shared) < 2:
        raise UserError("the studies share no queries", "make them with the same --dataset")
    columns = {"dataset": "str", "model": "str", "term": "str", "turns": "str"}
    found = frame_of(estimates(numbers), columns)
    found["temperature"] = np.nan
    tables = []
    for quantity, title in (
        (BITS, "bits about the response, expressed (own context) and by site alone"),
        (EXCESS, "follow-ups by the judge, beyond siblings"),
        (SHARE, "what the turns are, by the judge"),
    ):
        tables += tables_of(
            f"{title}; the same queries",
            found,
            {quantity: ("mean", 2), f"{quantity}, less": (f"minus {models[0]}", "+.2f")},
            index=("term", "turns", "model"),
            rows="queries",
            full=quantity == SHARE,
        )
    words = f"bits that sampled turns tell about their response ({after_which(runs, shared)})"
    own = only(found, BITS, term="own context", turns=SAMPLED)
    less = only(found, f"{BITS}, less", term="own context", turns=SAMPLED)
    return Result(
        name=NAME,
        question="How do models differ in how much their user turns depend on the response?",
        sentence=headline(sentence_of(words, own), found),
        control=" ".join(
            [
                sentence_of(f"the difference from {models[0]} on the same queries", less, null=0.0),
                "Within each study every number is a comparison with other responses to the same "
                "query.",
            ]
        ),
        estimates=found,
        tables=tables,
        figures={stem: with_style(each.draw)() for stem, each in drawings(found, runs).items()},
        about={"kind": NAME, **about_runs(runs)},
    )


def drawings(found: pd.DataFrame, runs: Sequence[Run]) -> dict[str, Drawing]:
    """Figures of what sampled turns express, and what sites and windows of layers carry of it."""
    bits = found[(found["quantity"] == BITS) & (found["turns"] == SAMPLED)]
    made: dict[str, Drawing] = {
        "models": Bars("expressed (own context) and carried", "bits", bits, by="model")
    }
    windows = []
    for run in runs:
        rows = read(folder_of(run.path, "locate")).estimates
        rows = rows[(rows["term"] == WINDOW) & (rows["quantity"] == BITS)]
        depth = rows["layer"].astype(float) / run.model["layers"]
        windows.append(rows.assign(depth=depth, model=run.model["name"]))
    if len(layers := pd.concat(windows, ignore_index=True)):
        title = "carried by windows of the response's layers"
        across = "first layer, as a share of all"
        made["layers"] = Lines(title, across, "bits", layers, across="depth", by="model")
    return made


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ia-mech compare",
        usage="%(prog)s STUDY STUDY [STUDY …] [--out DIR]",
        description=(__doc__ or "").strip(),
    )
    parser.add_argument("studies", nargs="+", type=path_of, metavar="STUDY", help="its folder")
    parser.add_argument(
        "--out", type=path_of, metavar="DIR",
        help="where results and page go (default: cache/compare-NAMES)",
    )  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _compare(args), lambda: "nothing was written")


def _compare(args: argparse.Namespace) -> int:
    if len(args.studies) < 2:
        raise UserError("one study can't be compared", "give two or more")
    names = "-".join(study.resolve().name.removeprefix("study-") for study in args.studies)
    out = args.out or cache_dir() / f"compare-{names}"
    refuse_place(out)
    found = result(args.studies)
    write(found, out)
    page = importlib.import_module("ia_mech.report.__main__")
    runs = [str(study / "run") for study in args.studies]
    status = page.main([*runs, "--results", str(out), "--out", str(out / "report.html")])
    show(found, console())
    return status


if __name__ == "__main__":
    sys.exit(main())
