"""How often the user turns of runs are follow-ups, with intervals over sources.

``load`` pools labelled runs, ``evidence`` reads likelihoods from results, ``compute`` has rates,
differences and floors and makes one row per estimate, ``gate`` says whether the judge can tell what
a turn followed, ``result`` says what was found. The package makes no interval of its own
(:mod:`ia_mech.stats` does) and never looks at a model or a hidden state.
"""
