"""Chat templates: what they render, and which tokens are the user header. It knows no tensors."""
