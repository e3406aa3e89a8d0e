"""Many items at once: requests in a thread of their own, verdicts out as they come.

The event loop runs in its own thread, so that a judge works where a loop runs already (a notebook),
an interrupt never lands inside the loop, and storing a verdict delays no request. A kill costs at
most ``concurrency`` turns' answers, an interrupt none that had arrived.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from ia_mech.errors import UserError
from ia_mech.judge.llm.server import Halted, Server
from ia_mech.judge.verdict import Item, Verdict

BREAKER = 10  # verdicts in a row without an answer that end the run, or --concurrency if it is more
GRACE_SECONDS = 1.0  # after an early end, for the answers under way: they are paid for already
SHUTDOWN_SECONDS = 5.0

Ask = Callable[[Server, Item], Awaitable[Verdict]]
Connect = Callable[[], contextlib.AbstractAsyncContextManager[Server]]


class Received(NamedTuple):
    """A verdict that has come. ``taken`` is set when whoever was given it is done with it."""

    index: int
    verdict: Verdict
    taken: asyncio.Event


class Session:
    """One pass over items.

    The first item goes alone: what no item would get past is found with one request, the response
    format is settled, and servers that keep prompts have the rubric when the others come. Then up
    to ``concurrency`` items are in flight. An item is in flight from its request until whoever
    takes its verdict has written it and comes back for the next, so answers that wait behind
    another's write count: no moment has more than ``concurrency`` turns whose answers are asked for
    and unwritten, and a kill loses no more. (A turn that was asked for twice is still one.)

    The run ends early, with a ``UserError``, when ``BREAKER`` items in a row were ``unavailable``,
    or when the server has ``rejected`` as many and answered none. Such rejections aren't handed out
    before: with a wrong setting they would be stored as if they were the items' fault.

    Args:
        connect: opens the server; entered and left in the session's thread.
        ask: one item's verdict; raises ``Halted`` if the run was halted before there was one, and
            when cancelled gives what was paid for, if anything was.
        items: what to judge.
        concurrency: most items in flight.

    Attributes:
        received: all verdicts that came, in that order.
        problem: what ended the run early.
    """

    def __init__(self, connect: Connect, ask: Ask, items: Sequence[Item], concurrency: int) -> None:
        self.received: list[Received] = []
        self.problem: BaseException | None = None
        self._connect = connect
        self._ask = ask
        self._items = items
        self._concurrency = concurrency
        self._breaker = max(BREAKER, concurrency)
        self._news: queue.SimpleQueue = queue.SimpleQueue()  # wakes ``wait``
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._stopping = False
        self._server: Server | None = None
        self._unavailable = 0  # in a row
        self._held: list[tuple[int, Verdict]] = []  # rejections before the first answer

    def wait(self, taken: int) -> None:
        """Wait until more than ``taken`` verdicts are received, or no more will be.

        Args:
            taken: how many the caller has had so far; it is done with all of them.
        """
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._main_task = self._loop.create_task(self._main())
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        elif taken:
            self._in_loop(self.received[taken - 1].taken.set)
        while len(self.received) == taken and not self._ended:
            self._news.get()

    def stop(self) -> None:
        """Send nothing more. Answers under way may come for another ``GRACE_SECONDS``."""
        if self._thread is not None and self._thread.is_alive():
            self._in_loop(self._stop)
            self._thread.join(GRACE_SECONDS + SHUTDOWN_SECONDS)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all is done
            self._loop.call_soon_threadsafe(call)

    # -- in the session's thread ---------------------------------------------------------------

    def _run(self) -> None:
        loop = self._loop
        try:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(self._main_task)
            if leftover := asyncio.all_tasks(loop):
                for task in leftover:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(leftover))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:
            self.problem = self.problem or error
        finally:
            loop.close()
            self._ended = True
            self._news.put(None)

    def _stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.halted.set()
        for entry in self.received:
            entry.taken.set()
        self._loop.call_later(GRACE_SECONDS, self._main_task.cancel)

    async def _main(self) -> None:
        waiting = iter(range(len(self._items)))
        async with self._connect() as self._server:
            if self._stopping:
                self._server.halted.set()
            try:
                await self._work(iter([next(waiting)]))
                workers = min(self._concurrency, len(self._items) - 1)
                await asyncio.gather(*[self._work(waiting) for _ in range(workers)])
            finally:
                cut_short = self._stopping or self.problem is not None
                if self._server.answered or not cut_short:
                    for index, verdict in self._held:
                        await self._deliver(index, verdict)

    async def _work(self, waiting: Iterator[int]) -> None:
        """Judge what is waiting, until nothing is or the run is halted.

        A problem halts the run: nothing more is sent, and what is under way comes to its end.
        """
        while not self._server.halted.is_set():
            index = next(waiting, None)
            if index is None:
                return
            try:
                await self._count(index, await self._ask(self._server, self._items[index]))
            except Halted:
                return
            except Exception as error:
                self.problem = self.problem or error
                self._server.halted.set()

    async def _count(self, index: int, verdict: Verdict) -> None:
        self._unavailable = self._unavailable + 1 if verdict.status == "unavailable" else 0
        if verdict.status == "rejected" and not self._server.answered:
            self._held.append((index, verdict))
        else:
            await self._deliver(index, verdict)
        if self._unavailable >= self._breaker:
            raise UserError(
                f"{self._unavailable} requests in a row got no answer, the last {verdict.error}",
                "check the server, --timeout and --concurrency, then give the same command again; "
                "verdicts so far are kept",
            )
        if len(self._held) >= self._breaker and not self._server.answered:
            raise UserError(
                f"the server rejected the first {len(self._held)} requests, the last with "
                f"{verdict.error}",
                "check --model, --mode and --param",
            )

    async def _deliver(self, index: int, verdict: Verdict) -> None:
        entry = Received(index, verdict, asyncio.Event())
        self.received.append(entry)
        self._news.put(None)
        if not self._stopping:
            await entry.taken.wait()


class Verdicts:
    """What a session receives: an iterator of (index, verdict), as they come.

    An exception while waiting, ``KeyboardInterrupt`` above all, closes it.

    Raises:
        UserError: what ended the session early, after all verdicts that were still received.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken = 0
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, Verdict]]:
        return self

    def __next__(self) -> tuple[int, Verdict]:
        session = self._session
        if not self._closed:
            try:
                session.wait(self._taken)
            except BaseException:
                self.close()
                raise
        if self._taken < len(session.received):
            entry = session.received[self._taken]
            self._taken += 1
            return entry.index, entry.verdict
        if not self._closed:
            self._closed = True
            if session.problem is not None:
                raise session.problem
        raise StopIteration

    def close(self) -> None:
        """End the session. What it received can still be iterated over.

        That begins with the verdict handed out last: an interrupt may have come before it was kept.
        """
        if not self._closed:
            self._taken = max(0, self._taken - 1)
            self._closed = True
            self._session.stop()

    def __del__(self) -> None:
        self.close()
