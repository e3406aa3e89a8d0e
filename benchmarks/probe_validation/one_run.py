"""One planted run: planted, written, read and analysed.

This isn't in ``__main__``, since worker processes don't import that.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.probe_validation import blocks
from benchmarks.probe_validation.blocks import BLOCKS
from benchmarks.probe_validation.planted import GAUSSIAN, Plan, plant, true_auroc, write
from probes import dataset
from probes.analysis import AnalysisSettings, analyse
from probes.controls import controls_of
from probes.show import conclude


@dataclass(frozen=True)
class RunFindings:
    """What the analysis of one planted run said; None for what a kind doesn't have.

    Attributes:
        beyond: hidden states tell more than a linear readout of first-token state and text.
        set_holds_first: the confidence set holds the first informative layer at its position.
        set_share: layers × positions in the confidence set, as a share of all.
        located: the headline is at the planted position and within one layer of the first
            informative one.
        readable: the headline's p is at most 0.05.
        headline_p, family_p: of the headline, and the smallest of the heat map.
        covered: the headline's interval holds the true AUROC of its probes.
        auroc, truth: estimate, and mean true AUROC of the probes it is of.
        above_output: AUROC of the headline minus that of the output's own probe.
    """

    kind: str
    beyond: bool | None = None
    set_holds_first: bool | None = None
    set_share: float | None = None
    located: bool | None = None
    readable: bool | None = None
    headline_p: float | None = None
    family_p: float | None = None
    covered: bool | None = None
    auroc: float | None = None
    truth: float | None = None
    above_output: float | None = None


def analyse_planted(kind: str, seed: int) -> RunFindings:
    """Plant and analyse one run; those of :mod:`blocks` as arrays, the others through files."""
    if kind in BLOCKS:
        found, at = blocks.analysed(kind, seed)
        own = [one.auroc.value for one in found.controls if one.control.name == "output"]
        headline = found.headline.auroc.value
        return RunFindings(
            kind,
            beyond=found.beyond and bool(found.beyond.deviance_saved.low > 0),
            set_holds_first=bool(found.among_best[at]),
            set_share=float(found.among_best.mean()),
            above_output=headline - own[0] if own else None,
        )
    position = "turn_end" if kind == "elsewhere" else "header_last"
    drawn = "signal" if kind == "elsewhere" else kind
    plan = Plan(drawn, informative_position=position, seed=seed)
    planted = plant(plan)
    lens = planted.lens.save(planted.weights_hash)
    with tempfile.TemporaryDirectory() as folder:
        run = write(planted, Path(folder) / "run")
        data = dataset.read([run.path])
        controls = controls_of(data)
        settings = AnalysisSettings(permutations=199, resamples=1000, workers=1)
        analysis = analyse(data, data.outcome, controls, settings)
    lens.unlink()
    headline, conclusion = analysis.headline, conclude(analysis)
    estimate, truth = headline.auroc, None
    if drawn in GAUSSIAN:
        probes = zip(headline.chosen, headline.weights, strict=True)
        truth = float(np.mean([true_auroc(planted, *cell, weights) for cell, weights in probes]))
    at = plan.informative_layer, plan.positions.index(plan.informative_position)
    return RunFindings(
        kind,
        beyond=conclusion.beyond,
        set_holds_first=bool(analysis.among_best[at]) if drawn == "signal" else None,
        set_share=float(analysis.among_best.mean()),
        located=headline.position == plan.informative_position
        and abs(headline.layer - plan.informative_layer) <= 1,
        readable=conclusion.readable,
        headline_p=analysis.tested.headline_p,
        family_p=float(analysis.tested.p_family.min()),
        covered=None if truth is None else bool(estimate.low <= truth <= estimate.high),
        auroc=estimate.value,
        truth=truth,
    )


def work_alone(cache: str) -> None:
    """Set up a worker process: one thread, and lenses in a temporary cache."""
    torch.set_num_threads(1)
    os.environ["IA_MECH_CACHE"] = cache
