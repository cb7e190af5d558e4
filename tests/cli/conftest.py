"""The command line in this process, with nothing of the user's environment."""

import pytest

from router.cli.main import main
from tests.cli.fake_fabric import FakeFabric


@pytest.fixture
def fabric():
    fake = FakeFabric()
    yield fake
    fake.close()


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command; return its exit status, standard output and standard error."""
    for name in ("MACFABRIC_URL", "MACFABRIC_API_KEY", "MACFABRIC_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MACFABRIC_DATA", str(tmp_path / "data"))

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(argv)
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call
