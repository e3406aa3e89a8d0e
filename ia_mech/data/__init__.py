"""Conversations and where they come from: built in, files, hub datasets.

It knows rows of data and their columns, and no tokenizer, template or model. How to add a public
dataset is stated in ``presets.py``.
"""
