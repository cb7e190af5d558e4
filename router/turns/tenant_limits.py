"""Limits of tenants: turns at once, and tokens that nodes compute for them in a minute.

Tokens are known only once a turn is admitted, and those of its answer once it ends. So a turn may
exceed what is left; the next ones wait until the debt is paid at the tenant's rate. Cached tokens
are free. A tenant over a limit gets 429 before anything else is done for its turn.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fabric.errors import OverloadedError
from fabric.ids import TenantId
from fabric.limits import retry_wait_s
from fabric.ports import Clock
from fabric.tenant_settings import TenantLimits
from fabric.turn.generation import Admitted, CacheTier
from router.limits import TENANT_WAIT_S_MAX
from router.telemetry import Telemetry
from router.turns.open_turn import EndedTurn
from router.turns.tenant_usage import TenantUsage, computed_tokens, saved_s

TURNS_LIMIT: Final = "turns_limit_exceeded"
RATE_LIMIT: Final = "rate_limit_exceeded"  # as OpenAI calls it
_MINUTE_S: Final = 60.0
_NEW_SHARE: Final = 0.2  # of the last turn in the mean duration


@dataclass(slots=True)
class _Account:
    """A tenant's turns that run, and the tokens that it may have computed now."""

    limits: TenantLimits
    left_tokens: float  # negative: a debt
    at_s: float  # when that was true
    running_count: int = 0
    turn_s: float = 1.0  # mean duration of its turns


class TenantAccounts:
    """Usage and limits of all tenants; used on the router's event loop."""

    def __init__(
        self, limits: Mapping[str, TenantLimits], clock: Clock, telemetry: Telemetry
    ) -> None:
        """Tenants without limits are only counted."""
        self._clock = clock
        self._telemetry = telemetry
        self.usage = TenantUsage(clock)
        now_s = clock.monotonic_s()
        self._accounts = {
            TenantId(tenant): _Account(each, float(each.tokens_per_minute or 0), now_s)
            for tenant, each in limits.items()
        }

    @contextmanager
    def count_turn(self, tenant: TenantId) -> Iterator[None]:
        """Count a turn from its request on; if it is not admitted, it has ended here.

        Raise OverloadedError if the tenant is over a limit.
        """
        account = self._accounts.get(tenant)
        try:
            if account is not None:
                self._require_room(account)
                account.running_count += 1
            try:
                yield
            except BaseException:
                if account is not None:
                    account.running_count -= 1
                raise
        except BaseException as error:
            if isinstance(error, OverloadedError):
                self.usage.note_refusal(tenant)
            self._telemetry.note_refusal(tenant, error)
            raise

    def note_admission(self, tenant: TenantId, first: Admitted) -> None:
        """Count the prompt of an admitted turn."""
        self.usage.note_admission(tenant, first)
        self._charge(tenant, computed_tokens(first))

    def note_end(
        self, tenant: TenantId, ended: EndedTurn, tier: CacheTier, recompute_s: float
    ) -> None:
        """Count the end of an admitted turn, and what it saved by cached tokens of `tier`."""
        tokens, is_ok = ended.answered_tokens, ended.outcome == "ok"
        saved = saved_s(recompute_s, ended.times)
        self._telemetry.note_saving(tier, saved)
        self.usage.note_end(tenant, tokens, ended.times, is_ok=is_ok, saved_s=saved)
        self._charge(tenant, tokens)
        account = self._accounts.get(tenant)
        if account is not None:
            account.running_count -= 1
            account.turn_s += _NEW_SHARE * (ended.seconds - account.turn_s)

    def limits_of(self, tenant: TenantId) -> TenantLimits:
        """Return a tenant's limits, which may be none."""
        account = self._accounts.get(tenant)
        return account.limits if account is not None else TenantLimits()

    def running_count(self, tenant: TenantId) -> int | None:
        """Return how many turns of a tenant run; None where nothing limits them."""
        account = self._accounts.get(tenant)
        return account.running_count if account is not None else None

    def _require_room(self, account: _Account) -> None:
        limits = account.limits
        if limits.turns is not None and account.running_count >= limits.turns:
            wait_s = account.turn_s / limits.turns
            message = (
                f"your limit of turns at once ({limits.turns}) is reached: retry this "
                "request once another has ended, or after Retry-After seconds"
            )
            raise OverloadedError(message, retry_after_s=retry_wait_s(wait_s), code=TURNS_LIMIT)
        rate = limits.tokens_per_minute
        if rate is None:
            return
        self._refill(account)
        if account.left_tokens <= 0:
            wait_s = (1.0 - account.left_tokens) * _MINUTE_S / rate
            message = (
                f"your limit of {rate} computed tokens a minute is used up: send the request again "
                "after Retry-After seconds; cached tokens do not count"
            )
            raise OverloadedError(
                message, retry_after_s=retry_wait_s(wait_s, TENANT_WAIT_S_MAX), code=RATE_LIMIT
            )

    def _refill(self, account: _Account) -> None:
        rate = account.limits.tokens_per_minute
        assert rate is not None, "the tenant has a rate"
        now_s = self._clock.monotonic_s()
        more = (now_s - account.at_s) * rate / _MINUTE_S
        account.left_tokens = min(float(rate), account.left_tokens + more)
        account.at_s = now_s

    def _charge(self, tenant: TenantId, tokens: int) -> None:
        account = self._accounts.get(tenant)
        if account is not None and account.limits.tokens_per_minute is not None:
            self._refill(account)
            account.left_tokens -= tokens
