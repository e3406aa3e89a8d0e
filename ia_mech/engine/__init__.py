"""The engine: token ids and tensors in, token ids and tensors out. It knows no templates, no text.

Read ``state.py`` first (prefill, forward, expand), then ``decode.py`` (the loop) and ``shared.py``
(attention to a prefix that stays where it is).
"""
