"""The controls of a probe set: what its contexts' texts and its models' outputs offer a probe."""

from dataclasses import replace

import numpy as np
from scipy.linalg import block_diag

from probes.controls import baselines
from probes.controls.baselines import Baseline
from probes.controls.control_task import control_outcomes, types
from probes.data.dataset import ProbeSet, lens_of
from probes.records import Controls

HEADER_LAST = "header_last"  # where the first token of the user turn is predicted


def controls_of(data: ProbeSet, seed: int = 0) -> Controls:
    """Text baselines, the output distribution, and types for the control task.

    Args:
        data: contexts and hidden states.
        seed: of the random projection.

    Raises:
        UserError: hidden states can't be read.
    """
    frame = data.contexts
    text = [
        baselines.tfidf(frame["text"].tolist()),
        baselines.lengths(
            frame["prompt_tokens"],
            frame["response_tokens"],
            frame["context_tokens"],
            frame["cut_off"],
        ),
        baselines.dataset_id(frame["dataset"], frame["run"]),
        baselines.random_projection(frame["token_ids"].tolist(), data.width, seed),
    ]
    missing = []
    output, why = _output(data)
    if why is not None:
        missing.append(f"no output control, so nothing can be called latent: {why}")
    kinds = types(frame["response_tokens"], frame["opening"])
    try:
        control_outcomes(data.outcome, kinds, 1, seed)
    except ValueError as error:
        kinds = None
        missing.append(f"no control task, so no selectivity: {error}")
    return Controls(text, output, kinds, missing)


def _output(data: ProbeSet) -> tuple[list[Baseline], str | None]:
    """The state that all next-token logits are linear in, and summaries; or why there are none."""
    of_model: dict[str, list[int]] = {}
    for number in data.contexts["run"].unique():
        of_model.setdefault(data.runs[number].model["weights_hash"], []).append(number)
    order, states, summaries = [], [], []
    for numbers in of_model.values():
        runs = [data.runs[number] for number in numbers]
        lacking = [run for run in runs if HEADER_LAST not in run.positions]
        if lacking:
            return [], f"{HEADER_LAST} was not kept in {lacking[0].path}"
        lens, why = lens_of(runs[0])
        if lens is None:
            return [], why
        last = np.concatenate(
            [data.states(n, data.runs[n].layers[-1], HEADER_LAST) for n in numbers]
        )
        ends = {int(token) for run in runs for token in run.record["identity"]["chat"]["stop_ids"]}
        temperatures = {t for run in runs for t in run.config["grid"]["temperatures"] if t > 0}
        states.append(baselines.output_state(lens, last))
        summaries.append(baselines.output_summaries(lens, last, sorted(ends), sorted(temperatures)))
        order += [np.flatnonzero(data.contexts["run"] == number) for number in numbers]
    back = np.argsort(np.concatenate(order), kind="stable")
    return [_stacked(states, back), _stacked(summaries, back)], None


def _stacked(parts: list[Baseline], order: np.ndarray) -> Baseline:
    """One baseline of several models' rows; each model has columns of its own.

    A direction in one model's output needn't mean the same in another's: shared columns would ask
    the control for one set of weights that fits all, and make it weaker than the output is.
    """
    blocks = block_diag(*(part.features - part.features.mean(0) for part in parts))
    return replace(parts[0], features=blocks[order])
