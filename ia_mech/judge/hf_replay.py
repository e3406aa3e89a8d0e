"""A local model's verdicts again, without the model.

What the model's weights hash to is known only when it is loaded, and is part of the judge's
identity. A replay finds the cache by the rest of the identity instead.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache, identities
from ia_mech.judge.llm import prompt
from ia_mech.judge.rubric import rubric_hash
from ia_mech.judge.verdict import Item, Verdict


def described(model: str) -> dict[str, Any]:
    """The part of a local judge's identity that its name and the rubric decide."""
    return {
        "kind": "hf",
        "model": model,
        "rubric": rubric_hash(),
        "prompt": prompt.prompt_hash(names_only=True),
        "calibrated": True,
    }


class HfReplay:
    """Stands in for an ``HfJudge`` whose verdicts are all in the cache. Loads nothing.

    One name may have been several models: a hub id that moved on, a folder with other weights, the
    same on a CPU and in half precision on a GPU. The cache that holds all that is asked for is
    taken; which of two such is meant, only the model can tell.

    Args:
        model: as it was given to the judge.
        items: what is to be judged.
        folder: of the caches; ``cache/judgements`` by default.

    Raises:
        UserError: no such verdicts, or of several models; a damaged cache.
    """

    paid = True

    def __init__(self, model: str, items: Sequence[Item], folder: Path | None = None) -> None:
        wanted = list(dict.fromkeys(items))
        found = []
        for identity in identities(described(model), folder):
            with VerdictCache(identity, folder, read_only=True) as cache:
                found.append((sum(cache.get(item, 0) is not None for item in wanted), identity))
        if not found:
            raise UserError(
                f"--replay: none of {len(wanted)} verdicts of {model} by this rubric is in the "
                f"cache, the first for the turn {wanted[0].turn[:60]!r}",
                "leave --replay out to judge them",
            )
        whole = [identity for count, identity in found if count == len(wanted)]
        if len(whole) > 1:
            weights = ", ".join(identity["weights_hash"] for identity in whole)
            raise UserError(
                f"--replay: the cache has verdicts of several models named {model} (weights "
                f"{weights})",
                "leave --replay out: the model is loaded then, and what it has judged is free",
            )
        # Of several that lack something, the miss is told of the one that lacks least.
        self.identity: dict[str, Any] = (whole or [max(found, key=lambda pair: pair[0])[1]])[0]

    def is_subject(self, model: dict[str, Any]) -> bool:
        """Whether the verdicts are of the weights that a run records of its ``model``.

        In its dtype only: another's hash needs the weights. They were compared when it judged.
        """
        return model["weights_hash"] == self.identity["weights_hash"]

    def estimate(self, items: Sequence[Item]) -> str:
        return ""

    def judge(self, items: Sequence[Item], repeats: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Nothing: there is no model."""
        if items:
            raise RuntimeError("a replay was asked to judge")
        return iter(())
