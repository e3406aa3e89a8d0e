"""Steering: what turns do when a direction is added at chosen tokens, or taken away."""
