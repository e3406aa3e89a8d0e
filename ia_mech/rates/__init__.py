"""How often the user turns of runs are genuine, with intervals over sources.

The package knows runs, a judge's verdicts and an annotator's labels: ``load`` joins them,
``grounding`` gives a judge's scores their p values, ``compute`` has the rate table and makes one
row per estimate, ``gate`` says whether the judge can tell what a turn followed, ``result`` says
what was found. It makes no interval of its own (:mod:`ia_mech.stats` does) and never looks at a
model or a hidden state.
"""
