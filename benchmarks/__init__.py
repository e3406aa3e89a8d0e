"""Benchmarks: speed of the engine, and checks of judges, probes and statistics."""

import ia_mech  # noqa: F401  # before torch: it sets how threads wait
