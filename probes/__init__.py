"""Linear probes on the hidden states that a run stored, with the judge's labels as their target.

The package reads runs through ``ia_mech.run.Run`` alone: hidden states, texts, labels, and the
final norm and unembedding saved once per model. It never loads a language model, and it doesn't
know how turns were sampled or judged.

What to read first: ``dataset`` (contexts and states), ``targets`` (what is predicted), ``analysis``
(the whole analysis of arrays), ``fit`` (nested cross-validation), ``show`` (conclusion, tables and
result). To add a control, see ``controls``.
"""
