"""What decoding must at least read, write and compute: no engine can be faster than the device is.

Each step reads every weight once, each context's keys and values once (not once per row), and of
each row its own keys and values, the newest of which it writes. Layers with a recurrent state read
and write that of each row, and its window of the convolution. Logits are written and read. What a
fused kernel may keep to itself, such as activations, is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.sampling_cuda.results import Size
from ia_mech.models.load import text_config


@dataclass(frozen=True)
class Least:
    """Bytes and operations of all decoding steps of a job.

    The prefill predicts the first new token, so that n of them are n - 1 steps.
    """

    bytes: float
    operations: float

    def seconds(self, bandwidth: float, rate: float) -> tuple[float, float]:
        """By bytes and by operations alone, for bytes and operations per second."""
        return self.bytes / bandwidth, self.operations / rate


def least(model: PreTrainedModel, cache: DynamicCache, size: Size) -> Least:
    """Of decoding ``size`` with a model.

    Args:
        model: whose parameters are counted in the dtypes they have.
        cache: of any prefill with this model, for the layers' shapes and dtypes.
        size: of the job.
    """
    rows, steps = size.contexts * size.rows, size.new_tokens - 1
    own = size.new_tokens / 2  # tokens of a row, the newest included, on the average of all steps
    weights, numbers = _weights(model)
    head = model.get_output_embeddings().weight
    logits = head.shape[0] * head.element_size()
    token = sum(_per_token(t) * t.element_size() for t in _attended(cache))
    state = sum(
        t[0].nbytes for kind in ("recurrent_states", "conv_states") for t in _states(cache, kind)
    )
    moved = weights + token * (size.contexts * size.context_tokens + rows * own)
    moved += rows * 2 * (state + logits)
    # A score's product and a value's: for each key-value head once per head that shares it.
    heads = text_config(model.config).num_attention_heads
    scored = sum(heads * t.shape[-1] for t in _attended(cache)) * (size.context_tokens + own)
    # The delta rule looks a key up in the state, adds to it, and looks a query up.
    recurrent = 3 * sum(t[0].numel() for t in _states(cache, "recurrent_states"))
    computed = 2 * rows * (numbers + scored + recurrent)
    return Least(steps * moved, steps * computed)


def _weights(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes that a step reads, and numbers that each token is multiplied with.

    A table of embeddings that isn't the head's as well is only looked up in.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = [p for p in model.parameters() if p is not table or p is head]
    return sum(p.nbytes for p in read), sum(p.numel() for p in read if p.ndim > 1)


def _attended(cache: DynamicCache) -> Iterator[Tensor]:
    """Keys and values ``[contexts, kv_heads, tokens, dim]`` of all layers that have them."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            yield from (layer.keys, layer.values)


def _per_token(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[-1]


def _states(cache: DynamicCache, kind: str) -> Iterator[Tensor]:
    """States ``[contexts, …]`` of one kind of all layers that have them."""
    for layer in cache.layers:
        held = getattr(layer, kind, None) or {}
        yield from (tensor for tensor in held.values() if tensor is not None)
