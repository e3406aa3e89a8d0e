"""Fitting linear probes: folds, solvers and nested cross-validation. It knows arrays only."""
