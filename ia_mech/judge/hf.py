"""A local causal language model as a judge, without a server.

It doesn't write: the rubric's names are scored as the assistant's answer, and the likeliest is the
verdict. So there is always one, and a probability for each category with it.
"""

from collections.abc import Sequence
from itertools import takewhile

import torch

from ia_mech.chat.template import ChatTemplate, message
from ia_mech.engine.check import check_engine
from ia_mech.engine.memory import Backoff
from ia_mech.engine.score import Turn, score
from ia_mech.engine.splice import continued
from ia_mech.engine.state import Prefilled, Prefix, prefill
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.judge import prompt
from ia_mech.judge.rubric import BUILT_IN, Rubric
from ia_mech.judge.verdict import Item, Judge, Verdict
from ia_mech.models.load import ModelSpec, Subject, context_limit, load, refuse_unknown_ids

# An item without content: how likely the model finds each name regardless of the texts.
CONTENT_FREE = Item("N/A", "N/A", "N/A")

UNLIKE_TEXTS = "a", "7"  # texts that have no beginning in common


class HfJudge(Judge):
    """Judges by the likelihood of each category's name as the answer of a causal language model.

    The score of a category is the log-probability of all tokens of its name after the prompt, minus
    the same for an item without content (contextual calibration, Zhao et al. 2021, arXiv
    2102.09690). It isn't divided by the name's length: no name begins another, so these are
    log-probabilities of events that exclude each other, and calibration takes away what a long
    name costs. ``scores`` is the softmax over all names, ``cannot_assess`` included.

    The rubric's part of a prompt is run through the model once, and query and response once for
    all turns of theirs that stand together. Items go one by one and unpadded, their answers as
    one right-padded batch, so a verdict doesn't depend on what else is judged.

    ``model`` and ``device`` are given as for sampling, or a model that is loaded already as
    ``subject``. It needs a chat template; thinking is switched off where that allows it.

    Raises:
        UserError: a model that can't be loaded, has no chat template, or that the engine gets
            wrong.
    """

    paid = True

    def __init__(
        self,
        model: str,
        device: str = "auto",
        rubric: Rubric = BUILT_IN,
        *,
        subject: Subject | None = None,
    ) -> None:
        self.model = model
        self.rubric = rubric
        self._subject = subject or load(ModelSpec(name=model, device=device))
        self._template = ChatTemplate(self._subject.tokenizer)
        self._rubric = self._common_ids(*(Item(mark, "", "") for mark in UNLIKE_TEXTS))
        # States after tokens that several prompts begin with: the rubric, and the last context.
        self._states: dict[tuple[str, ...], tuple[list[int], Prefilled]] = {}
        check_engine(self._subject.model, self._rubric[:64])
        self._answers = [self._answer_ids(name) for name in rubric.names]
        self._prior: torch.Tensor | None = None  # [categories], of the item without content
        self._backoff = Backoff(len(rubric.names))
        self.identity = {
            "kind": "hf",
            "model": model,
            "rubric": rubric.hash,
            "prompt": prompt.prompt_hash(rubric, names_only=True),
            "calibrated": True,
            "weights_hash": self._subject.weights_hash,
            "template": self._template.hash,
        }

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """An item that is too long for the model, or for the device's memory, is ``rejected``."""
        return [self._verdict(item) for item in items]

    def log_likelihoods(self, item: Item) -> torch.Tensor:
        """Log-probability of each name after the item's prompt, in nats; ``[categories]`` float64.

        Raises:
            UserError: the prompt is longer than the model's context, or has tokens that it hasn't.
        """
        ids = self._prompt_ids(item)
        refuse_unknown_ids(ids, self._subject.model.config)
        limit = context_limit(self._subject.model.config)
        longest = max(len(answer) for answer in self._answers)
        if limit is not None and len(ids) + longest > limit:
            problem = f"the prompt has {len(ids)} tokens, the model takes {limit}"
            raise UserError(problem, "use a model with a longer context")
        model = self._subject.model
        with torch.inference_mode():
            prefilled = self._prefilled(item, ids)
            turns = [Turn(0, answer) for answer in self._answers]
            scored = self._backoff.map(lambda group: score(model, [prefilled], group), turns)
        return torch.tensor(
            [float(s.logprobs_raw.astype("float64").sum()) for s in scored]
        ).double()

    # -- one item ------------------------------------------------------------------------------

    def _verdict(self, item: Item) -> Verdict:
        try:
            if self._prior is None:
                self._prior = self.log_likelihoods(CONTENT_FREE)
            logits = self.log_likelihoods(item) - self._prior
        except UserError as problem:
            return Verdict(None, "rejected", error=str(problem))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return Verdict(None, "rejected", error="the item doesn't fit into the device's memory")
        if not logits.isfinite().all():  # max() would take the first of NaNs, which is a follow-up
            return Verdict(None, "unparsable", error=f"{self.model} gives no finite likelihoods")
        scores = logits.softmax(-1).tolist()
        best = max(range(len(scores)), key=scores.__getitem__)
        return Verdict(
            self.rubric.names[best],
            scores=dict(zip(self.rubric.names, scores, strict=True)),
            rationale=f"the likeliest answer of {self.model}, at {scores[best]:.2f}",
            mode="likelihood",
        )

    def _prefilled(self, item: Item, ids: list[int]) -> Prefilled:
        """The state after a prompt, from the states after the rubric and after the context."""
        context = item.query, item.response
        if not self._states:
            self._states[()] = self._rubric, prefill(self._subject.model, [Prefix(self._rubric)])
        if context not in self._states:
            shared = self._common_ids(*(Item(*context, mark) for mark in UNLIKE_TEXTS))
            self._states = {(): self._states[()]}  # an earlier context's goes first
            self._states[context] = shared, self._continued((), shared)
        return self._continued(context, ids)

    def _continued(self, prefix: tuple[str, ...], ids: list[int]) -> Prefilled:
        """The state after a prompt that begins with a prefix, whose state is left as it was."""
        model, (done, state) = self._subject.model, self._states[prefix]
        if ids[: len(done)] != done:  # tokens merged across the border
            return prefill(model, [Prefix(ids)])
        return continued(model, state, ids[len(done) :])

    # -- text and tokens -----------------------------------------------------------------------

    def _prompt_text(self, item: Item) -> str:
        """The dialogue up to where the assistant answers."""
        system, user = prompt.messages(item, self.rubric, names_only=True)
        options = {"add_generation_prompt": True, "enable_thinking": False}
        try:
            return self._template.render([system, user], **options)
        except UserError:  # no system messages: all goes to the user's
            whole = message("user", f"{system['content']}\n\n{user['content']}")
            return self._template.render([whole], **options)

    def _prompt_ids(self, item: Item) -> list[int]:
        return self._template.encode(self._prompt_text(item))[0]

    def _common_ids(self, *items: Item) -> list[int]:
        """The ids that prompts begin with, minus the last few, which what differs may change."""
        together = zip(*(self._prompt_ids(item) for item in items), strict=False)
        common = [same[0] for same in takewhile(lambda ids: len({*ids}) == 1, together)]
        return common[: max(1, len(common) - 4)]

    def _answer_ids(self, name: str) -> list[int]:
        """The tokens of a name at the start of the assistant's turn."""
        before = self._prompt_text(CONTENT_FREE)
        whole, start = self._template.encode(before + name)[0], self._template.encode(before)[0]
        return (
            whole[len(start) :] if whole[: len(start)] == start else self._template.encode(name)[0]
        )
