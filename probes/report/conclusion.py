"""The conclusion of an analysis: one sentence, and the rule for calling a target latent."""

from dataclasses import dataclass

import numpy as np

from ia_mech.stats import Estimate
from probes.analysis import Analysis, Compared, Headline

LEVEL = 0.05  # of permutation tests
COVERAGE = 0.95  # that an interval of a gain must have at least


@dataclass(frozen=True)
class Conclusion:
    """What an analysis shows, and no more.

    Attributes:
        readable: the headline's p value is at most 0.05.
        beyond_text: readable, and the gain over every text baseline has an interval above zero.
        latent: beyond text, and the gain over every form of the model's own output distribution has
            an interval above zero. Never without that control, nor from intervals below 95%.
        sentence: in words.
    """

    readable: bool
    beyond_text: bool
    latent: bool
    sentence: str


def conclude(analysis: Analysis, what: str = "the follow-up rate") -> Conclusion:
    """What the headline, its p value and its controls show.

    Args:
        analysis: of one target.
        what: the target, in words.
    """
    headline, tested = analysis.headline, analysis.tested
    auroc = headline.measures["auroc"]
    readable = bool(tested.p <= LEVEL)
    if not readable:
        return Conclusion(False, False, False, _nothing(analysis, what, auroc))
    text, output = _of_kind(analysis, "text"), _of_kind(analysis, "output")
    sure = analysis.settings.level >= COVERAGE
    beyond_text = sure and bool(text) and all(_above(c.gain) for c in text)
    beyond_output = sure and bool(output) and all(_above(c.gain) for c in output)
    said = [
        f"{what} is readable from {_place(headline)}: AUROC {auroc.text()}, p {_p(tested.p)} "
        "(selection replayed)"
    ]
    said.append(_against(output, "the model's own output distribution"))
    said.append(_against(text, "what can be read from the text"))
    said.append(_against(_of_kind(analysis, "control task"), "a task without meaning"))
    latent = beyond_text and beyond_output
    if latent:
        closing = "So it is latent: more than the next-token distribution and the text tell"
    elif not sure:
        closing = f"Latent is never said of intervals below {COVERAGE:.0%}"
    elif not output:
        closing = "Whether it is latent can't be said without the output control"
    elif beyond_output:
        closing = "Not shown to be latent: it may be topic, wording or length"
    elif beyond_text:
        closing = "Not shown to be latent: the output distribution may tell as much"
    else:
        closing = "Not shown to be latent: text and output distribution may tell as much"
    return Conclusion(True, beyond_text, latent, "; ".join(filter(None, said)) + f". {closing}.")


def _nothing(analysis: Analysis, what: str, auroc: Estimate) -> str:
    tested, headline = analysis.tested, analysis.headline
    if not tested.permutations:
        return f"{what} was not tested: nothing is claimed without permutations."
    sources = analysis.outcome.source_count
    chance = f"{np.quantile(tested.null, 0.95):.2f}"
    return (
        f"no evidence that {what} is readable from the hidden states of {len(analysis.outcome)} "
        f"contexts of {sources} sources: AUROC {auroc.text()} where the inner loop chose to look "
        f"({_place(headline)}), p {_p(tested.p)}. The closed form that is tested has "
        f"{tested.value:.2f}, and one in twenty permutations of the labels reaches {chance}: what "
        "is readable no better than that can't be told from nothing here."
    )


def _against(compared: list[Compared], name: str) -> str:
    """The least certain gain over the controls of a kind: it decides."""
    if not compared:
        return ""
    strongest = min(compared, key=lambda c: (_above(c.gain), np.nan_to_num(c.gain.low, nan=-1.0)))
    gain = strongest.gain
    ends = "" if np.isnan(gain.low) else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
    return f"{gain.value:+.2f}{ends} over {name} ({strongest.name})"


def _of_kind(analysis: Analysis, kind: str) -> list[Compared]:
    return [c for c in analysis.compared if c.kind == kind]


def _above(gain: Estimate) -> bool:
    return bool(gain.low > 0)


def _place(headline: Headline) -> str:
    return f"layer {headline.layer} at {headline.position}"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
