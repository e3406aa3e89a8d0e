"""Keys kept out of what servers send: a server may repeat the key that it was given, or a part."""

import re

PART = 8  # characters of a key that are masked wherever they stand together

# The beginnings of keys that vendors share among all their customers and name in their messages.
# Shorter ones (``sk-``, ``gsk_``, ``hf_``) are below PART anyway.
_PREFIXES = (
    "sk-ant-api03-",
    "sk-ant-admin01-",
    "sk-svcacct-",
    "sk-admin-",
    "sk-or-v1-",
    "sk-proj-",
    "github_pat_",
)

# What people set where a server wants no key, such as ``sk-no-key-required``. Masking the words of
# these would spoil rationales.
_DUMMY_WORD = re.compile(
    "any|anything|api|dummy|empty|example|fake|ignored|key|lm|local|localhost|na|needed|no|none|"
    "not|null|ollama|placeholder|required|sk|studio|test|token|unused|vllm|your"
)

# Without a change of length, as ``str.lower`` has for some letters. Host names come back like this.
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


class Mask:
    """Replaces every run of ``PART`` or more characters of a key with ``[key]``, in any case.

    Keys shorter than ``PART``, dummy keys and the prefixes that vendors give all their keys are no
    secrets and stay. The time is linear in the text.
    """

    def __init__(self, key: str) -> None:
        key = key.translate(_LOWER)
        self._prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
        starts = range(len(key) - PART + 1)
        dummy = all(_DUMMY_WORD.fullmatch(word) for word in re.split(r"[-_]", key))
        self._parts = frozenset() if dummy else frozenset(key[i : i + PART] for i in starts)

    def __call__(self, text: str) -> str:
        lowered = text.translate(_LOWER)
        runs: list[list[int]] = []  # [start, end) of the key's characters in the text
        for start in range(len(text) - PART + 1) if self._parts else ():
            if lowered[start : start + PART] in self._parts:
                if runs and start <= runs[-1][1]:
                    runs[-1][1] = start + PART
                else:
                    runs.append([start, start + PART])
        shown, done = [], 0
        for start, end in runs:
            if lowered[start:end] not in self._prefix:
                shown += [text[done:start], "[key]"]
                done = end
        return "".join([*shown, text[done:]])
