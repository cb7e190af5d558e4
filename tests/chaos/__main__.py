"""Run a real fabric while its processes die and its disks fail; exit 1 at any violation."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.chaos.nemesis import KINDS
from tests.chaos.run import PLANTS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of faults (default: 3)")
    parser.add_argument("--only", choices=KINDS, help="no other kind of fault")
    parser.add_argument("--plant", choices=PLANTS, help="misbehave; a judge must find it")
    parser.add_argument(
        "--folder", type=Path, help="kept, with all logs (default: a temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        report = run(
            options.folder or Path(temporary),
            options.seed,
            options.minutes,
            only=options.only,
            plant=options.plant,
            report_line=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        print(
            f"seed {report.seed}: {report.answers} answers, {report.memories_judged} memories"
            f" judged, {len(report.faults)} faults in {report.seconds:.0f} s"
        )
        for violation in report.violations:
            print(f"{violation.at_s:8.1f} s  {violation.judge}: {violation.text}")
        print(f"{len(report.violations)} violations")
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
