"""Workers on a Ray cluster: an actor on every GPU, or on the CPUs of every node.

An actor loads the model by its specification and computes with as many threads as a process of its
own would have there. In this process a thread waits for each item that an actor computes: what
``workers.py`` says of workers holds of these threads. It asks twice a second for what the item's
listener is to be told. Only this process writes, so that nodes share no disk but the model's.

An actor that ends is begun again, and so are actors on nodes that join. An item whose actor has
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
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

import torch
import transformers

from ia_mech import __version__
from ia_mech.cli import expanded
from ia_mech.display import Progress
from ia_mech.engine.passes import on_block
from ia_mech.engine.workers import Crew, Stopped, Team, Threads, usable_cores
from ia_mech.errors import UserError
from ia_mech.models.embedded import MODELS
from ia_mech.models.load import ModelSpec, Subject, load, resolve_device

Result = TypeVar("Result")

HERE = "local"  # the address of this machine: Ray's word
AGAIN = 3  # times that an actor is begun again, or an item computed again
LOOK = 1.0  # seconds between looks at the nodes
ASK = 0.5  # seconds between questions about an item
MOST = 1024  # workers of a cluster; each costs this process a thread
CALLS = 64  # that an actor takes at once: a few for each worker
STORE = 2**30  # bytes of this machine's memory for what is on its way, where it is the cluster


def team_of(spec: ModelSpec, crew: Crew, progress: Progress) -> Team:
    """The workers that a command asks for, around a model."""
    if crew.ray is None:
        return Threads(load(spec))
    return Actors(cluster(crew.ray), spec, progress)


def device_of(device: str, ray: str | None) -> torch.device:
    """What workers compute on, here or on a cluster, where the setting is ``device``."""
    return resolve_device(device) if ray is None else torch.device(cluster(ray).kind(device))


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
        """Load a model unless it is there. Returns what has to be alike in all actors, and what the
        task gives, for which the model is ``named`` as the user did."""
        with self._alone:
            if spec not in self._subjects:
                self._subjects[spec] = load(spec)
            subject = replace(self._subjects[spec], spec=named)
            return (*software(), subject.weights_hash), fetched(task[0])(subject, *args)

    def workers(self, crew: Crew, items: int, item_bytes: int, on_cpu: bool) -> int:
        return crew.for_items(items, item_bytes, on_cpu)[0]

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
        relay = self._relays.get(key)
        return relay._taken() if relay else []

    def end(self, key: str) -> None:
        """Nobody waits for a call any more."""
        self._relays.pop(key, None)


@lru_cache(maxsize=8)
def fetched(reference: Any) -> Any:
    """What the main process has put there, once for all calls."""
    import ray

    return ray.get(reference)


def software() -> tuple[str, ...]:
    """What rows depend on besides weights: versions, torch's on any kind of machine."""
    return __version__, torch.__version__.partition("+")[0], transformers.__version__


# -- in the main process ---------------------------------------------------------------------------


class Cluster:
    """A cluster that this process has joined, and its actors, which stay until the process ends."""

    def __init__(self, address: str) -> None:
        self.address, self.last = address, ""
        self.actors: dict[tuple, Any] = {}  # by place: kind of device, node, number on the node
        self.hosts: dict[tuple, str] = {}
        self._ended: Counter[tuple] = Counter()  # how often since one has computed an item
        self._alone = threading.Lock()

    @cached_property
    def ray(self) -> Any:
        """Ray, joined to the cluster.

        Raises:
            UserError: Ray isn't installed, or no cluster answers.
        """
        try:
            import ray
        except ImportError:
            remedy = "install it: pip install 'ia-mech[ray]'"
            raise UserError("workers on a cluster need ray", remedy) from None
        before, here = signal.getsignal(signal.SIGTERM), dict[str, Any]()
        if self.address == HERE:
            here = {"num_cpus": usable_cores(), "object_store_memory": STORE}
            here |= {"include_dashboard": False}
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except Exception as error:  # Ray raises many kinds
            raise UserError(
                f"no Ray cluster answers at {self.address!r} ({_last_line(error)})",
                "give host:port of its head, or auto on a node of it; without an address, this "
                "machine's devices are used",
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's would end the process at once
        return ray

    def kind(self, device: str) -> str:
        """``cuda`` or ``cpu``: what actors compute on. ``auto`` is GPUs if any node has one.

        Raises:
            UserError: no node has such a device, or one of several GPUs is named.
        """
        if device not in ("auto", "cpu", "cuda"):
            problem = f"--device {device} can't be used on a cluster, whose workers use all devices"
            raise UserError(problem, "give auto, cpu or cuda; CUDA_VISIBLE_DEVICES can hide GPUs")
        if self.address == HERE:
            return resolve_device(device).type
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
        if device == "cuda" and not gpus:
            raise UserError("--device cuda: no node of the cluster has a GPU", "use --device cpu")
        return "cuda" if gpus and device != "cpu" else "cpu"

    def look(self, kind: str) -> None:
        """Begin an actor on each device that has none.

        Raises:
            UserError: all have ended too often.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        places = []
        for node in self.ray.nodes():
            cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
            count, needs = min(1, cpus), {"num_cpus": cpus}
            if kind == "cuda":
                count, needs = gpus, {"num_cpus": 0, "num_gpus": 1}
            for number in range(count if node["Alive"] else 0):
                places.append(place := (kind, node["NodeID"], number))
                if place in self.actors or self._ended[place] > AGAIN:
                    continue
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                how = {"max_concurrency": CALLS, "scheduling_strategy": there} | needs
                self.hosts[place] = node["NodeManagerAddress"]
                self.actors[place] = self.ray.remote(Actor).options(**how).remote(max(1, cpus))
        if places and all(self._ended[place] > AGAIN for place in places):
            raise self.refusal()

    def useful(self, place: tuple) -> None:
        """An actor has computed an item."""
        self._ended.pop(place, None)

    def lost(self, place: tuple, actor: Any, error: Exception) -> bool:
        """An actor has ended, or doesn't answer; whether that is news."""
        with self._alone:
            if self.actors.get(place) is not actor:
                return False
            del self.actors[place]
            self._ended[place] += 1
            self.last = f"{self.hosts[place]}: {_last_line(error)}"
        self.ray.kill(actor)  # one that only didn't answer might go on
        return True

    def refusal(self) -> UserError:
        return UserError(
            f"actors of the cluster ended {AGAIN + 1} times ({self.last})",
            "see Ray's log of it; if its node lacks memory, give fewer --workers",
        )


cluster = cache(Cluster)


class Actors:
    """A team: the actors of a cluster, with a model."""

    most, threads = MOST, 1

    def __init__(self, cluster: Cluster, spec: ModelSpec, progress: Progress) -> None:
        if spec.device_map is not None:
            problem = "--device-map can't be used on a cluster, where a worker has one device"
            raise UserError(problem, "leave it out, or leave --ray out")
        self.device = torch.device(cluster.kind(spec.device))
        self._named, self._spec = spec, replace(spec, device=self.device.type)
        for field in ("name", "adapter"):
            given = getattr(spec, field)
            if given is not None and given not in MODELS and expanded(given).exists():
                # Whole, for other processes.
                whole: dict[str, Any] = {field: os.path.abspath(expanded(given))}
                self._spec = replace(self._spec, **whole)
        self._cluster, self._progress = cluster, progress
        self._begun: dict[tuple, tuple[Any, Any]] = {}  # by place: an actor, and what it will give
        self._workers: dict[tuple, int] = {}  # by place: how many there are, once the model is
        self._alike: tuple = ()
        self._spread: tuple | None = None
        self._looked = 0.0

    def begin(self, task: Callable[..., Result], *args: Any) -> Result:
        self._task = [self._cluster.ray.put(task)], args
        self._progress.say(f"waiting for a device of the cluster to load {self._named.name} …")
        while not self._workers:
            self._look()
            time.sleep(ASK / 10)
        return self._found

    def spread(self, crew: Crew, items: int, item_bytes: int = 0) -> None:
        self._spread, self._each = (
            (crew, items, item_bytes, self.device.type == "cpu"),
            crew.threads,
        )
        self._free: queue.SimpleQueue[tuple] = queue.SimpleQueue()  # a place for each free worker
        self._sent: dict[Callable, list] = {}
        for place in self._workers:
            self._give_work(place)

    def ready(self) -> int:
        if time.monotonic() - self._looked > LOOK:
            self._look()
        return sum(self._workers.values())

    def call(self, task: Callable[..., Result], *args: Any, listener: Any = None) -> Result:
        check = on_block.get() or self._look  # in the main thread nobody else looks
        for _ in range(AGAIN + 1):
            place, actor = self._taken(check)
            try:
                found = self._computed(actor, task, args, listener, check)
                self._cluster.useful(place)
                return found
            except self._endings as error:
                self._note_end(place, actor, error)
            finally:
                self._free.put((place, actor))
        raise self._cluster.refusal()

    def shown(self, progress: Progress) -> Progress:
        return _Shown(progress, self._workers)

    @property
    def _endings(self) -> tuple:
        errors = self._cluster.ray.exceptions
        return errors.RayActorError, errors.ObjectLostError

    def _look(self) -> None:
        """See which actors there are now, and where the model is. For the main thread."""
        cluster, self._looked = self._cluster, time.monotonic()
        cluster.look(self.device.type)
        for place in [p for p, (actor, _) in self._begun.items() if cluster.actors.get(p) != actor]:
            del self._begun[place]
            self._workers.pop(place, None)
        for place, actor in list(cluster.actors.items()):
            if place[0] != self.device.type or place in self._workers:
                continue
            if place not in self._begun:
                self._begun[place] = actor, actor.begin.remote(self._spec, self._named, *self._task)
            given = self._begun[place][1]
            if not cluster.ray.wait([given], timeout=0)[0]:
                continue
            try:
                alike, found = self._got(given)
            except self._endings as error:
                self._note_end(place, actor, error)
                continue
            if not self._alike:
                self._alike, self._found = alike, found
            self._refuse_unlike(place, alike)
            self._workers[place] = 0
            if self._spread is not None:
                self._progress.say(f"{cluster.hosts[place]} computes, too")
                self._give_work(place)

    def _refuse_unlike(self, place: tuple, alike: tuple) -> None:
        names = "ia_mech", "torch", "transformers", "the weights"
        for name, one, first in zip(names, alike, self._alike, strict=True):
            if one != first:
                host = self._cluster.hosts[place]
                problem = f"{name} differs between nodes: {one} on {host}, {first} before"
                raise UserError(problem, "give all nodes the same software and model")

    def _give_work(self, place: tuple) -> None:
        assert self._spread is not None
        actor = self._begun[place][0]
        try:
            self._workers[place] = self._got(actor.workers.remote(*self._spread))
        except self._endings as error:
            self._note_end(place, actor, error)
            return
        for _ in range(self._workers[place]):
            self._free.put((place, actor))

    def _note_end(self, place: tuple, actor: Any, error: Exception) -> None:
        if self._cluster.lost(place, actor, error):
            self._progress.say(f"{self._cluster.last}; what it computed is computed again")

    def _taken(self, check: Callable[[], None]) -> tuple[tuple, Any]:
        """A worker that is free, and still there."""
        while True:
            with contextlib.suppress(queue.Empty):
                place, actor = self._free.get(timeout=ASK)
                if self._cluster.actors.get(place) == actor:
                    return place, actor
            check()

    def _computed(
        self, actor: Any, task: Callable, args: tuple, listener: Any, check: Callable[[], None]
    ) -> Any:
        """What a worker of an actor computes; what it reports is passed on meanwhile."""
        ray, key = self._cluster.ray, uuid.uuid4().hex
        if task not in self._sent:
            self._sent[task] = [ray.put(task)]
        given = actor.call.remote(key, self._spec, self._each, self._sent[task], args)
        try:
            ended = False
            while not ended:
                ended = bool(ray.wait([given], timeout=ASK)[0])
                for name, words in ray.get(actor.told.remote(key)):
                    getattr(listener, name)(*words)
                check()
        finally:
            actor.end.remote(key)
        return self._got(given)

    def _got(self, given: Any) -> Any:
        """What a call gave, or raised there."""
        try:
            return self._cluster.ray.get(given)
        except self._cluster.ray.exceptions.RayTaskError as error:
            raise error.cause from error


class _Shown:
    """Progress whose notes say how many devices compute."""

    def __init__(self, progress: Progress, devices: dict) -> None:
        self._devices = devices
        self.start, self.say, self.stop = progress.start, progress.say, progress.stop
        self._advance = progress.advance

    def advance(self, steps: int = 1, note: str = "") -> None:
        count = len(self._devices)
        devices = f"{count} device{'s' * (count != 1)}"
        self._advance(steps, f"{note}, {devices}" if note else devices)


def _last_line(error: Exception) -> str:
    return [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))][-1][:200]
