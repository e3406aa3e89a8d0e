"""The sampling rule, written plainly: one row at a time, in Python's integers and in float64.

A uniform number is (word + 1/2) / 2**32 in float32, as the rule has it: close to one, where float32
is coarse, the noise of the exact number would be another.
"""

import numpy as np

BLOCK = 64
# By how much a score in float32 may be off. Noise lies between -2.9 and 22.9, so what can win, or
# nearly, is within |x| = 29 of the best before noise. In units of 2**-24: 4 |x| for the difference,
# the factor and the product; 2 for the power; 63 for the sum of 64; 2 |x| for its logarithm; 4 * 23
# for two logarithms that make the noise; |x| + 23 for adding it. That is 383, or 2.3e-5.
ROUNDING = 2.5e-5
_MASK = 0xFFFFFFFF


def philox(counter, key) -> tuple[int, ...]:
    """Philox4x32-10, from the paper's description."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def noise(key, numbers, step: int, level: int) -> np.ndarray:
    """Gumbel noise ``[numbers]`` of tokens (level 0) or blocks (level 1), float64."""
    words = [philox((n // 4, step, level, 0), key)[n % 4] for n in numbers]
    uniform = (np.array(words, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(float)))


def draw(logits, temperature: float, key, step: int) -> tuple[int, float]:
    """The token that a row draws, and its margin.

    Args:
        logits: ``[vocab]``.
        temperature: 0 for greedy.
        key: the two words of the row's stream.
        step: index of the token within its row.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if not temperature:
        return int(logits.argmax()), _lead(logits)
    scores = (logits - logits.max()) / temperature
    blocks = [range(start, len(scores))[:BLOCK] for start in range(0, len(scores), BLOCK)]
    with np.errstate(divide="ignore"):
        of_blocks = np.array([np.log(np.exp(scores[block]).sum()) for block in blocks])
    of_blocks += noise(key, range(len(blocks)), step, level=1)
    block = blocks[int(of_blocks.argmax())]
    of_tokens = scores[block] + noise(key, block, step, level=0)
    return block[int(of_tokens.argmax())], min(_lead(of_blocks), _lead(of_tokens))


def _lead(scores: np.ndarray) -> float:
    if len(scores) == 1:
        return np.inf
    second, first = np.sort(scores)[-2:]
    return float(first - second)
