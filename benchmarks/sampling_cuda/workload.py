"""What is decoded: random models of a few shapes, their contexts and rows, and how ours does it."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from benchmarks.sampling.peers import prefixes, rows_of
from benchmarks.sampling_cuda.results import Size
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.check import check_engine
from ia_mech.engine.cuda.check import with_graphs
from ia_mech.engine.cuda.copies import CopyStream, HostCopy
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.decode import decode_stream
from ia_mech.engine.plan import batch_defaults, plan_units
from ia_mech.engine.prefill import Prefilled, prefill
from ia_mech.engine.shared_prefix import Engine
from ia_mech.models.load import text_config

QWEN3 = {
    "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "qwen3-4b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32,
    ),
    # Three gated delta layers to one of full attention, as the family has them; the widths are
    # chosen to be near the 4B above and are no released checkpoint's.
    "qwen3.5-hybrid": lambda: Qwen3_5TextConfig(
        vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: transformers.Qwen3Config(
        **QWEN3 | {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 8}, hidden_size=32,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ),
    "tiny-hybrid": lambda: Qwen3_5TextConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
TINY = [name for name in SHAPES if name.startswith("tiny")]  # does it run? figures mean nothing


TINY_SIZE = Size(4, 24, 5, 6)


def build(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random model of one of ``SHAPES``, made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=dtype)
    return model.eval().requires_grad_(False)


def random_contexts(model: PreTrainedModel, size: Size, seed: int = 1) -> list[list[int]]:
    """Token ids ``[contexts][context_tokens]``, the same for the same seed."""
    vocab = text_config(model.config).vocab_size
    generator = torch.Generator().manual_seed(seed)
    shape = size.contexts, size.context_tokens
    return torch.randint(5, vocab, shape, generator=generator).tolist()


class Workload:
    """A model with its contexts and rows, and the job as ours does it.

    Attributes:
        model: random weights.
        size: how much is decoded.
        ids: of the contexts, ``[contexts][context_tokens]``.
        blocks: of the model.
    """

    def __init__(self, model: PreTrainedModel, size: Size) -> None:
        self.model, self.size = model, size
        self.ids = random_contexts(model, size)
        self._rows = [
            row for context in range(size.contexts) for row in rows_of(context, size.rows)
        ]
        self.blocks = find_blocks(model)
        self._copies = CopyStream(model.device)

    @cached_property
    def engine(self) -> Engine:
        """Chosen and checked as for any run."""
        probe = self.ids[0][:12]
        return with_graphs(self.model, probe, check_engine(self.model, probe))

    def groups(self, capture: bool, sent: list[HostCopy] | None = None) -> Iterator[Prefilled]:
        """The contexts, prefilled a group at a time.

        Args:
            capture: all layers are captured at the last positions.
            sent: if given, logits and residuals are sent off the device, and put here.
        """
        wanted = prefixes(self.ids)
        lengths = [self.size.context_tokens] * self.size.contexts
        for unit in plan_units(
            lengths, len(lengths), batch_defaults(self.model.device).prefill_tokens
        ):
            group = prefill(self.model, [wanted[i] for i in unit], self.blocks if capture else None)
            if sent is not None:
                sent += [self._copies.start(tensor) for tensor in (group.logits, group.residuals)]
            yield group

    def whole_job(self, graphs: bool) -> None:
        """Prefill with capture, decode, sample; captures and tokens are on the host at the end."""
        sent: list[HostCopy] = []
        self.decode(self.groups(True, sent), graphs)
        for copy in sent:
            copy.wait()

    def decode(self, groups: Iterator[Prefilled] | Sequence[Prefilled], graphs: bool) -> None:
        """Decode all rows of prefilled groups, all together."""
        size, rows = self.size, len(self._rows)
        sizes = Sizes.of(size.contexts, size.rows, rows, size.context_tokens, size.new_tokens)
        decoded = decode_stream(
            self.model, groups, self._rows, [], size.new_tokens, width=rows,
            share=self.engine.shared > 0, static=sizes if graphs else None,
        )  # fmt: skip
        if any(len(row.token_ids) != size.new_tokens for row in decoded):
            raise RuntimeError(f"a row has not {size.new_tokens} tokens")
