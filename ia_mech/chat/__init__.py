"""Chat templates and text: what a template renders, and which tokens are the user header.

It knows tokenizers, and no tensors, models or files. How a template family is supported (nothing
is listed by name) is stated in ``format.py``.
"""
