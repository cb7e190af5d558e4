"""Entry point of `macfabric`: run a command and report a failure in one line.

Exit status: 0 done, 1 failed, 2 used wrongly, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from fabric.errors import FabricError
from router.cli.errors import (
    FAILED,
    INTERRUPTED,
    MISUSED,
    CommandError,
    LocatedError,
    describe_os_error,
)
from router.cli.terminal import discard_output, flush_output, print_error
from router.client.http_api import ClientError, InvalidUrlError

COMPLETING: Final = "_ARGCOMPLETE"  # set by the scripts of `macfabric completion`


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    if not __debug__:
        return _fail("assertions guard stored caches; do not use python -O", MISUSED)
    return run_guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def run_guarded(command: Callable[[], int]) -> int:
    """Run a command; report an error in one line, and return the exit status."""
    try:
        try:
            status = command()
        except SystemExit:  # after --help or --version
            flush_output()
            raise
        flush_output()
    except LocatedError as error:
        print_error(error)
        return _flush_status(error.status)
    except CommandError as error:
        return _fail(str(error), error.status)
    except ClientError as error:
        return _fail(str(error), MISUSED if isinstance(error, InvalidUrlError) else FAILED)
    except FabricError as error:
        return _fail(error.message, FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python must not complain at exit.
        discard_output()
        return FAILED
    except OSError as error:
        return _fail(describe_os_error(error), FAILED)
    return status


def _run(argv: list[str]) -> int:
    # Imported here, so that Ctrl-C during the imports does not end in a traceback either.
    from router.cli.commands import build_parser
    from router.cli.doctor.import_check import require_own_names

    if COMPLETING in os.environ:
        from router.cli.completion import answer_shell

        return answer_shell()

    own_argv, further = _split_off(argv)
    arguments = build_parser(own_argv).parse_args(own_argv, argparse.Namespace(further=further))
    require_own_names()
    return int(arguments.run(arguments))


def _split_off(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--` into our arguments and those of another command.

    argparse would mix up the options of both.
    """
    if argv[:1] not in (["launch"], ["service"]) or "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def _fail(message: str, status: int) -> int:
    print_error(f"macfabric: {message}")
    return _flush_status(status)


def _flush_status(status: int) -> int:
    try:
        flush_output()
    except (CommandError, BrokenPipeError):
        discard_output()
    return status


if __name__ == "__main__":
    sys.exit(main())
