"""Keep Time Machine from backing up a node's folder.

Its backups would keep what is erased here, and copy each day's blocks. Source: tmutil(8); without
`-p` an exclusion belongs to the folder itself and needs no rights.
"""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Final

TMUTIL: Final = "/usr/bin/tmutil"
TIMEOUT_S: Final = 30.0

_log = logging.getLogger(__name__)


def exclude_from_backups(folder: Path, platform: str = sys.platform) -> None:
    """Exclude a folder on macOS; log a failure."""
    if platform != "darwin":
        return
    try:
        done = subprocess.run(
            [TMUTIL, "addexclusion", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("Time Machine may back up erased agents: %s", type(error).__name__)
        return
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        _log.warning("Time Machine may back up erased agents: %s", reason[0])
