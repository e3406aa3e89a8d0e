"""A run as one page: what was found, with its controls, and the turns to check it against.

``contents`` reads what a page holds, ``turns`` the table of its turn browser; ``ia_mech.page`` has
the template and its script.
"""
