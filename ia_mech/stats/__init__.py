"""Intervals, tests, agreement and corrected rates: pure NumPy and SciPy on arrays.

The package knows that rows come in sources, which are resampled, flipped and permuted as wholes; it
knows nothing of runs, judges or models. No other code in the project computes an interval or a
test. ``benchmarks/coverage.py`` measures how well they keep their level:

- a rate: Wilson's interval, with the effective number of turns; of a rate of 0 or 1 the exact bound
  1 − 0.05^(1/n) for n queries;
- a corrected mass: the same, of sums of corrected labels (the difference estimator);
- a difference of two rates: both rates' intervals and the correlation between them (MOVER);
- a floor, an excess: Student's t, with a variance that knows that a decoy shares one query with
  some decoys and another one with others;
- a rise from greedy to sampled turns, and its two parts (Kitagawa's decomposition): Student's t
  with a jackknife over queries;
- κ, AUROC: bootstrap over queries.
"""

from ia_mech.stats.agreement import balanced_accuracy, kappa_of
from ia_mech.stats.auroc import auroc_columns
from ia_mech.stats.clusters import cluster_bootstrap, cluster_mean, weighted_share
from ia_mech.stats.components import variance_components
from ia_mech.stats.confidence_set import model_confidence_set
from ia_mech.stats.correction import corrected_labels, corrected_mean, prediction_powered
from ia_mech.stats.decomposition import Decomposition, decomposed_difference
from ia_mech.stats.differences import Difference, group_difference, paired_difference
from ia_mech.stats.dyads import dyadic_difference, dyadic_mean, dyadic_rate, dyadic_test
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
    "corrected_labels",
    "corrected_mean",
    "decomposed_difference",
    "dyadic_difference",
    "dyadic_mean",
    "dyadic_rate",
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
