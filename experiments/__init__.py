"""Experiments: one question each, answered from sampled runs.

An experiment reads runs, estimates and shows; it doesn't use the engine's insides.
How to add one: :mod:`experiments.experiment`.
"""
