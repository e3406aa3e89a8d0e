"""Does a model that solves a task also follow up on it as a user would?

Knows how to verify responses and joins that with judged user turns; loads no model.
"""
