"""What an operator may set: the `metadata: {macfabric: …}` section of cluster.yaml.

Every key has a default, an unknown key is an error that names it, and nothing else of the
file is read here: the rest belongs to Ray.
"""

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from fabric.codec import from_plain
from fabric.edit_mode import EDIT_MODES, EXACT
from fabric.errors import RejectedError
from fabric.ids import SELF_TEST_TENANT, TenantId, parse_node_name, parse_tenant_id
from fabric.keys.api_keys import key_digest
from fabric.limits import (
    ACTIVE_SEQUENCES_MAX,
    ALLOWED_HOSTS_MAX,
    COMPLETION_TOKENS_MAX,
    GIB,
    MIB,
    MODEL_ALIASES_MAX,
    NODES_MAX,
    PIN_SHARE_MAX,
    POLICIES_MAX,
    POLICY_NAME_CHARS_MAX,
    REPLICAS_MAX,
    TENANT_SHARES_MAX,
    WAITING_REQUESTS_MAX,
)
from fabric.retention.policy import Rules, TenantShare
from fabric.template_options import RESERVED_OPTIONS

_POLICY_NAME = re.compile(rf"\w[\w.-]{{0,{POLICY_NAME_CHARS_MAX - 1}}}", re.ASCII)
_POLICY_USE = re.compile(r"\w+|\w+(\.\w+)*:\w+", re.ASCII)
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]{1,253}", re.ASCII)
KV_BITS = {0, 4, 8}
AUTO, ALWAYS, NEVER = ENCRYPTION_MODES = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class KvBits:
    """Bits per number kept by each kind of layer; 0 keeps the model's own precision."""

    full: int = 4
    window: int = 4
    latent: int = 8  # 4 bits cost a latent 20x the error of 8 (ARCHITECTURE.md)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Budgets and policies of every node."""

    hot_bytes: int = 8 * GIB  # resident 4-bit caches of agents
    disk_bytes: int = 500 * GIB
    disk_ttl_s: float = 24 * 3600.0  # an agent idle for so long goes, unless its pin holds
    tenants: dict[str, TenantShare] = field(default_factory=dict)  # parts of both budgets
    pin_share: float = PIN_SHARE_MAX  # of a tenant's floor that its pins may fill
    exact_chunks: bool = False  # prefill on a fixed grid: warm is bit-equal to cold, slower
    edit_recomputed_tokens: int = 0  # behind each edit of an amortized memory, computed anew
    span_recomputed_tokens: int = 16  # of each run out of another context, computed anew
    active_max: int = ACTIVE_SEQUENCES_MAX
    waiting_max: int = WAITING_REQUESTS_MAX
    context_tokens_max: int = 0  # 0: what the model's config says
    kv_bits: KvBits = field(default_factory=KvBits)
    chat_template: str = ""  # a file with a Jinja template in place of the model's own
    template_options: dict[str, Any] = field(default_factory=dict)  # unless a request has its own
    strict_template: bool = False  # what a template refuses is refused, not folded
    tool_parser: str = AUTO  # of the model's calls: a format's name, "auto" or "none"
    reasoning_parser: str = AUTO  # of its thoughts, likewise
    encrypt_at_rest: bool = False  # with a key derived from the cluster key; costs a copy per read
    encrypt_links: str = AUTO  # between nodes: "always", "never", or "auto": not over Thunderbolt
    durability: str = "full"  # "full", "barrier" or "none": what a publish waits for
    scrub_bytes_per_s: int = 16 * MIB  # stored blocks read again while nothing runs; 0: never
    scrub_every_s: float = 24 * 3600.0  # a block's next check, at the earliest
    popular_bytes: int = GIB  # of what agents of other nodes begin with, lent and borrowed; 0: none

    @property
    def rules(self) -> Rules:
        """What is fair between tenants, in memory and on disk."""
        tenants = {TenantId(name): share for name, share in self.tenants.items()}
        return Rules(tenants, self.pin_share)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Whether clients reach the router by HTTPS."""

    mode: str = AUTO  # "always", "never", or "auto": wherever others than this machine may come
    certificate: str = ""  # a PEM file with the whole chain; "": the fabric's own
    key: str = ""  # its private key
    names: tuple[str, ...] = ()  # more names and addresses that the fabric's own is for


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """One policy that rewrites conversations before nodes read them."""

    use: str  # a built-in one's name, or `module:Class` of an operator's own
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # by which requests ask for it; "": its own, or its class's
    by_default: bool = True  # False: only for requests that ask for it

    @property
    def known_as(self) -> str:
        """Its name for requests and answers."""
        return self.name or self.use.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How clients reach the fabric."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: dict[str, str] = field(default_factory=dict, repr=False)  # tenant: key, or sha256:…
    api_keys_file: str = ""  # more of them, in a YAML file of its own that only its owner reads
    operator_keys: dict[str, str] = field(default_factory=dict, repr=False)  # name: key, likewise
    operator_keys_file: str = ""
    loopback_without_key: bool = True
    # Further names under which programs of this machine reach the router without a key.
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # of web pages that may ask, exactly as browsers send them
    # A name that clients ask for: the model that serves it. `*` ends the beginning of many names.
    model_aliases: dict[str, str] = field(default_factory=dict)
    completion_tokens_max: int = COMPLETION_TOKENS_MAX  # of one answer, whatever a client asks for
    takeover_after_s: float = 2.0  # how long a turn waits for a silent owner
    edits: str = EXACT  # "exact" or "amortize": what edited memories become, unless a request says
    policies: tuple[PolicySettings, ...] = ()  # in the order in which they rewrite
    replicas: int = 0  # copies of each agent on other nodes, refreshed behind its turns
    # How many nodes there are, once all have come: until then, for two minutes at most, what the
    # router has not heard of is answered by "come again". 0: as many as FILE or `up` name.
    nodes_expected: int = 0
    tls: TlsSettings = field(default_factory=TlsSettings)

    @property
    def uses_tls(self) -> bool:
        """Whether its port speaks HTTPS."""
        return self.tls.mode == ALWAYS or (self.tls.mode == AUTO and not is_loopback(self.host))


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """All of the `macfabric` section."""

    model: str = "recall"  # a bundled model's name, or a folder that mlx-lm loads
    data_dir: str = "~/.macfabric"
    keys_dir: str = ""  # what `macfabric certs create` made, on each Mac; "": in data_dir
    local_nodes: tuple[str, ...] = ()  # names for `macfabric up`; default node-a, node-b, …
    node: NodeSettings = field(default_factory=NodeSettings)
    router: RouterSettings = field(default_factory=RouterSettings)


def parse_settings(section: Any) -> FabricSettings:
    """Check and build the settings; raise RejectedError naming the offending key."""
    settings: FabricSettings = from_plain(FabricSettings, section or {}, "macfabric")
    for name in settings.local_nodes:
        parse_node_name(name)
    check_keys(settings.router)
    check_doors(settings.router)
    _check_ranges(settings)
    _check_tenants(settings.node.tenants)
    _check_policies(settings.router.policies)
    for name in settings.node.template_options.keys() & RESERVED_OPTIONS:
        message = f"macfabric.node.template_options.{name}: it belongs to the node"
        raise RejectedError(message, code="invalid_settings")
    return settings


def check_keys(router: RouterSettings) -> None:
    """Raise RejectedError for what is no key, or is the key of two."""
    owners: dict[bytes, str] = {}
    for kind, keys in (("api_keys", router.api_keys), ("operator_keys", router.operator_keys)):
        for name, key in keys.items():
            where = f"{kind}.{name}"
            if kind == "api_keys":
                _check_tenant(name, f"router.{where}")
            else:
                parse_tenant_id(name)
            try:
                digest = key_digest(key)
            except RejectedError as error:
                message = f"macfabric.router.{where}: {error.message}"
                raise RejectedError(message, code="invalid_settings") from None
            if digest in owners:
                message = f"macfabric.router.{where}: this is the key of {owners[digest]}, too"
                raise RejectedError(message, code="invalid_settings")
            owners[digest] = where


def check_doors(router: RouterSettings) -> None:
    """Raise RejectedError for what is no host's name, or no one page's origin."""
    rules = (
        ("allowed_hosts", router.allowed_hosts, _HOST_NAME, "a name without port or wildcard"),
        ("cors_origins", router.cors_origins, _ORIGIN, "an origin such as https://app.example"),
    )
    for setting, names, form, what in rules:
        wrong = next((name for name in names if form.fullmatch(name) is None), None)
        if wrong is not None:
            message = f"macfabric.router.{setting}: '{wrong[:100]}' is not {what}, in lower case"
            raise RejectedError(message, code="invalid_settings")
        if len(names) > ALLOWED_HOSTS_MAX:
            message = f"macfabric.router.{setting}: more than {ALLOWED_HOSTS_MAX}"
            raise RejectedError(message, code="invalid_settings")


def _check_tenant(name: str, where: str) -> None:
    """Refuse what is no tenant's name, and the one whose blocks no budget counts."""
    if parse_tenant_id(name) == SELF_TEST_TENANT:
        message = f"macfabric.{where}: this name is each node's own, for its self-test"
        raise RejectedError(message, code="invalid_settings")


def _check_tenants(tenants: dict[str, TenantShare]) -> None:
    rules = [(len(tenants) <= TENANT_SHARES_MAX, f": at most {TENANT_SHARES_MAX}")]
    for tenant, share in tenants.items():
        _check_tenant(tenant, f"node.tenants.{tenant}")
        floor = share.floor if share.floor is not None else 0.0
        rules += [
            (0 < share.quota <= 1, f".{tenant}.quota must be over 0 and at most 1"),
            (0 <= floor <= share.quota, f".{tenant}.floor must be 0 to its quota"),
        ]
    rules.append((sum(s.floor or 0 for s in tenants.values()) <= 1, ": floors are over 1 together"))
    for holds, message in rules:
        if not holds:
            text = f"macfabric.node.tenants{message}"
            raise RejectedError(text, code="invalid_settings")


def _check_policies(policies: tuple[PolicySettings, ...]) -> None:
    names = [each.known_as for each in policies]
    rules = [(len(policies) <= POLICIES_MAX, f": at most {POLICIES_MAX}")]
    for at, each in enumerate(policies):
        is_named = _POLICY_NAME.fullmatch(each.known_as) is not None
        is_known = _POLICY_USE.fullmatch(each.use) is not None
        rules += [
            (
                is_known,
                f"[{at}].use: '{each.use[:100]}' is no name of a policy, and no module:Class",
            ),
            (is_named, f"[{at}].name has letters, digits, '_', '.' and '-', at most 64"),
            (names.index(each.known_as) == at, f"[{at}].name: another one has it, too"),
        ]
    for holds, message in rules:
        if not holds:
            text = f"macfabric.router.policies{message}"
            raise RejectedError(text, code="invalid_settings")


def _check_ranges(settings: FabricSettings) -> None:
    node, router = settings.node, settings.router
    rules = (
        (node.hot_bytes > 0, "node.hot_bytes must be positive"),
        (node.disk_bytes > 0, "node.disk_bytes must be positive"),
        (node.disk_ttl_s > 0, "node.disk_ttl_s must be positive"),
        (0 <= node.pin_share <= PIN_SHARE_MAX, f"node.pin_share must be 0-{PIN_SHARE_MAX}"),
        (1 <= node.active_max <= ACTIVE_SEQUENCES_MAX, "node.active_max must be 1-32"),
        (1 <= node.waiting_max <= WAITING_REQUESTS_MAX, "node.waiting_max must be 1-256"),
        (node.context_tokens_max >= 0, "node.context_tokens_max must not be negative"),
        (
            {node.kv_bits.full, node.kv_bits.window, node.kv_bits.latent} <= KV_BITS,
            "node.kv_bits are 0 (the model's own), 4 or 8",
        ),
        (node.durability in ("full", "barrier", "none"), "node.durability is full|barrier|none"),
        (node.scrub_bytes_per_s >= 0, "node.scrub_bytes_per_s must not be negative"),
        (node.scrub_every_s > 0, "node.scrub_every_s must be positive"),
        (node.popular_bytes >= 0, "node.popular_bytes must not be negative"),
        (0 <= router.port <= 65535, "router.port must be 0-65535"),
        (node.encrypt_links in ENCRYPTION_MODES, "node.encrypt_links is auto|always|never"),
        (router.tls.mode in ENCRYPTION_MODES, "router.tls.mode is auto|always|never"),
        (
            bool(router.tls.certificate) == bool(router.tls.key),
            "router.tls.certificate and router.tls.key belong together",
        ),
        (
            0 <= router.nodes_expected <= NODES_MAX,
            f"router.nodes_expected must be 0-{NODES_MAX}",
        ),
        (
            1 <= router.completion_tokens_max <= COMPLETION_TOKENS_MAX,
            f"router.completion_tokens_max must be 1-{COMPLETION_TOKENS_MAX}",
        ),
        (
            len(router.model_aliases) <= MODEL_ALIASES_MAX,
            f"router.model_aliases are at most {MODEL_ALIASES_MAX}",
        ),
        (
            all(router.model_aliases) and all(router.model_aliases.values()),
            "router.model_aliases have names on both sides",
        ),
        (router.edits in EDIT_MODES, f"router.edits is {'|'.join(EDIT_MODES)}"),
        (router.takeover_after_s > 0, "router.takeover_after_s must be positive"),
        (0 <= router.replicas <= REPLICAS_MAX, f"router.replicas must be 0-{REPLICAS_MAX}"),
    )
    for holds, message in rules:
        if not holds:
            text = f"macfabric.{message}"
            raise RejectedError(text, code="invalid_settings")


def is_loopback(host: str) -> bool:
    """Say whether what is sent to a host stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
