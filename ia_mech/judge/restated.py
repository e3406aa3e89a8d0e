"""Turns that may only ask the query again: a rough rule on words, not a label."""

from ia_mech.judge.builtin.features import FUNCTION_WORDS, WORD


def restates(query: str, text: str) -> bool:
    """Whether more than half of a turn's distinct words, without function words, are the query's.

    Of follow-ups these are suspects: a wrong conversation can't show whether they take up the
    response or only say the query in other words.
    """
    asked, said = ({*WORD.findall(one.lower())} - FUNCTION_WORDS for one in (query, text))
    return len(said & asked) > len(said) / 2
