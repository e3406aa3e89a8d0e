"""How likely are users' real follow-ups, what do they owe to the response, and what beats them?

Knows the scores that runs store; loads no model and scores nothing itself.
"""
