"""Put on a model, once, what all passes need; any number of threads may then run the model.

An installed model has

- linear weights reordered where that pays (``weights.py``);
- hooks on its blocks, which capture and edit what the current pass says (``passes.py``);
- on CUDA, fused norms in the engine's passes (``norms.py``);
- where rows share their prefix, an attention function for the layers that share it; the other
  layers keep the model's own (``shared.py``).

Nothing is set or reset around a pass. Outside of the engine's passes an installed model computes
what it did before, to the bit: ``generate``, a plain call, a gradient. (A large model on a CPU
holds reordered weights only, and computes with them everywhere; it can't be copied or saved.) Merge
adapters and train weights before a model is installed, or install it again.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.norms import fuse_norms
from ia_mech.engine.passes import current, hook_blocks
from ia_mech.engine.shared import Engine, attend_shared, is_shared
from ia_mech.engine.weights import pack_rows, reorder_weights
from ia_mech.models.load import ROUTED, rotation_border, text_config

ATTRIBUTE = "_ia_mech_installed"  # a model's attribute that holds its Installed


class LayerBytes(NamedTuple):
    """The bytes that each of so many alike layers holds of a sequence: ``each`` per token for the
    last ``most`` tokens (None: for all), and ``fixed`` at any length. ``shared``: rows refer to
    their context's, however long it is."""

    layers: int
    each: int
    most: int | None
    fixed: int
    shared: bool

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, in one layer."""
        return self.fixed + self.each * (tokens if self.most is None else min(tokens, self.most))


@dataclass
class Installed:
    """What passes need to know about a model.

    Attributes:
        depth: how many blocks it has.
        config: of its text model.
        attention: name of the model's own attention implementation.
        border: most tokens of a row, if the model rotates longer rows differently; else None.
        held: what the layers of its cache hold, once the start-up check has measured it.
    """

    depth: int
    config: Any
    attention: str
    border: int | None
    _engine: Engine
    held: tuple[LayerBytes, ...] = ()

    @property
    def engine(self) -> Engine:
        """How rows attend to their prefix. Without a shared layer, attention is the model's own and
        every row has a copy: slower, and the reference for sharing. Set it only while no pass
        runs."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine
        name = _routed(self.attention) if engine.share else self.attention
        self.config._attn_implementation = name

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """While it lasts, attention is the model's own. For comparisons while no pass runs."""
        before = self.config._attn_implementation
        self.config._attn_implementation = self.attention
        try:
            yield
        finally:
            self.config._attn_implementation = before


def install(model: PreTrainedModel) -> Installed:
    """Install a model; its rows share their prefix wherever the architecture allows it.

    Installing a model again takes note of weights that have changed.

    Raises:
        UserError: its blocks can't be found.
    """
    reorder_weights(model)
    if model.device.type == "cuda":
        fuse_norms(model)
    if ATTRIBUTE not in vars(model):
        blocks, config = find_blocks(model), text_config(model.config)
        hook_blocks(blocks)
        if model.device.type == "cpu":
            pack_rows(model)
        engine, border = Engine.possible(model), rotation_border(model.config)
        made = Installed(len(blocks), config, config._attn_implementation, border, engine)
        setattr(model, ATTRIBUTE, made)
        made.engine = engine
    return installed(model)


def installed(model: PreTrainedModel) -> Installed:
    """What passes need to know about an installed model.

    Raises:
        RuntimeError: the model isn't installed.
    """
    made = vars(model).get(ATTRIBUTE)
    if made is None:
        raise RuntimeError(f"{type(model).__name__} isn't installed: call install, or check_engine")
    return cast(Installed, made)


def _routed(original: str) -> str:
    """Register attention by a shared layer's function or else the original; returns its name."""
    name = f"{ROUTED}{original}"
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    AttentionInterface.register(name, _shared_or(original))
    if original in masks:
        masks[name] = _mask_or_none(masks[original])
    return name


def _shared_or(original: str) -> Callable:
    def attention(module, query, key, value, attention_mask, **kwargs):
        if is_shared(key):
            return attend_shared(module, query, key, value, attention_mask, **kwargs)
        # Looked up as the model's own code does: each architecture has its own eager function.
        code = sys.modules[type(module).__module__]
        eager = getattr(code, "eager_attention_forward", None)
        function = code.ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return function(module, query, key, value, attention_mask, **kwargs)

    return attention


def _mask_or_none(original: Callable) -> Callable:
    def mask(*args, **kwargs):
        one = current()
        if one is not None and not one.masked:
            return None
        made = original(*args, **kwargs)
        if one is None or made is None or made.dtype != torch.bool:
            return made
        # Padding may see the first column, which is padding, too. For a query that sees nothing,
        # kernels for GPUs have made NaN, and zero times NaN would reach other tokens.
        made = made.clone()
        made[..., 0] |= ~made.any(-1)
        return made

    return mask
