"""Which row is decoded where and when, for any mix of rows, widths and lengths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ia_mech.engine.loop import COMPACT_BELOW, Schedule
from ia_mech.engine.shared_prefix import BatchSlots

LENGTHS = st.lists(st.integers(1, 9), max_size=40)  # how many tokens each row will draw
WIDTHS = st.integers(1, 12)
steady = settings(derandomize=True, deadline=None, max_examples=80)


def run(lengths: list[int], width: int) -> list[list[int]]:
    """Drive a schedule as the loop does; the rows in the batch at each step."""
    schedule, drawn, steps = Schedule(len(lengths), width), [0] * len(lengths), []
    while True:
        while schedule.waiting and schedule.free:
            rows = schedule.take(schedule.free)
            for row in rows:
                drawn[row] += 1
            going = [row for row in rows if drawn[row] < lengths[row]]
            lines = schedule.place(going)
            assert [schedule.slots[line] for line in lines] == going
        if not schedule.busy:
            assert drawn == lengths, "every row, each of its tokens once"
            return steps
        if schedule.waiting:
            assert len(schedule.busy) == width, "full as long as rows wait"
        kept = schedule.compact()
        if kept is not None:
            assert not schedule.waiting and schedule.busy == list(range(len(kept)))
        elif not schedule.waiting:
            assert len(schedule.busy) > COMPACT_BELOW * len(schedule.slots)
        rows = [schedule.slots[line] for line in schedule.busy]
        assert len(set(rows)) == len(rows) and len(schedule.slots) <= width
        assert [schedule.age[line] for line in schedule.busy] == [drawn[row] for row in rows]
        for row in rows:
            drawn[row] += 1
        schedule.drawn(
            [at for at in schedule.busy if drawn[(row := schedule.slots[at])] == lengths[row]]
        )
        steps.append(rows)


@steady
@given(LENGTHS, WIDTHS)
def test_every_row_draws_its_tokens_once_in_a_full_batch(lengths, width):
    steps = run(lengths, width)
    decoded = [row for rows in steps for row in rows]
    assert sorted(decoded) == sorted(
        row for row, length in enumerate(lengths) for _ in range(length - 1)
    )
    firsts = [decoded.index(row) for row, length in enumerate(lengths) if length > 1]
    assert firsts == sorted(firsts), "rows begin in order"
    for row in set(decoded):
        at = [step for step, rows in enumerate(steps) if row in rows]
        assert at == list(range(at[0], at[0] + len(at))), "and go on without a pause"


@steady
@given(LENGTHS, WIDTHS)
def test_no_more_steps_than_a_full_batch_needs(lengths, width):
    work = sum(length - 1 for length in lengths)
    longest = max(lengths, default=1) - 1
    assert len(run(lengths, width)) <= work // width + longest


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 30)), min_size=1, max_size=12
)


@steady
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), STEPS)
def test_lines_write_at_their_own_age_and_look_no_further(contexts, steps):
    """Against a plain list per line: what it holds, and what a token may look at."""
    lines = BatchSlots(contexts, torch.float32, torch.device("cpu"))
    held: list[list[float]] = [[] for _ in contexts]
    idle: set[int] = set()
    buffer, count = torch.zeros(12, 1, 40, 1), 0.0
    for begun, seed in steps:
        free = [*sorted(idle), *range(len(held), 12)][: len(begun)]
        lines.put(free, begun[: len(free)])
        for line in free:
            idle.discard(line)
            held[line : line + 1] = [[]]
        leaving = [line for line in range(len(held)) if line not in idle and (seed >> line) & 1]
        if len(leaving) + len(idle) < len(held):
            lines.retire(leaving)
            idle.update(leaving)
        new = 1 + seed % 3
        states = count + torch.arange(len(held) * new, dtype=torch.float32).view(-1, 1, new, 1)
        count += len(held) * new
        lines.begin(new)
        used = lines.write(buffer, states)
        step = lines.step
        assert used.shape == (len(held), 1, step.end, 1)
        for line, mine in enumerate(held):
            if line in idle:
                continue
            before = len(mine)
            mine += states[line, 0, :, 0].tolist()
            for at in range(new):
                seen = torch.ones(step.end, dtype=torch.bool)
                if step.bias is not None:
                    seen = step.bias[line if len(step.bias) > 1 else 0, 0, at] == 0
                assert used[line, 0, seen, 0].tolist() == mine[: before + at + 1]
        lines.finish(new)
        assert step.end == max(len(mine) for line, mine in enumerate(held) if line not in idle)
    order = list(range(len(held))) if lines.order is None else lines.order.tolist()
    for span in lines.spans:
        assert {lines.contexts[line] for line in order[span.start : span.stop]} == {span.context}
    assert sum(span.stop - span.start for span in lines.spans) == len(held)
    assert len({span.context for span in lines.spans}) == len(lines.spans)
