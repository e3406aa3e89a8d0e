"""The one exception for input that cannot be used, and what a machine may lack."""

import errno
import os


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device, or this machine, had no memory left.

    Also where it was raised while that was being handled, as by leaving a CUDA graph's capture.
    """
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return False
    if any(text in str(error) for text in _NO_MEMORY):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_out_of_memory(before)


_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",  # of a shared library
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_NO_PRIMITIVE = "could not create a primitive"  # what oneDNN says, of code it can't place
_MEMORY = "free memory, raise ulimit -v, or use smaller batches, fewer runs or another --device"
_THREADS = "raise ulimit -u (or -v), or set OMP_NUM_THREADS=1"
_REMEDIES = {
    errno.EMFILE: "raise ulimit -n",
    errno.ENFILE: "close other programs, or raise fs.file-max",
    errno.ENOSPC: "free some space, or give another path",
    errno.EDQUOT: "free some space, or give another path",
    errno.EFBIG: "raise ulimit -f",
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
    errno.EROFS: "give another path",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
}


def exhaustion(error: BaseException) -> UserError | None:
    """What the machine, or a limit set on this process, lacks; None for an error of another kind.

    Libraries report it each in their own way: as an OSError, as the system's text for one, or as a
    RuntimeError of other words.
    """
    said = " ".join(str(error).split())[:200]
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        number = next((n for n in _REMEDIES if os.strerror(n) in said), None)
    if number in _REMEDIES:
        return UserError(said, _REMEDIES[number])
    if is_out_of_memory(error) or any(text in said for text in (*_NO_MEMORY, _NO_PRIMITIVE)):
        return UserError(f"there is no memory left ({said or type(error).__name__})", _MEMORY)
    if "No usable temporary directory" in said:
        return UserError(said, "free space in one of them, or set TMPDIR")
    if isinstance(error, RuntimeError) and "can't start new thread" in said:
        return UserError("no further thread can be started", _THREADS)
    return None
