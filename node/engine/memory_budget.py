"""Cache memory of running sequences, and eviction of idle caches to make room for them.

    limit = reserved (sequences in the engine) + idle (resident caches between turns) + free

The limit is the total, or less while the machine is short of memory (`restrict`).

The engine thread reserves memory, and the owner of the idle caches reports their size; one lock
guards both. Neither waits for the other: a reservation that does not fit requests an eviction, and
the engine retries it after the owner has answered.
"""

import threading
from collections.abc import Callable

from fabric.errors import RejectedError
from fabric.limits import MIB


class Reservation:
    """One sequence's share of the budget; starts with nothing."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: "MemoryBudget") -> None:
        self._budget = budget
        self.size_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Reserve at least `size_bytes`, even over the limit, for memory that is already in use."""
        self._budget.take(self, size_bytes)

    def claim(self, size_bytes: int) -> bool:
        """Reserve at least `size_bytes` if they are free, without evicting; return whether so."""
        return self._budget.claim(self, size_bytes)

    def grow(self, size_bytes: int, *, force: bool = False) -> bool:
        """Reserve at least `size_bytes` if they fit; return whether so (see MemoryBudget.grow)."""
        return self._budget.grow(self, size_bytes, force=force)

    def release(self) -> None:
        """Give everything back; idempotent."""
        self._budget.release(self)


class MemoryBudget:
    """Counter of the bytes of caches; callable from any thread.

    `make_room(bytes)` requests the owner of the idle caches to drop that many. It reports by
    `set_idle`, from within the call or later from its own thread, even if it freed nothing.
    """

    def __init__(self, total_bytes: int, make_room: Callable[[int], None] | None = None) -> None:
        self.total_bytes = total_bytes
        self._limit_bytes = total_bytes
        self._make_room = make_room
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._idle_bytes = 0
        self._answers_count = 0
        self._asked_at: int | None = None  # answers received when room was last requested

    @property
    def limit_bytes(self) -> int:
        """Bytes that may be used now; a sequence that runs alone may exceed them."""
        return self._limit_bytes

    def resize(self, total_bytes: int) -> None:
        """Change the total, once the model's own needs are known and before the first turn."""
        with self._lock:
            self.total_bytes = self._limit_bytes = total_bytes

    def restrict(self, limit_bytes: int) -> None:
        """Set the limit, at most the total; existing reservations stay."""
        with self._lock:
            self._limit_bytes = min(limit_bytes, self.total_bytes)

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of resident caches that no sequence uses."""
        return self._idle_bytes

    @property
    def claimable_bytes(self) -> int:
        """Bytes that sequences could have if every idle cache were dropped."""
        return self._limit_bytes - self._reserved_bytes

    def set_idle(self, size_bytes: int) -> None:
        """Report the size of the idle caches; called by their owner's thread only."""
        with self._lock:
            self._idle_bytes = size_bytes
            self._answers_count += 1

    def check(self, size_bytes: int) -> None:
        """Raise RejectedError if `size_bytes` would not fit even alone."""
        if size_bytes > self.total_bytes:
            message = (
                f"this request needs {-(-size_bytes // MIB)} MiB of cache memory and this node "
                f"may use {self.total_bytes // MIB} MiB: shorten the conversation, ask for fewer "
                "tokens, or raise node.hot_bytes"
            )
            raise RejectedError(message, code="exceeds_memory", param="messages")

    def take(self, reservation: Reservation, size_bytes: int) -> None:
        """Count memory in use, even over the limit."""
        with self._lock:
            self._take(reservation, size_bytes)

    def claim(self, reservation: Reservation, size_bytes: int) -> bool:
        """Enlarge a reservation if that fits without evicting idle caches."""
        with self._lock:
            if self._shortfall(reservation, size_bytes) > 0:
                return False
            return self._take(reservation, size_bytes)

    def grow(self, reservation: Reservation, size_bytes: int, *, force: bool = False) -> bool:
        """Enlarge a reservation if that fits; otherwise request an eviction of idle caches.

        `force`: exceed the limit if the owner of the idle caches has answered and it still does
        not fit.
        """
        with self._lock:
            shortfall_bytes = self._shortfall(reservation, size_bytes)
            ask = self._make_room if self._idle_bytes else None
            is_asking = ask is not None and self._asked_at == self._answers_count
            if shortfall_bytes <= 0 or (force and (ask is None or self._is_answered)):
                return self._take(reservation, size_bytes)
            if ask is None or is_asking:
                return False
            self._asked_at = self._answers_count
        ask(min(shortfall_bytes, self._idle_bytes))
        with self._lock:
            shortfall_bytes = self._shortfall(reservation, size_bytes)
            if shortfall_bytes <= 0 or (force and self._is_answered):
                return self._take(reservation, size_bytes)
        return False

    def release(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved_bytes -= reservation.size_bytes
            reservation.size_bytes = 0

    @property
    def _is_answered(self) -> bool:
        return self._asked_at is not None and self._answers_count > self._asked_at

    def _shortfall(self, reservation: Reservation, size_bytes: int) -> int:
        extra_bytes = size_bytes - reservation.size_bytes
        if extra_bytes <= 0:
            return 0
        return self._reserved_bytes + self._idle_bytes + extra_bytes - self._limit_bytes

    def _take(self, reservation: Reservation, size_bytes: int) -> bool:
        extra_bytes = max(0, size_bytes - reservation.size_bytes)
        self._reserved_bytes += extra_bytes
        reservation.size_bytes += extra_bytes
        self._asked_at = None
        return True
