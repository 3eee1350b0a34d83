"""Who among the replicas may be sent requests, kept up to date; a newcomer first catches up with changes of policy."""

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.server.replicas_affinity import Lead, PrefixAffinity
from engine.server.replicas_call import BrokenAnswerError, Forwarded, Headers
from engine.server.replicas_fleet import Fleet, Member, ReplicaLostError
from engine.server.sending import to_json

LOG = logging.getLogger("zlab.server")
POLICY = "/v1/policy"
LOOK_S = 1.0
ANSWER_TIMEOUT_S = 17.0  # for what is asked of every replica: a change of policy gives up after 15 s by itself
MOST_CHANGES = 64  # that a newcomer carries out; who has missed more has no use for the oldest


@dataclass(frozen=True)
class Reply:
    """What one replica answered, whole; status 0 and the reason as body if it gave no answer."""

    member: Member
    status: int
    headers: Headers
    body: bytes

    @property
    def done(self) -> bool:
        """Whether the replica did what was asked."""
        return 200 <= self.status < 300


def undo_of(change: Forwarded, done: Reply) -> Forwarded:
    """What takes a change of policy back in the replica that gave this reply to it."""
    said = json.loads(done.body)
    headers = tuple(pair for pair in change.headers if pair[0].lower() != b"content-length")
    body = to_json({"lane": said["lane"], "digest": said["digest"]})
    return replace(change, path=f"{POLICY}/undo", headers=headers, body=body)


class Roster:
    """The replicas as last seen, and the rule that chooses among those that are well."""

    def __init__(self, fleet: Fleet, lead: Lead | None = None) -> None:
        self.fleet = fleet
        self.rule = PrefixAffinity(1, lead)
        self.members: dict[str, Member] = {}
        self.num_lost = 0
        self._changes: list[Forwarded] = []  # the last that every replica has carried out
        self._num_changes = 0  # in all
        self._caught_up: dict[str, int] = {}  # how many of them, by replica
        self._looking = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Look around once, then again and again."""
        await self.look()
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Look no more; a look under way is finished."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def look(self) -> None:
        """Ask who is there. Newcomers carry out the changes so far before they are sent anything."""
        async with self._looking:
            present = {member.id: member for member in await self.fleet.members()}
            self._caught_up = {id: self._caught_up.get(id, 0) for id in present}
            for member in present.values():
                await self._catch_up(member)
            self._take(present)

    def lose(self, replica: str) -> None:
        """A replica did not answer: it is sent nothing until it is seen again."""
        if replica in self.members:
            LOG.warning("replica %s is lost", self.members[replica].name)
            self.num_lost += 1
            self._take({id: member for id, member in self.members.items() if id != replica})

    async def ask_all(self, request: Forwarded) -> list[Reply]:
        """The same request to every replica at once; their replies by name."""
        members = sorted(self.members.values(), key=lambda member: member.name)
        return list(await asyncio.gather(*(self._ask(member, request) for member in members)))

    async def change_all(self, request: Forwarded) -> tuple[list[Reply], list[Reply]]:
        """Ask all for a change; one that all carry out is asked of every newcomer, too.

        A policy that only some take is taken back there: the second list has their replies to that.
        """
        async with self._looking:
            replies = await self.ask_all(request)
            done = [reply for reply in replies if reply.done]
            if done and len(done) < len(replies) and request.path == POLICY:
                return replies, list(
                    await asyncio.gather(*(self._ask(reply.member, undo_of(request, reply)) for reply in done))
                )
            if done and len(done) == len(replies):
                self._changes = [*self._changes, request][-MOST_CHANGES:]
                self._num_changes += 1
                for reply in replies:
                    self._caught_up[reply.member.id] = self._num_changes
        return replies, []

    async def _ask(self, member: Member, request: Forwarded) -> Reply:
        status, body = 0, b""
        headers: Headers = ()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                async for part in self.fleet.forward(request, member.id):
                    if part.status is not None:
                        status, headers = part.status, part.headers
                    body += part.body
        except TimeoutError:
            return Reply(member, 0, (), f"no answer within {ANSWER_TIMEOUT_S:g} s".encode())
        except (ReplicaLostError, BrokenAnswerError) as error:
            return Reply(member, 0, (), str(error).encode())
        return Reply(member, status, headers, body)

    async def _catch_up(self, member: Member) -> None:
        missing = self._num_changes - self._caught_up[member.id]
        if not missing:
            return
        for change in self._changes[-missing:]:
            reply = await self._ask(member, change)
            if not reply.done:
                LOG.error("replica %s cannot catch up: %s", member.name, reply.body[:500].decode(errors="replace"))
                return
        self._caught_up[member.id] = self._num_changes

    def _take(self, present: dict[str, Member]) -> None:
        self.members = present
        well = [
            member
            for member in present.values()
            if member.trouble is None and self._caught_up[member.id] == self._num_changes
        ]
        if well:
            self.rule.capacity_blocks = max(1, min(member.num_blocks for member in well))
        self.rule.set_replicas(member.id for member in well)

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()
                return
            try:
                await self.look()
            except Exception as error:
                LOG.error("the replicas cannot be seen: %s", error)
