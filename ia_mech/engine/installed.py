"""Put on a model, once, what all passes need; then any number of threads may run it.

An installed model has

- linear weights reordered where that pays (``weights.py``);
- hooks on its blocks, which capture and edit what the current pass says (``passes.py``);
- where rows share their prefix, an attention function that serves the layers which do and leaves
  the others to the model's own (``shared.py``).

Nothing is set or reset around a pass. Outside of passes an installed model computes what it did
before, to the bit: ``generate``, a plain call, a gradient. (A large model on a CPU holds reordered
weights only, and computes with them everywhere; it can't be copied or saved.) Merge adapters and
train weights before a model is installed, or install it again.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.passes import current, hook_blocks
from ia_mech.engine.shared import Engine, attend_shared, is_shared
from ia_mech.engine.weights import reorder_weights
from ia_mech.models.load import ROUTED, rotation_border, text_config

ATTRIBUTE = "_ia_mech_installed"  # of a model: the Installed


@dataclass
class Installed:
    """What passes have to know of a model.

    Attributes:
        depth: how many blocks it has.
        config: of its text model.
        attention: name of the model's own attention implementation.
        border: most tokens of a row, where longer ones are rotated otherwise.
    """

    depth: int
    config: Any
    attention: str
    border: int | None
    _engine: Engine

    @property
    def engine(self) -> Engine:
        """How rows attend to their prefix. Without a shared layer, attention is the model's own,
        and every row has a copy: slower, and what sharing is compared with. It is set while no
        pass is being made."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine
        name = _routed(self.attention) if engine.share else self.attention
        self.config._attn_implementation = name

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """While it lasts, attention is the model's own; for comparisons, while no pass is made."""
        before = self.config._attn_implementation
        self.config._attn_implementation = self.attention
        try:
            yield
        finally:
            self.config._attn_implementation = before


def install(model: PreTrainedModel) -> Installed:
    """Install a model; its rows share their prefix wherever the architecture allows it.

    To install it again is to take note of weights that were changed.

    Raises:
        UserError: its blocks can't be found.
    """
    reorder_weights(model)
    if ATTRIBUTE not in vars(model):
        blocks, config = find_blocks(model), text_config(model.config)
        hook_blocks(blocks)
        engine, border = Engine.possible(model), rotation_border(model.config)
        made = Installed(len(blocks), config, config._attn_implementation, border, engine)
        setattr(model, ATTRIBUTE, made)
        made.engine = engine
    return installed(model)


def installed(model: PreTrainedModel) -> Installed:
    """What was noted of a model when it was installed.

    Raises:
        RuntimeError: it wasn't.
    """
    made = vars(model).get(ATTRIBUTE)
    if made is None:
        raise RuntimeError(f"{type(model).__name__} isn't installed: call install, or check_engine")
    return cast(Installed, made)


def _routed(original: str) -> str:
    """The name under which attention goes to shared layers' own function, or to the original."""
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
        # As the model's own code looks it up: each has an eager function of its own.
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
        # Padding is shown the first column, padding itself: of a query that sees nothing, kernels
        # for GPUs have made NaN, which goes on to others as zero times NaN.
        made = made.clone()
        made[..., 0] |= ~made.any(-1)
        return made

    return mask
