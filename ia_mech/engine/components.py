"""What each block's attention and MLP add to the residual stream, at tokens of given sequences.

``attn`` is what a block's attention adds, full or linear (recurrent), and ``mlp`` what its MLP or
its experts add: after the norm behind it, where a block has one. They sum to what the block adds,
which every pass of :func:`states` compares.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.memory import allowed
from ia_mech.engine.passes import current
from ia_mech.engine.state import PREFILL_TOKENS, Prefix, prefill, similar_lengths
from ia_mech.errors import UserError
from ia_mech.run.tokens import ATTN, MLP, RESID

Added = dict[tuple[str, int], Tensor]  # by branch and layer: [rows, positions, d_model]
ATTRIBUTE = "_ia_mech_branches"  # of a model whose branches have hooks
ROUNDINGS = 4  # epsilons, of the norms of all terms, by which the sum may miss
_POST_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")  # Gemma and OLMo; GLM
_POST_ATTN = ("post_self_attn_layernorm", "post_attention_layernorm")
_ATTN, _MLP = ("self_attn", "linear_attn"), ("mlp",)


_keeping: ContextVar[tuple[Tensor, Added] | None] = ContextVar("keeping", default=None)


@contextlib.contextmanager
def keeping(columns: Tensor) -> Iterator[Added]:
    """While it lasts, a pass of this thread keeps what hooked branches add at ``[rows, positions]``
    columns, as edits leave it."""
    added: Added = {}
    token = _keeping.set((columns, added))
    try:
        yield added
    finally:
        _keeping.reset(token)


def states(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
    layers: Sequence[int],
    components: Sequence[str] = (RESID,),
    on_tokens: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """States of sequences, each computed whole in one pass: by component
    ``[sequences, layers, positions, d_model]`` on the CPU, in the model's dtype.

    Args:
        model: installed.
        positions: ``[sequences][positions]`` indices into each sequence; -1, which gives NaN, where
            it lacks one.
        layers: 0 is the embeddings, which nothing was added to.
        components: of :data:`COMPONENTS`.
        on_tokens: called after each group of sequences with how many tokens were computed.

    Raises:
        UserError: the model's blocks add something else, or its branches can't be found.
    """
    branches = set(components) - {RESID}
    if branches:
        hook_branches(model)
    found: dict[str, dict[int, Tensor]] = {component: {} for component in components}
    lengths = [len(ids) for ids in sequences]
    for members in similar_lengths(lengths, allowed(PREFILL_TOKENS[model.device.type])):
        longest = max(lengths[i] for i in members)
        at = torch.tensor([list(positions[i]) for i in members])
        padding = longest - torch.tensor([lengths[i] for i in members])
        columns = (at + padding[:, None]).clamp(max=longest - 1)
        with keeping(columns) as added:
            made = prefill(model, [Prefix(sequences[i], positions[i]) for i in members])
        assert made.residuals is not None
        whole = {RESID: made.residuals.cpu()}
        if branches:
            whole |= _added(added, whole[RESID], model)
        for component in components:
            chosen = whole[component][:, list(layers)]
            found[component].update(zip(members, chosen, strict=True))
        if on_tokens is not None:
            on_tokens(sum(lengths[i] for i in members))
    return {
        component: torch.stack([rows[i] for i in range(len(sequences))])
        for component, rows in found.items()
    }


def _added(added: Added, resid: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """By branch ``[rows, layers + 1, positions, d_model]``, NaN at layer 0 and at lacking
    positions; compared with the residual stream."""
    found = {}
    for branch in (ATTN, MLP):
        whole = torch.full_like(resid, torch.nan)
        for layer in range(1, resid.shape[1]):
            whole[:, layer] = added[branch, layer].cpu()
        found[branch] = whole.masked_fill(resid.isnan(), torch.nan)
    terms = [resid[:, :-1].float(), *(found[one][:, 1:].float() for one in (ATTN, MLP))]
    error = (sum(terms) - resid[:, 1:].float()).norm(dim=-1)
    bound = ROUNDINGS * torch.finfo(resid.dtype).eps * sum(term.norm(dim=-1) for term in terms)
    if missed := (error > bound).any(-1).any(0).nonzero().flatten().tolist():
        raise UserError(
            f"attention and MLP of {type(model).__name__} aren't all that its blocks add (layer "
            f"{missed[0] + 1})",
            f"ask for the component {RESID}",
        )
    return found


def hook_branches(model: PreTrainedModel) -> None:
    """Put hooks on the branches, once, through which passes keep and edit what these add.

    Raises:
        UserError: the model's branches can't be found.
    """
    if ATTRIBUTE in vars(model):
        return
    found = list(_find_branches(model))
    for branch, layer, module in found:
        module.register_forward_hook(_Leave(branch, layer))
    setattr(model, ATTRIBUTE, True)


def _find_branches(model: PreTrainedModel) -> Iterator[tuple[str, int, nn.Module]]:
    for layer, block in enumerate(find_blocks(model), start=1):
        post = any(hasattr(block, name) for name in _POST_MLP)
        for branch, names in (
            (ATTN, (*_POST_ATTN, *_ATTN) if post else _ATTN),
            (MLP, (*_POST_MLP, *_MLP)),
        ):
            there = [name for name in names if isinstance(getattr(block, name, None), nn.Module)]
            if not there:
                raise UserError(
                    f"block {layer} of {type(model).__name__} has no component {branch} that is "
                    "known",
                    f"ask for the component {RESID}",
                )
            yield branch, layer, getattr(block, there[0])


class _Leave:
    """The hook behind what a branch adds at last."""

    def __init__(self, branch: str, layer: int) -> None:
        self.place = branch, layer

    def __call__(self, _module, _args, output):
        if (one := current()) is None:
            return None
        own = output[0] if isinstance(output, tuple) else output
        added = one.edited(*self.place, own)
        if (kept := _keeping.get()) is not None:
            columns = kept[0].to(added.device)
            rows = torch.arange(len(columns), device=added.device)[:, None]
            kept[1][self.place] = added[rows, columns]
        if added is own:
            return None
        return (added, *output[1:]) if isinstance(output, tuple) else added
