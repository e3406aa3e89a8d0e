"""Experiments: one question each, answered from sampled runs.

An experiment reads runs, estimates and shows; it doesn't use the engine's insides.
How to add one: :mod:`experiments.experiment`.
"""

import ia_mech  # noqa: F401  # before torch: it sets how threads wait
