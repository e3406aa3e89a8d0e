"""Loading the subject model. It knows files and devices, and nothing of conversations."""
