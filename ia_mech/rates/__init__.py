"""How often the user turns of runs are genuine, with intervals over sources.

The package knows runs, a judge's verdicts and an annotator's labels: ``load`` joins them,
``compute`` makes one row per estimate, ``gate`` says whether the judge can tell a turn's own
conversation from another one, ``show`` prints. It makes no interval of its own
(:mod:`ia_mech.stats` does) and never looks at a model, a text's probability or a hidden state.
"""
