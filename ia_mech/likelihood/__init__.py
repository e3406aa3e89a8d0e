"""How likely given user turns are after their own context and after counterfactual ones.

It asks ``chat`` for token ids and ``engine`` for scores of ids; it computes no tensors itself, and
knows nothing of files or of how a run is scheduled. ``reaction`` and ``copying`` need neither: they
are functions of likelihood arrays and of texts.
"""
