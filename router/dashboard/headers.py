"""Headers of the page's files: what a browser may do with them, and how long it keeps them."""

from typing import Final

# Scripts and styles are files of this server, never part of the page, which uses no other server.
# With `require-trusted-types-for`, browsers refuse to parse any text as HTML.
CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFETY: Final = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def headers_of(media_type: str, tag: str) -> dict[str, str]:
    """Return the headers of a file: browsers check each time whether it has changed."""
    return {
        **SAFETY,
        "content-type": media_type,
        "cache-control": "no-cache",
        "etag": tag,
        "vary": "accept",  # `/` answers programs otherwise
    }
