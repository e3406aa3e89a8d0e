"""The embedded judge: offline, deterministic, explainable, and a heuristic.

Plain rules settle what they can settle (empty and looping turns, thinking markers, closings,
copies); the rest goes to a small multinomial logistic regression on features of the
three texts (``features.py``), fitted on annotated turns and shipped as numbers in ``model.json``.
``CARD.md`` says on what it was fitted and how well it does.
"""

from ia_mech.judge.rules.judge import RulesJudge

__all__ = ["RulesJudge"]
