"""The cards of a report: one per question, with the answer of each run (:mod:`ia_mech.results`).

Nothing is computed here. All that a card shows of an analysis stands in its result.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt

from ia_mech.cli import program, shell_word
from ia_mech.display import link_title, links_of, reading_of
from ia_mech.estimates import ALL, all_datasets
from ia_mech.judge.rubric import heading
from ia_mech.page import image
from ia_mech.rates.evidence import changed_runs
from ia_mech.rates.fit import FOOTNOTE
from ia_mech.rates.load import EVERY
from ia_mech.results import Result, Table, read, sentences_of
from ia_mech.run import Run
from ia_mech.run.labels import BUILT_IN
from ia_mech.run.queries import conversations_text
from ia_mech.run.sources import sources_of
from ia_mech.settings import Settings

# Kinds of results in the order in which a page shows them; other kinds follow, by name.
ORDER = (
    *("compare", "study", "rates", "reaction", "locate", "elicit", "probe", "steering"),
    *("interchange", "mass", "mass_vector", "perturbations", "rates-by-correct"),
    *("temperature_sweep", "agreement"),
)
# A control all of whose sentences the page has shown.
ABOVE = "The judge's control stands at the top of the page."
MAX_ESTIMATES = 400  # rows that a page lists; the file has all
_STARRED = re.compile(r"\d\*")  # a temperature above the judge's fit
_ADVICE = re.compile(r" --[a-z]")  # in a sentence that says what to do, not what was found
RATES = ("rate", "follow-up rate")  # quantities whose rows are turns
LINES = ("model", "weights_hash", "perturbation", "condition", "dataset", "temperature")
_INTERVAL = re.compile(r"(\[[-+−–\d.,% ]{3,40}\])")


def _many(count: float, one: str, several: str) -> str:
    """Such as ``2 queries``; empty of none or of an unknown count."""
    return f"{count:,.0f} {one if count == 1 else several}" if count > 0 else ""


def _temperature(found: pd.DataFrame) -> pd.Series:
    """The temperatures of estimates; NaN where they have none."""
    return found.get("temperature", pd.Series(np.nan, found.index))


@dataclass(frozen=True)
class Picture:
    """A figure."""

    name: str
    address: str
    reading: str  # how to read it
    box: str  # its ``viewBox``
    marks: list[tuple[str, str, list[float]]]  # each mark's link, the link in words, its rectangle


@dataclass(frozen=True)
class Answer:
    """What one analysis says of one run, or of several."""

    run: str  # the run's name on the page; empty for a result of several runs
    result: Result
    pictures: list[Picture]
    estimates: Table  # every number
    folder: str  # of the files, relative to the run: a page names no folder of this machine
    elsewhere: bool  # some turns behind the numbers are in runs that the page doesn't show

    @property
    def kind(self) -> str:
        return str(self.result.about.get("kind", self.result.name))

    @property
    def counted(self) -> str:
        """Of what the numbers are, such as ``12 queries · greedy, T = 1 · 2 samples · 72 turns``;
        without what the result doesn't tell."""
        found = self.result.estimates
        found = all_datasets(found) if "dataset" in found else found
        rates = found[found["quantity"].isin(RATES) & _temperature(found).notna()]
        used = rates if len(rates) else found
        every = sorted(_temperature(used).dropna().unique())
        sampled = ", ".join(f"{t:g}" for t in every if t > 0)
        turns = rates.drop_duplicates([*{*rates} & {*LINES}])["rows"].sum() if len(rates) else 0
        told = [
            _many(used["sources"].max(), "query", "queries"),
            ", ".join(["greedy"] * (0 in every) + [f"T = {sampled}"] * bool(sampled)),
            _many(self.result.about.get("samples", 0), "sample", "samples"),
            _many(turns, "turn", "turns"),
        ]
        return " · ".join(filter(None, told))

    @property
    def judge(self) -> str:
        return str(self.result.about.get("judge", ""))

    @property
    def by(self) -> str:
        """The field of the data by whose values rates are grouped."""
        return str(self.result.about.get("settings", {}).get("by") or "")

    @property
    def plain(self) -> bool:
        """Whether it says how often the turns of the run are follow-ups, all of them together."""
        settings = self.result.about.get("settings", {})
        every = settings.get("responses", EVERY) == EVERY and not (self.by or self.drawn)
        return self.kind == "study" or (self.kind == "rates" and every)

    @property
    def drawn(self) -> str:
        """How many sampled tokens the sampled turns have, if they weren't sampled as a whole."""
        return str(self.result.about.get("settings", {}).get("sampled_tokens") or "")

    @property
    def sentences(self) -> list[list[str]]:
        """The findings, each cut into pieces: every second piece is an interval.
        :attr:`controls` are cut in the same way. Behind the first star stands what it means."""
        said = [one for one in sentences_of(self.result.sentence) if one not in self.advice]
        if (
            at := next((k for k, one in enumerate(said) if _STARRED.search(one)), None)
        ) is not None:
            said[at] += f" {FOOTNOTE}"
        return [_INTERVAL.split(one) for one in said]

    @property
    def advice(self) -> list[str]:
        """The sentences that say what would tell more."""
        return [one for one in sentences_of(self.result.sentence) if _ADVICE.search(one)]

    @property
    def controls(self) -> list[list[str]]:
        return [_INTERVAL.split(one) for one in sentences_of(self.result.control or "none.")]


@dataclass(frozen=True)
class Card:
    """One question with the answers to it, which stand side by side."""

    id: str  # of the element on the page
    name: str  # the kind of analysis, in words
    question: str
    answers: list[Answer]


def cards_of(
    runs: Sequence[Run], names: Sequence[str], folders: Sequence[Sequence[Path]]
) -> list[Card]:
    """The cards of a page, in :data:`ORDER`, made from each run's folders with results. ``names``
    are the runs' names on the page. Each figure, each sentence of a control, and each result of
    several runs is shown once.

    Raises:
        UserError: a folder that holds no result, or a damaged one.
    """
    by_folder: dict[Path, Answer] = {}
    changed = [of for pair in zip(runs, folders, strict=True) for of in changed_runs(*pair)]
    here = {run.identity_digest for run in (*runs, *(run for run, _ in changed))}
    for run, name, folders_of_run in zip(runs, names, folders, strict=True):
        for folder in folders_of_run:
            if folder not in by_folder:
                by_folder[folder] = _answer(run, name, folder, runs, here)
    cards: dict[tuple[str, str], list[Answer]] = {}
    shown, said = set[str](), set[str]()
    for answer in sorted(by_folder.values(), key=lambda one: (*_place(one.kind), not one.plain)):
        pictures = [picture for picture in answer.pictures if picture.address not in shown]
        shown.update(picture.address for picture in pictures)
        control = sentences_of(answer.result.control)
        seen = said if len(runs) == 1 else ()  # else it isn't clear whose it is
        new = [one for one in control if not any(one.rstrip(".") in other for other in seen)]
        said.update(control)
        result = (
            replace(answer.result, control=" ".join(new) or ABOVE) if control else answer.result
        )
        answers = cards.setdefault((answer.kind, answer.result.question), [])
        answers.append(replace(answer, result=result, pictures=pictures))
    return [
        Card(f"s{at}", kind.replace("_", " "), question, answers)
        for at, ((kind, question), answers) in enumerate(cards.items(), 1)
    ]


def _place(kind: str) -> tuple[int, str]:
    return (ORDER.index(kind) if kind in ORDER else len(ORDER), kind)


def _answer(run: Run, name: str, folder: Path, runs: Sequence[Run], here: set[str]) -> Answer:
    result = read(folder)
    if result.about["kind"].startswith("rates"):
        samples = run.settings["samples"]
        result = replace(result, about={"samples": samples, **result.about})
    kept = result.about.get("labels", {}).get(run.identity_digest)
    if kept is not None and kept != run.labels.digest(result.about["labellers"]):
        warning = "These results rest on labels that have been replaced or removed since. "
        result = replace(result, sentence=warning + result.sentence)
    inside = run.path.resolve() in folder.resolve().parents
    counted = set(result.about.get("identities", []))
    given = {one.identity_digest for one in runs}
    return Answer(
        run=name if len(counted & given) < 2 else "",
        result=result,
        pictures=[_picture(stem, svg) for stem, svg in result.figures.items()],
        estimates=estimates_table(result.estimates),
        folder="/".join(folder.parts[-2:]) if inside else folder.name,
        elsewhere=not counted <= here,
    )


def _picture(stem: str, svg: bytes) -> Picture:
    box, links = links_of(svg)
    marks = [(link, link_title(link, heading), place) for link, place in links]
    return Picture(stem.replace("_", " "), image(svg), reading_of(svg), box, marks)


def missing(run: Run, folders: Sequence[Path], judge: str | None) -> str:
    """The command, without ``ia-mech``, that makes the first results which a run still lacks: rates
    by the ``judge``, or the labels of one. Empty if it lacks none."""
    if judge is None:
        return f"judge run {shell_word(run.path)}"
    if run.settings["first_tokens"]:  # its turns are no sample
        return ""
    found = [read(folder).about for folder in folders]
    rated = {about.get("judge") for about in found if about["kind"].startswith("rates")}
    flag = run.labels.flag(judge)
    return "" if judge in rated else f"rates {shell_word(run.path)}{flag}"


def estimates_table(frame: pd.DataFrame) -> Table:
    """Estimates as a table of texts. Those of all datasets together come first; a column with the
    same value in all rows goes into the title."""
    if "dataset" in frame:
        frame = frame.sort_values("dataset", key=lambda names: names != ALL, kind="stable")
    columns = [name for name in frame if frame[name].nunique(dropna=False) > 1]
    alike = [name for name in frame if name not in columns and frame[name].notna().any()]
    title = [f"{name}: {_text(frame[name].iloc[0])}" for name in alike]
    if len(frame) > MAX_ESTIMATES:
        title.append(f"the first {MAX_ESTIMATES} of {len(frame)} rows; the file has all")
    rows = frame[columns].head(MAX_ESTIMATES).itertuples(index=False, name=None)
    return Table(" · ".join(title), columns, [[_text(cell) for cell in row] for row in rows])


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return "–" if np.isnan(cell) else f"{cell:.4g}"
    return "–" if cell is None or cell is pd.NA else str(cell)


def facts(run: Run) -> dict[str, str]:
    """How a run was sampled, with which software, and who judged it."""
    settings, model = run.settings, run.model
    temperatures = ", ".join(["greedy", *(f"{t:g}" for t in settings["temperatures"])])
    each = f"{settings['samples']} samples each"
    if settings["first_tokens"]:
        each = "a greedy turn from each of the likeliest first tokens"
    found = {
        "run": run.name,  # a page names no folder of this machine
        "identity": run.identity_digest,
        "model": f"{model['name']} ({model['weights_hash']}, {model['dtype']})",
        "dataset": str(settings["dataset"]),
        "conversations": conversations_text(
            run.counts["contexts"], sources_of(run.turns).nunique()
        ),
        "turns": f"{len(run.turns)}, at most {settings['max_new_tokens']} tokens each",
        "temperatures": f"{temperatures}; {each}, seed {settings['seed']}",
        "software": ", ".join(f"{k} {v}" for k, v in run.record["identity"]["software"].items()),
    }
    if skipped := run.record.get("skipped"):
        found["skipped rows"] = f"{len(skipped)}, such as {skipped[0]}"
    few, queries = run.unanswered
    if few:
        found["queries left out"] = f"{few} of {queries}, with too few finished responses"
    if run.ignored_check:
        found["start-up check"] = f"failed, and was ignored: {run.ignored_check}"
    for judge in run.labels.judges:
        identity = run.labels.record("judgements", judge).get("identity", {})
        found[f"judge {judge}"] = ", ".join(
            f"{key} {value}" for key, value in identity.items() if isinstance(value, str | int)
        )
    for annotator in run.labels.annotators:
        found[f"annotator {annotator}"] = f"{len(run.labels.annotations(annotator))} turns"
    return found


def provenance(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """The :func:`facts` of runs, a column for each."""
    columns = [facts(run) for run in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    return Table(
        "", ["what", *names], [[key, *(of.get(key, "–") for of in columns)] for key in keys]
    )


def commands(runs: Sequence[Run], cards: Sequence[Card]) -> list[str]:
    """The commands that sampled the runs, those of the built-in judge, and those that made the
    results and keep theirs. A run is named without its folder."""
    words = [
        Settings.read(run.settings).command(Path(run.name), run.model.get("device", ""))
        for run in runs
    ]
    sampled = [f"ia-mech{one.removeprefix(program())}" for one in words]  # no path of this machine
    sampled += [
        f"ia-mech judge run {shell_word(run.name)}" for run in runs if BUILT_IN in run.labels.judges
    ]
    answers = (answer for card in cards for answer in card.answers)
    made = [answer.result.about.get("command") for answer in answers]
    return [*sampled, *dict.fromkeys(filter(None, made))]


def builtin_card(runs: Sequence[Run]) -> str:
    """The built-in judge's card, as HTML, if it judged one of the runs, else nothing."""
    records = [run.labels.record("judgements", one) for run in runs for one in run.labels.judges]
    if all(record.get("identity", {}).get("kind") != "builtin" for record in records):
        return ""
    card = (files("ia_mech.judge.builtin") / "CARD.md").read_text(encoding="utf-8")
    return MarkdownIt("commonmark").enable("table").render(card.partition("\n")[2])
