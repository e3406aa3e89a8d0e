"""The start-up check of static buffers, which runs on a GPU after that of the engine.

Where it finds something against them, the ordinary loop is used; the reason is recorded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.check import TOLERANCE
from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.layers import STATIC
from ia_mech.engine.cuda.stepper import StaticBuffers
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Row
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.models.load import accepts, text_config

ROWS, TOKENS = 33, 5  # rows of one context, and what each of them writes


def with_static_buffers(
    model: PreTrainedModel, ids: Sequence[int], engine: Engine, wanted: str = "auto"
) -> Engine:
    """The engine, with static buffers if the model is on a GPU and its numbers are right in them.

    Args:
        model: the subject model.
        ids: at least 12 token ids of real text.
        engine: that was checked.
        wanted: with ``graphs`` steps are captured; ``portable`` refuses static buffers, which share
            the prefix.

    Raises:
        UserError: ``graphs`` is wanted, and can't be.
    """
    if model.device.type != "cuda" or wanted == "portable":
        return engine
    graphs = wanted == "graphs"
    # Where layers that can be shared are not, their attention was found wrong.
    if engine.shared < Engine.possible(model).shared:
        problem = engine.why
    else:
        problem = why_not(model) or _failure(model, list(ids), graphs)
    if not problem:
        return replace(engine, static=True, graphs=graphs, why="")
    if graphs:
        raise UserError(f"--engine graphs: {problem}", "use --engine auto")
    whys = dict.fromkeys([engine.why, problem])  # once where they are the same
    return replace(engine, why="; ".join(filter(None, whys)))


def why_not(model: PreTrainedModel) -> str:
    """What keeps this model from being decoded in static buffers; empty where nothing does."""
    kinds = (type(layer) for layer in DynamicCache(config=model.config).layers)
    other = next((kind.__name__ for kind in kinds if kind not in STATIC), None)
    if other is not None:
        return f"no static buffers: there are none for a {other}"
    # Their caches are those of sliding windows, their masks are not.
    if getattr(text_config(model.config), "attention_chunk_size", None) is not None:
        return "no static buffers: some layers attend in chunks"
    if not accepts(model, "position_ids"):
        return "no static buffers: the model finds positions by itself"
    return ""


def _failure(model: PreTrainedModel, ids: list[int], graphs: bool) -> str:
    """Why static buffers fail for this model; empty where they don't."""
    try:
        problem = _difference(model, ids, graphs)
    except Exception as error:  # whatever a model does that can't be captured
        # Leaving a capture that failed raises once more.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        problem = "out of memory" if is_out_of_memory(error) else " ".join(str(first).split())[:120]
    kernel = " (with Triton; IA_MECH_TRITON=0 is without)" if fused.available(model.device) else ""
    return f"no static buffers: {problem}{kernel}" if problem else ""


@torch.inference_mode()
def _difference(model: PreTrainedModel, ids: list[int], graphs: bool) -> str:
    """Decode rows of two contexts greedily, and compare what is recorded with full passes."""
    prompts, contexts = [ids[:7], ids[7:11]], [0] + [1] * ROWS
    group = prefill(model, [Prefix(prompt) for prompt in prompts])
    buffers = StaticBuffers(model, 2, ROWS, 7, TOKENS, graphs)
    rows = [Row(context, 0.0, (0, 0)) for context in contexts]
    decoded = decode(model, group, rows, [], TOKENS, static=buffers)
    worst, largest = 0.0, 1.0
    for row in (0, 1, ROWS):
        wrote = torch.from_numpy(decoded[row].token_ids)
        prompt = prompts[contexts[row]]
        whole = torch.tensor([[*prompt, *wrote.tolist()]], device=model.device)
        logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].double().cpu()
        theirs = logits.log_softmax(-1).gather(-1, wrote[:, None])[:, 0]
        apart = (torch.from_numpy(decoded[row].logprobs_raw) - theirs).abs().nan_to_num(torch.inf)
        worst, largest = max(worst, float(apart.max())), max(largest, float(logits.abs().max()))
    # A log-probability is off by twice what its logits are off by. Rows that read each other's
    # contexts are found in every dtype (the embedded model: 6.9 nats, where bfloat16 allows 0.96
    # and takes 0.13); rows displaced by a token (0.17 nats) only in float32, as in the tests.
    allowed = 2 * max(TOLERANCE, 2 * torch.finfo(model.dtype).eps) * largest
    return "" if worst <= allowed else f"log-probabilities differ from a full pass by {worst:.2g}"
