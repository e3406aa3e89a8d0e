"""The engine: token ids and tensors in, token ids and tensors out. It knows no templates, no text.

Read ``installed.py`` (what a model gets, once) and ``passes.py`` (what a pass captures and edits),
then ``state.py`` (prefill, forward, expand), ``decode.py`` (the loop), ``steps.py`` (its steps),
``captured.py`` (its steps on a GPU) and ``shared.py`` (attention to a prefix that stays where it
is).
"""
