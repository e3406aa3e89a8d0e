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
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

import torch
import transformers

from ia_mech import __version__
from ia_mech.display import Progress
from ia_mech.engine.passes import on_block
from ia_mech.engine.workers import Crew, Stopped, Team, usable_cores, usable_memory
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, Subject, load, resolve_device

HERE = "local"  # the address of this machine: Ray's word
AGAIN = 3  # times that an actor is begun again, or an item computed again
LOOK, ASK = 1.0, 0.5  # seconds between looks at the nodes, and between questions about an item
CALLS = 64  # that an actor takes at once: a few for each worker
STORE = 2**30  # bytes of this machine's memory for what is on its way, where it is the cluster


def team_of(spec: ModelSpec, crew: Crew, progress: Progress) -> Team:
    """The workers that a command asks for, around a model."""
    if crew.ray is None:
        return Team(load(spec))
    if (spec, crew.ray) not in TEAMS:
        while TEAMS:
            TEAMS.popitem()[1].close()
        TEAMS[spec, crew.ray] = Actors(spec, crew.ray)
    TEAMS[spec, crew.ray].say = progress.say
    return TEAMS[spec, crew.ray]


def device_of(device: str, address: str | None) -> torch.device:
    """What workers compute on, where the setting is ``device``; ``auto`` is GPUs if there are any.
    A device that isn't there is refused."""
    if address is not None and device.startswith("cuda:"):
        remedy = "give cuda; CUDA_VISIBLE_DEVICES can hide some"
        raise UserError(f"--device {device}: --ray uses all GPUs", remedy)
    if address in (None, HERE) or device not in ("auto", "cuda"):
        return resolve_device(device)
    gpus = joined(address).cluster_resources().get("GPU")
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no node of the cluster has a GPU", "use --device cpu")
    return torch.device("cuda" if gpus else "cpu")


@cache
def joined(address: str) -> Any:
    """Ray, once this process has joined the cluster."""
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # of items that nobody waits for any more
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs ray", "install it: pip install 'ia-mech[ray]'") from None
    here = {"num_cpus": usable_cores(), "object_store_memory": STORE, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if ":" in address:  # Ray asks for minutes where nobody is
            host, port = address.rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        how = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address, **how, **(here if address == HERE else {}))
    except Exception as error:  # Ray raises many kinds
        raise UserError(
            f"no Ray cluster answers at {address!r} ({_last_line(error)})",
            "give host:port of its head, auto on one of its nodes, or nothing for this machine",
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
    """A process of a cluster that computes with a model. Several of its methods run at once."""

    def __init__(self, spec: ModelSpec, cores: int, folder: str) -> None:
        os.environ["LOKY_MAX_CPU_COUNT"] = str(cores)  # which usable_cores() reads
        with contextlib.suppress(OSError):
            os.chdir(folder)  # to which the model's path may be relative
        self._spec, self._subject = spec, cast(Subject, None)
        self._relays: dict[str, Relay] = {}  # of the calls that somebody waits for

    def begin(self, task: list, args: tuple) -> tuple:
        """What all actors must have in common, cores and free memory, and what the task gives."""
        self._subject = self._subject or load(self._spec)
        found = fetched(task[0])(self._subject, *args)
        common = *versions(), self._subject.weights_hash
        return common, (usable_cores(), usable_memory().free), found

    def call(self, key: str, threads: int, task: list, args: tuple) -> Any:
        relay = self._relays[key] = Relay()

        def check() -> None:
            if key not in self._relays:
                raise Stopped

        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # memory may have run out in the call before
        torch.set_num_threads(threads)  # of this thread
        on_block.set(check)
        return fetched(task[0])(self._subject, *args, relay)

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


def versions() -> tuple[str, ...]:
    return __version__, torch.__version__.partition("+")[0], transformers.__version__


# -- in the main process ---------------------------------------------------------------------------


@dataclass(eq=False)
class Device:
    """An actor, and the device of the cluster where it is."""

    place: tuple[str, int]  # the node, and the number there
    host: str
    actor: Any
    given: Any = None  # what it gives once it has the model
    machine: tuple[int, int] | None = None  # its cores and free memory then
    workers: int = 0


class Actors(Team):
    """The actors of a cluster, with a model."""

    most = 1024  # each costs this process a thread

    def __init__(self, spec: ModelSpec, address: str) -> None:
        if spec.device_map is not None:
            raise UserError("--device-map can't be used with --ray", "leave one of them out")
        self.device, self.threads = device_of(spec.device, address), 1
        self._spec, self._ray = replace(spec, device=self.device.type), joined(address)
        errors = self._ray.exceptions
        self._endings = errors.RayActorError, errors.ObjectLostError
        self._devices: list[Device] = []
        self._ended: Counter[tuple[str, int]] = Counter()  # actors, since one has computed an item
        self._put = lru_cache(8)(lambda task: [self._ray.put(task)])  # once for all calls
        self.say: Callable[[str], None] = print
        self._last, self._looked = "", 0.0

    def begin(self, task: Callable, *args: Any) -> Any:
        self._common: tuple = ()
        self._spread: tuple = ()
        self._task = self._put(task), args
        for one in self._devices:
            one.given, one.machine, one.workers = None, None, 0
        if not self._devices:
            self.say(f"waiting for a device of the cluster to load {self._spec.name} …")
        while not self._common:
            self._look()
            time.sleep(ASK / 10)
        return self._found

    def spread(self, crew: Crew, items: int, item_bytes: int = 0) -> None:
        on_cpu = self.device.type == "cpu"
        first = next((one.machine for one in self._devices if one.machine), None)
        threads = crew.for_items(items, item_bytes, on_cpu, first)[1]  # the same on all nodes
        self._spread = crew._replace(threads=threads), items, item_bytes, on_cpu
        self._free: queue.SimpleQueue[Device] = queue.SimpleQueue()
        for one in self._devices:
            self._give_work(one)

    def ready(self) -> int:
        if time.monotonic() - self._looked > LOOK:
            self._look()
        return sum(one.workers for one in self._devices)

    def call(self, task: Callable, *args: Any, listener: Any = None) -> Any:
        check = on_block.get() or self._look  # in the main thread nobody else looks
        for _ in range(AGAIN + 1):
            one = self._taken(check)
            try:
                found = self._computed(one.actor, task, args, listener, check)
                self._ended.pop(one.place, None)
                return found
            except self._endings as error:
                self._note_end(one, error)
            finally:
                self._free.put(one)
        raise self._refusal()

    def close(self) -> None:
        """End all actors, so that those of another model can have the devices."""
        for one in self._devices:
            self._ray.kill(one.actor)

    def devices(self) -> str:
        return f", devices: {sum(one.workers > 0 for one in self._devices)}"

    def _look(self) -> None:
        """See which devices there are now, and which have the model. For the main thread."""
        self._looked, on_cpu, places = time.monotonic(), self.device.type == "cpu", 0
        taken = {one.place for one in self._devices}
        for node in self._ray.nodes():
            cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
            needs = {"num_cpus": cpus} if on_cpu else {"num_cpus": 0, "num_gpus": 1}
            for number in range((min(1, cpus) if on_cpu else gpus) * node["Alive"]):
                place, places = (node["NodeID"], number), places + 1
                if place not in taken and self._ended[place] <= AGAIN:
                    kinds = self._ray.util.scheduling_strategies
                    at = kinds.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    how = needs | {"max_concurrency": CALLS, "scheduling_strategy": at}
                    kind, words = self._ray.remote(**how)(Actor), (max(1, cpus), os.getcwd())
                    actor = kind.remote(self._spec, *words)
                    self._devices.append(Device(place, node["NodeManagerAddress"], actor))
        if places and not self._devices:
            raise self._refusal()
        for one in [*self._devices]:
            one.given = one.given or one.actor.begin.remote(*self._task)
            if not one.machine and self._ray.wait([one.given], timeout=0)[0]:
                try:
                    common, one.machine, found = self._got(one.given)
                except self._endings as error:
                    self._note_end(one, error)
                    continue
                if not self._common:
                    self._common, self._found = (*versions(), common[-1]), found
                if common != self._common:
                    raise UserError(
                        f"{one.host} has other versions of ia_mech, torch or transformers, or "
                        f"other weights: {common}, not {self._common}",
                        "give all nodes the same software and the same model",
                    )
                self._give_work(one)

    def _give_work(self, one: Device) -> None:
        if self._spread and one.machine:
            one.workers = self._spread[0].for_items(*self._spread[1:], one.machine)[0]
            for _ in range(one.workers):
                self._free.put(one)

    def _note_end(self, one: Device, error: Exception) -> None:
        """An actor has ended, or doesn't answer."""
        try:
            self._devices.remove(one)
        except ValueError:
            return  # noted before, by another thread
        self._ended[one.place] += 1
        self._ray.kill(one.actor)  # one that only doesn't answer might go on
        self._last = f"{one.host}: {_last_line(error)}"
        self.say(f"{self._last}; what was under way there is computed again")

    def _refusal(self) -> UserError:
        return UserError(
            f"an actor of the cluster ended {AGAIN + 1} times ({self._last})",
            "see Ray's log of it; if its node lacks memory, give fewer --workers",
        )

    def _taken(self, check: Callable[[], None]) -> Device:
        """A worker that is free, and still there."""
        while True:
            with contextlib.suppress(queue.Empty):
                if (one := self._free.get(timeout=ASK)) in self._devices:
                    return one
            check()

    def _computed(
        self, actor: Any, task: Callable, args: tuple, listener: Any, check: Callable[[], None]
    ) -> Any:
        """What a worker of an actor computes; what it reports is passed on meanwhile."""
        key, ended = uuid.uuid4().hex, False
        given = actor.call.remote(key, self._spread[0].threads, self._put(task), args)
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


TEAMS: dict[tuple[ModelSpec, str], Actors] = {}  # the last one: models don't share devices


def _last_line(error: Exception) -> str:
    lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
    return lines[-1][:200]
