"""Judges of generated user turns, by one rubric, and annotators' labels to hold them against.

The package reads texts (query, response, user turn) and labels; it never reads activations or
log-probabilities, and never loads the subject model: labels made from those would make every later
probe of them circular. ``verdict`` is the contract of a judge and explains how to add one;
``decoys`` is the control of all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.judge.verdict import Item, Judge
    from ia_mech.run import Run


def builtin_judge() -> "Judge":
    """The built-in judge, whose ``judge(items)`` gives verdicts on :class:`verdict.Item` objects.

    Its encoder is downloaded once, when it first judges.
    """
    from ia_mech.judge.builtin import BuiltInJudge

    return BuiltInJudge()


def label(
    run: "str | Path | Run",
    judge: "Judge | Callable[[Item], str | bool] | None" = None,
    name: str | None = None,
    *,
    replace: bool = False,
) -> "pd.DataFrame":
    """Have a judge label the user turns of a run, and its decoys, as ``ia-mech judge run`` does.

    Labels by the built-in judge that are there already stay as they are. A judge of your own
    judges again each time, since nothing tells whether its code has changed; if it says that it is
    ``paid``, its labels come from the cache.

    Args:
        run: or its folder, where the labels are kept.
        judge: the built-in judge if not given; a function that takes an
            :class:`ia_mech.judge.verdict.Item` (``query``, ``response``, ``turn``) and returns True
            for a follow-up and False for any other turn, or always a category of the rubric, such
            as ``"generic"``; or a :class:`ia_mech.judge.verdict.Judge`.
        name: of its labels in the run; if not given, ``builtin`` or the name of the function or
            class.
        replace: whether to judge again and replace what is there under the name, also if another
            judge made it.

    Returns:
        What ``run.labelled(name)`` gives: a row per turn, with ``text``, ``category``,
        ``follow_up`` and ``follow_up_probability``.

    Raises:
        UserError: as :func:`ia_mech.judge.judging.label_run`; the judge is neither a function nor
            such an object.
    """
    from ia_mech.display import Bar
    from ia_mech.judge.judging import label_run
    from ia_mech.judge.shown import counts_of, judged_text
    from ia_mech.judge.verdict import Judge, judge_of
    from ia_mech.run import Run

    if judge is None:
        judge, name = builtin_judge(), name or "builtin"
    elif not isinstance(judge, Judge):
        if isinstance(judge, type) or not callable(judge):
            raise UserError(
                f"{judge!r} is no judge",
                "give a function of an item that returns True, False or a category, or an object "
                "of a subclass of ia_mech.judge.verdict.Judge (language models: ia-mech judge run)",
            )
        judge = judge_of(judge)
    name = name or type(judge).__name__
    run = run if isinstance(run, Run) else Run.open(run)
    label_run(run, judge, name, bar := Bar(), replace=replace)
    turns = run.labelled(name)
    items = run.labels.judgements(name, ["item"])["item"]
    judged = judged_text(items, run.labels.decoys(name, columns=["item", "decoy"]))
    bar.say(f"labels by {name} of {judged}: {counts_of(turns['category'], judge.rubric)}")
    return turns
