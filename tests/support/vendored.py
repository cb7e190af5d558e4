"""Built files of third-party libraries: fetched from the npm registry, pinned and checked.

    make vendored     fetches them again, and rejects files whose digests differ

Each library is given by its version, the digest of its package as the registry publishes it, and
the files taken from it, unchanged. To upgrade one, change its version and digest here.
"""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = "router/dashboard/static/vendor"
TESTS = "tests/e2e/vendor"


@dataclass(frozen=True)
class Library:
    """Package; `files` are paths here by paths in it, each with its SHA-256."""

    name: str
    version: str
    sha512: str  # of the package, in base 64
    files: dict[str, tuple[str, str]]


LIBRARIES = (
    Library(
        "htm",  # its build contains Preact
        "3.1.1",
        "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {
            "preact/standalone.module.js": (
                f"{PAGE}/htm-preact.js",
                "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
            ),
            "LICENSE": (
                f"{PAGE}/htm-license.txt",
                "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
            ),
        },
    ),
    Library(
        "preact",  # the licence of what htm's build contains
        "10.29.8",
        "ej2aVZ+vZ8WO7tvlQWRM9N63A0KzF9q4mWJfDUHgYaIofWY9hu74QdnQrjoPMmZi2/nZ5gN0bJCQF49xQqx09Q==",
        {
            "LICENSE": (
                f"{PAGE}/preact-license.txt",
                "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
            )
        },
    ),
    Library(
        "uplot",
        "1.6.32",
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.esm.js": (
                f"{PAGE}/uplot.js",
                "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
            ),
            "dist/uPlot.min.css": (
                f"{PAGE}/uplot.css",
                "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
            ),
            "LICENSE": (
                f"{PAGE}/uplot-license.txt",
                "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
            ),
        },
    ),
    Library(
        "axe-core",
        "4.14.1",
        "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        {
            "axe.min.js": (
                f"{TESTS}/axe.min.js",
                "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
            ),
            "LICENSE": (
                f"{TESTS}/axe-license.txt",
                "af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e",
            ),
        },
    ),
)


def wrong_files() -> list[str]:
    """Return the committed files that differ from those of their libraries."""
    expected = [place for library in LIBRARIES for place in library.files.values()]
    return [path for path, digest in expected if digest_of(ROOT / path) != digest]


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file; nothing if it is absent."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def fetch(library: Library) -> None:
    """Write the files of one library; raise SystemExit if anything differs from its digest."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"{library.name}@{library.version}"
        command = ["npm", "pack", "--silent", "--ignore-scripts", package]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        content = archive.read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != library.sha512:
        message = f"{package}: the package has the digest {found}"
        raise SystemExit(message)
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        for inner, (path, digest) in library.files.items():
            member = members.extractfile(f"package/{inner}")
            assert member is not None, "a file"
            data = member.read()
            if hashlib.sha256(data).hexdigest() != digest:
                message = f"{package}: {inner} has another digest"
                raise SystemExit(message)
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_bytes(data)


if __name__ == "__main__":
    for each in LIBRARIES:
        fetch(each)
        print(f"{each.name} {each.version}", file=sys.stderr)
