"""Rewrite the golden files after an intended change: `python -m tests.formats.rewrite`."""

import json

from tests.formats import test_golden_bytes, test_wire_names


def main() -> None:
    """Replace both files by the present code's output."""
    golden = {name: raw.hex() for name, raw in test_golden_bytes.current().items()}
    test_golden_bytes.PATH.write_text(json.dumps(golden, indent=1) + "\n")
    names = json.dumps(test_wire_names.current(), indent=1)
    test_wire_names.PATH.write_text(names + "\n")


if __name__ == "__main__":
    main()
