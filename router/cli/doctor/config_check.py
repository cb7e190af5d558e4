"""`macfabric config check`: run Ray's check of a cluster file, and find what Ray overlooks."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from fabric.hosting.cluster_file import fabric_section
from fabric.keys import CLUSTER_FILE_KEYS, SHIPPED_KEYS, is_plain
from fabric.settings import PolicySettings, inspect_settings
from router.cli.certs import cluster_keys
from router.cli.config_file import (
    compose,
    line_of,
    others_may_read,
    read_cluster_file,
    repeated_keys,
    with_key_files,
)
from router.cli.config_show import add_show
from router.cli.doctor.cluster_findings import cluster_findings, host_complaint, named_hosts
from router.cli.doctor.finding import ConfigFinding, error, warning
from router.cli.doctor.setting_findings import setting_findings
from router.cli.errors import FAILED, CommandError
from router.cli.terminal import print_json, print_line
from router.policies.registry import configured_policies


def add_config(commands: Any) -> None:
    """Declare the command."""
    config = commands.add_parser("config")
    verbs = config.add_subparsers(metavar="VERB")
    check = verbs.add_parser(
        "check",
        help="check a cluster file before `ray up`",
        description="Let Ray parse the file, then look for mistakes that Ray accepts, "
        "and check metadata.macfabric. Exit status 1 if there is an error.",
    )
    check.add_argument("file", type=Path, metavar="FILE", help="cluster.yaml")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=run_check)
    add_show(verbs)


def run_check(arguments: argparse.Namespace) -> int:
    """Check a file and print the findings."""
    cluster = read_cluster_file(arguments.file)
    tree = compose(arguments.file)
    findings = [*ray_findings(cluster), *own_findings(cluster, Path.cwd()), *_keys(arguments.file)]
    findings += key_findings(cluster, arguments.file, datetime.now(UTC))
    lines = {finding.where: line_of(tree, finding.where) for finding in findings}
    for where, at in repeated_keys(tree):
        findings.append(error(where, "is written twice; Ray takes the last one"))
        lines[where] = at
    findings.sort(key=lambda finding: lines[finding.where] or 0)
    errors = sum(finding.level == "error" for finding in findings)
    if arguments.json:
        rows = [asdict(finding) | {"line": lines[finding.where]} for finding in findings]
        print_json({"ok": not errors, "findings": rows})
        return FAILED if errors else 0
    for finding in findings:
        line = lines[finding.where]
        place = f"{arguments.file}:{line}" if line else str(arguments.file)
        print_line(f"{place}: {finding.level}: {finding.where}: {finding.message}")
    print_line(_summary(arguments.file, errors, len(findings) - errors))
    return FAILED if errors else 0


def _summary(file: Path, errors: int, warnings: int) -> str:
    counted = [f"{count} {what}{'s' if count > 1 else ''}"
               for count, what in ((errors, "error"), (warnings, "warning")) if count]  # fmt: skip
    if errors:
        return f"{file}: {', '.join(counted)}"
    if warnings:
        return f"{file}: {counted[0]}; `ray up {file}` accepts it, but look at that first"
    return f"{file} is fine; `ray up {file}` accepts it"


def ray_findings(cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    """Yield the findings of Ray's own validation."""
    from router.supervise.ray_config import ray_complaint

    complaint = ray_complaint(cluster)
    if complaint is not None:
        yield error("Ray", complaint)


def own_findings(cluster: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    """Yield mistakes that Ray accepts, and errors in our section.

    `base` is where `ray up` will run: paths start there, not beside the file.
    """
    yield from cluster_findings(cluster, base)
    settings, problems = inspect_settings(fabric_section(cluster))
    yield from (error(f"metadata.{problem.where}", problem.message) for problem in problems)
    wrong = {problem.where for problem in problems}
    yield from _policies(settings.router.policies)
    for finding in setting_findings(settings, cluster):
        if finding.where.removeprefix("metadata.") not in wrong:
            yield finding


def _policies(policies: Sequence[PolicySettings]) -> Iterator[ConfigFinding]:
    """Yield errors in policies; an operator's own policy need only exist on the head."""
    for at, policy in enumerate(policies):
        try:
            list(configured_policies([policy]))
        except FabricError as failure:
            where, _, why = failure.message.partition(": ")
            report = warning if ":" in policy.use else error
            yield report(f"metadata.{where.replace('[0]', f'[{at}]', 1)}", why)


def _keys(path: Path) -> Iterator[ConfigFinding]:
    """Yield keys that others may read, in the file and in the key files that it names."""
    settings, problems = inspect_settings(fabric_section(read_cluster_file(path)))
    if any(".router." in problem.where for problem in problems):
        return  # reported already
    router = settings.router
    for kind, keys in (("api_keys", router.api_keys), ("operator_keys", router.operator_keys)):
        where = f"metadata.macfabric.router.{kind}"
        plain = sorted(name for name, key in keys.items() if is_plain(key))
        if not plain:
            continue
        names = ", ".join(plain)
        yield warning(
            where,
            f"has the keys of {names} in clear text, and others can read Ray's copies of it: "
            "write sha256:HEX (printf %s KEY | shasum -a 256), or name a file in "
            f"{kind}_file",
        )
        if others_may_read(path):
            yield warning(where, f"others may read the keys in {path}: chmod 600 {path}")
    named = {"api_keys_file": router.api_keys_file, "operator_keys_file": router.operator_keys_file}
    # A file that travels with the keys is not yet at its place on the head.
    files = {kind: name.replace(SHIPPED_KEYS, CLUSTER_FILE_KEYS, 1) for kind, name in named.items()}
    missing = [kind for kind, name in files.items() if not Path(name or ".").expanduser().exists()]
    for kind in missing:
        message = f"{files[kind]} is not on this machine; the head needs it"
        yield warning(f"metadata.macfabric.router.{kind}", message)
    if not missing:
        try:
            local_router = replace(
                router,
                api_keys_file=files["api_keys_file"],
                operator_keys_file=files["operator_keys_file"],
            )
            with_key_files(replace(settings, router=local_router))
        except (FabricError, CommandError) as failure:
            yield error("metadata.macfabric.router", str(failure))


def key_findings(cluster: dict[str, Any], file: Path, now: datetime) -> Iterator[ConfigFinding]:
    """Yield errors in the keys that the file ships and in those written in it."""
    where = f"file_mounts.{SHIPPED_KEYS}"
    if inspect_settings(fabric_section(cluster))[1] or any(
        host_complaint(host) for _, host in named_hosts(cluster)
    ):
        return  # reported already; certificates are for hosts that can be found
    try:
        keys, subject = cluster_keys(cluster, file)
    except CommandError as failure:
        yield error(where, str(failure))
        return
    if keys.path.exists():
        why = keys.renewal_reason(subject, now)
        if why is not None:
            remedy = f"`macfabric certs create {file}`"
            yield error(where, f"needs another certificate ({why}): {remedy}")
    settings, _ = inspect_settings(fabric_section(cluster))
    if settings.keys_dir != SHIPPED_KEYS:
        yield error("metadata.macfabric.keys_dir", f"is not {SHIPPED_KEYS}, where the keys are")
