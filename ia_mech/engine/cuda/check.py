"""Can this model be decoded from CUDA graphs, and are the numbers right then?

Asked on a GPU, after the engine itself was found right. Whatever speaks against it is a reason to
decode step by step as on a CPU, which is said and recorded, and none to stop.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ia_mech.engine.check import TOLERANCE
from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.cuda.stepper import FIELDS, STEPS, Stepper, why_not
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import is_out_of_memory

SEATS, ROOM = 33, 512  # rows of one context, and tokens that contexts have room for


def with_graphs(
    model: PreTrainedModel, ids: Sequence[int], engine: Engine, wanted: str = "auto"
) -> Engine:
    """The engine, with CUDA graphs if the model is on a GPU and they are right.

    Args:
        model: the subject model.
        ids: at least 12 token ids of real text.
        engine: that was checked.
        wanted: as for :func:`ia_mech.engine.check.check_engine`; ``portable`` refuses graphs, whose
            rows share their prefix.
    """
    # Where layers that can be shared are not, their attention was found wrong.
    found_wrong = engine.shared < Engine.possible(model).shared
    if model.device.type != "cuda" or wanted == "portable" or found_wrong:
        return engine
    problem = why_not(model)
    try:
        problem = problem or _problem(model, list(ids))
    except Exception as error:  # whatever a model does that can't be captured
        # Leaving a capture that failed raises once more.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        said = "out of memory" if is_out_of_memory(error) else " ".join(str(first).split())[:120]
        problem = f"no CUDA graphs: {said}"
    if problem and fused.available(model.device):
        problem += " (with Triton's kernels; IA_MECH_TRITON=0 does without)"
    why = "; ".join(filter(None, [engine.why, problem])) if problem else ""
    return replace(engine, graphs=not problem, why=why)


@torch.inference_mode()
def _problem(model: PreTrainedModel, ids: list[int]) -> str:
    """Decode rows of two contexts greedily; what is recorded against full passes.

    So many rows, and so much room, that kernels work on tiles of the size that they have in a run.
    """
    prompts, contexts = [ids[:7], ids[7:11]], [0] + [1] * SEATS
    group = prefill(model, [Prefix(prompt) for prompt in prompts])
    sizes = Sizes.of_rows(contexts, len(contexts), ROOM, 2 * STEPS + 1)
    stepper, seating = Stepper(model, sizes, group), Seating(sizes.slots)
    stepper.put_contexts([seating.hold(context) for context in (0, 1)], group, (0, 1))
    rows = len(contexts)
    greedy = torch.zeros(rows), torch.zeros(rows, 2).long()
    first = stepper.begin(range(rows), contexts, group, torch.tensor(contexts), *greedy)
    stepper.seat(*seating.tables(contexts, sizes))
    copies = [first, stepper.run(rows, STEPS), stepper.run(rows, STEPS)]
    drawn = torch.cat([copy.wait() for copy in copies])
    tokens, logprobs = (drawn[:, FIELDS.index(name)] for name in ("token", "logprob"))
    worst, largest = 0.0, 1.0
    for row, context in ((0, 0), (1, 1), (SEATS, 1)):
        wrote = tokens[:, row].long().tolist()
        whole = torch.tensor([[*prompts[context], *wrote]], device=model.device)
        logits = model(whole, use_cache=False).logits[0, -len(wrote) - 1 : -1].double().cpu()
        theirs = logits.log_softmax(-1).gather(-1, torch.tensor(wrote)[:, None])[:, 0]
        apart = (logprobs[:, row] - theirs).abs().nan_to_num(torch.inf)
        worst, largest = max(worst, float(apart.max())), max(largest, float(logits.abs().max()))
    # A log-probability is off by twice what its logits are off by. Rows that read each other's
    # contexts are found in every dtype (the embedded model: 6.9 nats, where bfloat16 allows 0.96
    # and takes 0.13); rows displaced by a token (0.17 nats) only in float32, as in the tests.
    allowed = 2 * max(TOLERANCE, 2 * torch.finfo(model.dtype).eps) * largest
    if worst <= allowed:
        return ""
    return f"no CUDA graphs: log-probabilities differ from a full pass by {worst:.2g}"
