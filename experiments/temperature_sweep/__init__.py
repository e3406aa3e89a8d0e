"""What temperature does to the user turn: rates, the first token, and what greedy hides."""
