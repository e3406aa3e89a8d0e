"""Does a model that solves a task also follow up on it as a user would?"""
