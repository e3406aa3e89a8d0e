"""Judges of generated user turns: from text alone, by one rubric.

``python -m ia_mech.judge`` is the command line; ``rubric`` the categories, ``rules`` the embedded
offline judge, ``llm`` and ``hf`` language models as judges, ``sheets`` the way to people's labels.
"""
