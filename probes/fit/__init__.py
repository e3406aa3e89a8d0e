"""Folds, solvers and nested cross-validation, as functions of arrays.

Nothing here knows runs, files, targets or controls.
"""
