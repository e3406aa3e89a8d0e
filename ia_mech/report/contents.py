"""What a report says: parts, each of one analysis of one run.

A part comes from verdicts (:mod:`ia_mech.rates`, whose tables and sentences it shows), from a probe
analysis' card, or from the results of an experiment. An experiment's results are any folder with an
``estimates.parquet`` that says, as JSON in its metadata under ``ia_mech``, the ``experiment``, the
``runs`` it is of and their ``identities``, a ``title`` (the question), a ``sentence`` (what was
found), a ``control`` and ``notes``, and names its ``figures``, SVG files beside it.
``experiments.runner.write`` writes them; nothing else is known of an experiment here.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table
from rich.text import Text

from ia_mech.display import Recorder, svg_of
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, together
from ia_mech.judge import agreement as agreements
from ia_mech.models.embedded import cache_dir
from ia_mech.page import image
from ia_mech.rates.compute import estimates
from ia_mech.rates.figures import rates as rates_figure
from ia_mech.rates.load import NO_ANNOTATOR, Judged, read_runs
from ia_mech.rates.show import print_rates
from ia_mech.run import Run
from ia_mech.run.integrity import read_json
from ia_mech.stats import Estimate

# Sections in the order of reading; experiments that aren't named come after them, by name.
ORDER = (
    *("rates", "reaction", "probes", "steering"),
    *("perturbations", "likelihood", "decoupling", "temperature_sweep"),
)
LAST = "agreement"
ROWS = 400  # of estimates that a page lists; the file has all
ESTIMATES, TURNS = "estimates.parquet", "turns.parquet"


@dataclass(frozen=True)
class Shown:
    """A table as texts."""

    heads: list[str]
    rows: list[list[str]]
    title: str = ""


@dataclass(frozen=True)
class Part:
    """What one analysis says of one run.

    Attributes:
        name: of the section; parts of one name stand side by side.
        title: the question.
        run: of which run.
        sentence: what was found; empty if the results don't say.
        control: what it is held against; empty for none.
        pictures: (name, address) of each figure.
        tables: as at the terminal.
        notes: what has to be known to read them.
        estimates: every number, for experiments and probes.
        folder: where the files are; empty for what was computed for the page.
    """

    name: str
    title: str
    run: str
    sentence: str
    control: str
    pictures: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Shown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    estimates: Shown | None = None
    folder: str = ""


@dataclass(frozen=True)
class Results:
    """The results of an experiment: the folder and what its estimates say of themselves."""

    folder: Path
    about: dict[str, Any]


def parts_of(run: Run, name: str, results: Sequence[Results]) -> list[Part]:
    """Every part of a run; ``name`` is what the page calls the run.

    Raises:
        UserError: labels or results that can't be read.
    """
    parts: list[Part] = []
    for judge in run.labels.judges:
        parts.append(_rates(read_runs([run], judge, _annotator(run)), name))
    parts += [_probe(card.parent, name) for card in sorted(run.path.glob("probes/*/card.json"))]
    parts += [_experiment(one, name) for one in results]
    if len(run.labels.judges) + len(run.labels.annotators) > 1:
        parts.append(_agreement(run, name))
    place = str(run.path)  # commands in notes name it; a page holds no folders of this machine
    return [
        replace(part, notes=[note.replace(place, run.name) for note in part.notes])
        for part in parts
    ]


def grouped(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts of one name and question together, in :data:`ORDER`."""

    def place(name: str) -> tuple[int, str]:
        rank = len(ORDER) + (name == LAST)
        return (ORDER.index(name) if name in ORDER else rank, name)

    found: dict[tuple[str, str], list[Part]] = {}
    for part in sorted(parts, key=lambda part: place(part.name)):
        found.setdefault((part.name, part.title), []).append(part)
    return [
        {"id": f"s{at}", "name": name.replace("_", " "), "title": title, "parts": those}
        for at, ((name, title), those) in enumerate(found.items(), 1)
    ]


# -- verdicts -------------------------------------------------------------------------------------


def _annotator(run: Run) -> str:
    """Whose labels correct the rates: the only annotator's, or none's."""
    names = run.labels.annotators
    return names[0] if len(names) == 1 else NO_ANNOTATOR


def _rates(judged: Judged, name: str) -> Part:
    found = estimates(judged)
    recorder = Recorder()
    print_rates(recorder, judged, found)
    own = found[(found["quantity"] == "follow_up_rate") & (found["outcome"] == "genuine")]
    said = [
        f"{f'T = {row.temperature:g}:' if row.temperature else 'greedy'} "
        f"{Estimate(row.value, row.low, row.high, row.sources).text()}"
        for row in together(own).itertuples()
    ]
    sources = judged.turns["source"].nunique()
    pictures = []
    for perturbation, of in found.groupby("perturbation"):
        more = "" if perturbation == "none" else f", {perturbation}"
        figure = rates_figure(of, f"judge {judged.gate}{more}")
        words = f"rate, floor and excess by temperature, and the failure profile{more}"
        pictures.append((words, image(svg_of(figure, "rates"))))
    sentences = {f"{gate.sentence}." for gate in judged.gates.values()}
    return Part(
        name="rates",
        title="How often are the user turns genuine follow-ups?",
        run=name,
        sentence=f"The {judged.judge} judge calls these shares of {len(judged.turns)} turns "
        f"genuine (95% intervals over {sources} sources): {', '.join(said)}.",
        control=_sentence(judged.gate.sentence),
        pictures=pictures,
        tables=[shown(table) for table in recorder.tables],
        notes=[line for line in recorder.lines if line not in sentences],
    )


def _agreement(run: Run, name: str) -> Part:
    found, recorder = agreements.agreement(run), Recorder()
    agreements.print_pairs(recorder, found.pairs)
    agreements.print_floors(recorder, found.floors)
    for (truth, prediction), comparison in found.pairs.items():
        agreements.print_comparison(recorder, f"{prediction} against {truth}", comparison)
    kappas = [
        f"{prediction} against {truth} {comparison.kappa.text()}"
        for (truth, prediction), comparison in found.pairs.items()
    ]
    return Part(
        name=LAST,
        title="How far do judges and annotators agree?",
        run=name,
        sentence=f"Cohen's κ of the categories: {', '.join(kappas)}." if kappas else "",
        control="What each calls genuine of turns after another conversation (floor), below.",
        tables=[shown(table) for table in recorder.tables],
        notes=recorder.lines,
    )


def shown(table: Table) -> Shown:
    """A table of the terminal as texts, without markup."""

    def plain(cell: Any) -> str:
        return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

    cells = [[plain(cell) for cell in column.cells] for column in table.columns]
    heads = [plain(column.header) for column in table.columns]
    return Shown(heads, [list(row) for row in zip(*cells, strict=True)], plain(table.title or ""))


# -- what lies in folders -------------------------------------------------------------------------


def results_of(run: Run, more: Sequence[Path] = ()) -> list[Results]:
    """Results of experiments on a run.

    Looked for in the run (``experiments/``), and beside it and in the cache (where experiments that
    sample keep theirs, ``cache/<run>-reaction``) if they say that they are of this run.

    Args:
        run: the run.
        more: further folders, which are taken as they are.

    Raises:
        UserError: estimates that no experiment wrote, in the run or in ``more``.
    """
    own = [path.parent for path in sorted(run.path.glob(f"experiments/*/{ESTIMATES}"))]
    found = [Results(folder, _about(folder)) for folder in dict.fromkeys([*own, *more])]
    name, there = run.path.resolve().name, {one.folder.resolve() for one in found}
    for place in {run.path.resolve().parent, cache_dir().resolve()}:
        for folder in sorted(path for path in place.glob("*") if path.name.startswith(f"{name}-")):
            if folder in there or not (folder / ESTIMATES).is_file():
                continue
            there.add(folder)
            about = _about(folder)
            if run.identity_digest in about.get("identities", []):
                found.append(Results(folder, about))
    return found


def _about(folder: Path) -> dict[str, Any]:
    """What a folder's estimates say of themselves."""
    file = folder / ESTIMATES
    if not file.is_file():
        raise UserError(f"{folder} has no {ESTIMATES}", "name a folder that an experiment wrote")
    try:
        about = json.loads(pq.read_schema(file).metadata[b"ia_mech"])
        texts = [about["experiment"], *about["runs"], *about.get("notes", [])]
        texts += [about.get(name, "") for name in ("title", "sentence", "control")]
        texts += about["figures"]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is none")
        return about
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"no experiment wrote {file}, or it is damaged", "remove it, or analyse again"
        ) from None


def _experiment(results: Results, run: str) -> Part:
    folder, about = results.folder, results.about
    name = about["experiment"]
    return Part(
        name=name,
        title=about.get("title") or name.replace("_", " "),
        run=run,
        sentence=_sentence(about.get("sentence", "")),
        control=_sentence(about.get("control", "")),
        pictures=_pictures(folder, about["figures"]),
        notes=list(about.get("notes", [])),
        estimates=listed(_table(folder / ESTIMATES)),
        folder=_place(folder),
    )


def _probe(folder: Path, run: str) -> Part:
    try:
        card = read_json(folder / "card.json")
        sentence, notes = str(card["verdict"]["sentence"]), [str(note) for note in card["notes"]]
        controls = [f"{one['name']} {_estimate(one['auroc'])}" for one in card["controls"]]
        notes += [f"{one['name']}: {one['what']}." for one in card["controls"]]
        target = str(card["target"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / 'card.json'} is damaged ({error})", "run probes.train again, --replace"
        ) from None
    return Part(
        name="probes",
        title=f"What can be read from the hidden states? (probe {folder.name})",
        run=run,
        sentence=_sentence(sentence),
        control=f"AUROC from the text or the output alone, and of a control task: "
        f"{', '.join(controls)}."
        if controls
        else "",
        pictures=_pictures(folder, [path.stem for path in sorted(folder.glob("*.svg"))]),
        notes=[f"Target: {target}", *notes],
        estimates=listed(_table(folder / ESTIMATES)),
        folder=_place(folder),
    )


def _place(folder: Path) -> str:
    """Where files are, as seen from the run's folder: a report holds no places of this machine."""
    inside = folder.parent.name in ("experiments", "probes")
    return "/".join(folder.parts[-2:]) if inside else folder.name


def _sentence(text: str) -> str:
    """With a capital in front and a full stop."""
    return text[:1].upper() + text[1:] + "." * (bool(text) and text[-1] != ".")


def _estimate(numbers: dict[str, Any]) -> str:
    value, low, high = (
        np.nan if numbers[name] is None else float(numbers[name])
        for name in ("value", "low", "high")
    )
    return Estimate(value, low, high, int(numbers["sources"])).text()


def _pictures(folder: Path, stems: Sequence[str]) -> list[tuple[str, str]]:
    files = [(stem, folder / f"{Path(stem).name}.svg") for stem in stems]
    return [
        (stem.replace("_", " "), image(file.read_bytes())) for stem, file in files if file.is_file()
    ]


def _table(file: Path) -> pd.DataFrame:
    try:
        return pq.read_table(file).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} can't be read ({error})", "analyse again") from None


def listed(frame: pd.DataFrame) -> Shown:
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
    return Shown(kept, [[_text(cell) for cell in row] for row in rows], " · ".join(words))


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
        "conversations": f"{run.kept['contexts']} contexts of "
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


def provenance(run: Run, name: str) -> Iterator[Shown]:
    """What was sampled and with what, who judged, and which files the run has."""
    yield Shown(["what", "is"], [list(fact) for fact in facts(run).items()], name)
    folders: dict[str, list[int]] = {}
    for file in sorted(path for path in run.path.rglob("*") if path.is_file()):
        top = file.relative_to(run.path).parts
        if top[0].startswith("."):
            continue
        folders.setdefault(top[0] + ("/" if len(top) > 1 else ""), []).append(file.stat().st_size)
    rows = [[key, str(len(sizes)), f"{sum(sizes):,}"] for key, sizes in folders.items()]
    yield Shown(["files", "number", "bytes"], rows, f"files of {name} (docs/run-format.md)")
