"""The one exception for input that cannot be used, and errors for what a machine may lack."""


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

    def __reduce__(self) -> tuple:  # by its two texts, from another process
        return type(self), (self.problem, self.remedy)


_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# In the system's words, whichever library reports it.
_REMEDIES = {
    "No space left on device": "free some space, or give another path",
    "Disk quota exceeded": "free some space, or give another path",
    "Too many open files": "raise ulimit -n",
    "can't start new thread": "raise ulimit -u, or give --threads 1",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device, or this machine, had no memory left.

    True, too, of an exception that was raised while such a one was being handled.
    """
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return False
    if any(phrase in str(error) for phrase in _NO_MEMORY):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_out_of_memory(before)


def exhaustion(error: BaseException) -> UserError | None:
    """A UserError that says what the machine lacks (memory, space, files or threads), or None."""
    text = " ".join(str(error).split())[:200]
    if is_out_of_memory(error):
        return UserError(
            f"there is no memory left ({text or type(error).__name__})",
            "free memory, or use smaller batches, fewer runs or another --device",
        )
    remedy = next((remedy for phrase, remedy in _REMEDIES.items() if phrase in text), None)
    return None if remedy is None else UserError(text, remedy)
