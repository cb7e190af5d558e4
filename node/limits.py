"""Bounds of a node: name with its unit last, and what it bounds or why."""

from typing import Final

from fabric.limits import GIB, KIB, MIB

# Blocks and files
ROOM_TOKENS: Final = 512  # free capacity of a new cache, which then grows by copying
RESTORE_MEASURED_BYTES_MIN: Final = 1 * MIB  # of memory; shorter restores measure the file system
EDITED_PIECES_MAX: Final = 1 << 10  # of one edited head; an edit beyond them is recomputed instead
DIRECTIVES_BYTES_MAX: Final = 256 * KIB  # of one agent's directives in memory
EDITS_SHOWN_MAX: Final = 8  # edits in an agent's view, which heartbeats carry
EDIT_WINDOWS_MAX: Final = 32  # holes of one prompt; each keeps a window's rows in memory
SPAN_CHUNKS_MAX: Final = 1 << 17  # indexed by a node: about 6M tokens, 40 MB
SPAN_INDEXED_TOKENS_MAX: Final = 1 << 20  # of records read for one turn: takes 0.1 s
SPAN_PLACES_MAX: Final = 4  # places of one chunk in the records of the last turns
SPAN_KEPT_TOKENS_MIN: Final = 32  # a shorter moved run costs more in later steps than it saves
RECORD_WRITES_MAX: Final = 4  # tries to write one record; each failed one found a lost block
TILE_PLANS_MAX: Final = 64  # cached plans of sequences with many moved runs; exceeds one batch
AGENTS_PER_NODE_MAX: Final = 10_000
ANSWERS_READ_MAX: Final = 16  # agents whose remembered answers are cached in decoded form
ALIKE_AGENTS_MAX: Final = 16  # agents compared with a new prompt, token by token
ANSWER_END_CHARS_MAX: Final = 64  # text that both the template and the model write after an answer
ANSWER_OPENINGS_MAX: Final = 16  # remembered texts with which a template opens an answer
UNSAVED_BYTES_MAX: Final = 128 * MIB  # of one prompt; beyond it, prefill waits for the disk
STATES_HOT_MAX: Final = 4  # of one agent: after its answer's beginning, prompt, text and turn
QUARANTINE_FILES_MAX: Final = 32  # enough to inspect; a failing drive must not fill up with them
QUARANTINE_REASON_CHARS_MAX: Final = 40  # part of a quarantined file's name
DRAIN_FLAG_BYTES_MAX: Final = 64
DRIVE_POLL_S: Final = 10.0  # between two measurements of a drive's free space
RUN_MARK_INTERVAL_S: Final = 60.0  # between two notes that a node's process still runs
RUN_MARK_BYTES_MAX: Final = 4_096  # size of the mark of a running process
INCARNATION_BYTES_MAX: Final = 32
TERM_FILE_BYTES_MAX: Final = 4 * KIB
SERVED_FILE_BYTES_MAX: Final = 64 * KIB
FLUSH_IDLE_S: Final = 15.0  # time that an agent may be in memory only before it is flushed
FLUSH_RETRY_S: Final = 1.0  # pause after the disk refused a flush, even if memory is short
SELF_TEST_RETRY_S_MAX: Final = 240.0  # between two self-tests that a disk error made inconclusive
SLEEP_NOTICE_S: Final = 25.0  # to save agents before sleep: macOS waits at most 30 s
SLEEP_REPORT_S: Final = 3.0  # part of that for a heartbeat of the router
NODE_STOP_WAIT_S: Final = 10.0  # wait for running turns when a node stops
FLUSH_FAILURES_MAX: Final = 3  # in one pass; then the disk is at fault, not the agents
LOOP_RETRY_S: Final = 15.0  # pause after a failed round; outlasts short failures

# Integrity
SCRUB_IDLE_S: Final = 5.0  # time without a turn before stored blocks are read again
SCRUB_STEP_S: Final = 1.0  # of reading per step; an arriving turn waits for one block at most
WARM_START_BYTES_MAX: Final = 4 * GIB  # blocks shared by several records, read after a start
WARM_START_BYTES_PER_S: Final = 256 * MIB  # rate of that, while no turn runs
WARM_START_STEP_S: Final = 0.25  # of reading per step; an arriving turn waits for a few blocks
SPAN_LENDERS_MAX: Final = 1_024  # most recently used agents whose prefixes may be offered to a node
SPAN_TRIES_MAX: Final = 4  # agents tried for one prefix: some have lost its windows or states
SPAN_OFFERS_MAX: Final = 32  # prefixes that one node offers another, the most shared first
SPAN_RETURNS_MAX: Final = 1_024  # agents, per node, that lent a span and then became private
SPAN_LEASE_S: Final = 900.0  # life of an unused lent prefix, unless renewed
FSCK_FINDINGS_MAX: Final = 10_000  # listed for one folder; further ones are only counted

# Encryption at rest
ENCRYPTION_STEP_BYTES: Final = 64 * MIB  # of other models' folders, encrypted in one step

# Retention
FREE_SHARE: Final = 0.05  # freed in excess, so that a full tier is not sorted for every block
RECLAIM_EVERY_S: Final = 60.0  # delay with which expired agents are evicted, at most
SERVED_EVERY_S: Final = 600.0  # idle time that a crash may lose
FOLDERS_EVERY_S: Final = 3_600.0  # between two measurements of other models' folders
TRIM_ROUNDS_MAX: Final = 8  # rounds of shrinking records before agents are evicted
EVICTIONS_MAX: Final = 64  # agents that one step removes; turns run between steps

# HTTP
CHARACTER_TOKENS_MAX: Final = 16  # waited for to complete one character, which has up to four bytes

# Prompts
ENCODERS: Final = 4  # threads that render and encode prompts
ENCODING_BYTES_MAX: Final = 4 * MIB  # of text encoded at once; each byte takes about 100
ENCODING_SMALL_BYTES: Final = 64 * KIB  # encoded within 0.1 s: not counted towards that

# Structured output
CALL_SCHEMAS_BYTES_MAX: Final = 256 * KIB  # schemas of all tools whose calls are enforced
CALL_TEXT_COUNTED_CHARS_MAX: Final = 4_096  # text between tags; compilers allow 250,000 states
CALL_ITEMS_COUNTED_MAX: Final = 32  # items of a list in formats without a schema compiler
CALL_VALUES_DEPTH_MAX: Final = 8  # nesting in Gemma's calls; a schema may refer to itself
JSON_INDENT_MAX: Final = 32  # spaces at a line's start; unbounded, a model may write only spaces
GRAMMAR_WORKERS: Final = 2  # threads that compile, and as many that compute masks
GRAMMARS_COMPILING_MAX: Final = 32  # turns that wait for one to compile
GRAMMAR_COMPILE_S: Final = 5.0  # time to compile one; beyond it, the format is refused
GRAMMARS_KEPT_MAX: Final = 64  # compiled ones cached on one node; a few MB each
GRAMMAR_MASK_S: Final = 2.0  # time for one token's mask; beyond it, the answer fails
LINE_ENDS_AFTER_THOUGHT_MAX: Final = 2  # after a thought, before a prescribed format
FORMAT_REASON_CHARS_MAX: Final = 400  # of a compiler's error message
CUT_CHARACTER_TOKENS_MAX: Final = 4  # of a thought's last character: one for each byte
THOUGHT_TAIL_CHARS: Final = 256  # searched for the marker that ends a thought

# Engine
AGENT_TURNS_WAITING_MAX: Final = 16  # queued for one agent
TURN_SPANS_MAX: Final = 64  # parts of one turn's span: some ten, and two for each pause
STREAM_EVENTS_MAX: Final = 4_096  # a client that reads slower than this is dropped
PREFILL_CHUNK_TOKENS_MAX: Final = 4_096
PREFILL_CHUNK_TOKENS_MIN: Final = 512
PREFILL_CHUNK_TOKENS_BUSY_MIN: Final = 128  # in shorter chunks, overhead exceeds computation
FIRST_TOKEN_CHUNK_TOKENS_MAX: Final = 64  # whose logits cost less than a step for the last one
PREFILL_CHUNK_S: Final = 1.0  # time that an arriving request may wait for a chunk
PREFILL_CHUNK_BUSY_S: Final = 0.25  # the longest pause that a reader of a stream overlooks
HEAD_WAIT_FACTOR: Final = 1.5  # times the predicted time, after which a turn computes a head itself
HEAD_WAIT_EXTRA_S: Final = 2.0  # added to that, for the disk
HEAD_TOKENS_MIN: Final = 128  # computed as soon as another turn could have published them
HEAD_BYTES_MAX: Final = 64 * MIB  # of an awaited head, copied out between two steps
PREFILL_HOLD_S: Final = 0.5  # longest time that prompts are held while a moved agent's stream waits
SCORED_CHUNK_TOKENS: Final = 256  # tokens whose logits are held at once: 156 MB for 152k tokens
PREFILL_WARM_TOKENS: Final = 512  # remaining tokens up to which a prompt goes before long ones
PREFILL_WARM_STREAK_MAX: Final = 8  # chunks of warm prompts in a row while a long one waits
ENGINE_CALLS_MAX: Final = 4_096  # 32 turns submit a few each; more means that a step hangs
HEAD_FETCHES_MAX: Final = 8  # heads fetched from other nodes at a time
HEAD_FETCH_EXTRA_S: Final = 0.1  # limit of one fetch: this, plus a multiple of the expected time;
HEAD_FETCH_FACTOR: Final = 3.0  # the turn then computes the missing tokens
HEAD_START_S: Final = 0.03  # delay of a fetch before its first bytes
HEAD_REPLY_S: Final = 1.0  # wait for another node's answer, beyond the call's own wait
HEAD_CONNECT_S: Final = 0.5  # limit of connecting to it: a node that is down must not delay a turn
HEAD_GRACE_POLLS: Final = 3  # polls of a node at which the lending turn has not arrived yet
HEAD_OFFER_S: Final = 30.0  # time within which a turn on another node may begin to fetch
HEAD_LENDERS_MAX: Final = 16  # agents whose heads are compared with a prompt's
FETCHES_MAX: Final = 4  # agents copied at a time; more would share the same links
FETCHES_WAITING_MAX: Final = 32  # waiting copies; each holds a control call
LOW_LATENCY_WORKERS: Final = 2  # threads of each kind for work that a silent stream waits for
WARM_UPS_MAX: Final = 8  # moves whose cache is read into memory during the copy
DEVICE_FAILURES_MAX: Final = 3  # within DEVICE_FAILURES_WITHIN_S; then the process ends
DEVICE_FAILURES_WITHIN_S: Final = 60.0
DEVICE_POOL_IDLE_S: Final = 2.0  # time without work before the pool is returned to the system
DEVICE_POOL_STEPS: Final = 256  # decode steps before it is returned while others continue
DEVICE_POOL_PREFILL_TOKENS: Final = 1_024  # chunk size from which it is returned after the chunk
SCORES_COPIES: Final = 4  # copies of a chunk's scores that a GPU has not freed yet
PREFIX_COPIES: Final = 2  # copies of a layer's prefix as plain numbers; measured: 2.1 with scores
MEMORY_POLL_S: Final = 2.0  # between two readings of the system's memory pressure
MEMORY_SHRINK_S: Final = 10.0  # between two steps in which the budget shrinks
MEMORY_CALM_S: Final = 60.0  # time without pressure before the budget grows again
MEMORY_SHRINK_PARTS: Final = 8  # a step shrinks the budget by 1/8
MEMORY_FLOOR_PARTS: Final = 8  # at least 1/8 of the budget stays under any pressure
BLOCK_READERS: Final = 4  # concurrent reads of one restore; a few saturate a drive
STORED_ERRORS_MAX: Final = 8  # of a device; each synchronization raises one
BLOCKED_POLL_S: Final = 0.02  # poll interval of a loop with nothing runnable
PENALTY_TOKENS_MAX: Final = 4_096  # last tokens that penalties consider
CALL_HEADER_CHARS_MAX: Final = 4_096  # between two parts of a tool call; longer text is not a call
CALL_CODE_CHARS_MAX: Final = 1 << 16  # Python's parser takes much memory for each
CALL_ID_CHARS_MAX: Final = 64  # of an id that the model itself gave a tool call

# Scheduling
PAUSED_SEQUENCES_MAX: Final = 32  # each one keeps its cache
ADMISSION_PASSES_MAX: Final = 8  # smaller requests that may overtake one waiting for memory
BACKGROUND_WAIT_S_MAX: Final = 30.0  # wait after which a background turn is promoted
BACKGROUND_PROMOTED_MAX: Final = 1  # at a time: an old backlog must not displace interactive turns
TENANT_WAITING_FACTOR: Final = 3  # queue places of one tenant per free place: 3/4 if it is alone
BACKGROUND_WAITING_SHARE: Final = 0.5  # of the queue; the rest is kept for interactive turns

# Control plane
LIST_BYTES_MAX: Final = 32 * KIB  # of agents in one answer, approximately; the caller asks for more
GONE_AGENTS_MAX: Final = 16_384  # removed agents that a node can still name; 2 MB
CONTROL_CALLS_MAX: Final = 64  # including long copies; heartbeats must not wait for them
WAITING_CALLS_MAX: Final = 32  # queued calls of tenants; one tenant: half
START_REASON_CHARS_MAX: Final = 200  # of the reason why a node did not start

# Erasures
TOMBSTONE_BYTES_MAX: Final = 4 * KIB  # of one file
RECORD_WRITE_POLLS_MAX: Final = 3_000  # polls of a record that is being written: 30 s
ERASE_CALLS_MAX: Final = 1_024  # remembered, so that a repeated call gets the same answer

# Data plane
TRANSFER_STREAMS: Final = 4
TRANSFER_CONNECTIONS_MAX: Final = 64
TRANSFER_SLICE_BYTES_MIN: Final = 256 * KIB  # sent within 30 s: the slowest link has 9 kB/s
TRANSFER_REQUEST_BYTES: Final = 8 * MIB  # requested at once by one stream, and as much ahead
TRANSFER_RANGE_BYTES_MIN: Final = 512 * KIB  # a block is not cut smaller
TRANSFER_LINKS_MAX: Final = 8  # links of one peer that one fetch uses
TRANSFER_HOLD_S: Final = 0.25  # longest wait of a slice while more urgent ones are sent
TRANSFER_SILENCE_S: Final = 1.0  # without a byte while another link transfers: the link is dead
TRANSFER_SILENCE_ALONE_S: Final = 8.0  # without a byte while no other link transfers
TRANSFER_IDLE_S: Final = 20.0  # time that an idle connection is kept for the next fetch
TRANSFER_IDLE_MAX: Final = 16  # idle connections
TRANSFER_TIMEOUT_S: Final = 30.0
OFFER_LIFE_S_MAX: Final = 4 * 3600.0  # of an offer, even if it is in use
TRANSFER_WAKES_MAX: Final = 64
TRANSFER_WRONG_MAX: Final = 2  # wrong deliveries of one block before its fetch fails
OFFERS_MAX: Final = 1_024

# Copies of agents
PREFETCHES_MAX: Final = 2  # at once on one node: they compete with turns for the disk
ABORTED_MOVES_MAX: Final = 1_024  # remembered; a commit of an older one fails by its epoch

# Links
SKETCH_LENGTHS_MAX: Final = 8  # of one agent: changes since which a list needs only the last pieces
VIEWS_KEPT_MAX: Final = 8  # last views sent to routers, which get only the changes since
LINK_RESEND_S: Final = 60.0  # interval at which an unchanged link is sent again, with its age
LINK_RATE_CHANGE_MIN: Final = 0.1  # share by which a link's rate must change to be sent again
LINK_RTT_CHANGE_MIN: Final = 0.5  # the same for its round trip, which varies more
LINKS_REPORTED_MAX: Final = 256  # in one heartbeat, the most recently used
LISTENERS_MAX: Final = 32  # addresses at which a node listens for other nodes
DEVICES_TRIED_MAX: Final = 3  # interfaces tried for one address; each may time out

# Hibernation: one agent as one file
HIBERNATIONS_MAX: Final = 4  # exports and imports at once on a node; one tenant: half
