"""Route of usage: of the tenant, or for operators of all tenants."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.views.shape import AnswerShape, Row
from router.http.auth import caller_of, shown_tenant
from router.http.paging import limit_of
from router.http.refusals import refuse
from router.limits import USAGE_PAGE_MAX
from router.turns.tenant_limits import TenantAccounts
from router.turns.tenant_usage import Period, UsageRow

PATH: Final = "/v1/usage"
_COUNTERS: Final = (
    "turns", "broken_turns", "refused_turns", "prompt_tokens", "cached_tokens", "fetched_tokens",
    "computed_tokens", "completion_tokens", "compute_s", "saved_s",
)  # fmt: skip
_NAMED: dict[str, Any] = {name: f"counts.{name}" for name in _COUNTERS}
USAGE: Final = AnswerShape(UsageRow, "usage", "tenant", "period", "start_s", **_NAMED)
_DIGITS: Final = 3


class UsageApi:
    """Usage of tenants by hour or day."""

    def __init__(self, accounts: TenantAccounts) -> None:
        self._accounts = accounts

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """List periods, the newest first; operators see all tenants, or one that they name."""
        query = request.query_params
        is_operator = caller_of(request).operator is not None
        sees_all = is_operator and "tenant" not in query
        tenant = None if sees_all else shown_tenant(request)
        limit, period = limit_of(query, USAGE_PAGE_MAX), _period(query.get("period"))
        found = self._accounts.usage.rows(tenant, period)
        answer = {
            "object": "list",
            "data": [_row(row) for row in found[:limit]],
            "has_more": len(found) > limit,
            "limits": None,
        }
        if tenant is not None:
            limits = self._accounts.limits_of(tenant)
            answer["limits"] = {
                "turns": limits.turns,
                "tokens_per_minute": limits.tokens_per_minute,
                "running_turns": self._accounts.running_count(tenant),
            }
        return JSONResponse(answer)


def _period(text: str | None) -> Period:
    try:
        return Period(text or Period.DAY)
    except ValueError:
        refuse("period", f"expected one of {', '.join(Period)}")


def _row(row: UsageRow) -> Row:
    shown = USAGE.row(row)
    return {**shown, **{name: round(shown[name], _DIGITS) for name in ("compute_s", "saved_s")}}
