"""Compare the engine, before each run, with plain forward passes of the same model.

Some architectures keep state that cached decoding, left padding or a continuation of several tokens
does not reach: Mamba2 ignores the cache it is given, Jamba's multi-token continuation ignores its
recurrent state. Their results would be wrong without an error. So everything that the engine does
is compared with plain forward passes without a cache, on two short prompts of unequal length.
Sharing a prefix interferes with a model's attention more than copying it does: where only sharing
fails, every row gets a copy.

Differences of logits are measured in displacements: how far the logits at a token are from those at
the nearer of its two neighbours. Logits that belong to another token are a whole displacement away
in every dtype. Rounding moves a row by a small share of one, which scales with the dtype's epsilon.
Where a token changes next to nothing, rounding would be held against nothing: a displacement counts
as no less than a share of the logits themselves (:data:`LEAST`).

Captured steps are what a GPU decodes with if rows decoded with them pass the same comparison. Else
steps are computed as they come.

Two checks would need prompts of hundreds or thousands of tokens, and do without them. Sliding
windows are narrowed, so that short prompts fill them; as wide as they are, they are checked where
they hold whole rows, which share their prefix then. A prefix of more than
:data:`LONG` tokens, which attention kernels process in several blocks, is made by repeating the
keys and values of a short one; rows that share it are compared with a row that has a copy.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ia_mech.engine.decode import Decoded, Row, decode
from ia_mech.engine.installed import LayerBytes, install, installed
from ia_mech.engine.memory import kept
from ia_mech.engine.sampling import draw_tokens, stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared import Engine, held
from ia_mech.engine.state import Prefilled, Prefix, State, expand, forward, held_tensors, prefill
from ia_mech.engine.workers import torch_threads
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.models.load import context_limit, refuse_unknown_ids, text_config

TOLERANCE = 2e-3  # in displacements, in float32
# In half precision the median row may be off by so many epsilons. The embedded model (30 layers) is
# off by 2.5 to 5.5 of them, tiny models without experts by up to 9. Position ids that are wrong by
# one put rows off by 24 in bfloat16, the coarser of the two dtypes.
ROUNDINGS = 16
# No row may be off by more: rounding can change which experts a token is sent to, which moves its
# row further. The logits of another token are off by 1 or more.
OUTLIER = 0.5
# A displacement is taken to be this share of the logits at least, in float32 and in half precision:
# they may always be off by 70 and by 4 epsilons of their own size.
LEAST, LEAST_HALF = 4e-3, 0.25
LONG, QUERIES = 512, 33  # attention on CPUs takes blocks of 512 keys, and of 32 queries or more
WINDOW = 8  # tokens; each prompt fills it, together with what is decoded
PADDED = 33  # tokens of a padded batch: 1 modulo 32, where padding has gone wrong before
STEPS = 3
CAPTURING = ("cuda",)  # types of devices on which steps can be captured
TOKENS = 24  # two prompts of 12 and 5, and a turn of 7


def check_engine(model: PreTrainedModel, ids: Sequence[int], *, ignore: bool = False) -> Engine:
    """Install a model with an engine that gives the logits of full forward passes.

    A loaded model that has passed isn't checked again until its dtype or device changes.

    Args:
        model: the subject model.
        ids: at least :data:`TOKENS` token ids of real text.
        ignore: go on although the numbers differ; ``Engine.ignored`` then says how.

    Raises:
        UserError: the model's numbers differ, or the engine can't run it (names the architecture);
            or an id isn't the model's.
    """
    refuse_unknown_ids(ids, model.config)
    made, place = install(model), (model.dtype, model.device)
    if model in _PASSED and _PASSED[model][0] == place:
        made.engine = _PASSED[model][1]
        return made.engine
    made.engine = Engine.possible(model)
    while not made.engine.ignored:
        try:
            _check(model, list(ids))
            if model.device.type in CAPTURING:
                made.engine = _capturing(model, list(ids))
            _PASSED[model] = place, made.engine
            break
        except UserError as error:
            if made.engine.share:  # in fewer layers: at first without those that have a window
                full = made.engine.shared if made.engine.within else ()
                made.engine = replace(made.engine, shared=full, within=(), why=error.problem)
            elif ignore and isinstance(error, _WrongNumbers):
                made.engine = replace(made.engine, ignored=error.problem)
            else:
                raise
    return made.engine


_PASSED: WeakKeyDictionary[PreTrainedModel, tuple[object, Engine]] = WeakKeyDictionary()


class _WrongNumbers(UserError):
    """The model runs, but its numbers differ from those of a full forward pass."""


def _check(model: PreTrainedModel, ids: list[int]) -> None:
    try:
        # Threads of passes this small mostly wait for each other, on a busy machine for a minute.
        with torch_threads(1), torch.inference_mode():
            with _narrow_windows(model, ids[:TOKENS]):
                differences = [_Differences(model, ids)]
                differences[0].measure()
            if installed(model).engine.within:
                differences.append(_Differences(model, ids))
                differences[1].compare_decoding("decoding within a window")
    except UserError:
        raise
    except Exception as error:  # architectures that aren't made for this raise anything
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{type(model).__name__} can't be run by this engine "
            f"({' '.join(str(error).split())[:120]})",
            "use a decoder-only model whose blocks pass on one hidden state per token",
        ) from error
    made = installed(model)
    made.held = _layer_bytes(model, differences[0].prefilled.state, made.engine)
    for each in differences:
        each.refuse_large_ones()


def _capturing(model: PreTrainedModel, ids: list[int]) -> Engine:
    """The engine of a model that has passed; with captured steps, if those pass, too."""
    made = installed(model)
    plain, why = made.engine, _uncapturable(model)
    if not why:
        made.engine = replace(plain, captured=True)
        try:
            with torch_threads(1), torch.inference_mode(), _narrow_windows(model, ids[:TOKENS]):
                differences = _Differences(model, ids)
                differences.compare_decoding("cached decoding")  # says what rounding does
                differences.compare_captured_steps()
            differences.refuse_large_ones()
            why = made.engine.uncaptured
        except Exception as error:  # a model may do anything that can't be captured
            if is_out_of_memory(error):
                raise
            why = " ".join(str(getattr(error, "problem", error)).split())[:160]
        kept.pop(model, None)  # with the narrow windows
    if not why:
        made.held = tuple(one._replace(shared=True) for one in made.held)
    return replace(plain, captured=not why, uncaptured=why)


def _uncapturable(model: PreTrainedModel) -> str:
    """Why a model's steps can't be captured, as far as that is known; empty if it isn't."""
    made, config = installed(model), text_config(model.config)
    if len(made.engine.shared) + len(made.engine.within) < made.engine.layers:
        return "some layers don't keep keys and values that rows can share"
    if made.border is not None or getattr(config, "attention_chunk_size", None):
        return "positions or chunks depend on the longest row"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "the model is on several devices"
    return "" if find_spec("triton") else "Triton isn't installed"


def _layer_bytes(model: PreTrainedModel, state: State, engine: Engine) -> tuple[LayerBytes, ...]:
    """What the layers of a cache hold, read off one of several rows."""
    found: list[LayerBytes] = []
    whole = DynamicCache(config=model.config).layers  # with the windows that the check has narrowed
    layers = zip(state.cache.layers, whole, strict=True)
    for number, (layer, its) in enumerate(layers, start=1):
        each, most, fixed = 0, None, sum(tensor.nbytes for tensor in held_tensors(layer))
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            keys, values = held(layer)
            own = keys.nbytes + values.nbytes
            each, fixed = own // keys.shape[-2], fixed - own
            window = getattr(its, "sliding_window", None)
            most = None if window is None else window - 1
        shared = number in engine.shared
        found.append(LayerBytes(1, each // state.rows, most, fixed // state.rows, shared))
    counts = Counter(found)
    return tuple(one._replace(layers=count) for one, count in counts.items())


class _Differences:
    """How far the engine's numbers are from those of full passes.

    Attributes:
        deviations: what the engine did -> by how many displacements each row is off.

    Raises:
        UserError: logits that aren't finite.
    """

    def __init__(self, model: PreTrainedModel, ids: list[int]) -> None:
        self.model = model
        self.prompts, self.turn = [ids[:12], ids[12:17]], ids[17:TOKENS]
        # [turn + 2, vocab] each: row s + 1 holds the logits after s tokens of the turn.
        self.full = [
            _full_pass(model, [[*prompt, *self.turn]])[0, len(prompt) - 2 :]
            for prompt in self.prompts
        ]
        self.device = self.full[0].device  # of the last layer
        self.half = torch.finfo(model.dtype).bits < 32
        least = LEAST_HALF if self.half else LEAST
        self.least = least * max(1e-30, *map(_size, self.full))
        self.deviations: dict[str, list[float]] = {}
        self.largest = 0.0  # the largest of all differences of logits
        if not all(logits.isfinite().all() for logits in self.full):
            raise UserError(
                f"the logits of {type(model).__name__} in {model.dtype} are not finite".replace(
                    "torch.", ""
                ),
                "use --dtype bfloat16 or float32"
                if model.dtype == torch.float16
                else "copy or download the model again: its weights are damaged, or not finite",
            )
        prefixes = [Prefix(prompt, [len(prompt) - 1]) for prompt in self.prompts]
        self.prefilled = prefill(model, prefixes)

    def measure(self) -> None:
        """Compare everything that the engine does with full passes."""
        for context, logits in enumerate(self.prefilled.logits):
            self._compare_step("a left-padded batch", logits, context, 0)
        self._pad()
        self.compare_decoding("cached decoding")
        self._score()
        self._sample()
        if installed(self.model).engine.shared and self._long:
            self._compare_long_prefix()

    def refuse_large_ones(self) -> None:
        """Raise UserError if rows are off by more than rounding explains."""
        allowed = max(TOLERANCE, ROUNDINGS * torch.finfo(self.model.dtype).eps)
        for what, off in self.deviations.items():
            typical, worst = sorted(off)[(len(off) - 1) // 2], max(off)
            if not (typical <= allowed and worst <= (OUTLIER if self.half else allowed)):
                raise _WrongNumbers(
                    f"{type(self.model).__name__} gives other logits in {what} than in a full "
                    f"forward pass (off by {worst:.2g} of the difference that one token makes)",
                    "use another architecture or --attention; --ignore-check runs this one anyway",
                )

    def _compare_step(self, what: str, ours: Tensor, context: int, step: int) -> None:
        """Compare logits ``[vocab]`` after ``step`` tokens of the turn."""
        self._compare(what, ours, self.full[context][step : step + 3])

    def _compare(self, what: str, ours: Tensor, around: Tensor) -> None:
        """Compare logits ``[vocab]`` with the middle one of ``around`` ``[3, vocab]``."""
        difference = float(_apart(ours, around[1]).amax())
        self.largest = max(self.largest, difference)
        displacement = float(_apart(around[[0, 2]], around[1]).amax(-1).amin())
        self.deviations.setdefault(what, []).append(difference / max(displacement, self.least))

    def _compare_logprobs(
        self,
        what: str,
        ours: np.ndarray,
        logits: Tensor,
        tokens: Sequence[int],
        context: int,
        warmth: float = 1.0,
    ) -> None:
        """Compare log-probabilities ``[tokens]`` at a temperature with those that ``logits``
        ``[tokens + 2, vocab]`` give, averaged over tokens; the logits begin a token early."""
        mine = torch.as_tensor(ours, device=self.device)
        off = float(_apart(mine, _logprobs(logits[1:-1] / warmth, tokens)).mean())
        # The displacement is measured on the turn, which is text: a model that repeats a token
        # gives it nearly the same log-probability at each step, so mere rounding would look like
        # another token's.
        before, right, after = (
            _logprobs(self.full[context][shift:] / warmth, self.turn) for shift in range(3)
        )
        displacement = min(float(_apart(one, right).mean()) for one in (before, after))
        self.deviations.setdefault(what, []).append(off / max(displacement, self.least))

    def _pad(self) -> None:
        """Compare a short prompt with much padding, and the long prompt beside it."""
        long = (self.prompts[0] * PADDED)[:PADDED]
        beside = prefill(self.model, [Prefix(long), Prefix(self.prompts[1])])
        alone = _full_pass(self.model, [long])[0]
        self._compare_step("a left-padded batch", beside.logits[1], 1, 0)
        around = torch.stack([alone[-2], alone[-1], alone[-3]])
        self._compare("a left-padded batch", beside.logits[0], around)

    def compare_decoding(self, what: str) -> None:
        """Feed the turn token by token to rows of both contexts, and to a row whose context was
        prefilled alone; the first row is dropped before the last token."""
        alone = prefill(self.model, [Prefix(self.prompts[1])])
        groups, contexts = [self.prefilled, alone], [0, 1, 2]
        state = expand(self.model, groups, contexts, STEPS + 1)
        for step, token in enumerate(self.turn[: STEPS + 1], start=1):
            ours = _step(self.model, state, [token] * state.rows)
            for row, context in enumerate(contexts):
                self._compare_step(what, ours[row], min(context, 1), step)
            if step == STEPS:
                contexts = [contexts[row] for row in state.drop([0])]

    def _score(self) -> None:
        both = (self.turn, self.turn[:-1])  # of unequal length
        turns = [Turn(context, turn) for turn in both for context in (0, 1)]
        scores = score(self.model, [self.prefilled], turns)
        for turn, scored in zip(turns, scores, strict=True):
            logits = self.full[turn.context][: len(turn.ids) + 2]
            self._compare_logprobs(
                "scoring a turn", scored.logprobs_raw, logits, turn.ids, turn.context
            )

    def _sample(self) -> None:
        """Compare greedy and sampled rows with the sampling rule on the logits of full passes."""
        rows = _rows(2)
        decoded = decode(self.model, [self.prefilled], rows, [], STEPS)
        self._compare_rows("sampled rows", rows, decoded)

    def compare_captured_steps(self) -> None:
        """Compare rows of both prompts and of a long context: all at once, and so that rows of
        every age are decoded together."""
        groups = [self.prefilled, *self._long]
        rows = _rows(2 + len(self._long))
        decoded = decode(self.model, groups, rows, [], 2 * STEPS)
        stops = decoded[1].token_ids[1:2].tolist()  # at least one row ends before others
        joined = decode(self.model, groups, rows, stops, 2 * STEPS, together=4)
        for each in (decoded, joined):
            self._compare_rows("captured steps", rows[:6], each[:6])
            if self._long:
                self._compare_long_rows(rows[6:], each[6:])

    @cached_property
    def _long(self) -> list[Prefilled]:
        """A long context, if the model takes one."""
        limit = context_limit(self.model.config)
        if limit is not None and limit <= LONG + TOKENS:
            return []
        state = _repeat_prefix(self.model, self.prefilled.state)
        return [Prefilled(state, self.prefilled.logits[:1], None)]

    def _compare_rows(self, what: str, rows: Sequence[Row], decoded: Sequence[Decoded]) -> None:
        """Compare the rows of both prompts, which are as many each, with full passes."""
        each = len(rows) // 2
        for context, prompt in enumerate(self.prompts):
            mine = slice(each * context, each * (context + 1))
            written = [[*prompt, *one.token_ids.tolist()] for one in decoded[mine]]
            longest = max(map(len, written))
            padded = [ids + [0] * (longest - len(ids)) for ids in written]  # nobody sees it
            logits = _full_pass(self.model, padded)[:, len(prompt) - 2 :]
            for compared in zip(rows[mine], decoded[mine], logits, strict=True):
                self._compare_row(what, *compared)

    def _compare_long_rows(self, rows: Sequence[Row], decoded: Sequence[Decoded]) -> None:
        """Compare rows of a long context with rows that have a copy of it, by plain steps."""
        copied = expand(self.model, self._long, [0] * len(rows), copies=True)
        logits = [self._long[0].logits.expand(len(rows), -1)] * 2
        for step in range(2 * STEPS):
            ended = [min(step, len(one.token_ids) - 1) for one in decoded]
            tokens = [int(one.token_ids[at]) for one, at in zip(decoded, ended, strict=True)]
            logits.append(_step(self.model, copied, tokens))
        for compared in zip(rows, decoded, torch.stack(logits, 1), strict=True):
            self._compare_row("captured steps", *compared)

    def _compare_row(self, what: str, row: Row, wrote: Decoded, logits: Tensor) -> None:
        """Compare what a row wrote with logits ``[tokens + 2 or more, vocab]`` of a full pass over
        it."""
        warmth, tokens = row.temperature or 1.0, wrote.token_ids.tolist()
        count, context = len(tokens), row.context % len(self.prompts)
        logits = logits[: count + 2]
        self._compare_logprobs(what, wrote.logprobs_raw, logits, tokens, context)
        if row.temperature:
            tempered = wrote.logprobs_tempered
            self._compare_logprobs(what, tempered, logits, tokens, context, warmth)
        steps = torch.arange(count, device=self.device)
        keys = torch.tensor([row.stream] * count, device=self.device)
        temperature = torch.full((count,), row.temperature, device=self.device)
        right = draw_tokens(logits[1:-1], temperature, keys, steps[:, None])
        # Logits that differ by d choose the same token where the margin is above 2 d / T.
        raw = torch.from_numpy(wrote.logprobs_raw).to(self.device)
        most = (raw - right.logprob).abs().clamp(min=self.largest)
        close = right.margin <= 2 * most / warmth
        if not ((right.token == torch.tensor(tokens, device=self.device)) | close).all():
            self.deviations[what].append(torch.inf)

    def _compare_long_prefix(self) -> None:
        """Compare rows that share a long prefix with a row that has a copy of it."""
        shared = expand(self.model, self._long, [0] * QUERIES, 2)
        copied = expand(self.model, self._long, [0], copies=True)
        right = [_step(self.model, copied, [token])[0] for token in self.turn[:3]]
        for token in self.turn[:2]:
            ours = _step(self.model, shared, [token] * QUERIES)
        for logits in ours:
            self._compare("rows of a long context", logits, torch.stack(right))


def _rows(contexts: int) -> list[Row]:
    """Three rows of each context."""
    return [
        Row(context, temperature, stream_key(0, "check", context))
        for context in range(contexts)
        for temperature in (0.0, 0.7, 2.0)
    ]


def _step(model: PreTrainedModel, state: State, tokens: Sequence[int]) -> Tensor:
    """Logits ``[rows, vocab]`` after one more token in every row."""
    token = torch.tensor(tokens, device=state.mask.device)[:, None]
    return forward(model, state, token, torch.ones_like(token)).logits[:, -1]


def _full_pass(model: PreTrainedModel, ids: list[list[int]]) -> Tensor:
    """Logits ``[rows, tokens, vocab]`` float32 of one pass of the model as it was loaded, without
    cache, mask or padding."""
    with installed(model).own_attention():
        return model(torch.tensor(ids, device=model.device), use_cache=False).logits.float()


def _size(logits: Tensor) -> float:
    """The size of logits ``[tokens, vocab]``: of the top one or the middle one, since a model may
    hide tokens behind a logit like -1e9."""
    return float(torch.stack([logits.amax(-1), logits.median(-1).values]).abs().amax())


def _logprobs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities ``[tokens]`` by the rows of ``logits`` ``[tokens or more, vocab]``."""
    chosen = torch.tensor(tokens, device=logits.device)
    return logits[: len(chosen)].log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences; infinite where a number is NaN."""
    return (a - b).abs().nan_to_num(torch.inf)


def _repeat_prefix(model: PreTrainedModel, state: State) -> State:
    """The first context (it has no padding), its keys and values repeated to more than :data:`LONG`
    tokens; layers with a window hold as many as that reaches."""
    first = Prefilled(state, torch.zeros(len(state.mask), 0, device=state.mask.device), None)
    long = expand(model, [first], [0], copies=True)
    length = state.mask.shape[1]
    times = LONG // length + 1
    for layer in long.cache.layers:
        if isinstance(layer, DynamicLayer):
            window = getattr(layer, "sliding_window", length * times + 1)
            layer.keys, layer.values = (
                tensor.repeat(1, 1, times, 1)[:, :, -(window - 1) :] for tensor in held(layer)
            )
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length * times
    long.mask = long.mask.repeat(1, times)
    long.position = long.position + length * (times - 1)
    return long


@contextlib.contextmanager
def _narrow_windows(model: PreTrainedModel, ids: list[int]) -> Iterator[None]:
    """While it lasts, sliding windows and chunks have at most :data:`WINDOW` tokens, if all layers
    have the same size and the model reads it from its configuration at each pass."""
    config, places = text_config(model.config), []
    for name in ("sliding_window", "attention_chunk_size"):
        window, *others = {getattr(layer, name, None) or 0 for layer in config.per_layer_config}
        if window > WINDOW and not others:
            holders = [config, *(m for m in model.modules() if getattr(m, name, 0) == window)]
            places += [(holder, name, window) for holder in holders]

    def narrow(most: float) -> None:
        for holder, name, window in places:
            setattr(holder, name, min(window, most))

    before = _full_pass(model, [ids]) if places else None
    try:
        narrow(WINDOW)
        if before is not None and torch.equal(_full_pass(model, [ids]), before):
            narrow(torch.inf)  # it doesn't read them
        yield
    finally:
        narrow(torch.inf)
