"""A run in a notebook: what it is, as a table, and its figures.

What computes and draws lies in packages above this one, which are imported when a figure is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ia_mech.cli import quoted
from ia_mech.errors import UserError
from ia_mech.untrusted import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ia_mech.run import Run


def facts(run: Run) -> dict[str, str]:
    """What was sampled, with what, and who judged it."""
    config, grid, model = run.config, run.config["grid"], run.model
    contexts = f"{run.kept['contexts']} contexts"
    turns = f"at most {grid['max_new_tokens']} tokens each"
    if run.kept["contexts"]:
        contexts += f" of {run.turns['source_id'].nunique()} sources"
        turns = f"{len(run.turns)}, {turns}"
    found = {
        "folder": str(run.path),
        "identity": run.identity_digest,
        "model": f"{model['name']} ({model['weights_hash']}, {model['dtype']})",
        "dataset": str(config["dataset"]),
        "conversations": contexts if run.complete else f"{contexts} so far",
        "turns": turns,
        "temperatures": ", ".join(["greedy", *(f"{t:g}" for t in grid["temperatures"])])
        + f"; {grid['samples']} samples each, seed {grid['seed']}",
        "software": ", ".join(f"{k} {v}" for k, v in run.record["identity"]["software"].items()),
    }
    for judge in run.labels.judges:
        identity = run.labels.record("judgements", judge).get("identity", {})
        found[f"judge {judge}"] = ", ".join(
            f"{key} {value}" for key, value in identity.items() if isinstance(value, str | int)
        )
    for annotator in run.labels.annotators:
        found[f"annotator {annotator}"] = f"{len(run.labels.annotations(annotator))} turns"
    return found


def html(run: Run) -> str:
    """:func:`facts` as a table."""
    rows = (
        f"<tr><th>{escape(visible(name))}</th><td>{escape(visible(text))}</td></tr>"
        for name, text in facts(run).items()
    )
    return f"<table>{''.join(rows)}</table>"


@dataclass(frozen=True)
class Plots:
    """Figures of a run, as reports and experiments draw them."""

    run: Run

    def rates(self, judge: str | None = None) -> Figure:
        """Rate, floor and excess by temperature, and what the turns are.

        Args:
            judge: whose verdicts; the only judge's if not given.

        Raises:
            UserError: no verdicts, or of several judges.
        """
        from ia_mech.rates.compute import estimates
        from ia_mech.rates.figures import rates
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        judged = read_runs([self.run], judge, NO_ANNOTATOR)
        found = estimates(judged)
        whole = found[found["perturbation"] == found["perturbation"].iloc[0]]
        return rates(whole, f"judge {judged.gate}")

    def reaction(self) -> Figure:
        """Bits that a turn tells about its response, with controls and ceiling, by temperature.

        Raises:
            UserError: ``experiments.reaction`` has no results of this run.
        """
        import pyarrow.parquet as pq

        from experiments.reaction.show import figures
        from ia_mech.display import styled
        from ia_mech.report.contents import ESTIMATES, results_of

        found = [one for one in results_of(self.run) if one.about["experiment"] == "reaction"]
        if not found:
            raise UserError(
                f"{self.run.path} has no results of reaction",
                f"run python -m experiments.reaction {quoted(self.run.path)}",
            )
        estimates = pq.read_table(found[0].folder / ESTIMATES).to_pandas()
        return styled(figures)(estimates, self.run.model["name"])["information"]

    def heatmap(self, probe: str | None = None) -> Figure:
        """AUROC of linear probes by layer and position.

        Args:
            probe: the name of the analysis, a folder in ``probes/``; the only one if not given.

        Raises:
            UserError: no such analysis, or several and none was named.
        """
        from probes.report.figures import heat_map
        from probes.report.files import stored_map

        names = sorted(card.parent.name for card in self.run.path.glob("probes/*/card.json"))
        if not names:
            raise UserError(
                f"{self.run.path} has no probes",
                f"run python -m probes.train {quoted(self.run.path)}",
            )
        if probe not in names and (probe is not None or len(names) > 1):
            given = "none was chosen" if probe is None else f"none is {probe!r}"
            raise UserError(
                f"{self.run.path} has {len(names)} probe analyses and {given}",
                f"give one of {', '.join(names)}",
            )
        folder = self.run.path / "probes" / (probe or names[0])
        return heat_map(stored_map(folder), f"{self.run.model['name']} · {folder.name}")
