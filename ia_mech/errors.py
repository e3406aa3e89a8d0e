"""The one exception for input that cannot be used."""


class UserError(Exception):
    """Bad input. Command lines print it as one line and exit with status 2.

    Args:
        problem: what is wrong, naming the thing.
        remedy: what to do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy
