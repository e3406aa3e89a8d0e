"""Judges of generated user turns, by one rubric, and annotators' labels to hold them against.

The package reads texts (query, response, user turn) and labels; it never reads activations or
log-probabilities, and never loads the subject model: labels made from those would make every later
probe of them circular. ``verdict`` is the contract of a judge and explains how to add one;
``decoys`` is the control of all of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.judge.verdict import Judge
    from ia_mech.run import Run


def builtin_judge() -> "Judge":
    """The built-in judge, whose ``judge(items)`` gives verdicts on :class:`verdict.Item` objects.

    Its encoder is downloaded once, when it first judges.
    """
    from ia_mech.judge.builtin import BuiltInJudge

    return BuiltInJudge()


def label(
    run: "str | Path | Run", judge: "Judge | None" = None, name: str = "builtin"
) -> "pd.DataFrame":
    """Have a judge label the user turns of a run, and its decoys, as ``ia-mech judge run`` does.

    Args:
        run: or its folder, where the verdicts are kept. Verdicts that cost time or money come from
            the cache; the built-in judge's are made again (``run.labelled()`` reads those there).
        judge: the built-in judge unless another is given.
        name: of its verdicts in the run.

    Returns:
        What ``run.labelled(name)`` gives: a row per turn, with ``category`` and ``follow_up``.

    Raises:
        UserError: as :func:`ia_mech.judge.judging.label_run`; the judge isn't an object.
    """
    from ia_mech.display import Bar
    from ia_mech.judge.judging import label_run
    from ia_mech.judge.verdict import Judge
    from ia_mech.run import Run

    if judge is not None and not isinstance(judge, Judge):
        raise UserError(
            f"{judge!r} is no judge",
            "give an object of a class of ia_mech.judge.verdict.Judge, or use ia-mech judge run",
        )
    run = run if isinstance(run, Run) else Run.open(run)
    label_run(run, judge or builtin_judge(), name, Bar())
    return run.labelled(name)
