"""One stream of changes that is read when the test says so."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from gxpo_services.api.feed import ChangeFeed, Subscription
from gxpo_services.db.database import Database
from gxpo_services.runs import changes


class Reader:
    """A feed without its task, and one stream of it."""

    def __init__(self, database: Database, secret: str, runs: list[int] | None = None, **options: Any) -> None:
        self.feed = ChangeFeed(database, changes.messages)
        self.stream = Subscription(secret, runs, **options)
        self.held = ExitStack()
        self.held.enter_context(self.feed.following(self.stream))

    async def pages(self) -> list[list[bytes]]:
        """What one reading finds, as it is sent."""
        await self.feed._update()
        pages = []
        while page := await changes._next(self.feed, self.stream):
            pages.append(page)
        return pages

    async def read(self) -> list[bytes]:
        return [message for page in await self.pages() for message in page]
