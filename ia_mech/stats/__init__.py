"""Intervals, tests, agreement and corrected rates: pure NumPy and SciPy on arrays.

The package knows that rows come in sources, which are resampled, flipped and permuted as wholes; it
knows nothing of runs, judges or models. No other code in the project computes an interval or a
test. ``docs/judging.md`` says which is used for what; ``benchmarks/coverage.py`` measures how well
they keep their level.
"""

from ia_mech.stats.agreement import balanced_accuracy, kappa_of
from ia_mech.stats.auroc import auroc_columns
from ia_mech.stats.clusters import cluster_bootstrap, cluster_mean, weighted_share
from ia_mech.stats.components import variance_components
from ia_mech.stats.confidence_set import model_confidence_set
from ia_mech.stats.correction import prediction_powered
from ia_mech.stats.decomposition import Decomposition, decomposed_difference
from ia_mech.stats.differences import Difference, group_difference, paired_difference
from ia_mech.stats.dyads import dyadic_difference, dyadic_mean, dyadic_test
from ia_mech.stats.fold_scores import FoldScores, ResampledScore
from ia_mech.stats.intervals import LEAST_SHOWN, Estimate, wilson, zero_events_bound
from ia_mech.stats.significance import holm, permutation_p

__all__ = [
    "LEAST_SHOWN",
    "Decomposition",
    "Difference",
    "Estimate",
    "FoldScores",
    "ResampledScore",
    "auroc_columns",
    "balanced_accuracy",
    "cluster_bootstrap",
    "cluster_mean",
    "decomposed_difference",
    "dyadic_difference",
    "dyadic_mean",
    "dyadic_test",
    "group_difference",
    "holm",
    "kappa_of",
    "model_confidence_set",
    "paired_difference",
    "permutation_p",
    "prediction_powered",
    "variance_components",
    "weighted_share",
    "wilson",
    "zero_events_bound",
]
