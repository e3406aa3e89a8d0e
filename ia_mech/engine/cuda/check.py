"""The start-up check of static buffers, which runs on a GPU after that of the engine.

Where it finds something against them, the ordinary loop is used; the reason is recorded.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.check import check_rows
from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.layers import STATIC
from ia_mech.engine.cuda.stepper import StaticBuffers
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.models import parallel
from ia_mech.models.load import accepts, text_config


def with_static_buffers(
    model: PreTrainedModel, ids: Sequence[int], engine: Engine, wanted: str = "auto"
) -> Engine:
    """The engine, with static buffers if the model is on a GPU and its numbers are right in them.

    Args:
        model: the subject model.
        ids: token ids of real text, as many as the engine's check takes.
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
    if parallel.active() or getattr(model, "hf_device_map", None):
        return "no static buffers: the model is on several devices"
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
        with torch.inference_mode():
            check_rows(model, ids, partial(_decode_rows, model, graphs))
        problem = ""
    except UserError as error:
        problem = error.problem
    except Exception as error:  # whatever a model does that can't be captured
        # Leaving a capture that failed raises once more.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        problem = "out of memory" if is_out_of_memory(error) else " ".join(str(first).split())[:120]
    kernel = " (with Triton; IA_MECH_TRITON=0 is without)" if fused.available(model.device) else ""
    return f"no static buffers: {problem}{kernel}" if problem else ""


def _decode_rows(
    model: PreTrainedModel, graphs: bool, prefilled: Prefilled, rows: list[Row], tokens: int
) -> list[Decoded]:
    contexts, longest = prefilled.state.mask.shape
    buffers = StaticBuffers(model, contexts, len(rows), longest, tokens, graphs)
    return decode(model, prefilled, rows, [], tokens, static=buffers)
