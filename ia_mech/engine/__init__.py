"""The engine: token ids and tensors in, token ids and tensors out. It knows no templates, no text.

Read ``loop.py`` first: prefill, expand, decode, sample in the order they happen. ``decode.py``
chooses the back end (this loop, or the same in static buffers: ``cuda/``) and has its contract.
"""
