"""Many items at once: requests in a thread of their own, verdicts out as they come.

The event loop runs in its own thread, so that a judge works where a loop runs already (a notebook),
an interrupt never lands inside the loop, and storing a verdict delays no request.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

from ia_mech.errors import UserError
from ia_mech.judge.llm.server import Halted, Server
from ia_mech.judge.verdict import Item, Verdict

BREAKER = 10  # verdicts in a row without an answer that end the run, or --concurrency if it is more
SHUTDOWN_SECONDS = 5.0

Ask = Callable[[Server, Item], Awaitable[Verdict]]
Connect = Callable[[], contextlib.AbstractAsyncContextManager[Server]]


class Session:
    """One pass over items.

    The first item goes alone: what no item would get past is found with one request, the response
    format is settled, and servers that keep prompts have the rubric when the others come. Then up
    to ``concurrency`` items are under way, where an item counts until whoever takes its verdict
    comes back for the next; so a kill costs at most that many answers.

    The run ends early, with a ``UserError``, when ``BREAKER`` items in a row were ``unavailable``,
    or when the server has ``rejected`` as many and answered none. Such rejections aren't handed out
    before: with a wrong setting they would be stored as if they were the items' fault.

    Args:
        connect: opens the server; entered and left in the session's thread.
        ask: one item's verdict; raises ``Halted`` if the run was halted before there was one.
        items: what to judge.
        concurrency: most items under way.
    """

    def __init__(self, connect: Connect, ask: Ask, items: Sequence[Item], concurrency: int) -> None:
        self._connect = connect
        self._ask = ask
        self._items = items
        self._concurrency = concurrency
        self._breaker = max(BREAKER, concurrency)
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()  # None at the end
        self._problem: BaseException | None = None
        self._server: Server | None = None
        self._unavailable = 0  # in a row
        self._held: list[tuple[int, Verdict]] = []  # rejections before the first answer

    def verdicts(self) -> Iterator[tuple[int, Verdict]]:
        """Yield (index, verdict) as they come.

        Raises:
            UserError: what ended the run early, after all verdicts that were still received.
        """
        loop = asyncio.new_event_loop()
        main = loop.create_task(self._main())
        thread = threading.Thread(target=self._run, args=(loop, main), daemon=True)
        thread.start()
        try:
            while (entry := self._outbox.get()) is not None:
                index, verdict, taken = entry
                yield index, verdict
                loop.call_soon_threadsafe(taken.set)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: all is done
                loop.call_soon_threadsafe(main.cancel)
            thread.join(SHUTDOWN_SECONDS)
        if self._problem is not None:
            raise self._problem

    # -- in the session's thread ---------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(main)
            if leftover := asyncio.all_tasks(loop):
                for task in leftover:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(leftover))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:
            self._problem = self._problem or error
        finally:
            loop.close()
            self._outbox.put(None)

    async def _main(self) -> None:
        waiting = iter(range(len(self._items)))
        async with self._connect() as self._server:
            await self._work(iter([next(waiting)]))
            workers = min(self._concurrency, len(self._items) - 1)
            await asyncio.gather(*[self._work(waiting) for _ in range(workers)])
            if self._problem is None or self._server.answered:
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
                self._problem = self._problem or error
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
        taken = asyncio.Event()
        self._outbox.put((index, verdict, taken))
        await taken.wait()
