"""One planted run: planted, written, read and analysed.

Not in ``__main__``, which worker processes don't import.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.probe_validation.planted import GAUSSIAN, Plan, plant, true_auroc, write
from probes import dataset
from probes.analysis import Settings, analyse
from probes.controls import controls_of
from probes.report.conclusion import conclude


@dataclass(frozen=True)
class Found:
    """What the analysis of one planted run said.

    Attributes:
        landed: the headline is at the planted position and within one layer of the first
            informative one.
        readable, beyond_text, latent: the conclusion.
        headline_p, family_p: of the headline, and the smallest of the heat map.
        covered: the headline's interval holds the true AUROC of its probes; None without a truth.
        auroc, truth: estimate, and mean true AUROC of the probes it is of.
    """

    kind: str
    landed: bool
    readable: bool
    beyond_text: bool
    latent: bool
    headline_p: float
    family_p: float
    covered: bool | None
    auroc: float
    truth: float | None


def try_one(kind: str, seed: int) -> Found:
    """Plant, write, read and analyse one run."""
    position = "turn_end" if kind == "elsewhere" else "header_last"
    drawn = "signal" if kind == "elsewhere" else kind
    plan = Plan(drawn, informative_position=position, seed=seed)
    planted = plant(plan)
    lens = planted.lens.save(planted.weights_hash)
    with tempfile.TemporaryDirectory() as folder:
        run = write(planted, Path(folder) / "run")
        data = dataset.read([run.path])
        controls = controls_of(data)
        settings = Settings(permutations=199, resamples=1000, control_draws=1, workers=1)
        analysis = analyse(data, data.outcome, controls, settings)
    lens.unlink()
    headline, said = analysis.headline, conclude(analysis)
    estimate, truth = headline.measures["auroc"], None
    if drawn in GAUSSIAN:
        probes = zip(headline.picked, headline.weights, strict=True)
        truth = float(np.mean([true_auroc(planted, *cell, weights) for cell, weights in probes]))
    return Found(
        kind=kind,
        landed=headline.position == plan.informative_position
        and abs(headline.layer - plan.informative_layer) <= 1,
        readable=said.readable,
        beyond_text=said.beyond_text,
        latent=said.latent,
        headline_p=analysis.tested.p,
        family_p=float(analysis.tested.p_family.min()),
        covered=None if truth is None else bool(estimate.low <= truth <= estimate.high),
        auroc=estimate.value,
        truth=truth,
    )


def work_alone(cache: str) -> None:
    """Set up a worker process: one thread, and lenses in a temporary cache."""
    torch.set_num_threads(1)
    os.environ["IA_MECH_CACHE"] = cache
