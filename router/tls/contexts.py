"""TLS contexts of the router: one for requests to nodes, one for serving clients."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

from fabric.errors import FatalError
from fabric.keys import AUTHORITY_CERTIFICATE, CLUSTER_KEY, MEMBER_CERTIFICATE, MEMBER_KEY
from fabric.settings import TlsSettings

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class RouterKeys:
    """The keys in one folder."""

    folder: Path
    cluster_key: bytes = field(repr=False)

    def node_facing(self) -> ssl.SSLContext:
        """Return the context for requests to nodes, with certificates on both sides."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load(context, self.folder / MEMBER_CERTIFICATE, self.folder / MEMBER_KEY)
        try:
            context.load_verify_locations(self.folder / AUTHORITY_CERTIFICATE)
        except (OSError, ssl.SSLError) as error:
            message = (
                f"{self.folder / AUTHORITY_CERTIFICATE} is not a valid certificate ({error}); "
                "replace it with `macfabric certs rotate`"
            )
            raise FatalError(message) from None
        return context

    def router_facing(self, settings: TlsSettings) -> ssl.SSLContext:
        """Return the context for requests to another router, as its clients make them."""
        context = self.node_facing()
        if settings.certificate:  # all routers serve the operator's own
            context.load_verify_locations(Path(settings.certificate).expanduser())
            context.check_hostname = False
        return context

    def client_facing(self, settings: TlsSettings) -> ssl.SSLContext:
        """Return the context for serving clients, with the operator's certificate or ours."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # older client libraries lack 1.3
        if settings.certificate:
            certificate = Path(settings.certificate).expanduser()
            _load(context, certificate, Path(settings.key).expanduser())
        else:
            _load(context, self.folder / MEMBER_CERTIFICATE, self.folder / MEMBER_KEY)
        return context


def certificate_ends_s(keys: RouterKeys, settings: TlsSettings) -> float | None:
    """Return when the certificate for clients expires; None if it cannot be read."""
    path = Path(settings.certificate).expanduser() if settings.certificate else None
    try:
        raw = (path or keys.folder / MEMBER_CERTIFICATE).read_bytes()
        return load_pem_x509_certificate(raw).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def read_router_keys(folder: Path) -> RouterKeys:
    """Read the key that all nodes and routers of the fabric share; raise FatalError without it."""
    path = folder / CLUSTER_KEY
    try:
        key = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        message = (
            f"{path}: cannot read a cluster key ({type(error).__name__}); "
            "create the keys with `macfabric certs create`"
        )
        raise FatalError(message) from None
    if len(key) != KEY_BYTES:
        message = f"{path}: a cluster key must have {KEY_BYTES} bytes, as hex digits"
        raise FatalError(message)
    return RouterKeys(folder, key)


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        message = f"{certificate} and {key} must be a certificate and its private key ({error})"
        raise FatalError(message) from None
