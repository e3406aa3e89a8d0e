"""Does the engine get this model right? Asked of every model before it is sampled from.

Some architectures keep state in ways that cached decoding, left padding or a continuation of
several tokens don't reach (Mamba2 ignores the cache it is given, Jamba's multi-token continuation
its recurrent state) and would give wrong numbers without a word. So the engine's path is held
against plain forward passes without a cache, on two short prompts of unequal length. Sharing the
prefix reaches deeper into the model's attention than copying it: where only that fails, the
portable engine is used.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ia_mech.engine.capture import find_blocks
from ia_mech.engine.loop import decode_step
from ia_mech.engine.prefill import Prefix, can_join, continue_prefill, expand, join, prefill
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError, is_out_of_memory

TOLERANCE = 2e-3  # of the largest logit, in float32; in half precision 16 roundings of it
STEPS = 3
KINDS = (
    "a left-padded batch",
    "cached decoding",
    "a batch that is joined",
    "a prefill that goes on",
    "scoring a turn",
)


def check_engine(model: PreTrainedModel, ids: Sequence[int], wanted: str = "auto") -> Engine:
    """Choose the engine, and compare its prefill, decoding and scoring with full forward passes.

    Args:
        model: the subject model.
        ids: at least 12 token ids of real text.
        wanted: ``auto``, ``shared`` or ``portable``; ``auto`` shares the prefix where the
            architecture has layers for it and the numbers are right.

    Raises:
        UserError: the model's numbers differ, or it can't be run this way; names the architecture.
    """
    engine = Engine.possible(model)
    if wanted == "shared" and not engine.shared:
        raise UserError(
            f"--engine shared: {type(model).__name__} can't ({engine.why})", "use --engine auto"
        )
    if wanted == "portable":
        engine = replace(engine, shared=0, why="")
    try:
        _check(model, list(ids), share=engine.shared > 0)
    except UserError as error:
        if not engine.shared:
            raise
        _check(model, list(ids), share=False)  # raises if the fault is the model's
        if wanted == "shared":
            raise UserError(f"--engine shared: {error.problem}", "use --engine auto") from error
        engine = replace(engine, shared=0, why=error.problem)
    return engine


def _check(model: PreTrainedModel, ids: list[int], share: bool) -> None:
    name = type(model).__name__
    try:
        worst, largest = _differences(model, ids, share)
    except UserError:
        raise
    except Exception as error:  # whatever an architecture raises that isn't made for this
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{name} can't be run by this engine ({' '.join(str(error).split())[:120]})",
            "use a decoder-only model whose blocks pass on one hidden state per token",
        ) from error
    if not largest < torch.inf:
        raise UserError(
            f"the logits of {name} in {model.dtype} are not finite".replace("torch.", ""),
            "use --dtype bfloat16 or float32",
        )
    allowed = max(TOLERANCE, 16 * torch.finfo(model.dtype).eps) * max(1.0, largest)
    for what, difference in worst.items():
        if not difference <= allowed:
            raise UserError(
                f"{name} gives other logits in {what} than in a full forward pass "
                f"({difference:.2g} apart)",
                "use another architecture, or another --attention; sampling would be wrong",
            )


@torch.inference_mode()
def _differences(
    model: PreTrainedModel, ids: list[int], share: bool
) -> tuple[dict[str, float], float]:
    """Largest difference by what was done, and the largest absolute logit."""
    prompts, turn = [ids[:7], ids[:4]], ids[7 : 8 + STEPS]
    prefixes = [Prefix(prompt, [len(prompt) - 1]) for prompt in prompts]
    full = [_full(model, [*prompt, *turn])[len(prompt) - 1 :] for prompt in prompts]
    largest = float(torch.stack([logits.abs().amax() for logits in full]).amax())
    worst = dict.fromkeys(KINDS, 0.0)

    def note(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        worst[what] = max(worst[what], float((ours - theirs).abs().nan_to_num(torch.inf).max()))

    prefilled = prefill(model, prefixes, find_blocks(model))
    for row, logits in enumerate(full):
        note("a left-padded batch", prefilled.logits[row], logits[0])
    rows = [0, 1, 1]  # the context of each
    index = torch.tensor(rows, device=model.device)
    state = expand(prefilled.state, index, capacity=STEPS, share=share)
    for step in range(STEPS):
        token = torch.tensor([turn[step]] * len(rows), device=model.device)
        ours = decode_step(model, state, token)
        for row, context in enumerate(rows):
            note("cached decoding", ours[row], full[context][step + 1])
    if can_join(state):  # a row of context 1 begins in line 0, and the others write their last
        join(state, [0], prefilled.state, index[1:2], [1])
        token = torch.tensor([turn[0], turn[STEPS], turn[STEPS]], device=model.device)
        ours = decode_step(model, state, token)
        for row, (context, step) in enumerate([(1, 0), (1, STEPS), (1, STEPS)]):
            note("a batch that is joined", ours[row], full[context][step + 1])
    if share and Engine.possible(model).whole:  # both prompts, with one more token and two more
        longer = continue_prefill(model, prefilled, [1, 0], [turn[:2], turn[:1]])
        for row, (context, step) in enumerate([(1, 2), (0, 1)]):
            note("a prefill that goes on", longer.logits[row], full[context][step])
    scored = score(model, prefilled, [Turn(context, turn) for context in rows], [], share)
    for row, context in enumerate(rows):
        chosen = torch.tensor(turn, device=model.device)[:, None]
        raw = full[context][: len(turn)].log_softmax(-1).gather(-1, chosen)[:, 0].cpu()
        note("scoring a turn", torch.from_numpy(scored[row].logprobs_raw), raw)
    return worst, largest


def _full(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` float32 of one pass without cache, mask or padding."""
    return model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
