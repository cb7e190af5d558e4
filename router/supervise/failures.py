"""Reasons for which a process of a fabric ended, from what it and Ray have logged."""

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from router.limits import FAILURE_CHARS_MAX, RAYLET_LOG_BYTES_MAX

# Ray's raylet gives its agents 15 seconds to write their ports into files.
_LATE_AGENT: Final = re.compile(r"Timed out waiting for file \S*port")
_ENDED_AGENT: Final = re.compile(r"one Ray agent failed, agent_name = (\w+)")
_FAILED_CHECK: Final = re.compile(r"Check failed: (.+)")
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes them into files, too
_ENDED_SERVER: Final = re.compile(r"(\w+) \[exit code=(-?\d+)\]")


def words_of(log: str) -> list[str]:
    """Return a log's lines without the frames of tracebacks; their last lines name the failure."""
    lines, in_frames = [], False
    for line in _STYLE.sub("", log).splitlines():
        if line.startswith("Traceback (most recent call last)"):
            in_frames = True
        elif not (in_frames and line.startswith((" ", "\t"))):
            in_frames = False
            lines.append(line)
    return lines


def last_words(log: str) -> str:
    """Return the last non-empty line of a log, shortened."""
    words = [line.strip() for line in words_of(log) if line.strip()]
    return words[-1][:FAILURE_CHARS_MAX] if words else ""


def ray_failure(printed: str, raylet: str) -> str:
    """Return why `ray start` ended, from its own log and its raylet's errors."""
    if _LATE_AGENT.search(raylet):
        return "its agents took more than 15 s to start"
    if match := _ENDED_AGENT.search(raylet):
        return f"its {match[1]} ended"
    if match := _FAILED_CHECK.search(raylet):
        return f"its raylet ended: {match[1][:FAILURE_CHARS_MAX]}"
    if match := _ENDED_SERVER.search(_STYLE.sub("", printed)):
        return f"its {match[1]} {describe_status(int(match[2]))}"
    return last_words(printed)


def describe_status(status: int) -> str:
    """Return how a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def raylet_logs(temp_dir: Path) -> dict[Path, int]:
    """Return the files that the raylets of a Ray node have written, with their sizes."""
    logs = temp_dir / "session_latest" / "logs"
    # A fatal error is in one of the two, or in both.
    paths = [*logs.glob("raylet*.err"), *logs.glob("raylet*.out")]
    return {path: path.stat().st_size for path in paths}


def new_errors(temp_dir: Path, before: Mapping[Path, int]) -> str:
    """Return the end of what raylets have written since their files had the sizes of `before`."""
    texts = []
    for path, size in raylet_logs(temp_dir).items():
        begin = before.get(path, 0) if size >= before.get(path, 0) else 0
        with path.open("rb") as file:
            file.seek(max(begin, size - RAYLET_LOG_BYTES_MAX))
            texts.append(file.read(RAYLET_LOG_BYTES_MAX).decode(errors="replace"))
    return "\n".join(texts)
