"""`macfabric config check`: what Ray says about a cluster file, and what it fails to say."""

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from fabric.keys.api_keys import is_plain
from fabric.keys.key_files import MADE_KEYS, SHIPPED_KEYS
from fabric.settings import PolicySettings, parse_settings
from router.cli.certs import cluster_keys
from router.cli.config_file import (
    others_may_read,
    our_section,
    read_cluster_file,
    with_key_files,
)
from router.cli.errors import FAILED, CommandError
from router.cli.terminal import print_json, print_line
from router.policies.configured import configured_policies

PROVIDER_KEYS = {"type", "head_ip", "worker_ips"}
_COMMAND_LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
# What every `ray start` of a fabric needs -> why.
_START_NEEDS = {
    r"RAY_AUTH_MODE=token": "RAY_AUTH_MODE=token is not set: Macs with mixed defaults refuse "
    "each other without a word",
    r"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1": "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 is not set: Ray "
    "refuses more than one Mac without it",
    r"RAY_worker_niceness=0": "RAY_worker_niceness=0 is not set: Ray's default of 15 slows token "
    "generation",
    r"--node-ip-address": "--node-ip-address is missing: Ray guesses the address",
    r"--labels\S*mac=|--labels=\S*mac": "--labels=mac=NAME is missing: no node will be put there",
    r"--resources\S*mlx": "--resources='{\"mlx\": 1}' is missing: no node will be put there",
    r"--object-store-memory": "--object-store-memory is missing: Ray takes up to 2 GiB for "
    "objects that a fabric never has",
}


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """One thing that is wrong (error) or will surprise (warning)."""

    level: str
    where: str
    message: str


def add_config(commands: Any) -> None:
    """Declare the command."""
    config = commands.add_parser("config", help="work with cluster.yaml")
    verbs = config.add_subparsers(metavar="VERB", required=True)
    check = verbs.add_parser(
        "check",
        help="check a cluster file before `ray up`",
        description="Ask Ray, then look for mistakes that Ray accepts, and check "
        "metadata.macfabric. Exit status 1 where there is an error.",
    )
    check.add_argument("file", type=Path, metavar="FILE", help="cluster.yaml")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Check a file and print what was found."""
    whole = read_cluster_file(arguments.file)
    findings = [*ray_findings(whole), *own_findings(whole, Path.cwd()), *_keys(arguments.file)]
    findings += key_findings(whole, arguments.file, datetime.now(UTC))
    wrong = any(finding.level == "error" for finding in findings)
    if arguments.json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print_line(f"{finding.level}: {finding.where}: {finding.message}")
        if not wrong:
            print_line(f"{arguments.file} is fine; `ray up {arguments.file}` will take it")
    return FAILED if wrong else 0


def ray_findings(whole: dict[str, Any]) -> Iterator[ConfigFinding]:
    """Yield what Ray's own validation says."""
    from router.supervise.ray_config import ray_complaint

    complaint = ray_complaint(whole)
    if complaint is not None:
        yield _error("Ray", complaint)


def own_findings(whole: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    """Yield what Ray accepts although it is wrong, and errors in our section.

    `base` is where `ray up` will run: paths start there, not beside the file.
    """
    yield from _provider(_map(whole, "provider"), whole)
    yield from _access(whole, base)
    yield from _commands(whole)
    try:
        settings = parse_settings(our_section(whole))
    except FabricError as error:
        yield _error("metadata.macfabric", error.message)
        return
    yield from _policies(settings.router.policies)
    has_keys = settings.router.api_keys or settings.router.api_keys_file
    if not has_keys and not _is_loopback(settings.router.host):
        message = "is empty: whoever comes from another machine is refused"
        yield _warning("metadata.macfabric.router.api_keys", message)


def _policies(policies: Sequence[PolicySettings]) -> Iterator[ConfigFinding]:
    """Yield what stands against policies; an operator's own need only be found on the head."""
    for at, each in enumerate(policies):
        try:
            list(configured_policies([each]))
        except FabricError as error:
            where, _, why = error.message.partition(": ")
            made = _warning if ":" in each.use else _error
            yield made(f"metadata.{where.replace('[0]', f'[{at}]', 1)}", why)


def _keys(path: Path) -> Iterator[ConfigFinding]:
    """Yield who else may read the keys of a file, and of those that it names."""
    try:
        settings = parse_settings(our_section(read_cluster_file(path)))
    except FabricError:
        return  # told already
    router = settings.router
    for kind, keys in (("api_keys", router.api_keys), ("operator_keys", router.operator_keys)):
        where = f"metadata.macfabric.router.{kind}"
        plain = sorted(name for name, key in keys.items() if is_plain(key))
        if not plain:
            continue
        names = ", ".join(plain)
        yield _warning(
            where,
            f"spells the keys of {names} out, and Ray copies this file to where others read it: "
            "write sha256:HEX (printf %s KEY | shasum -a 256), or name a file in "
            f"{kind}_file",
        )
        if others_may_read(path):
            yield _warning(where, f"others may read {path}, keys included: chmod 600 {path}")
    named = {"api_keys_file": router.api_keys_file, "operator_keys_file": router.operator_keys_file}
    # What travels with the keys is not yet where the head will find it.
    files = {kind: name.replace(SHIPPED_KEYS, MADE_KEYS, 1) for kind, name in named.items()}
    missing = [kind for kind, name in files.items() if not Path(name or ".").expanduser().exists()]
    for kind in missing:
        message = f"{files[kind]} is not on this machine; the head needs it"
        yield _warning(f"metadata.macfabric.router.{kind}", message)
    if not missing:
        try:
            here = replace(
                router,
                api_keys_file=files["api_keys_file"],
                operator_keys_file=files["operator_keys_file"],
            )
            with_key_files(replace(settings, router=here))
        except (FabricError, CommandError) as error:
            yield _error("metadata.macfabric.router", str(error))


def key_findings(whole: dict[str, Any], file: Path, now: datetime) -> Iterator[ConfigFinding]:
    """Yield what stands against the keys that the file ships, and against those written in it."""
    where = f"file_mounts.{SHIPPED_KEYS}"
    try:
        keys, subject = cluster_keys(whole, file)
    except CommandError as error:
        yield _error(where, str(error))
        return
    if keys.path.exists():
        why = keys.why_renew(subject, now)
        if why is not None:
            remedy = f"`macfabric certs create {file}`"
            yield _error(where, f"needs another certificate ({why}): {remedy}")
    settings = parse_settings(our_section(whole))
    if settings.keys_dir != SHIPPED_KEYS:
        yield _error("metadata.macfabric.keys_dir", f"is not {SHIPPED_KEYS}, where the keys are")


def _provider(provider: dict[str, Any], whole: dict[str, Any]) -> Iterator[ConfigFinding]:
    if not whole.get("cluster_name"):
        yield _warning("cluster_name", "is missing: a second cluster would share the default name")
    if provider.get("type") != "local":
        yield _error("provider.type", "must be local: the Macs are there already")
        return
    for key in sorted(set(provider) - PROVIDER_KEYS):
        yield _error(f"provider.{key}", "is unknown, and Ray ignores it without a word")
    head, workers = provider.get("head_ip"), provider.get("worker_ips")
    if not isinstance(workers, list):
        return  # Ray has said so
    yield from _hosts(head, workers)
    if head in workers:
        yield _error("provider.worker_ips", f"names the head {head}: it is a node anyway")
    for address in sorted({str(w) for w in workers if workers.count(w) > 1}):
        yield _error("provider.worker_ips", f"names {address} twice")
    count = len(workers)
    for key in ("min_workers", "max_workers"):
        wanted = whole.get(key, count)
        if isinstance(wanted, int) and wanted < count:
            left_out = f"leaves {count - wanted} of {count} workers out"
            yield _error(key, f"is {wanted} and {left_out} without a word")
        elif isinstance(wanted, int) and wanted > count:
            yield _warning(key, f"is {wanted}, but there are only {count} workers")


def _hosts(head: object, workers: list[Any]) -> Iterator[ConfigFinding]:
    for key, host in [("head_ip", head), *(("worker_ips", worker) for worker in workers)]:
        if _is_loopback(host):
            message = f"names {host}, which every Mac takes for itself"
            yield _error(f"provider.{key}", message)
        elif str(host).endswith(".local"):
            message = f"names {host}; such a name may lead to the Mac itself: better its address"
            yield _warning(f"provider.{key}", message)


def _access(whole: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    auth = _map(whole, "auth")
    if not auth.get("ssh_user"):
        yield _error("auth.ssh_user", "is missing: `ray up` fails later, with a KeyError")
    key = auth.get("ssh_private_key")
    if not key and _map(whole, "provider").get("worker_ips"):
        message = "is missing: the head, which starts the workers, has no key to them"
        yield _error("auth.ssh_private_key", message)
    if key and not Path(str(key)).expanduser().exists():
        yield _warning("auth.ssh_private_key", f"{key} does not exist on this machine")
    for remote, local in _map(whole, "file_mounts").items():
        path = base / Path(str(local)).expanduser()
        if not path.exists():
            message = f"{local} does not exist, seen from {base}, where `ray up` would run"
            if remote == SHIPPED_KEYS:
                message = f"{local} does not exist: `macfabric certs create` makes it"
            yield _error(f"file_mounts.{remote}", message)
        elif path.is_dir():
            yield from _contents(f"file_mounts.{remote}", path)


def _contents(where: str, folder: Path) -> Iterator[ConfigFinding]:
    """Look for what Ray would read beside the sources: it reads every file, also excluded ones."""
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    closed = [path for path in files if not os.access(path, os.R_OK)]
    if closed:
        yield _error(
            where, f"this account may not read {closed[0]}: `ray up` fails (`make clean`?)"
        )
    compiled = sum(path.suffix == ".pyc" for path in files)
    if compiled:
        message = "compiled files, which Ray takes for changed code; `make clean` removes them"
        yield _warning(where, f"{folder} holds {compiled} {message}")


def _commands(whole: dict[str, Any]) -> Iterator[ConfigFinding]:
    for key in _COMMAND_LISTS:
        for index, command in enumerate(_strings(whole.get(key))):
            complaint = _shell_complaint(command)
            if complaint:
                yield _error(f"{key}.{index}", f"is no valid shell: {complaint}")
    head = " ; ".join(_strings(whole.get("head_start_ray_commands")))
    workers = " ; ".join(_strings(whole.get("worker_start_ray_commands")))
    has_workers = bool(_map(whole, "provider").get("worker_ips"))
    for key, text in (("head_start_ray_commands", head), ("worker_start_ray_commands", workers)):
        if key.startswith("worker") and not has_workers:
            continue
        for needed, why in _START_NEEDS.items():
            if not re.search(needed, text):
                yield _warning(key, why)
    if not re.search(r"RAY_enable_autoscaler_v2=0", head):
        message = "RAY_enable_autoscaler_v2=0 is not set: Ray 2.60 starts one worker too few"
        yield _error("head_start_ray_commands", message)
    if "macfabric serve" not in head:
        yield _error("head_start_ray_commands", "never runs `macfabric serve`: nothing answers")
    if has_workers and "RAY_HEAD_IP" not in workers:
        message = "never uses $RAY_HEAD_IP: the workers do not know the head"
        yield _error("worker_start_ray_commands", message)


def _is_loopback(host: object) -> bool:
    try:
        return ip_address(str(host)).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _shell_complaint(command: str) -> str | None:
    bash = shutil.which("bash")
    if bash is None:
        return None
    done = subprocess.run(
        [bash, "-n", "-c", command], capture_output=True, text=True, check=False, timeout=10
    )
    return (done.stderr.strip().splitlines() or ["?"])[0] if done.returncode else None


def _map(whole: dict[str, Any], key: str) -> dict[str, Any]:
    value = whole.get(key)
    return value if isinstance(value, dict) else {}


def _strings(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _error(where: str, message: str) -> ConfigFinding:
    return ConfigFinding("error", where, message)


def _warning(where: str, message: str) -> ConfigFinding:
    return ConfigFinding("warning", where, message)
