"""`make mac-check`: run the checks that one Mac allows and print a table for an issue.

The project is developed on Linux, where MLX computes on the CPU. Each step runs in its own process,
and a failed one does not stop the others. Checks that need two Macs, a cable or a power plug are in
docs/macs.md. On other systems the same steps run, and show less.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.report import environment
from fabric.hosting.chip import chip_name
from router.cli.doctor.doctor_network import run
from router.cli.main import run_guarded
from router.cli.output import Steps

ROOT: Final = Path(__file__).resolve().parents[1]
STEP_TIMEOUT_S: Final = 1_800.0
DETAIL_CHARS_MAX: Final = 400
_CLI: Final = (sys.executable, "-m", "router.cli.main")
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")

Judge = Callable[[int, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Step:
    """A program to run, and the reader of its output."""

    name: str
    shows: str
    command: tuple[str, ...]
    judge: Judge
    quick: tuple[str, ...] = ()  # options added for a run of minutes


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a step; the verdict is `ok`, `missed` (a limit) or `failed`."""

    name: str
    shows: str
    verdict: str
    detail: str
    seconds: float
    swapped_mib: float  # of the whole machine, meanwhile


def judge_doctor(status: int, printed: str) -> tuple[str, str]:
    """Read `macfabric doctor --json`."""
    checks = _json(printed).get("checks", [])
    bad = [check for check in checks if check["verdict"] != "ok"]
    detail = "; ".join(f"{check['verdict']}: {check['name']}" for check in bad)
    verdict = "ok" if status == 0 and checks else "failed"
    return verdict, detail or f"{len(checks)} checks"


def judge_demo(status: int, printed: str) -> tuple[str, str]:
    """Read `macfabric demo --json`."""
    report = _json(printed)
    if status or not report:
        return "failed", _last_line(printed)
    return "ok", f"ready in {report['start_seconds']} s, all answers right in {report['seconds']} s"


def judge_tests(status: int, printed: str) -> tuple[str, str]:
    """Read what pytest printed."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    detail = "; ".join([_last_line(printed).strip("= "), *failed])
    return ("ok" if status == 0 else "failed"), detail


def judge_bench(status: int, printed: str) -> tuple[str, str]:
    """Read the report that a benchmark printed as JSON."""
    found = _json(printed)
    if not found:
        return "failed", _last_line(printed) or f"exit status {status}"
    figures = [
        f"{limit['statement']} {_figure(limit['figure'])} (limit {_figure(limit['bound'])})"
        for limit in sorted(found["limits"], key=lambda limit: limit["met"] is not False)
    ]
    return ("missed" if found["met"] is False else "ok"), "; ".join(figures)


def _bench(name: str, shows: str) -> Step:
    command = (sys.executable, "-m", "benchmarks", name, "--json")
    return Step(f"bench {name}", shows, command, judge_bench, ("--quick",))


STEPS: Final = (
    Step("doctor", "settings of this machine", (*_CLI, "doctor", "--json"), judge_doctor),
    Step(
        "demo",
        "Ray starts; agents survive kills and moves",
        (*_CLI, "demo", "--json"),
        judge_demo,
    ),
    Step(
        "tests",
        "kernels, views, restores bit for bit, memory plans, the drive, the network",
        (*_PYTEST, *(f"tests/node/{each}" for each in ("mlx", "store", "net", "test_machine.py"))),
        judge_tests,
        ("-k", "test_backend"),
    ),
    Step(
        "device errors",
        "no wrong word after an error of the GPU",
        (*_PYTEST, "tests/node/engine/test_device_errors.py", "tests/e2e/test_failing_devices.py"),
        judge_tests,
        ("-k", "raised_to_their_callers"),
    ),
    _bench("append", "no cache is copied for one more token"),
    _bench("decode", "tokens/s beside mlx-lm; graph nodes and host time of a step"),
    _bench("memory", "bytes of a cached token"),
    _bench("soak", "memory stays flat over 2,000 requests"),
    _bench("turn-save", "what saving a turn costs"),
    _bench("restore", "reading a context back at the drive's speed"),
    _bench("migrate", "an agent moves while it streams"),
)  # fmt: skip


def run_step(step: Step, *, quick: bool) -> Result:
    """Run one step to its end; report any failure as its result."""
    command = [*step.command, *(step.quick if quick else ())]
    began_s, swapped = time.monotonic(), used_swap_mib()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
        )
        verdict, detail = step.judge(done.returncode, done.stdout or done.stderr)
    except subprocess.TimeoutExpired:
        verdict, detail = "failed", f"did not finish within {STEP_TIMEOUT_S:g} s"
    seconds = time.monotonic() - began_s
    swapped_mib = used_swap_mib() - swapped
    return Result(step.name, step.shows, verdict, detail, round(seconds, 1), round(swapped_mib, 1))


def used_swap_mib() -> float:
    """Return the system's used swap; 0 if unknown."""
    used = re.search(r"used = ([\d.]+)M", run("/usr/sbin/sysctl", "-n", "vm.swapusage"))
    if used is not None:
        return float(used[1])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0.0
    kib = {
        key: int(value) for key, value in re.findall(r"^(Swap\w+):\s+(\d+)", lines, re.MULTILINE)
    }
    return (kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)) / 1_024


def machine() -> dict[str, str]:
    """Describe this machine without its name or any path."""
    found = {key: str(value) for key, value in environment().items()}
    memory = run("/usr/sbin/sysctl", "-n", "hw.memsize").strip()
    commit = run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    system = f"macOS {platform.mac_ver()[0]}" if platform.mac_ver()[0] else platform.system()
    return {"system": system, "chip": chip_name() or "", "memory": memory, "commit": commit} | {
        key: found[key] for key in ("mlx", "mlx_lm", "backend", "python")
    }


def table(described: dict[str, str], results: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    lines = [" · ".join(f"{key} {value}" for key, value in described.items() if value), ""]
    lines += ["| step | shows | verdict | figures | s | swapped MiB |", "|---|---|---|---|---|---|"]
    for one in results:
        detail = one.detail.replace("|", "/")[:DETAIL_CHARS_MAX]
        cells = (one.name, one.shows, one.verdict, detail, one.seconds, one.swapped_mib)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the requested steps; return exit status 1 if one failed or missed a limit."""
    parser = argparse.ArgumentParser(
        prog="make mac-check", description="Show what one Mac can show; print a table to paste."
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--only", action="append", choices=names, help="one step; repeatable")
    parser.add_argument("--quick", action="store_true", help="see that it works; judge no speed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args(argv)
    steps = [step for step in STEPS if not arguments.only or step.name in arguments.only]
    progress, results = Steps(), []
    for number, step in enumerate(steps, 1):
        progress.say(f"{number} of {len(steps)}, {step.name}: {step.shows}")
        results.append(run_step(step, quick=arguments.quick))
        progress.say(f"{step.name}: {results[-1].verdict}")
    described = machine()
    if arguments.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"machine": described, "steps": rows}, indent=2, ensure_ascii=False))
    else:
        print(table(described, results))
    return 0 if all(result.verdict == "ok" for result in results) else 1


def _json(printed: str) -> dict[str, Any]:
    try:
        found = json.loads(printed)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _last_line(printed: str) -> str:
    return (printed.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
