"""Estimate, without a model's weights, what its rows hold and how long its passes take.

The model is made on the ``meta`` device, where tensors have shapes and no numbers, and reads a few
tokens there. It fills a cache of the layers' own kinds there, and what a row holds is read off that
cache: keys and values, sliding windows, recurrent and convolution states.
"""

import copy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ia_mech.engine.state import held_tensors, is_full
from ia_mech.engine.workers import MOST_WORKERS, usable_cores
from ia_mech.models.load import text_config

PROBE = 4  # tokens that are read on the meta device
RESERVE = 8  # one part in so many of a device's memory is left to activations and drivers
LOGITS_HELD = 3  # a step's logits, and two copies while a token is drawn from them
# Operations of matrix products a second, and bytes read a second: of one CPU core, as measured
# (AVX-512, 96 rows), and of a GPU, as estimated.
OPERATIONS = {"cpu": 4e10, "cuda": 2e14}
BANDWIDTH = {"cpu": 1.4e10, "cuda": 2e12}


@dataclass(frozen=True)
class LayerBytes:
    """The bytes that a layer holds of a sequence: ``each`` per token for the last ``most`` tokens
    (None: for all), and ``fixed`` at any length. ``full``: rows may share it (full attention)."""

    each: int
    most: int | None
    fixed: int
    full: bool

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return self.fixed + self.each * (tokens if self.most is None else min(tokens, self.most))


@dataclass(frozen=True)
class Footprint:
    """A model's sizes in bytes.

    Attributes:
        layers: what each layer of its cache holds.
        weights: bytes of all weights.
        parameters: how many parameters there are.
        vocab: how many logits a token has.
        shared: whether rows share their context in the layers of full attention.
    """

    layers: tuple[LayerBytes, ...]
    weights: int
    parameters: int
    vocab: int
    shared: bool = True

    def context(self, tokens: int) -> int:
        """Bytes of a prefilled context of so many tokens."""
        return sum(layer.of(tokens) for layer in self.layers)

    def row(self, tokens: int, new: int) -> int:
        """Most bytes of a row that goes on from such a context for ``new`` tokens: its own state,
        one layer of it twice while that is replaced, and its logits."""
        copied = [x.of(tokens + new) for x in self.layers if not (x.full and self.shared)]
        own = sum(x.of(new) for x in self.layers if x.full and self.shared)
        return own + sum(copied) + max(copied, default=0) + LOGITS_HELD * 4 * self.vocab

    def seconds(self, tokens: int, passes: int, device: str) -> float:
        """About how many seconds so many tokens take in so many passes that read all weights."""
        cores = usable_cores() if device == "cpu" else 1
        reading = passes * self.weights / BANDWIDTH[device]
        return max(reading, 2 * self.parameters * tokens / (OPERATIONS[device] * cores))


def footprint(model_config: PretrainedConfig, dtype: torch.dtype) -> Footprint:
    """The sizes of a model in a dtype, from its configuration.

    Args:
        model_config: the model's; of a multimodal one the text part counts.
        dtype: of weights, keys and values.
    """
    config: Any = copy.deepcopy(text_config(model_config))  # making a model changes it
    options = {}
    if hasattr(config, "_experts_implementation"):
        options["experts_implementation"] = "batched_mm"  # the others need real numbers
    with torch.device("meta"), torch.inference_mode():
        made: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", **options
        )
        cache = DynamicCache(config=config)
        ids = torch.zeros(1, PROBE, dtype=torch.long)
        made.eval()(input_ids=ids, past_key_values=cache, use_cache=True)
    numbers = [parameter.numel() for parameter in made.parameters()]
    return Footprint(
        tuple(_layer_bytes(layer) for layer in cache.layers),
        sum(one.nbytes for one in made.parameters()),
        sum(numbers),
        config.vocab_size,
    )


def _layer_bytes(layer: Any) -> LayerBytes:
    size = sum(tensor.nbytes for tensor in held_tensors(layer))
    if not isinstance(layer, DynamicLayer):
        return LayerBytes(0, None, size, False)
    keys: Tensor | None = layer.keys
    most = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else None
    tokens = 1 if keys is None else keys.shape[-2]
    return LayerBytes(size // tokens, most, 0, is_full(layer))


def part_bytes(device: torch.device, weights: int, everywhere: bool = False) -> int:
    """How many bytes of this machine's memory a part may take, however many are free now.

    Args:
        everywhere: the weights are distributed over all GPUs.

    Returns:
        All that the device has, minus the weights and a reserve; on a CPU, one worker's share of
        that, with as many workers as its cores allow.
    """
    if device.type == "cpu":
        total, workers = psutil.virtual_memory().total, min(MOST_WORKERS, usable_cores())
    else:
        count = torch.cuda.device_count() if everywhere else 1
        total, workers = torch.cuda.get_device_properties(device).total_memory * count, 1
    left = total - total // RESERVE - weights
    return max(left, total // RESERVE) // workers
