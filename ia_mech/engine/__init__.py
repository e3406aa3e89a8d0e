"""The engine: token ids and tensors in, token ids and tensors out.

It knows nothing about templates or text. Read ``loop.py`` first: prefill, expand, decode, sample in
the order they happen. ``decode.py`` chooses between it and the same from CUDA graphs, ``cuda/``.
"""
