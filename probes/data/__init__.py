"""What probes are trained on: targets, contexts, hidden states; and planted runs."""
