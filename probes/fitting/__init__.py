"""Folds, rotations, fits, selection, code lengths and transfer: functions of arrays."""
