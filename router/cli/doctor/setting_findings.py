"""Valid settings that are likely mistakes, given the cluster file and this machine.

Findings that only another Mac can confirm, such as a missing folder there, are warnings.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fabric.ids import DEFAULT_TENANT
from fabric.keys import CLUSTER_FILE_KEYS, SHIPPED_KEYS
from fabric.limits import GIB, MIB
from fabric.settings import (
    CALL_NAMES,
    NEVER,
    PARSER_MODES,
    THOUGHT_NAMES,
    FabricSettings,
    NodeSettings,
    RouterSettings,
    is_loopback,
)
from router.cli.doctor.cluster_findings import named_hosts
from router.cli.doctor.finding import ConfigFinding, error, warning
from router.cli.errors import CommandError
from router.cli.model_choice import bundled_models, chosen_model
from router.cli.output import human_bytes
from router.supervise.ray_member import RAY_PORT

_OURS, _NODE = "metadata.macfabric", "metadata.macfabric.node"
_ROUTER = "metadata.macfabric.router"
_USEFUL_BYTES: Final = 64 * MIB  # less cannot hold an agent of a real model
_LARGEST_MAC_BYTES: Final = 512 * GIB
_SSH_PORT: Final = 22
_FREE_PORTS: Final = 1_024  # those below need an administrator's rights
_SHORT_TTL_S: Final = 600.0
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not listened on
_EMPTIED: Final = ("/tmp", "/private/tmp", "/var/tmp", "/private/var/tmp")  # noqa: S108
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def setting_findings(settings: FabricSettings, cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    """Yield likely mistakes in settings that are valid in themselves."""
    hosts = [str(host) for _, host in named_hosts(cluster) if host is not None]
    yield from _model(settings.model)
    yield from _data_dir(settings.data_dir)
    yield from _amounts(settings.node)
    yield from _formats(settings.node)
    yield from _absent(f"{_NODE}.chat_template", settings.node.chat_template)
    yield from _tenants(settings)
    yield from _address(settings.router, hosts)
    yield from _port(settings.router)
    yield from _access(settings.router)
    yield from _counts(settings.router, len(hosts))
    yield from _standby(settings.router, len(hosts))
    yield from _aliases(settings)


def _model(model: str) -> Iterator[ConfigFinding]:
    where, bundled = f"{_OURS}.model", bundled_models()
    if model in bundled:
        return
    folder = Path(model).expanduser()
    if not folder.is_absolute():
        if _HUB_ID.fullmatch(model):
            name = model.rpartition("/")[2]
            yield error(
                where,
                f"{model} looks like a Hugging Face id, and nothing is downloaded here: run `hf "
                f"download {model} --local-dir ~/models/{name}` on every Mac, and write "
                f"~/models/{name}",
            )
        elif "/" in model:
            yield error(
                where, f"{model}: write an absolute path, from / or ~: every Mac has its own folder"
            )
        else:
            near = get_close_matches(model, bundled, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(bundled)}"
            message = f"there is no bundled model {model!r}; {hint} A folder begins with / or ~"
            yield error(where, message)
    elif not folder.is_dir():
        message = f"{model} is not a folder on this machine; every Mac of the file needs it"
        yield warning(where, message)
    else:
        try:
            chosen_model(model, "")
        except CommandError as failure:
            yield error(where, str(failure).strip())


def _data_dir(data_dir: str) -> Iterator[ConfigFinding]:
    where, path = f"{_OURS}.data_dir", Path(data_dir).expanduser()
    if not path.is_absolute():
        message = f"{data_dir} depends on where a Mac starts the node: write an absolute path"
        yield error(where, f"{message}, from / or ~")
    elif any(Path(data_dir).is_relative_to(folder) for folder in _EMPTIED):
        message = f"macOS empties {data_dir} by itself: stored agents would be lost there"
        yield warning(where, message)


def _amounts(node: NodeSettings) -> Iterator[ConfigFinding]:
    for name in ("hot_bytes", "disk_bytes"):
        amount = getattr(node, name)
        if amount is not None and amount < _USEFUL_BYTES:
            message = f"is {human_bytes(amount)}, which holds no agent: did you mean 8GiB?"
            yield error(f"{_NODE}.{name}", message)
    hot_bytes = node.hot_bytes or 0
    if hot_bytes > _LARGEST_MAC_BYTES:
        message = f"is {human_bytes(hot_bytes)}: no Mac has so much memory"
        yield error(f"{_NODE}.hot_bytes", message)
    if _USEFUL_BYTES <= node.disk_bytes < hot_bytes:
        message = f"is less than hot_bytes, {human_bytes(hot_bytes)}: what is in RAM must fit"
        yield warning(f"{_NODE}.disk_bytes", message)
    if node.disk_ttl_s < _SHORT_TTL_S:
        message = f"evicts agents that were idle for {node.disk_ttl_s:g} seconds: 24h is a day"
        yield warning(f"{_NODE}.disk_ttl_s", message)


def _formats(node: NodeSettings) -> Iterator[ConfigFinding]:
    for name, chosen, known in (
        ("tool_parser", node.tool_parser, CALL_NAMES | _upstream_parsers()),
        ("reasoning_parser", node.reasoning_parser, THOUGHT_NAMES),
    ):
        names = sorted(known | PARSER_MODES)
        if chosen not in names:
            near = get_close_matches(chosen, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            yield error(f"{_NODE}.{name}", f"there is no {chosen!r}; {hint}")


def _upstream_parsers() -> frozenset[str]:
    """List the parsers of the installed mlx-lm without importing it."""
    spec = find_spec("mlx_lm")
    folders = (spec.submodule_search_locations or []) if spec else []
    modules = (path for folder in folders for path in Path(folder).glob("tool_parsers/[a-z]*.py"))
    return frozenset(path.stem for path in modules)


def _absent(where: str, name: str) -> Iterator[ConfigFinding]:
    """Yield a missing file; one that travels with the keys is looked for where keys are made."""
    if not name:
        return
    path = Path(name.replace(SHIPPED_KEYS, CLUSTER_FILE_KEYS, 1)).expanduser()
    if not path.is_absolute():
        yield error(
            where, f"{name} depends on where a Mac starts: write an absolute path, from / or ~"
        )
    elif not path.is_file():
        yield warning(where, f"{path} is not on this machine; the Macs that read it need it")


def _tenants(settings: FabricSettings) -> Iterator[ConfigFinding]:
    router = settings.router
    if router.api_keys_file:
        return  # the file may name them; it is on the head
    known = {DEFAULT_TENANT, *router.api_keys}
    for tenant in settings.node.tenants:
        if tenant not in known:
            near = get_close_matches(tenant, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"no key in router.api_keys is this tenant's{hint}"
            yield warning(f"{_NODE}.tenants.{tenant}", message)


def _address(router: RouterSettings, hosts: list[str]) -> Iterator[ConfigFinding]:
    if is_loopback(router.host) or router.host in _EVERYWHERE or not hosts:
        return
    head, *others = hosts
    if router.host in others:
        message = f"{router.host} is a worker: the router runs on the head, {head}"
        yield error(f"{_ROUTER}.host", message)
    elif router.host != head:
        message = f"{router.host} is not the head's address ({head}), where the router runs"
        yield warning(f"{_ROUTER}.host", f"{message}; 0.0.0.0 means all its addresses")


def _port(router: RouterSettings) -> Iterator[ConfigFinding]:
    where, port = f"{_ROUTER}.port", router.port
    if port == RAY_PORT:
        yield error(where, f"{port} is used by Ray: choose another one")
    elif port == _SSH_PORT:
        yield error(where, f"{port} is used by ssh (Remote Login): choose another one")
    elif port == 0:
        yield warning(where, "0 chooses another free port at each start: clients need a fixed one")
    elif port < _FREE_PORTS:
        message = f"{port} needs an administrator's rights: take one of {_FREE_PORTS} to 65535"
        yield warning(where, message)


def _access(router: RouterSettings) -> Iterator[ConfigFinding]:
    for name in ("certificate", "key"):
        yield from _absent(f"{_ROUTER}.tls.{name}", getattr(router.tls, name))
    if is_loopback(router.host):
        return
    if not (router.api_keys or router.api_keys_file):
        message = "is empty: requests from other machines are refused"
        yield warning(f"{_ROUTER}.api_keys", message)
    if router.tls.mode == NEVER:
        message = "sends keys and prompts in clear text over the network: auto uses https there"
        yield warning(f"{_ROUTER}.tls.mode", message)


def _standby(router: RouterSettings, hosts_count: int) -> Iterator[ConfigFinding]:
    if not router.standby:
        return
    nodes = router.nodes_expected or hosts_count
    if nodes + len(router.voters) == 2:
        message = (
            "two Macs cannot elect a router when one of them fails: run `macfabric voter` on a "
            "third machine and list it in voters, or expect to decide with `macfabric promote`"
        )
        yield warning(f"{_ROUTER}.standby", message)
    if is_loopback(router.host):
        message = f"a standby on another Mac cannot forward requests to {router.host}: 0.0.0.0 can"
        yield warning(f"{_ROUTER}.host", message)


def _counts(router: RouterSettings, macs: int) -> Iterator[ConfigFinding]:
    if not macs:
        return
    if router.replicas > macs - 1:
        message = f"is {router.replicas}, and besides an agent's own Mac there are {macs - 1}"
        yield error(f"{_ROUTER}.replicas", message)
    if router.nodes_expected > macs:
        message = f"is {router.nodes_expected}, and the file names {macs} Macs"
        yield error(f"{_ROUTER}.nodes_expected", message)


def _aliases(settings: FabricSettings) -> Iterator[ConfigFinding]:
    served = Path(settings.model).name
    for alias, model in settings.router.model_aliases.items():
        if model != served:
            message = f"points to {model!r}, but the served model is called {served!r}"
            yield error(f"{_ROUTER}.model_aliases.{alias}", message)
