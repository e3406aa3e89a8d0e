"""Loading the subject model with its tokenizer, and handing its activations to others.

It knows checkpoints, devices and dtypes, and nothing of conversations, templates or decoding.
"""
