"""Check of the installed code before an upgrade restarts anything with it.

A process that cannot import its code ends at once, and the one before it is gone by then. Other
machines may have other code, which shows only when they start it.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import fabric
from router.cli.errors import CommandError

MAIN_MODULES: Final = {"node": "node.ray_actor", "router": "router.__main__"}
CHECK_S: Final = 300.0  # a busy machine imports MLX and Ray slowly
# Compiles what is imported later, too.
_PROGRAM: Final = """
import sys
from importlib import import_module
from pathlib import Path
root, package, module = sys.argv[1:]
try:
    for name in ("fabric", package):
        for path in sorted(Path(root, name).rglob("*.py")):
            compile(path.read_bytes(), str(path), "exec")
    import_module(module)
except SyntaxError as error:
    sys.exit(f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def require_startable(package: str, root: Path | None = None) -> None:
    """Raise CommandError if the installed code of `node` or `router` cannot be imported."""
    source = str(root or Path(fabric.__file__).resolve().parents[1])
    paths = [source, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # -P: a file in the user's folder must not take the place of a module.
    argv = [sys.executable, "-P", "-c", _PROGRAM, source, package, MAIN_MODULES[package]]
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=CHECK_S, check=False
        )
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        is_broken = done.returncode != 0
    except subprocess.TimeoutExpired:
        why, is_broken = f"its import takes over {CHECK_S:g} s", True
    if is_broken:
        message = (
            f"the installed code of the {package} cannot start: {why}. Nothing was restarted: the "
            "fabric serves as before. Fix that or install the previous version, then repeat the "
            "command"
        )
        raise CommandError(message)
