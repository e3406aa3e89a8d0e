"""The temperatures that given user turns are scored at."""

from collections.abc import Iterable

SCORED = (
    *(round(0.1 * step, 1) for step in range(1, 16)),  # 0.1, 0.2, … 1.5
    *(1.75, 2.0, 2.25, 2.5, 3.0),
)


def scored_temperatures(sampled: Iterable[float]) -> tuple[float, ...]:
    """:data:`SCORED` with the temperatures that a run samples at, ascending."""
    return tuple(sorted({*SCORED, *sampled}))
