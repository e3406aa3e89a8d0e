"""Conversations and where they come from: built in, files, hub datasets. It knows no tokenizer."""
