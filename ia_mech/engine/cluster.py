"""Workers on a Ray cluster: an actor on every GPU, or on the CPUs of every node.

An actor loads the model by its specification, and computes with as many threads as a process of its
own would have there. In this process a thread waits for each item that an actor computes, so that
what ``workers.py`` says of workers holds of these threads. Only this process writes: nodes share no
disk but the model's. Actors stay until this process ends.

An actor that ends is begun again, and one is begun on each node that joins. An item whose actor has
ended is computed again, at most :data:`AGAIN` times.
"""

import contextlib
import logging
import os
import queue
import signal
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import transformers

from ia_mech import __version__
from ia_mech.cli import expanded
from ia_mech.display import Progress
from ia_mech.engine.passes import on_block
from ia_mech.engine.workers import Crew, Stopped, Team, usable_cores, usable_memory
from ia_mech.errors import UserError
from ia_mech.models.embedded import MODELS
from ia_mech.models.load import ModelSpec, Subject, load, resolve_device

HERE = "local"  # the address of this machine: Ray's word
AGAIN = 3  # times that an actor is begun again, or an item computed again
LOOK, ASK = 1.0, 0.5  # seconds between looks at the nodes, and between questions about an item
CALLS = 64  # that an actor takes at once: a few for each worker
STORE = 2**30  # bytes of this machine's memory for what is on its way, where it is the cluster


def team_of(spec: ModelSpec, crew: Crew, progress: Progress) -> Team:
    """The workers that a command asks for, around a model."""
    return Team(load(spec)) if crew.ray is None else Actors(spec, crew.ray, progress)


def device_of(device: str, address: str | None) -> torch.device:
    """What workers compute on, where the setting is ``device``; ``auto`` is GPUs if there are any.

    Raises:
        UserError: there is no such device; or it is one of several, of which a cluster uses all.
    """
    if address is None:
        return resolve_device(device)
    if device not in ("auto", "cpu", "cuda"):
        remedy = "give auto, cpu or cuda; CUDA_VISIBLE_DEVICES can hide GPUs"
        raise UserError(f"--device {device} can't be used with --ray, which uses all", remedy)
    if address == HERE:
        return resolve_device(device)
    gpus = any(node["Alive"] and node["Resources"].get("GPU") for node in joined(address).nodes())
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no node of the cluster has a GPU", "use --device cpu")
    return torch.device("cuda" if gpus and device != "cpu" else "cpu")


@cache
def joined(address: str) -> Any:
    """Ray, once this process has joined the cluster.

    Raises:
        UserError: Ray isn't installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs ray", "install it: pip install 'ia-mech[ray]'") from None
    before, here = signal.getsignal(signal.SIGTERM), dict[str, Any]()
    if address == HERE:
        here = {"num_cpus": usable_cores(), "object_store_memory": STORE}
        here["include_dashboard"] = False
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **here)
    except Exception as error:  # Ray raises many kinds
        raise UserError(
            f"no Ray cluster answers at {address!r} ({_last_line(error)})",
            "give host:port of its head, or auto on one of its nodes; without an address, this "
            "machine's devices are used",
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's would end the process at once
    return ray


# -- in an actor -----------------------------------------------------------------------------------


class Relay:
    """Stands for a listener that is in another process: notes which of its methods are called."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, tuple]] = deque()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self._told.append((name, args))

    def _taken(self) -> list[tuple[str, tuple]]:
        return [self._told.popleft() for _ in range(len(self._told))]


class Actor:
    """A process of a cluster that computes with models. Several of its methods run at once."""

    def __init__(self, cores: int) -> None:
        os.environ["LOKY_MAX_CPU_COUNT"] = str(cores)  # which usable_cores() reads
        self._alone = threading.Lock()
        self._subjects: dict[ModelSpec, Subject] = {}
        self._relays: dict[str, Relay] = {}  # of the calls that somebody waits for

    def begin(self, spec: ModelSpec, named: ModelSpec, task: list, args: tuple) -> tuple:
        """Load a model unless it is there. Returns what all actors must have in common, cores and
        free memory, and what the task gives, for which the model is ``named`` as the user did."""
        with self._alone:
            if spec not in self._subjects:
                self._subjects[spec] = load(spec)
            subject = replace(self._subjects[spec], spec=named)
            version = torch.__version__.partition("+")[0]
            common = __version__, version, transformers.__version__, subject.weights_hash
            found = fetched(task[0])(subject, *args)
            return common, (usable_cores(), usable_memory().free), found

    def call(self, key: str, spec: ModelSpec, threads: int, task: list, args: tuple) -> Any:
        relay = self._relays[key] = Relay()

        def check() -> None:
            if key not in self._relays:
                raise Stopped

        torch.set_num_threads(threads)  # of this thread
        token = on_block.set(check)
        try:
            return fetched(task[0])(self._subjects[spec], *args, relay)
        finally:
            on_block.reset(token)

    def told(self, key: str) -> list[tuple[str, tuple]]:
        """What the listener of a call is to be told now."""
        return self._relays[key]._taken() if key in self._relays else []

    def end(self, key: str) -> None:
        """Nobody waits for a call any more."""
        self._relays.pop(key, None)


@lru_cache(maxsize=8)
def fetched(reference: Any) -> Any:
    """What the main process has put there, once for all calls."""
    import ray

    return ray.get(reference)


# -- in the main process ---------------------------------------------------------------------------

Place = tuple[str, str, int]  # the kind of a device, its node, its number there
ACTORS: dict[Place, Any] = {}  # of this process


@dataclass
class Member:
    """An actor of a team, what it gives once it has the model, and how many workers it has then."""

    actor: Any
    host: str
    given: Any
    machine: tuple[int, int] | None = None
    workers: int = 0


class Actors(Team):
    """The actors of a cluster, with a model."""

    most = 1024  # each costs this process a thread

    def __init__(self, spec: ModelSpec, address: str, progress: Progress) -> None:
        if spec.device_map is not None:
            raise UserError("--device-map can't be used with --ray", "leave one of them out")
        self.device, self.threads = device_of(spec.device, address), 1
        self._named, self._spec = spec, replace(spec, device=self.device.type)
        for name in ("name", "adapter"):
            given = getattr(spec, name)
            if given is not None and given not in MODELS and expanded(given).exists():
                whole: dict[str, Any] = {name: os.path.abspath(expanded(given))}
                self._spec = replace(self._spec, **whole)
        self._ray, self._progress = joined(address), progress
        errors = self._ray.exceptions
        self._endings = errors.RayActorError, errors.ObjectLostError
        self._ended: Counter[Place] = Counter()  # how often since one there has computed an item
        self._alone, self._last, self._looked = threading.Lock(), "", 0.0

    def begin(self, task: Callable, *args: Any) -> Any:
        self._members: dict[Place, Member] = {}
        self._common: tuple = ()
        self._spread: tuple = ()
        self._task = [self._ray.put(task)], args
        self._progress.say(f"waiting for a device of the cluster to load {self._named.name} …")
        while not self._common:
            self._look()
            time.sleep(ASK / 10)
        return self._found

    def spread(self, crew: Crew, items: int, item_bytes: int = 0) -> None:
        there, on_cpu = list(self._members.items()), self.device.type == "cpu"
        first = next(one.machine for _, one in there if one.machine)
        threads = crew.for_items(items, item_bytes, on_cpu, first)[1]  # the same on all nodes
        self._spread = crew._replace(threads=threads), items, item_bytes, on_cpu
        self._free: queue.SimpleQueue[tuple[Place, Any]] = queue.SimpleQueue()
        self._sent: dict[Callable, list] = {}
        for place, one in there:
            self._give_work(place, one)

    def ready(self) -> int:
        if time.monotonic() - self._looked > LOOK:
            self._look()
        return sum(one.workers for one in self._members.values())

    def call(self, task: Callable, *args: Any, listener: Any = None) -> Any:
        check = on_block.get() or self._look  # in the main thread nobody else looks
        for _ in range(AGAIN + 1):
            place, actor = self._taken(check)
            try:
                found = self._computed(actor, task, args, listener, check)
                self._ended.pop(place, None)
                return found
            except self._endings as error:
                self._note_end(place, actor, error)
            finally:
                self._free.put((place, actor))
        raise self._refusal()

    def devices(self) -> str:
        return f", devices: {sum(one.workers > 0 for one in self._members.values())}"

    def _look(self) -> None:
        """See which devices there are now, and which have the model. For the main thread."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked, kind, places = time.monotonic(), self.device.type, []
        for node in self._ray.nodes():
            cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
            count, needs = min(1, cpus), {"num_cpus": cpus}
            if kind == "cuda":
                count, needs = gpus, {"num_cpus": 0, "num_gpus": 1}
            at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            how = {"max_concurrency": CALLS, "scheduling_strategy": at} | needs
            for place in [(kind, node["NodeID"], n) for n in range(count * node["Alive"])]:
                places.append(place)
                if place not in self._members and self._ended[place] <= AGAIN:
                    if place not in ACTORS:
                        ACTORS[place] = self._ray.remote(Actor).options(**how).remote(max(1, cpus))
                    given = ACTORS[place].begin.remote(self._spec, self._named, *self._task)
                    host = node["NodeManagerAddress"]
                    self._members[place] = Member(ACTORS[place], host, given)
        if places and all(self._ended[place] > AGAIN for place in places):
            raise self._refusal()
        for place, one in list(self._members.items()):
            if one.machine is None and self._ray.wait([one.given], timeout=0)[0]:
                try:
                    common, one.machine, found = self._got(one.given)
                except self._endings as error:
                    self._note_end(place, one.actor, error)
                    continue
                if not self._common:
                    self._common, self._found = common, found
                if common != self._common:
                    raise UserError(
                        f"{one.host} has other versions of ia_mech, torch or transformers, or "
                        f"other weights: {common}, not {self._common}",
                        "give all nodes the same software and the same model",
                    )
                self._give_work(place, one)

    def _give_work(self, place: Place, one: Member) -> None:
        if self._spread and one.machine:
            one.workers = self._spread[0].for_items(*self._spread[1:], one.machine)[0]
            for _ in range(one.workers):
                self._free.put((place, one.actor))

    def _note_end(self, place: Place, actor: Any, error: Exception) -> None:
        """An actor has ended, or doesn't answer."""
        with self._alone:
            if ACTORS.get(place) is not actor:
                return  # noted before
            del ACTORS[place]
            self._last = f"{self._members.pop(place).host}: {_last_line(error)}"
            self._ended[place] += 1
        self._ray.kill(actor)  # one that only doesn't answer might go on
        self._progress.say(f"{self._last}; what was under way there is computed again")

    def _refusal(self) -> UserError:
        return UserError(
            f"an actor of the cluster ended {AGAIN + 1} times ({self._last})",
            "see Ray's log of it; if its node lacks memory, give fewer --workers",
        )

    def _taken(self, check: Callable[[], None]) -> tuple[Place, Any]:
        """A worker that is free, and still there."""
        while True:
            with contextlib.suppress(queue.Empty):
                place, actor = self._free.get(timeout=ASK)
                if ACTORS.get(place) is actor:
                    return place, actor
            check()

    def _computed(
        self, actor: Any, task: Callable, args: tuple, listener: Any, check: Callable[[], None]
    ) -> Any:
        """What a worker of an actor computes; what it reports is passed on meanwhile."""
        key, ended, threads = uuid.uuid4().hex, False, self._spread[0].threads
        if task not in self._sent:
            self._sent[task] = [self._ray.put(task)]
        given = actor.call.remote(key, self._spec, threads, self._sent[task], args)
        try:
            while not ended:
                ended = bool(self._ray.wait([given], timeout=ASK)[0])
                for name, words in self._ray.get(actor.told.remote(key)):
                    getattr(listener, name)(*words)
                check()
        finally:
            actor.end.remote(key)
        return self._got(given)

    def _got(self, given: Any) -> Any:
        """What a call gave, or raised there."""
        try:
            return self._ray.get(given)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error


def _last_line(error: Exception) -> str:
    lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
    return lines[-1][:200]
