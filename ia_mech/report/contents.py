"""What a report says: parts, each the result of one analysis of one run (:mod:`ia_mech.results`).

Nothing is computed here, and nothing is known of an analysis but what its result says.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.cli import shell_word
from ia_mech.estimates import ALL
from ia_mech.page import image
from ia_mech.rates.load import result_folders
from ia_mech.results import Result, Table, read
from ia_mech.run import Run

# Questions in the order of reading; kinds that aren't named come after them, by name.
ORDER = (
    *("compare", "study", "rates", "reaction", "locate", "elicit", "probe", "steering"),
    *("perturbations", "likelihood", "decoupling", "temperature_sweep"),
)
LAST = "agreement"
ROWS = 400  # of estimates that a page lists; the file has all
_INTERVAL = re.compile(r"(\[[-+−–\d.,% ]{3,40}\])")


@dataclass(frozen=True)
class Part:
    """What one analysis says of one run, or of several.

    Attributes:
        run: what the page calls the run; empty for a result of several runs.
        result: the result.
        pictures: (name, address) of each figure.
        estimates: every number.
        folder: where the files are, as seen from the run: a page holds no places of this machine.
    """

    run: str
    result: Result
    pictures: list[tuple[str, str]]
    estimates: Table
    folder: str

    @property
    def name(self) -> str:
        """Of the question: parts of one name and question stand side by side."""
        return str(self.result.about.get("kind", self.result.name))

    @property
    def sentence(self) -> list[str]:
        """The sentence cut at intervals, which are the 2nd, the 4th piece and so on."""
        return _INTERVAL.split(self.result.sentence)

    @property
    def control(self) -> list[str]:
        """The control, likewise."""
        return _INTERVAL.split(self.result.control or "none.")


def folders_of(run: Run, more: Sequence[Path] = ()) -> list[Path]:
    """The folders with results on a run, and ``more``, each once.

    Raises:
        UserError: one is damaged.
    """
    return list(dict.fromkeys([*result_folders(run), *(folder.resolve() for folder in more)]))


def parts_of(
    runs: Sequence[Run], names: Sequence[str], folders: Sequence[Sequence[Path]]
) -> list[Part]:
    """The parts of runs; a result of several of them is one part.

    Args:
        runs: the runs.
        names: what the page calls them.
        folders: with results, by run.

    Raises:
        UserError: a folder that holds no result, or a damaged one.
    """
    parts: dict[Path, Part] = {}
    for run, name, of_run in zip(runs, names, folders, strict=True):
        for folder in of_run:
            parts.setdefault(folder, _part(run, name, folder, runs))
    return list(parts.values())


def _part(run: Run, name: str, folder: Path, runs: Sequence[Run]) -> Part:
    found = read(folder)
    kept = found.about.get("labels", {}).get(run.identity_digest)
    if kept is not None and kept != run.labels.digest(found.about["labellers"]):
        old = "These are results of labels that have been replaced since. "
        found = replace(found, sentence=old + found.sentence)
    inside = run.path.resolve() in folder.resolve().parents
    of = {one.identity_digest for one in runs} & set(found.about.get("identities", []))
    return Part(
        run=name if len(of) < 2 else "",
        result=found,
        pictures=[(stem.replace("_", " "), image(svg)) for stem, svg in found.figures.items()],
        estimates=listed(found.estimates),
        folder="/".join(folder.parts[-2:]) if inside else folder.name,
    )


def grouped(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts of one name and question together, in :data:`ORDER`; a figure is shown once."""

    def place(name: str) -> tuple[int, str]:
        rank = len(ORDER) + (name == LAST)
        return (ORDER.index(name) if name in ORDER else rank, name)

    found: dict[tuple[str, str], list[Part]] = {}
    shown: set[str] = set()
    for part in sorted(parts, key=lambda part: place(part.name)):
        pictures = [(name, picture) for name, picture in part.pictures if picture not in shown]
        shown.update(picture for _, picture in pictures)
        group = found.setdefault((part.name, part.result.question), [])
        group.append(replace(part, pictures=pictures))
    return [
        {"id": f"s{at}", "name": name.replace("_", " "), "title": title, "parts": those}
        for at, ((name, title), those) in enumerate(found.items(), 1)
    ]


def missing(run: Run, folders: Sequence[Path]) -> list[str]:
    """Commands that make the first results of a run which has none of its judges."""
    if not run.labels.judges:
        return [f"python -m ia_mech.judge run {shell_word(run.path)}"]
    there = {folder.name for folder in folders}
    return [
        f"python -m ia_mech.rates {shell_word(run.path)} --judge {judge}"
        for judge in run.labels.judges
        if f"rates-{judge}" not in there
    ]


def listed(frame: pd.DataFrame) -> Table:
    """Estimates as a table of texts, those of all datasets together first; what is alike in all
    rows goes into the title."""
    if "dataset" in frame:
        frame = frame.sort_values("dataset", key=lambda names: names != ALL, kind="stable")
    kept = [name for name in frame if frame[name].astype(str).nunique() > 1]
    same = [name for name in frame if name not in kept and frame[name].notna().any()]
    words = [f"{name}: {_text(frame[name].iloc[0])}" for name in same] if len(frame) else []
    if len(frame) > ROWS:
        words.append(f"the first {ROWS} of {len(frame)} rows; the file has all")
    rows = frame[kept].head(ROWS).itertuples(index=False, name=None)
    return Table(" · ".join(words), kept, [[_text(cell) for cell in row] for row in rows])


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return "–" if np.isnan(cell) else f"{cell:.4g}"
    return "–" if cell is None or cell is pd.NA else str(cell)


# -- where it comes from --------------------------------------------------------------------------


def facts(run: Run) -> dict[str, str]:
    """What was sampled, with what, and who judged it."""
    settings, model = run.settings, run.model
    temperatures = ", ".join(["greedy", *(f"{t:g}" for t in settings["temperatures"])])
    found = {
        "run": run.name,  # a page holds no folders of this machine
        "identity": run.identity_digest,
        "model": f"{model['name']} ({model['weights_hash']}, {model['dtype']})",
        "dataset": str(settings["dataset"]),
        "conversations": f"{run.counts['contexts']} contexts of "
        f"{run.turns['source_id'].nunique()} sources",
        "turns": f"{len(run.turns)}, at most {settings['max_new_tokens']} tokens each",
        "temperatures": f"{temperatures}; {settings['samples']} samples each, seed "
        f"{settings['seed']}",
        "software": ", ".join(f"{k} {v}" for k, v in run.record["identity"]["software"].items()),
    }
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


def provenance(run: Run, name: str) -> Iterator[Table]:
    """What was sampled and with what, who judged, and which files the run has."""
    yield Table(name, ["what", "is"], [list(fact) for fact in facts(run).items()])
    folders: dict[str, list[int]] = {}
    for file in sorted(path for path in run.path.rglob("*") if path.is_file()):
        top = file.relative_to(run.path).parts
        if top[0].startswith("."):
            continue
        folders.setdefault(top[0] + ("/" if len(top) > 1 else ""), []).append(file.stat().st_size)
    rows = [[key, str(len(sizes)), f"{sum(sizes):,}"] for key, sizes in folders.items()]
    yield Table(f"files of {name} (docs/run-format.md)", ["files", "number", "bytes"], rows)
