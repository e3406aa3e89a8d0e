"""The conclusion of an analysis: one plain sentence, the numbers behind it, and the rule."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from ia_mech.stats import Estimate
from probes.analysis import Analysis, Headline

LEVEL = 0.05  # of permutation tests
COVERAGE = 0.95  # that the interval of a gain must have at least
READOUT = (
    "a linear readout of the first-token state, the text, and the states at the ends of query and "
    "response"
)
# Planted complements, which count as much as the base does: contexts, features of a state, in how
# many sets they were found, of how many (docs/probes-validation.md).
PLANTED = ((120, 32, 196, 200), (480, 576, 3, 20))
OFTEN = 0.8  # power that is called enough
CONTROL_TASK = "random functions of length and opening of query and response (the control task)"


@dataclass(frozen=True)
class Conclusion:
    """What an analysis shows, and no more.

    Attributes:
        readable: both p values are at most 0.05: the headline's, with its selection replayed, and
            the smallest family-wise one of the heat map.
        beyond: readable, and hidden states save deviance that :data:`READOUT` leaves, with an
            interval above zero. Never without these controls, nor from intervals below 95%.
        sentence: in words; the first sentence is the plain one.
    """

    readable: bool
    beyond: bool
    sentence: str


def conclude(
    analysis: Analysis, what: str = "the follow-up rate", labelled_by: str = ""
) -> Conclusion:
    """What the headline, its p value and the gain over the readout show.

    Args:
        analysis: of one target.
        what: the target, in words.
        labelled_by: where the outcomes come from, such as ``judge rules``.
    """
    tested, gain = analysis.tested, analysis.beyond
    readable = bool(tested.p <= LEVEL and tested.p_family.min() <= LEVEL)
    sure = analysis.settings.level >= COVERAGE
    beyond = readable and sure and gain is not None and bool(gain.saved.low > 0)
    auroc = round(analysis.headline.measures["auroc"].value, 2)  # as it is shown
    tasks = [one for one in analysis.compared if one.kind == "control task"]
    chance = next((task for task in tasks if round(task.auroc.value, 2) >= auroc), None)
    subject = what[:1].upper() + what[1:]
    if not tested.permutations:
        said = [f"{subject} was not tested: nothing is claimed without permutations."]
    elif not readable:
        said = [f"No evidence was found that {what} can be read from the hidden states."]
    elif beyond:
        said = [f"{subject} can be read from the hidden states, beyond {READOUT}."]
    elif chance is not None:
        said = [
            f"{subject} can be read from the hidden states, but no better than {CONTROL_TASK}: it "
            "is not shown that they represent it."
        ]
    elif gain is None:
        said = [
            f"{subject} can be read from the hidden states; whether beyond {READOUT} can't be told "
            "without these controls."
        ]
    else:
        said = [
            f"{subject} can be read from the hidden states; that they tell more than {READOUT} is "
            "not shown."
        ]
    said.append(_numbers(analysis))
    if readable and chance is not None:
        known = f"{chance.oracle.value:.2f}" if chance.oracle else "–"
        said.append(
            f"The control task has AUROC {chance.auroc.text()}, of {known} for a probe that knows "
            "its rates."
        )
    if tested.permutations and not readable:
        said.append(_smallest(analysis))
    if gain is not None:
        added = (
            f"Added to that readout (AUROC {gain.base.value:.2f}), the hidden states save "
            f"{percent(gain.saved)} of its held-out deviance"
        )
        said.append(f"{added}, AUROC {signed(gain.gain)}.")
        if readable and not beyond:
            said.append(power_of_beyond(len(analysis.outcome), analysis.headline.weights.shape[1]))
        if not sure:
            said.append(f"Beyond is never said of intervals below {COVERAGE:.0%}.")
    if labelled_by:
        said.append(f"Labels: {labelled_by}.")
    return Conclusion(readable, beyond, " ".join(said))


def _numbers(analysis: Analysis) -> str:
    tested, auroc = analysis.tested, analysis.headline.measures["auroc"]
    p = ""
    if tested.permutations:
        p = f", p {p_text(tested.p)} (selection replayed; of the heat map, family-wise, p "
        p += f"{p_text(float(tested.p_family.min()))})"
    count, level = int(analysis.among_best.sum()), f"{100 * analysis.settings.level:g}%"
    told = f"{count} of {analysis.among_best.size} layers × positions can't be told from the best"
    if count == analysis.among_best.size:
        told = f"no layer or position stands out: none of {count} pairs can be told from the best"
    return (
        f"Probes whose layer and position are chosen inside the training folds have AUROC "
        f"{auroc.text()}{p}; {told} ({level} confidence set)."
    )


def _smallest(analysis: Analysis) -> str:
    """What would have been found: a null has a power."""
    tested, sources = analysis.tested, analysis.outcome.source_count
    reached = float(np.quantile(tested.null, 0.95))
    # In four of five data sets an estimate is above its mean less 0.84 standard deviations; the
    # spread is that under permutation.
    found = reached + float(norm.ppf(OFTEN)) * float(tested.null.std())
    return (
        f"The closed form that is tested has {tested.value:.2f}; one in twenty permutations of the "
        f"labels of these {sources} sources reaches {reached:.2f}, so that a true value of about "
        f"{found:.2f} would be found in four of five such data sets."
    )


def power_of_beyond(contexts: int, features: int) -> str:
    """What is known of how often a complement is found in data of this size."""
    known = " and ".join(
        f"{found} of {of} sets of {n} contexts with {d} features" for n, d, found, of in PLANTED
    )
    ratio = np.log(features / contexts)
    nearest = min(PLANTED, key=lambda one: abs(np.log(one[1] / one[0]) - ratio))
    likely = "would probably" if nearest[2] >= OFTEN * nearest[3] else "may well not"
    return (
        f"Planted hidden states that add as much as the output tells were found in {known}; these "
        f"are {contexts} contexts with {features} features, where such an addition {likely} be "
        "found, and a smaller one less often."
    )


# -- numbers in words -----------------------------------------------------------------------------


def place(headline: Headline) -> str:
    """What the rule chooses on all contexts, for the probe that is kept."""
    return f"layer {headline.layer}, {headline.position}"


def p_text(p: float) -> str:
    """``= 0.012``, or ``< 0.001``."""
    return "–" if np.isnan(p) else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def signed(estimate: Estimate, digits: int = 2) -> str:
    """``+0.12 [-0.02, +0.25]``."""
    if np.isnan(estimate.value):
        return "–"
    # The sign of an end decides the conclusion, so -0.00 keeps its sign.
    value, low, high = (f"{x:+.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [–]" if np.isnan(estimate.low) else f"{value} [{low}, {high}]"


def percent(estimate: Estimate) -> str:
    """``+1.2% [-0.3, +2.5]``."""
    ends = (
        "–" if np.isnan(estimate.low) else f"{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}"
    )
    return f"{100 * estimate.value:+.1f}% [{ends}]"
