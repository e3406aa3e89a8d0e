"""Whether there is enough to train probes on, and if not, what would be."""

import math

import numpy as np

from ia_mech.errors import UserError
from probes.data.outcome import Outcome
from probes.fitting.folds import movable

MIN_SOURCES = 20  # with a positive turn, and with a negative one


def check_enough(
    outcome: Outcome,
    folds: int = 5,
    minimum: int = MIN_SOURCES,
    positive: str = "a positive turn",
    negative: str | None = None,
    more_turns: bool = True,
) -> None:
    """Refuse outcomes that no probe can be trained and tested on.

    Args:
        outcome: k of n per context.
        folds: there must be at least so many sources of either kind.
        minimum: sources with a positive turn, and with a negative one.
        positive: what a positive turn is called (``Target.positive``).
        negative: and a negative one (``Target.negative``); any other turn if not given.
        more_turns: whether more turns per context would give more sources of either kind.

    Raises:
        UserError: there is one source, all rates are equal, or there are too few sources.
    """
    sources = int(outcome.sources.max()) + 1
    if sources == 1:
        raise UserError(
            f"all {len(outcome)} contexts come from one source; a probe is tested on sources that "
            "it wasn't trained on",
            f"sample contexts of many sources (at least {max(minimum, folds)})",
        )
    if np.ptp(outcome.rate) == 0:
        rate = outcome.rate[0]
        said = {0: f"no context has {positive}", 1: f"all turns of every context are {positive}"}
        raise UserError(
            said.get(rate, f"every context has the same rate of {positive}, {rate:.2f}")
            + ": there is nothing to predict",
            "choose another --target, or sample at other temperatures or more turns per context",
        )
    needed = max(minimum, folds)
    # Where all contexts of a run have the same rate, nothing can be told from it.
    varies = np.array([np.ptp(outcome.rate[outcome.runs == run]) > 0 for run in outcome.runs])
    if not varies.any():
        raise UserError(
            f"within each run (or dataset) all contexts have the same rate of {positive}: there is "
            "nothing to predict, as only contexts of the same are compared",
            "choose another --target or --within, or sample at other temperatures",
        )
    counted = (outcome.positives > 0) & varies, (outcome.negatives > 0) & varies
    have = [len(set(outcome.sources[rows])) for rows in counted]
    if min(have) >= needed:
        moving = movable(outcome)
        if moving < needed:
            raise UserError(
                f"only {moving} of {sources} sources can change places with another one, as the "
                "others have other numbers of contexts per run or perturbation: there is too "
                "little to permute",
                "give runs whose sources have equally many contexts",
            )
        return
    told, of = len(set(outcome.sources[varies])), f"{sources}"
    if told < sources:
        of = f"{told} in runs or datasets where rates differ"
    enough = math.ceil(told * needed / min(have) / 10) * 10
    few, what = min((have[0], positive), (have[1], negative or f"a turn other than {positive}"))
    others = ", more turns per context, or at other temperatures"
    if few == told or not more_turns:
        others = ""
    raise UserError(
        f"only {few} source{' has' if few == 1 else 's have'} {what} (of {of}); probes need "
        f"{needed} with one and {needed} without",
        f"sample contexts of about {enough} sources at this rate{others}",
    )
