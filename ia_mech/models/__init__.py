"""Load the subject model with its tokenizer, and hand its activations to other libraries.

The package knows checkpoints, devices and dtypes, not conversations, templates or decoding.
"""
