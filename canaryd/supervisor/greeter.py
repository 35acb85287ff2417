"""Side connections until they are sessions: accepted, greeted, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Container, Sized
from dataclasses import dataclass
from typing import Protocol

from canaryd.errors import AttachRefused, RefusalReason, WireError
from canaryd.logs import event_logger
from canaryd.wire.messages import Hello, Refused, Welcome
from canaryd.wire.side import SideConnection, SideListener, close_fds

log = event_logger(__name__)

GREETING_SECONDS = 5.0
_MAX_GREETINGS = 64


class Sessions(Sized, Container[bytes], Protocol):
    """The sessions that stand, by token."""


Greeted = tuple[SideConnection, Hello, list[int]]
"""A connection that was welcomed, what it said, and its descriptors, which the caller now owns."""


@dataclass
class _Greeting:
    side: SideConnection
    deadline: float
    objection: AttachRefused | None


class Greeter:
    """Accepts and greets.

    Args:
        listener: where clients connect; the caller's to close.
        uids: users whose engines may attach.
        max_sessions: sessions and greetings at the same time.
    """

    def __init__(self, listener: SideListener, *, uids: frozenset[int], max_sessions: int) -> None:
        self._listener = listener
        self._uids = uids
        self._max_sessions = max_sessions
        self._greetings: list[_Greeting] = []

    def descriptors(self) -> list[int]:
        """Descriptors to poll."""
        return [self._listener.fileno(), *(each.side.fileno() for each in self._greetings)]

    def serve(
        self,
        now: float,
        sessions: Sessions,
        *,
        refused: Callable[[AttachRefused], None],
        bad: Callable[[WireError], None],
    ) -> list[Greeted]:
        """Accept whoever waits and greet whoever said hello; `refused` and `bad` count what was turned away."""
        while (side := self._accept()) is not None:
            if len(self._greetings) >= _MAX_GREETINGS:
                side.close()
                continue
            # A refusal waits for the hello too: a client that is still writing it would miss the answer.
            self._greetings.append(_Greeting(side, now + GREETING_SECONDS, self._objection(side, len(sessions))))
        greeted: list[Greeted] = []
        waiting: list[_Greeting] = []
        for greeting in self._greetings:
            try:
                received = greeting.side.receive_hello()
            except WireError as error:
                bad(error)
                self._turn_away(greeting.side, Refused(reason=error.reason, cause=str(error), remedy=_MATCHING))
                continue
            except OSError:
                greeting.side.close()  # it hung up
                continue
            if received is None:
                if now < greeting.deadline:
                    waiting.append(greeting)
                else:
                    log.warning("a side connection said nothing and is closed", pid=greeting.side.peer.pid)
                    greeting.side.close()
                continue
            hello, fds = received
            objection = greeting.objection
            if objection is None and hello.session in sessions:
                objection = AttachRefused(
                    RefusalReason.IDENTITY_TAKEN, "The session has a side connection.", "Begin a new session."
                )
            if objection is not None:
                close_fds(fds)
                refused(objection)
                self._turn_away(greeting.side, refusal_answer(objection))
            elif _answer(greeting.side, Welcome()):
                greeted.append((greeting.side, hello, fds))
            else:
                close_fds(fds)
                greeting.side.close()
        self._greetings = waiting
        return greeted

    def _accept(self) -> SideConnection | None:
        try:
            return self._listener.accept()
        except OSError as error:
            log.warning("a side connection could not be accepted", error=str(error))
            return None

    def _objection(self, side: SideConnection, sessions: int) -> AttachRefused | None:
        if side.peer.uid not in self._uids:
            return AttachRefused(
                RefusalReason.PEER_CREDENTIALS,
                f"The engine runs as user {side.peer.uid}, which may not attach here.",
                "Run it as the daemon's user, or add the user to peers.uids.",
            )
        if sessions + len(self._greetings) >= self._max_sessions:
            return AttachRefused(
                RefusalReason.LIMIT,
                f"{self._max_sessions} engine ranks are connected, which is the limit.",
                "Raise engines.max_sessions.",
            )
        return None

    @staticmethod
    def _turn_away(side: SideConnection, answer: Refused) -> None:
        _answer(side, answer)
        side.close()

    def close(self) -> None:
        """Hang up on whoever has not been greeted."""
        for greeting in self._greetings:
            greeting.side.close()
        self._greetings.clear()


_MATCHING = "Use a client of the daemon's version."


def refusal_answer(refusal: AttachRefused) -> Refused:
    """The wire answer that says why."""
    return Refused(reason=refusal.refusal.value, cause=refusal.cause, remedy=refusal.remedy)


def _answer(side: SideConnection, answer: Welcome | Refused) -> bool:
    try:
        side.answer(answer)
    except OSError:
        return False
    return True
