"""Queries whose turns are read under knockouts."""

from experiments.given_turns import Given
from experiments.knockout.block import Asked
from ia_mech.errors import UserError


def asked_of(given: Given, responses: int, turns: int) -> tuple[list[Asked], list[str]]:
    """The queries with their first responses, and what a reader has to know.

    Args:
        given: turns after several responses.
        responses: K.
        turns: most turns after each response.

    Raises:
        UserError: there are fewer responses, or fewer than two queries with a turn after each.
    """
    most = len(given.queries[0].contexts)
    if responses > most:
        raise UserError(f"--responses {responses}: there are {most} to each query", "give fewer")
    found = []
    for query in given.queries:
        contexts = tuple(given.contexts[query.source][:responses])
        after = given.turns[query.source][:responses]
        if all(after) and all(context.response for context in contexts):
            own = tuple((turn, k) for k, some in enumerate(after) for turn in some[:turns])
            found.append(Asked(query.source, query.dataset, contexts, own))
    if len(found) < 2:
        raise UserError(
            f"{len(found)} queries have {responses} responses with text and turns after each",
            "give runs of two queries or more",
        )
    left = len(given.queries) - len(found)
    notes = [f"{left} queries have an empty response, or one without turns; they are left out."]
    return found, notes if left else []
