"""What an analysis leaves in the run it is of.

::

    probes/<name>/
      probe.safetensors     directions in activation space
      card.json             where they come from, what they score, what may be said; written last
      estimates.parquet     every number with its interval, one row each
      predictions.parquet   per context, from probes that weren't trained on its source
      heat_map.png .svg     layer_curve.png .svg

A folder is written under another name and takes its place when it is whole.
"""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from ia_mech.errors import UserError
from ia_mech.run.labels import check_name
from ia_mech.run.layout import read_json
from probes.card import CARD, WEIGHTS, Probe, directions
from probes.data.dataset import ProbeSet
from probes.records import MEASURES, Analysis, Settings
from probes.report import figures, tables
from probes.report.verdict import Verdict

FILES = {
    *(WEIGHTS, CARD, "estimates.parquet", "predictions.parquet"),
    *(f"{name}.{kind}" for name in ("heat_map", "layer_curve") for kind in ("png", "svg")),
}
LAYERS = "0 = embeddings, l = output of block l, before the final norm"


@dataclass(frozen=True)
class Kept:
    """A place for one analysis.

    Attributes:
        folder: where it goes.
        data: what is analysed.
        asked: everything that decides the result, as the card records it.
    """

    folder: Path
    data: ProbeSet
    asked: dict

    @classmethod
    def place(
        cls,
        data: ProbeSet,
        settings: Settings,
        name: str | None = None,
        replace: bool = False,
        home: Path | None = None,
    ) -> "Kept":
        """A folder in a run that this analysis may write.

        The same analysis may be written again; one of other settings or labels is only replaced if
        asked for.

        Args:
            data: what is to be analysed.
            settings: how.
            name: of the folder; made from target, estimator and judge if not given.
            replace: any other analysis that is there.
            home: the run to keep it in; the first if not given.

        Raises:
            UserError: a name that no file can have, one that is taken, or files there that no
                analysis wrote.
        """
        if name is None:
            parts = [data.target.name.replace("@", "-at-"), settings.estimator, data.judge]
            name = "-".join([*parts, f"{len(data.runs)}-runs"] if len(data.runs) > 1 else parts)
        folder = (home or data.runs[0].path) / "probes" / check_name(name)
        _restore(folder)
        asked = _asked(data, settings)
        _check_free(folder, asked, replace)
        return cls(folder, data, asked)

    def write(self, analysis: Analysis, verdict: Verdict) -> None:
        """Write all files, or none."""
        scratch, old = _beside(self.folder, "new"), _beside(self.folder, "old")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            self._fill(scratch, analysis, verdict)
            if self.folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.folder, old)
            os.replace(scratch, self.folder)
        finally:
            _restore(self.folder)
            shutil.rmtree(scratch, ignore_errors=True)

    def _fill(self, folder: Path, analysis: Analysis, verdict: Verdict) -> None:
        data, headline = self.data, analysis.headline
        about = {
            "target": data.target.name,
            "judge": data.judge,
            "within": data.within,
            "estimator": analysis.settings.estimator,
            "model": ", ".join(dict.fromkeys(run.model["name"] for run in data.runs)),
            "runs": ", ".join(str(run.path) for run in data.runs),
        }
        tables.write_parquet(tables.rows(analysis, about), folder / "estimates.parquet")
        names = data.contexts[["run", "context_id", "dataset"]]
        names = names.assign(
            run=names["run"].map(lambda number: str(data.runs[number].path)),
            source=data.contexts["source"].str.replace("\0", "/"),
        )
        said = tables.predictions(analysis).drop(columns=["run", "source"], errors="ignore")
        tables.write_parquet(pd.concat([names, said], axis=1), folder / "predictions.parquet")
        title = f"{about['model']} · {data.target.name} · judge {data.judge}"
        figures.save(figures.heat_map(analysis, title), folder, "heat_map")
        figures.save(figures.layer_curve(analysis, title), folder, "layer_curve")
        position = analysis.positions.index(headline.position)
        states = data.layer(headline.layer)[:, position]
        found = directions(states, data.outcome, headline.penalty)
        Probe(found, self._card(analysis, verdict)).save(folder)

    def _card(self, analysis: Analysis, verdict: Verdict) -> dict:
        headline, tested = analysis.headline, analysis.tested
        measures = {
            name: {"what": MEASURES[name], **_plain(estimate)}
            for name, estimate in headline.measures.items()
        }
        compared = [
            {"name": c.name, "kind": c.kind, "what": c.what}
            | {"auroc": _plain(c.auroc), "gain": _plain(c.gain)}
            for c in analysis.compared
        ]
        return {
            "asked": self.asked,
            "layer": headline.layer,
            "position": headline.position,
            "layer_convention": LAYERS,
            "penalty": headline.penalty,
            "target": self.data.target.describe(),
            "verdict": {"sentence": verdict.sentence, "latent": verdict.latent},
            "p": tested.p,
            "permutations": tested.permutations,
            "chosen_by_outer_folds": [list(cell) for cell in headline.picked],
            "scores": measures,
            "controls": compared,
            "contexts": len(analysis.outcome),
            "training_sources": sorted(set(self.data.contexts["source"].str.replace("\0", "/"))),
            "notes": analysis.notes,
        }


def _check_free(folder: Path, asked: dict, replace: bool) -> None:
    """Refuse a place that holds anything but this analysis, or another one that may go.

    Raises:
        UserError: says what is there.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file", "give another --out")
    others = sorted({path.name for path in folder.iterdir()} - FILES)
    if others:
        raise UserError(
            f"{folder} holds what no analysis wrote ({', '.join(others[:3])})",
            "move it elsewhere, or give another --out",
        )
    if replace or not any(folder.iterdir()):
        return
    before = _asked_before(folder)
    if before is None:
        raise UserError(
            f"{folder / CARD} is missing or can't be read", "give another --out, or --replace"
        )
    differing = [key for key in asked if _compared(before, key) != _compared(asked, key)]
    if differing:
        raise UserError(
            f"{folder} holds an analysis that differs in {', '.join(differing)}",
            "give another --out, or --replace",
        )


def _compared(asked: dict, key: str):
    """A run that was moved is still the same run."""
    found = asked.get(key)
    if key == "runs" and isinstance(found, list):
        return [{k: v for k, v in run.items() if k != "path"} for run in found]
    return found


def _beside(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _restore(folder: Path) -> None:
    """Bring back what was moved out of the way, unless something else is there by now."""
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _asked(data: ProbeSet, settings: Settings) -> dict:
    """Runs, labels and settings, as JSON has them; not the number of threads."""
    chosen = {k: v for k, v in asdict(settings).items() if k != "workers"}
    runs = [
        {
            "path": str(run.path.resolve()),
            "identity": run.identity_digest,
            "model": run.model,
            "labels": _labels_digest(data, n),
        }
        for n, run in enumerate(data.runs)
    ]
    return {
        "runs": runs,
        "judge": {"name": data.judge, "identity": data.record.get("identity")},
        "rubric": data.record.get("rubric"),
        "target": data.target.name,
        "within": data.within,
        "positions": data.positions,
        "layers": list(data.layers),
        "settings": chosen,
    }


def _labels_digest(data: ProbeSet, number: int) -> str:
    """Of a run's outcomes: which contexts, k and n."""
    own = data.contexts.loc[data.contexts["run"] == number]
    hashes = pd.util.hash_pandas_object(own[["context_id", "positives", "trials"]], index=False)
    return f"{int(hashes.sum()):016x}"[-16:]


def _asked_before(folder: Path) -> dict | None:
    try:
        asked = read_json(folder / CARD).get("asked")
    except (OSError, ValueError, AttributeError):
        return None
    return asked if isinstance(asked, dict) else None


def _plain(estimate) -> dict:
    """JSON has no NaN."""
    numbers = {name: getattr(estimate, name) for name in ("value", "low", "high")}
    return {k: None if v != v else float(v) for k, v in numbers.items()} | {
        "sources": estimate.sources,
        "method": estimate.method,
    }
