"""Intervals, tests, agreement and corrected rates. Pure functions of arrays.

The unit of statistics is the source: samples of one context share its header state and are not
independent, so whole sources are resampled, flipped and permuted, and nothing in the project
computes an interval anywhere else. ``benchmarks/coverage.py`` shows by simulation what the
intervals and tests keep of their promises.
"""

from ia_mech.stats.agreement import (
    CategoryScore,
    alpha_of,
    balanced_accuracy,
    balanced_accuracy_of,
    cohen_kappa,
    confusion,
    kappa_of,
    krippendorff_alpha,
    precision_recall,
)
from ia_mech.stats.clusters import cluster_counts, cluster_mean, cluster_statistic
from ia_mech.stats.correction import IMPOSSIBLE, prediction_powered, rogan_gladen
from ia_mech.stats.curves import auroc, auroc_columns
from ia_mech.stats.intervals import Estimate, wilson, zero_events_bound
from ia_mech.stats.multiple import (
    PermutationTest,
    benjamini_hochberg,
    holm,
    permutation_max,
    permutation_p,
)
from ia_mech.stats.paired import (
    Paired,
    auroc_between,
    auroc_within,
    detectable_difference,
    paired_difference,
)
from ia_mech.stats.ranking import (
    FoldScores,
    Grouped,
    Replicated,
    group_difference,
    kendall,
    kendall_p,
)

__all__ = [
    "IMPOSSIBLE",
    "CategoryScore",
    "Estimate",
    "FoldScores",
    "Grouped",
    "Paired",
    "PermutationTest",
    "Replicated",
    "alpha_of",
    "auroc",
    "auroc_between",
    "auroc_columns",
    "auroc_within",
    "balanced_accuracy",
    "balanced_accuracy_of",
    "benjamini_hochberg",
    "cluster_counts",
    "cluster_mean",
    "cluster_statistic",
    "cohen_kappa",
    "confusion",
    "detectable_difference",
    "group_difference",
    "holm",
    "kappa_of",
    "kendall",
    "kendall_p",
    "krippendorff_alpha",
    "paired_difference",
    "permutation_max",
    "permutation_p",
    "precision_recall",
    "prediction_powered",
    "rogan_gladen",
    "wilson",
    "zero_events_bound",
]
