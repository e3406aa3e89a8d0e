"""A run as one page: what was found, with its controls, and the turns to check it against.

``contents`` reads the results that a page shows, ``turns`` the table of its turn browser. The
page's template and script are in ``ia_mech.page``.
"""
