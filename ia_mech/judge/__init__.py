"""Judges of generated user turns, by one rubric, and annotators' labels to hold them against.

The package reads texts (query, response, user turn) and labels; it never reads activations or
log-probabilities, and never loads the subject model: labels made from those would make every later
probe of them circular. ``verdict`` is the contract of a judge and explains how to add one;
``decoys`` is the control of all of them.
"""
