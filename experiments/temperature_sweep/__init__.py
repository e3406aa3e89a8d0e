"""What temperature does to the user turn: rates, the first token, and what greedy hides.

Knows judged turns with their tokens, header logits and the lens; loads no model.
"""
