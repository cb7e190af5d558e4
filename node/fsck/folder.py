"""Check of one model's folder of a node; `repair` makes its records claim only stored blocks.

    layout -> spec -> records -> blocks -> what records lack -> what nothing refers to

Repairs follow the same order: files are quarantined, then records cut, then the rest is removed,
so that an interrupted repair may simply be repeated.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fabric.errors import CorruptDataError, FabricError
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.hashing import agent_digest, tenant_salt
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.record.manifest import Manifest, decode_manifest, encode_manifest
from fabric.record.spec_file import SpecRecord
from fabric.record.stored_part import misplaced_refs, truncate_record
from node.fsck.block import BlockCheck
from node.fsck.report import FolderReport, Kind
from node.fsck.scan import Entry, make_private, scan_folder
from node.store import block_files, manifest_store
from node.store.encrypted_disk import MARKER
from node.store.folder_format import SPEC_FILE, read_spec
from node.store.posix_disk import QUARANTINE, TEMPORARY, DiskError, PosixDisk

_RECORD: Final = re.compile(r"[0-9a-f]{32}\.mf", re.ASCII)
FOLDERS: Final = (block_files.DIRECTORY, manifest_store.DIRECTORY, QUARANTINE)
Progress = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True, slots=True)
class _Record:
    """One sound record, without its text and tokens."""

    name: str
    salt: bytes | None
    refs: frozenset[BlockRef]
    misplaced: frozenset[BlockRef]
    branches: frozenset[BlockRef]  # blocks of its branches


class FolderCheck:
    """One check of one folder, which it has locked."""

    def __init__(
        self, disk: PosixDisk, report: FolderReport, key: bytes | None, *, repair: bool
    ) -> None:
        self._disk = disk
        self._report = report
        self._key = key
        self._repair = repair
        self._interned: dict[BlockRef, BlockRef] = {}
        self._records: list[_Record] = []

    def run(self, progress: Progress) -> None:
        """Check everything; add the findings to the report."""
        entries = self._layout()
        spec = self._spec()
        if not self._read_records(entries):
            return  # with the wrong key all records would look misplaced
        sound = self._blocks(entries, spec, progress)
        needed = self._shorten(sound)
        for ref in sorted(sound - needed, key=lambda ref: ref.name):
            self._note(
                Kind.UNREFERENCED_BLOCK,
                block_files.file_name(ref),
                "no record needs it",
                self._disk.remove,
            )

    # --- findings ----------------------------------------------------------------------------

    def _note(
        self, kind: Kind, name: str, detail: str, repair: Callable[[str], object] | None = None
    ) -> bool:
        """Add a finding and repair it if requested and possible; return whether it was repaired."""
        repaired = False
        if self._repair and repair is not None:
            try:
                repair(name)
                repaired = True
            except (FabricError, OSError) as error:
                detail = f"{detail}; not repaired: {error}"
        self._report.add(kind, name, detail, repaired=repaired)
        return repaired

    def _quarantine(self, kind: Kind, name: str, detail: str) -> None:
        self._note(kind, name, detail, lambda name: self._disk.quarantine(name, detail))

    # --- layout ------------------------------------------------------------------------------

    def _layout(self) -> list[Entry]:
        """Check names, kinds and modes; return the files that may be blocks and records."""
        entries = list(scan_folder(self._disk.root, FOLDERS))
        if self._repair:
            self._disk.recover()  # removes the temporaries
        for entry in entries:
            if entry.leaf.startswith(TEMPORARY):
                self._note(Kind.TEMPORARY, entry.name, "an interrupted write", lambda _: None)
            elif entry.leaf != "." and not _is_ours(entry):
                self._note(Kind.STRANGE, entry.name, "not ours; left alone")
            elif not _is_right_kind(entry):
                self._note_unexpected(entry)
            elif entry.is_exposed:
                self._note_exposed(entry)
            if entry.directory == QUARANTINE:
                detail = f"{entry.size_bytes:,} bytes, kept for inspection"
                self._note(Kind.QUARANTINED, entry.name, detail)
        return [entry for entry in entries if _is_ours(entry) and entry.is_file]

    def _note_unexpected(self, entry: Entry) -> None:
        detail = "a link, a pipe or a folder"
        if entry.is_directory or not entry.directory:
            self._note(Kind.NOT_A_FILE, entry.name, f"{detail}: remove it by hand")
        else:
            self._quarantine(Kind.NOT_A_FILE, entry.name, detail)

    def _note_exposed(self, entry: Entry) -> None:
        detail = f"mode {entry.mode & 0o777:04o}, owner {entry.owner}: others may use it"
        root = self._disk.root
        self._note(Kind.WRONG_MODE, entry.name, detail, lambda _: make_private(root, entry))

    def _spec(self) -> SpecRecord | None:
        try:
            spec = read_spec(self._disk)
        except (CorruptDataError, DiskError) as error:
            self._quarantine(Kind.DAMAGED_SPEC, SPEC_FILE, error.message)
            return None
        if spec is None:
            self._note(Kind.NO_SPEC, SPEC_FILE, "headers are checked by themselves only")
            return None
        if not spec.fingerprint.hex().startswith(self._report.folder):
            self._quarantine(Kind.DAMAGED_SPEC, SPEC_FILE, "cache spec of another model")
            return None
        self._report.model, self._report.fingerprint = spec.model, spec.fingerprint.hex()
        return spec

    # --- records -----------------------------------------------------------------------------

    def _read_records(self, entries: list[Entry]) -> bool:
        misplaced = []
        for entry in entries:
            if entry.directory != manifest_store.DIRECTORY:
                continue
            record = self._read_record(entry.name)
            if record is None:
                continue
            if self._key is not None and self._record_name(record) != entry.name:
                misplaced.append(entry.name)
            else:
                self._records.append(self._summary(entry.name, record))
        self._report.records_count = len(self._records)
        if misplaced and not self._records:
            detail = (
                f"none of {len(misplaced)} records has a name under this cluster key; "
                "use the key of the fabric that stored them"
            )
            self._note(Kind.WRONG_KEY, manifest_store.DIRECTORY, detail)
            return False
        for name in misplaced:
            self._quarantine(Kind.MISPLACED_RECORD, name, "record of another agent")
        return True

    def _read_record(self, name: str) -> Manifest | None:
        try:
            record = decode_manifest(self._disk.read(name, MANIFEST_BYTES_MAX))
        except CorruptDataError as error:
            self._quarantine(Kind.DAMAGED_RECORD, name, error.message)
        except (DiskError, FileNotFoundError) as error:
            self._note(Kind.UNREADABLE, name, str(error))
        else:
            if record.fingerprint.hex().startswith(self._report.folder):
                return record
            self._quarantine(Kind.FOREIGN_RECORD, name, "record of another model")
        return None

    def _record_name(self, record: Manifest) -> str:
        assert self._key is not None
        digest = agent_digest(self._key, *record.key)
        return f"{manifest_store.DIRECTORY}/{digest}.mf"

    def _summary(self, name: str, record: Manifest) -> _Record:
        def intern(refs: set[BlockRef]) -> frozenset[BlockRef]:
            return frozenset(self._interned.setdefault(ref, ref) for ref in refs)

        branches = intern({*record.branch_refs})
        if self._key is None:
            return _Record(name, None, intern(set(record.refs)), frozenset(), branches)
        salt = tenant_salt(self._key, record.tenant)
        misplaced = intern(misplaced_refs(record, salt))
        return _Record(name, salt, intern(set(record.refs)), misplaced, branches)

    # --- blocks ------------------------------------------------------------------------------

    def _blocks(
        self, entries: list[Entry], spec: SpecRecord | None, progress: Progress
    ) -> set[BlockRef]:
        """Check every block file; return the valid blocks."""
        files = [entry for entry in entries if entry.directory == block_files.DIRECTORY]
        salts = {
            block_files.file_name(ref): record.salt
            for record in self._records
            for ref in record.refs
        }
        check = BlockCheck(self._disk, self._report.folder, spec)
        total, done, sound = sum(entry.size_bytes for entry in files), 0, set()
        for entry in files:
            try:
                ref = check.check(entry.leaf, salts.get(entry.name))
                sound.add(self._interned.get(ref, ref))
            except CorruptDataError as error:
                self._quarantine(Kind.DAMAGED_BLOCK, entry.name, error.message)
            except FileNotFoundError:
                continue  # quarantined since it was listed
            except DiskError as error:
                if error.is_damage:
                    self._quarantine(Kind.DAMAGED_BLOCK, entry.name, error.message)
                else:
                    self._note(Kind.UNREADABLE, entry.name, error.message)
            done += entry.size_bytes
            progress(done, total)
        self._report.blocks_count, self._report.block_bytes = len(files), total
        return sound

    # --- what records lack -------------------------------------------------------------------

    def _shorten(self, sound: set[BlockRef]) -> set[BlockRef]:
        """Truncate records that lost blocks; return the blocks that records still need."""
        needed: set[BlockRef] = set()
        for record in self._records:
            lost = (record.refs - sound) | record.misplaced
            kept = record.refs - lost
            if lost:
                cut = self._truncate(record, lost)
                kept = frozenset(cut.refs) if cut is not None else kept
            needed |= kept | (record.branches & sound)  # a branch may lack blocks
        return needed

    def _truncate(self, record: _Record, lost: frozenset[BlockRef]) -> Manifest | None:
        """Report a record's lost blocks and repair it; return the repaired record, if it was."""
        full_record = self._read_record(record.name)
        if full_record is None:
            return None
        count = full_record.pieces.tokens_before(lost)
        cut = truncate_record(full_record, lost)

        def repair(name: str) -> None:
            if count:
                self._disk.publish(name, [encode_manifest(cut)])
            else:
                self._disk.quarantine(name, "none of its blocks is left")

        is_truncated = self._note(
            Kind.SHORT_RECORD,
            record.name,
            f"{len(lost)} of {len(record.refs)} blocks are missing, damaged or misnamed: "
            f"{count} of {full_record.tokens_count} tokens can be used",
            repair,
        )
        return cut if is_truncated else None


def _is_ours(entry: Entry) -> bool:
    """Return whether a node writes files with this name; quarantined files may have any name."""
    if not entry.directory:
        return entry.leaf in (".", SPEC_FILE, MARKER, *FOLDERS)
    if entry.directory == block_files.DIRECTORY:
        return block_files.parse_leaf(entry.leaf) is not None
    return entry.directory == QUARANTINE or _RECORD.fullmatch(entry.leaf) is not None


def _is_right_kind(entry: Entry) -> bool:
    if entry.leaf == "." or (not entry.directory and entry.leaf in FOLDERS):
        return entry.is_directory
    return entry.is_file or entry.directory == QUARANTINE
