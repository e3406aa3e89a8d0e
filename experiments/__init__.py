"""Experiments: one question each, answered from sampled runs.

An experiment knows how to read runs, estimate and show; it knows nothing of the engine's insides.
How to add one: :mod:`experiments.experiment`.
"""

import ia_mech  # noqa: F401  # before torch: it sets how threads wait
