"""States of any token: against ``hidden_states`` and plain hooks, on each kind of block."""

import pytest
import tiny
import torch
from contract import VECTOR, relative_l2

from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.components import states
from ia_mech.engine.installed import install
from ia_mech.errors import UserError
from ia_mech.run.tokens import ATTN, COMPONENTS, MLP, RESID

LENGTHS = (9, 14, 11)
AT = [(0, 8, -1), (3, 13, 5), (10, 2, 4)]
LAYERS = [1, 2, 3, 4]
# The modules whose output is added, written by hand.
BEHIND = {
    "llama": ("self_attn", "mlp"),
    "gpt_oss": ("self_attn", "mlp"),
    "qwen3_5": ("self_attn", "mlp"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
}


@torch.inference_mode()
def plain(model, ids, behind):
    """``{component: [layers + 1, tokens, d_model]}`` by plain hooks, one sequence, no padding."""
    seen: dict[str, list[torch.Tensor]] = {RESID: [], ATTN: [], MLP: []}

    def keep(component):
        def hook(_module, _args, output):
            seen[component].append((output[0] if isinstance(output, tuple) else output)[0].clone())

        return hook

    handles = []
    for block in find_blocks(model):
        attn = behind[0] if hasattr(block, behind[0]) else "linear_attn"
        handles.append(getattr(block, attn).register_forward_hook(keep(ATTN)))
        handles.append(getattr(block, behind[1]).register_forward_hook(keep(MLP)))
        handles.append(block.register_forward_hook(keep(RESID)))
    try:
        out = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    for layer in LAYERS[:-1]:  # hidden_states has the last layer after the final norm
        assert relative_l2(seen[RESID][layer - 1], out.hidden_states[layer][0]) < VECTOR
    return {component: torch.stack(found) for component, found in seen.items()}


@pytest.mark.parametrize("architecture", BEHIND)
def test_components_are_what_plain_hooks_see_and_sum_to_the_block(architecture):
    model = tiny.model(architecture)
    sequences = [tiny.prompt(n, seed=n) for n in LENGTHS]
    found = states(model, sequences, AT, LAYERS, COMPONENTS)
    below = states(model, sequences, AT, [layer - 1 for layer in LAYERS])[RESID]
    for row, (ids, at) in enumerate(zip(sequences, AT, strict=True)):
        wanted = plain(model, ids, BEHIND[architecture])
        for column, position in enumerate(at):
            for component in COMPONENTS:
                own = found[component][row, :, column]
                if position < 0:
                    assert own.isnan().all()
                else:
                    assert relative_l2(own, wanted[component][:, position]) < VECTOR
    there = torch.tensor(AT) >= 0
    sums = (below + found[ATTN] + found[MLP]).transpose(1, 2)[there]
    assert relative_l2(sums, found[RESID].transpose(1, 2)[there]) < VECTOR


@pytest.mark.parametrize("architecture", BEHIND)
def test_in_bfloat16_the_sum_misses_by_its_roundings(architecture):
    """A block rounds twice, once behind each addition, by at most half an epsilon of a sum of the
    three terms; norms of vectors keep that bound."""
    model = tiny.fresh(architecture).bfloat16()
    install(model)
    sequences = [tiny.prompt(n, seed=n) for n in LENGTHS]
    found = states(model, sequences, AT, LAYERS, COMPONENTS)
    below = states(model, sequences, AT, [layer - 1 for layer in LAYERS])[RESID].float()
    attn, mlp, resid = (found[one].float() for one in (ATTN, MLP, RESID))
    error = (below + attn + mlp - resid).norm(dim=-1)
    first = (below + attn).norm(dim=-1)
    bound = torch.finfo(torch.bfloat16).eps / 2 * (first + resid.norm(dim=-1)) * 1.01
    there = ~error.isnan()
    assert there.any() and found[ATTN].dtype == torch.bfloat16
    assert (error[there] <= bound[there]).all() and error[there].max() > 0


def test_what_a_block_adds_besides_is_refused():
    with pytest.raises(UserError, match="aren't all that its blocks add"):
        states(tiny.model("gemma4"), [tiny.prompt(5, seed=5)], [(1,)], [1], [ATTN])
