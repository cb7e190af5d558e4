"""Check of every answer of a router under test against the OpenAPI document."""

import json
import re

from jsonschema import Draft202012Validator
from starlette.routing import Match

from router.app import describe_api

DOCUMENT = describe_api()
_VALIDATORS = {}


def template(route):
    """Return a route's path as the document writes it."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)


def document_mismatch(method, path, status, media, body=None):
    """Return how an answer differs from the document, or nothing."""
    operation = DOCUMENT["paths"].get(path, {}).get(method.lower())
    if operation is None:
        return f"{method} {path} is no operation"
    documented = operation["responses"].get(str(status))
    if documented is None:
        return f"{method} {path} answers {status}"
    content = documented.get("content", {})
    if bool(content) != bool(media) or (media and media not in content):
        return f"{method} {path} answers {status} as {media}"
    if media != "application/json" or body is None:
        return None
    key = method, path, status
    if key not in _VALIDATORS:
        components = {"components": DOCUMENT["components"]}
        _VALIDATORS[key] = Draft202012Validator(content[media]["schema"] | components)
    error = next(_VALIDATORS[key].iter_errors(json.loads(body)), None)
    return error and f"{method} {path} {status} at {error.json_path}: {error.message[:300]}"


class Documented:
    """An application whose answers are checked as they leave."""

    def __init__(self, app):
        self._app = app
        self.wrong = []

    async def __call__(self, scope, receive, send):
        route = self._route(scope)
        if route is None or template(route) not in DOCUMENT["paths"]:  # added by a test
            await self._app(scope, receive, send)
            return
        # Routes for GET also answer HEAD, without a body.
        is_head = scope["method"] == "HEAD" and "GET" in route.methods
        method = "GET" if is_head else scope["method"]
        head, parts = {}, []

        async def watch(message):
            if message["type"] == "http.response.start":
                head.update(message)
            elif message["type"] == "http.response.body" and head:
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    self._judge(method, template(route), head, b"".join(parts), is_head=is_head)
            await send(message)

        await self._app(scope, receive, watch)

    def _route(self, scope):
        if scope["type"] != "http":
            return None
        return next((r for r in self._app.routes if r.matches(scope)[0] is Match.FULL), None)

    def _judge(self, method, path, head, body, *, is_head):
        headers = dict(head["headers"])
        media = headers.get(b"content-type", b"").decode().partition(";")[0]
        json_body = None if is_head or not body else body
        found = document_mismatch(method, path, head["status"], media, json_body)
        if found:
            self.wrong.append(found)
