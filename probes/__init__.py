"""Linear probes on the hidden states that a run stored. They predict the judge's labels.

The package reads hidden states, texts and labels through ``ia_mech.run.Run``, and each model's
final norm and unembedding through ``ia_mech.lens``. It never loads a language model, and does not
depend on how turns were sampled or judged.

What to read first: ``dataset`` (contexts and states), ``targets`` (what is predicted), ``analysis``
(the whole analysis of arrays), ``fit`` (nested cross-validation), ``show`` (conclusion, tables and
result). To add a control, see ``controls``.
"""
