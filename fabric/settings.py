"""Operator settings: the `metadata: {macfabric: …}` section of cluster.yaml.

Every key has a default, and an unknown key is an error that names it. This module reads nothing
else in the file; the rest belongs to Ray.

The names of tool and reasoning parsers that settings accept are those of
`node/dialect/families/`; a test keeps both lists equal.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from typing import Any, Final

from fabric.edit_mode import DISABLED, EDIT_MODES, EXACT, TRUNCATIONS
from fabric.errors import RejectedError
from fabric.ids import TenantId, parse_node_name, parse_tenant_id
from fabric.keys import key_digest
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
    QUEUED_TURNS_MAX,
    REPLICAS_MAX,
    STOP_WAIT_S_MAX,
    VOTERS_MAX,
    WAITING_REQUESTS_MAX,
)
from fabric.retention import Rules, TenantShare
from fabric.sampling_defaults import BUILT_IN, describe_range, in_range
from fabric.settings_reader import AUTOMATIC, SettingProblem, read_class, require_no_problems
from fabric.tenant_settings import (
    LIMITS,
    SHARES,
    WEIGHTS,
    TenantLimits,
    limit_rules,
    parse_tenant,
    share_rules,
    weight_rules,
)

PARSER_MODES: Final = frozenset({"auto", "none", "harmony"})
CALL_NAMES: Final = frozenset(
    {
        *("apertus", "command", "command_r", "deepseek", "deepseek_v32", "deepseek_v4"),
        *("deepseek_v41", "function_gemma", "gemma", "gemma4", "glm", "glm47"),
        *("granite", "hermes", "hunyuan", "json"),
        *("json_tools", "kimi_k2", "kimi_k3", "laguna", "llama", "llama4", "longcat"),
        *("minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_spark", "nemotron", "phi4"),
        *("qwen3_coder", "seed_oss"),
    }
)
THOUGHT_NAMES: Final = frozenset(
    {"apertus", "command", "gemma4", "longcat", "minimax_m3", "mistral", "seed", "think"}
)


# They would replace arguments that the node passes to the template, or change how it is rendered.
RESERVED_OPTIONS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# Options that the node reads: restore earlier answers' reasoning, move dates out of the system
# prompt, and read control marks in messages as control tokens.
RESTORE_OPTION: Final = "restore_reasoning"
DATES_OPTION: Final = "move_dates"
MARKS_OPTION: Final = "control_marks"
# Options of thoughts, set by the router and read by the node. Templates have one of the switches.
EFFORT_OPTION: Final = "reasoning_effort"
BUDGET_OPTION: Final = "thinking_budget"
LOG_FORMATS: Final = ("json", "text", "none")
THINKING_SWITCH: Final = "enable_thinking"
THINKING_SWITCHES: Final = (THINKING_SWITCH, "thinking")


_POLICY_NAME = re.compile(rf"\w[\w.-]{{0,{POLICY_NAME_CHARS_MAX - 1}}}", re.ASCII)
_POLICY_USE = re.compile(r"\w+|\w+(\.\w+)*:\w+", re.ASCII)
_COLLECTOR = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", re.ASCII)
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]{1,253}", re.ASCII)
_VOTER = re.compile(r"https?://[a-z0-9_.:\[\]-]{1,253}", re.ASCII)
_ROOT = "macfabric"
KV_BITS = {0, 4, 8}
DURABILITIES = ("full", "barrier", "none")
AUTO, ALWAYS, NEVER = ENCRYPTION_MODES = (AUTOMATIC, "always", "never")


@dataclass(frozen=True, slots=True)
class KvBits:
    """Bits per number kept by each kind of layer; 0 keeps the model's own precision."""

    full: int = 4
    window: int = 4
    latent: int = 8  # 4 bits cost a latent 20x the error of 8 (ARCHITECTURE.md)


UNLIMITED: Final = -1  # as a number of tokens


@dataclass(frozen=True, slots=True)
class EffortBudgets:
    """Tokens of thought that an effort allows; -1: no limit. `none` always allows none."""

    minimal: int = 512
    low: int = 1_024
    medium: int = 8_192
    high: int = 24_576
    xhigh: int = UNLIMITED
    max: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling defaults of omitted fields; None: from the model's own files."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Budgets and policies of every node."""

    hot_bytes: int | None = None  # of agents' resident caches; None, or `auto`: all that is left
    disk_bytes: int = 500 * GIB
    disk_ttl_s: float = 24 * 3600.0  # an agent idle for so long is evicted, unless pinned
    tenants: dict[str, TenantShare] = field(default_factory=dict)  # parts of both budgets
    pin_share: float = PIN_SHARE_MAX  # of a tenant's floor that its pins may fill
    exact_chunks: bool = False  # prefill on a fixed grid: warm is bit-equal to cold, slower
    edit_recomputed_tokens: int = 0  # recomputed after each edit of an amortized cache
    span_recomputed_tokens: int = 16  # recomputed of each run from another context
    active_max: int = ACTIVE_SEQUENCES_MAX
    waiting_max: int = WAITING_REQUESTS_MAX
    context_tokens_max: int = 0  # 0: by the model's config
    kv_bits: KvBits = field(default_factory=KvBits)
    chat_template: str = ""  # a file with a Jinja template in place of the model's own
    template_options: dict[str, Any] = field(default_factory=dict)  # unless a request has its own
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    strict_template: bool = False  # messages that a template refuses are refused, not folded
    tool_parser: str = AUTO  # of the model's calls: a format's name, "auto" or "none"
    reasoning_parser: str = AUTO  # of its thoughts, likewise
    thinking_budget: int = UNLIMITED  # tokens of thought, unless a request has its own budget
    effort_budgets: EffortBudgets = field(default_factory=EffortBudgets)
    encrypt_at_rest: bool = False  # with a key derived from the cluster key; costs a copy per read
    encrypt_links: str = AUTO  # between nodes: "always", "never", or "auto": not over Thunderbolt
    durability: str = "full"  # of a publish: "full", "barrier" or "none"
    scrub_bytes_per_s: int = 16 * MIB  # stored blocks read again while nothing runs; 0: never
    scrub_every_s: float = 24 * 3600.0  # a block's next check, at the earliest
    popular_bytes: int = GIB  # of shared prefixes, offered to and leased from other nodes; 0: none

    @property
    def rules(self) -> Rules:
        """Rules of fairness between tenants, in memory and on disk."""
        tenants = {TenantId(name): share for name, share in self.tenants.items()}
        return Rules(tenants, self.pin_share)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """HTTPS between clients and the router."""

    mode: str = AUTO  # "always", "never", or "auto": if other machines may connect
    certificate: str = ""  # a PEM file with the whole chain; "": the fabric's own
    key: str = ""  # its private key
    names: tuple[str, ...] = ()  # more names and addresses that the fabric's own is for


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Spans of turns for a collector that speaks OpenTelemetry's protocol."""

    endpoint: str = ""  # the collector's URL, without /v1/traces; "": no spans
    sample_ratio: float = 1.0  # of turns whose client has not decided it by a traceparent


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """One policy that rewrites conversations before nodes read them."""

    use: str  # a built-in one's name, or `module:Class` of an operator's own
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # by which requests ask for it; "": its own, or its class's
    by_default: bool = True  # False: only for requests that ask for it

    @property
    def known_as(self) -> str:
        """Name of the policy in requests and answers."""
        return self.name or self.use.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the router."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: dict[str, str] = field(default_factory=dict, repr=False)  # tenant: key, or sha256:…
    api_keys_file: str = ""  # YAML file with more keys, readable by its owner only
    operator_keys: dict[str, str] = field(default_factory=dict, repr=False)  # name: key, as above
    operator_keys_file: str = ""
    loopback_without_key: bool = True
    # More host names by which programs on this machine may reach the router without a key.
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # origins of web pages allowed to send requests
    # Requested name: model that serves it. A trailing `*` matches any rest of a name.
    model_aliases: dict[str, str] = field(default_factory=dict)
    completion_tokens_max: int = COMPLETION_TOKENS_MAX  # cap on max_tokens of any request
    takeover_after_s: float = 2.0  # how long a turn waits for a silent owner
    edits: str = EXACT  # default edit mode: "exact", "amortize" or "anywhere"
    policies: tuple[PolicySettings, ...] = ()  # applied in this order
    truncation: str = DISABLED  # of prompts over the context, unless a request chooses
    queue_max: int = WAITING_REQUESTS_MAX  # turns that wait for one node; one tenant: half
    tenant_weights: dict[str, float] = field(default_factory=dict)  # in those queues; others: 1
    tenant_limits: dict[str, TenantLimits] = field(default_factory=dict)  # beyond them: 429
    moves_idle_agents: bool = True  # to nodes that serve their next turns sooner
    replicas: int = 0  # copies of each agent on other nodes, refreshed after its turns
    # Number of nodes in the fabric. After a start, until all have joined or two minutes have
    # passed, requests for unknown agents are answered "retry later". 0: as in FILE or `up --nodes`.
    nodes_expected: int = 0
    # Whether a second router may take over from the first; routers then need a majority of voters:
    # the nodes, whose number must be known, and `voters`.
    standby: bool = False
    voters: tuple[str, ...] = ()  # URLs of `macfabric voter`, beside the nodes
    stop_wait_s: float = 30.0  # how long a stop waits for running turns; `down` may override it
    tls: TlsSettings = field(default_factory=TlsSettings)

    @property
    def uses_tls(self) -> bool:
        """Whether the router's port speaks HTTPS."""
        return self.tls.mode == ALWAYS or (self.tls.mode == AUTO and not is_loopback(self.host))


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """All of the `macfabric` section."""

    model: str = "recall"  # a bundled model's name, or a folder that mlx-lm loads
    data_dir: str = "~/.macfabric"
    keys_dir: str = ""  # made by `macfabric certs create`, on each Mac; "": in data_dir
    log_format: str = LOG_FORMATS[0]  # of each process's log file; "none": there is none
    local_nodes: tuple[str, ...] = ()  # names for `macfabric up`; default node-a, node-b, …
    node: NodeSettings = field(default_factory=NodeSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)


def parse_settings(section: Any) -> FabricSettings:
    """Check and build the settings; raise SettingsError naming every wrong key."""
    settings, problems = inspect_settings(section)
    require_no_problems(problems)
    return settings


def inspect_settings(section: Any) -> tuple[FabricSettings, tuple[SettingProblem, ...]]:
    """Return the settings, with defaults in place of invalid values, and all problems."""
    problems: list[SettingProblem] = []
    settings: FabricSettings = read_class(FabricSettings, section, _ROOT, problems)
    node, router = settings.node, settings.router
    for at, name in enumerate(settings.local_nodes):
        problems += _named_problem(parse_node_name, name, f"local_nodes[{at}]")
    is_format = settings.log_format in LOG_FORMATS
    problems += _broken([(is_format, "log_format", f"is {'|'.join(LOG_FORMATS)}")])
    problems += _broken(_tracing_rules(settings.tracing))
    problems += _broken(_node_rules(node))
    problems += _broken(_router_rules(router))
    problems += _key_problems(router)
    problems += _access_problems(router)
    problems += _voter_problems(router)
    named: dict[str, Iterable[str]] = {SHARES: node.tenants, WEIGHTS: router.tenant_weights}
    named[LIMITS] = router.tenant_limits
    for where, tenants in named.items():
        for tenant in tenants:
            problems += _named_problem(parse_tenant, tenant, f"{where}.{tenant}")
    problems += _broken(share_rules(node.tenants))
    if not any(problem.where.startswith(f"{_ROOT}.router.policies") for problem in problems):
        problems += _policy_problems(router.policies)  # indexes are right only in a valid list
    for option in sorted(node.template_options.keys() & RESERVED_OPTIONS):
        problems.append(_problem(f"node.template_options.{option}", "it belongs to the node"))
    return settings, tuple(problems)


def check_keys(router: RouterSettings) -> None:
    """Raise SettingsError for an invalid key, or a key that has two names."""
    require_no_problems(_key_problems(router))


def check_hosts_and_origins(router: RouterSettings) -> None:
    """Raise SettingsError for an invalid host name or page origin."""
    require_no_problems(_access_problems(router))


def _problem(setting: str, message: str) -> SettingProblem:
    return SettingProblem(f"{_ROOT}.{setting}", message)


def _broken(rules: Iterable[tuple[bool, str, str]]) -> Iterator[SettingProblem]:
    """Yield problems for broken rules, each rule (holds, setting, what it must be)."""
    for holds, setting, message in rules:
        if not holds:
            yield _problem(setting, message)


def _named_problem(
    parse: Callable[[object], object], name: str, setting: str
) -> Iterator[SettingProblem]:
    try:
        parse(name)
    except RejectedError as error:
        yield _problem(setting, error.message)


def _key_problems(router: RouterSettings) -> Iterator[SettingProblem]:
    owners: dict[bytes, str] = {}
    for kind, keys in (("api_keys", router.api_keys), ("operator_keys", router.operator_keys)):
        for name, key in keys.items():
            where = f"{kind}.{name}"
            parse = parse_tenant if kind == "api_keys" else parse_tenant_id
            yield from _named_problem(parse, name, f"router.{where}")
            try:
                digest = key_digest(key)
            except RejectedError as error:
                yield _problem(f"router.{where}", error.message)
                continue
            if digest in owners:
                yield _problem(f"router.{where}", f"this is the key of {owners[digest]}, too")
            owners[digest] = where


def _access_problems(router: RouterSettings) -> Iterator[SettingProblem]:
    rules = (
        ("allowed_hosts", router.allowed_hosts, _HOST_NAME, "a name without port or wildcard"),
        ("cors_origins", router.cors_origins, _ORIGIN, "an origin such as https://app.example"),
    )
    for setting, names, form, what in rules:
        for at, name in enumerate(names):
            if form.fullmatch(name) is None:
                message = f"'{name[:100]}' is not {what}, in lower case"
                yield _problem(f"router.{setting}[{at}]", message)
        if len(names) > ALLOWED_HOSTS_MAX:
            yield _problem(f"router.{setting}", f"more than {ALLOWED_HOSTS_MAX}")


def _voter_problems(router: RouterSettings) -> Iterator[SettingProblem]:
    for at, url in enumerate(router.voters):
        if _VOTER.fullmatch(url) is None:
            message = f"'{url[:100]}' is not a URL such as https://192.168.1.20:8010"
            yield _problem(f"router.voters[{at}]", message)
    if len(set(router.voters)) < len(router.voters) or len(router.voters) > VOTERS_MAX:
        yield _problem("router.voters", f"are at most {VOTERS_MAX}, and different ones")
    if router.voters and not router.standby:
        yield _problem("router.voters", "have no effect without router.standby")


def _policy_problems(policies: tuple[PolicySettings, ...]) -> Iterator[SettingProblem]:
    if len(policies) > POLICIES_MAX:
        yield _problem("router.policies", f"at most {POLICIES_MAX}")
    names = [each.known_as for each in policies]
    for at, each in enumerate(policies):
        where = f"router.policies[{at}]"
        yield from _broken(
            [
                (
                    _POLICY_USE.fullmatch(each.use) is not None,
                    f"{where}.use",
                    f"'{each.use[:100]}' is neither a policy's name nor a module:Class",
                ),
                (
                    _POLICY_NAME.fullmatch(each.known_as) is not None,
                    f"{where}.name",
                    "has letters, digits, '_', '.' and '-', at most 64",
                ),
                (
                    names.index(each.known_as) == at,
                    f"{where}.name",
                    "another one has it, too",
                ),
            ]
        )


def _node_rules(node: NodeSettings) -> Iterator[tuple[bool, str, str]]:
    bits = {node.kv_bits.full, node.kv_bits.window, node.kv_bits.latent}
    for name in ("disk_bytes", "disk_ttl_s", "scrub_every_s"):
        yield getattr(node, name) > 0, f"node.{name}", "must be positive"
    hot_bytes = node.hot_bytes
    yield hot_bytes is None or hot_bytes > 0, "node.hot_bytes", "must be positive, or auto"
    for name in ("context_tokens_max", "scrub_bytes_per_s", "popular_bytes",
                 "edit_recomputed_tokens", "span_recomputed_tokens"):  # fmt: skip
        yield getattr(node, name) >= 0, f"node.{name}", "must not be negative"
    yield 0 <= node.pin_share <= PIN_SHARE_MAX, "node.pin_share", f"must be 0-{PIN_SHARE_MAX}"
    budgets = node.effort_budgets
    for name in (each.name for each in fields(budgets)):
        is_budget = getattr(budgets, name) >= UNLIMITED
        yield is_budget, f"node.effort_budgets.{name}", "must be at least 0, or -1 for no limit"
    is_budget = node.thinking_budget >= UNLIMITED
    yield is_budget, "node.thinking_budget", "must be at least 0, or -1 for no limit"
    active, waiting = ACTIVE_SEQUENCES_MAX, WAITING_REQUESTS_MAX
    yield 1 <= node.active_max <= active, "node.active_max", f"must be 1-{active}"
    yield 1 <= node.waiting_max <= waiting, "node.waiting_max", f"must be 1-{waiting}"
    yield bits <= KV_BITS, "node.kv_bits", "are 0 (the model's own), 4 or 8"
    for name in BUILT_IN:
        value = getattr(node.sampling, name)
        is_valid = value is None or in_range(name, value)
        yield is_valid, f"node.sampling.{name}", describe_range(name)
    yield node.durability in DURABILITIES, "node.durability", f"is {'|'.join(DURABILITIES)}"
    modes = f"is {'|'.join(ENCRYPTION_MODES)}"
    yield node.encrypt_links in ENCRYPTION_MODES, "node.encrypt_links", modes


def _tracing_rules(tracing: TracingSettings) -> Iterator[tuple[bool, str, str]]:
    is_url = not tracing.endpoint or _COLLECTOR.fullmatch(tracing.endpoint) is not None
    like = "is a URL without user and query, such as http://127.0.0.1:4318 (OTLP over HTTP)"
    yield is_url, "tracing.endpoint", like
    is_ratio = 0.0 <= tracing.sample_ratio <= 1.0
    yield is_ratio, "tracing.sample_ratio", "must be 0-1"


def _router_rules(router: RouterSettings) -> Iterator[tuple[bool, str, str]]:
    tls, answer = router.tls, COMPLETION_TOKENS_MAX
    host = "is an address or a name without scheme and port, such as 127.0.0.1 or 0.0.0.0"
    yield is_host(router.host), "router.host", host
    yield 0 <= router.port <= 65535, "router.port", "must be 0-65535"
    yield tls.mode in ENCRYPTION_MODES, "router.tls.mode", f"is {'|'.join(ENCRYPTION_MODES)}"
    together = "router.tls.certificate and router.tls.key belong together"
    yield bool(tls.certificate) == bool(tls.key), "router.tls", together
    count = router.nodes_expected
    yield 0 <= count <= NODES_MAX, "router.nodes_expected", f"must be 0-{NODES_MAX}"
    tokens = router.completion_tokens_max
    yield 1 <= tokens <= answer, "router.completion_tokens_max", f"must be 1-{answer}"
    aliases = router.model_aliases
    at_most = f"are at most {MODEL_ALIASES_MAX}"
    yield len(aliases) <= MODEL_ALIASES_MAX, "router.model_aliases", at_most
    both = all(aliases) and all(aliases.values())
    yield both, "router.model_aliases", "have names on both sides"
    yield router.edits in EDIT_MODES, "router.edits", f"is {'|'.join(EDIT_MODES)}"
    yield router.truncation in TRUNCATIONS, "router.truncation", f"is {'|'.join(TRUNCATIONS)}"
    yield (
        1 <= router.queue_max <= QUEUED_TURNS_MAX,
        "router.queue_max",
        f"must be 1-{QUEUED_TURNS_MAX}",
    )
    yield from weight_rules(router.tenant_weights)
    yield from limit_rules(router.tenant_limits)
    yield router.takeover_after_s > 0, "router.takeover_after_s", "must be positive"
    yield (
        0 <= router.stop_wait_s <= STOP_WAIT_S_MAX,
        "router.stop_wait_s",
        f"must be 0-{STOP_WAIT_S_MAX:g} seconds",
    )
    yield 0 <= router.replicas <= REPLICAS_MAX, "router.replicas", f"must be 0-{REPLICAS_MAX}"


def is_host(text: str) -> bool:
    """Return whether a text is exactly an address or a host's name."""
    try:
        ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text.lower()) is not None
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
