"""How likely are users' real follow-ups, what do they owe to the response, and what beats them?"""
