"""Bounds of a node: name, unit last, and the reason."""

from typing import Final

from fabric.limits import GIB, KIB, MIB

# Blocks and files
ROOM_TOKENS: Final = 512  # capacity of a cache for what comes next; more grows by copying
EDITED_PIECES_MAX: Final = 1 << 10  # of one edited head: then an edit is computed anew instead
DIRECTIVES_BYTES_MAX: Final = 256 * KIB  # and of all of one agent's, as they lie in memory
EDITS_SHOWN_MAX: Final = 8  # of those, in an agent's view, which heartbeats carry
EDIT_WINDOWS_MAX: Final = 32  # holes of one prompt, each with a window's rows in memory beside it
SPAN_CHUNKS_MAX: Final = 1 << 17  # known by a node, of about 6M tokens and in some 40 MB
SPAN_INDEXED_TOKENS_MAX: Final = 1 << 20  # of records read for one turn: a tenth of a second
SPAN_PLACES_MAX: Final = 4  # of one chunk, in the records of the last turns
SPAN_KEPT_TOKENS_MIN: Final = 32  # a run moved is one more distance in every later step
RECORD_WRITES_MAX: Final = 4  # of one record; each but the last met a block that the drive lost
TILE_PLANS_MAX: Final = 64  # remembered, of sequences with many moved runs; more than one batch has
AGENTS_PER_NODE_MAX: Final = 10_000
ANSWERS_READ_MAX: Final = 16  # agents whose remembered answers are kept as they were read
ALIKE_AGENTS_MAX: Final = 16  # compared with a new prompt, token by token
ANSWER_END_CHARS_MAX: Final = 64  # that a template writes behind an answer, and the model as well
ANSWER_OPENINGS_MAX: Final = 16  # ways of a template to open answers that are remembered
UNSAVED_BYTES_MAX: Final = 128 * MIB  # of one prompt, before it waits for the disk
STATES_HOT_MAX: Final = 4  # of one agent: behind its answer's beginning, prompt, text, turn
QUARANTINE_FILES_MAX: Final = 32  # enough to inspect; a failing drive must not fill itself
QUARANTINE_REASON_CHARS_MAX: Final = 40  # of a file's name there
DRAIN_FLAG_BYTES_MAX: Final = 64
INCARNATION_BYTES_MAX: Final = 32
TERM_FILE_BYTES_MAX: Final = 4 * KIB
SERVED_FILE_BYTES_MAX: Final = 64 * KIB
FLUSH_IDLE_S: Final = 15.0  # how long an agent may be in memory only before it is tried again
FLUSH_RETRY_S: Final = 1.0  # rest for a disk that refused, however much memory is wanted
SELF_TEST_RETRY_MAX_S: Final = 240.0  # between two self-tests that the disk let tell nothing
SLEEP_NOTICE_S: Final = 25.0  # to leave the fabric: macOS sleeps after 30 without an answer
SLEEP_REPORT_S: Final = 3.0  # of that, for a heartbeat of the router
NODE_STOP_WAIT_S: Final = 10.0  # for turns that run when a node is told to stop
FLUSH_FAILURES_MAX: Final = 3  # in one pass; the disk, not the agent, is then at fault
LOOP_RETRY_S: Final = 15.0  # rest after a round that failed; longer than what fails for a moment

# Integrity
SCRUB_IDLE_S: Final = 5.0  # no turn for so long before stored blocks are read again
SCRUB_STEP_S: Final = 1.0  # a step's bytes, so that an arriving turn waits for one block at most
WARM_START_BYTES_MAX: Final = 4 * GIB  # read behind a start of what several records share
WARM_START_BYTES_PER_S: Final = 256 * MIB  # of it, while no turn runs
WARM_START_STEP_S: Final = 0.25  # a step's bytes, so that an arriving turn waits for few blocks
SPAN_LENDERS_MAX: Final = 1_024  # agents that are looked through for it, those used last
SPAN_TRIES_MAX: Final = 4  # agents tried for one: their windows and states there may be gone
SPAN_OFFERS_MAX: Final = 32  # beginnings that one node offers another, the most shared first
SPAN_RETURNS_MAX: Final = 1_024  # agents that lent something and are for themselves since, by node
SPAN_LEASE_S: Final = 900.0  # a lent prefix that no agent has used, unless renewed
FSCK_FINDINGS_MAX: Final = 10_000  # listed for one folder; the rest is counted

# Encryption at rest
ENCRYPTION_STEP_BYTES: Final = 64 * MIB  # of other models' folders, encrypted per step

# Retention
FREE_SHARE: Final = 0.05  # freed beyond need, so that a full tier is not sorted for every block
RECLAIM_EVERY_S: Final = 60.0  # how late an expired agent may go
SERVED_EVERY_S: Final = 600.0  # how much idle time a crash may lose
FOLDERS_EVERY_S: Final = 3_600.0  # how often the folders of other models are measured
TRIM_ROUNDS_MAX: Final = 8  # records made smaller before agents are evicted after all
EVICTIONS_MAX: Final = 64  # agents that one step removes; turns of others run in between

# HTTP
CHARACTER_TOKENS_MAX: Final = 16  # that one is waited for; it has four bytes

# Prompts
ENCODERS: Final = 4  # threads of a node that render and encode prompts
ENCODING_BYTES_MAX: Final = 4 * MIB  # of text, encoded at once; takes some 100 bytes each
ENCODING_SMALL_BYTES: Final = 64 * KIB  # a thread's tenth of a second: not counted

# Structured output
CALL_SCHEMAS_BYTES_MAX: Final = 256 * KIB  # of all tools whose calls are enforced
CALL_TEXT_COUNTED_CHARS_MAX: Final = 4_096  # between tags, where compilers have 250,000 states
CALL_ITEMS_COUNTED_MAX: Final = 32  # of a list that no schema's compiler writes
CALL_VALUES_DEPTH_MAX: Final = 8  # of what Gemma's are to write; a schema may refer to itself
JSON_INDENT_MAX: Final = 32  # spaces that begin a line; without a bound, a model may write no more
GRAMMAR_WORKERS: Final = 2  # threads that compile, and as many that compute masks
GRAMMARS_COMPILING_MAX: Final = 32  # at once, of one node; most of them wait
GRAMMAR_COMPILE_S: Final = 5.0  # then it is refused
GRAMMARS_KEPT_MAX: Final = 64  # compiled, of one node; a few MB each at most
GRAMMAR_MASK_S: Final = 2.0  # for one token's mask, after which its answer fails
LINE_ENDS_BEHIND_THOUGHT_MAX: Final = 2  # before what a format prescribes: as models write them
FORMAT_REASON_CHARS_MAX: Final = 400  # of a compiler's words about what it does not take
CUT_CHARACTER_TOKENS_MAX: Final = 4  # that a thought's last one may have: one for each byte
THOUGHT_TAIL_CHARS: Final = 256  # looked through for the marker that ends a thought

# Engine
AGENT_TURNS_WAITING_MAX: Final = 16  # for one agent, each behind the one before
STREAM_EVENTS_MAX: Final = 4_096  # a client that reads slower than this is dropped
PREFILL_CHUNK_TOKENS_MAX: Final = 4_096
PREFILL_CHUNK_TOKENS_MIN: Final = 512
PREFILL_CHUNK_TOKENS_BUSY_MIN: Final = 128  # shorter chunks cost more than they compute
PREFILL_CHUNK_S: Final = 1.0  # what a request that arrives now may have to wait for
PREFILL_CHUNK_BUSY_S: Final = 0.25  # the longest pause that a reader of a stream overlooks
HEAD_WAIT_FACTOR: Final = 1.5  # of the predicted time: then a turn computes a head itself
HEAD_WAIT_S_MIN: Final = 2.0  # and so much more, for the disk
HEAD_TOKENS_MIN: Final = 128  # computed as soon as another turn could have published them
HEAD_BYTES_MAX: Final = 64 * MIB  # of an awaited head, copied out between two steps
PREFILL_HOLD_S: Final = 0.5  # of prompts, at a stretch, while a stream that moves is silent
SCORED_CHUNK_TOKENS: Final = 256  # whose logits are held at once: 156 MB with 152k tokens
PREFILL_WARM_TOKENS: Final = 512  # a prompt with no more than this left goes before long ones
PREFILL_WARM_STREAK_MAX: Final = 8  # chunks of warm prompts in a row while a long one waits
ENGINE_CALLS_MAX: Final = 4_096  # 32 turns have a handful each; more means that a step hangs
HEAD_FETCHES_MAX: Final = 8  # beginnings of prompts that come from other nodes, at a time
HEAD_FETCH_S_MIN: Final = 0.1  # of one part on its way, and so many times the expected time:
HEAD_FETCH_FACTOR: Final = 3.0  # then the turn computes what is missing
HEAD_START_S: Final = 0.03  # of a fetch, before its first bytes
HEAD_REPLY_S: Final = 1.0  # for another node's answer, beyond what it was told to wait
HEAD_CONNECT_S: Final = 0.5  # to it: who does not listen holds no turn
HEAD_OFFER_S: Final = 30.0  # for which a turn on another node may begin to fetch
HEAD_LENDERS_MAX: Final = 16  # agents whose beginnings are compared with that of a prompt
FETCHES_MAX: Final = 4  # agents copied at a time; more share the same links
FETCHES_WAITING_MAX: Final = 32  # and those that wait; each holds a control call
LOW_LATENCY_WORKERS: Final = 2  # threads for what a silent stream waits for, of either kind
WARM_UPS_MAX: Final = 8  # moves whose memory is read back while they copy
DEVICE_FAILURES_MAX: Final = 3  # within the next limit, after which the process ends
DEVICE_FAILURES_WITHIN_S: Final = 60.0
DEVICE_POOL_IDLE_S: Final = 2.0  # without work, after which the pool is returned to the system
DEVICE_POOL_STEPS: Final = 256  # decode steps after which it is returned while others go on
DEVICE_POOL_PREFILL_TOKENS: Final = 1_024  # of a chunk behind which it is returned
SCORES_COPIES: Final = 4  # of a chunk's scores, of layers whose buffers a GPU has not freed yet
PREFIX_COPIES: Final = 2  # of a layer's prefix as plain numbers: 2.1 measured, with its scores
MEMORY_POLL_S: Final = 2.0  # between two looks at the system's memory pressure
MEMORY_SHRINK_S: Final = 10.0  # between two steps by which a warning shrinks the budget
MEMORY_CALM_S: Final = 60.0  # without pressure, after which the budget grows again
MEMORY_SHRINK_PARTS: Final = 8  # of the budget, by which a warning shrinks it
MEMORY_FLOOR_PARTS: Final = 8  # of the budget, of which one stays under any pressure
BLOCK_READERS: Final = 4  # reads of one restore in flight; a drive is at its fastest with a few
STORED_ERRORS_MAX: Final = 8  # of a device: each synchronization raises one
BLOCKED_POLL_S: Final = 0.02  # how often a loop with nothing runnable looks around
PENALTY_TOKENS_MAX: Final = 4_096  # what penalties look back on
CALL_HEADER_CHARS_MAX: Final = 4_096  # between two parts of a tool call; more is no call
CALL_CODE_CHARS_MAX: Final = 1 << 16  # Python's own parser takes much memory for each
CALL_ID_CHARS_MAX: Final = 64  # that a model gave a tool call by itself

# Scheduling
PAUSED_SEQUENCES_MAX: Final = 32  # each one keeps its cache
ADMISSION_PASSES_MAX: Final = 8  # smaller requests that may overtake one waiting for memory
BACKGROUND_PATIENCE_S: Final = 30.0  # unserved for so long, background counts as interactive
BACKGROUND_PROMOTED_MAX: Final = 1  # at a time: an old backlog must not become a foreground
TENANT_WAITING_FACTOR: Final = 3  # places of one tenant per free one: three quarters if alone
BACKGROUND_WAITING_SHARE: Final = 0.5  # of the queue; the rest is kept for people who wait

# Control plane
LIST_BYTES_MAX: Final = 32 * KIB  # about, of agents in one answer; the rest is asked for
GONE_AGENTS_MAX: Final = 16_384  # removed ones that a node can still name; 2 MB
CONTROL_CALLS_MAX: Final = 64  # long copies among them; heartbeats must not wait for those,
WAITING_CALLS_MAX: Final = 32  # nor for these, which tenants ask for; one tenant: half
START_REASON_CHARS_MAX: Final = 200  # of why a node did not start

# Erasures
TOMBSTONE_BYTES_MAX: Final = 4 * KIB  # of one file
RECORD_WRITE_POLLS_MAX: Final = 3_000  # of an agent whose record is being written: 30 s
ERASE_CALLS_MAX: Final = 1_024  # answered alike when one comes twice

# Data plane
TRANSFER_STREAMS: Final = 4
TRANSFER_CONNECTIONS_MAX: Final = 64
TRANSFER_SLICE_BYTES_MIN: Final = 256 * KIB  # in 30 s: 9 kB/s is the slowest link served
TRANSFER_REQUEST_BYTES: Final = 8 * MIB  # asked for at once by one stream; and as much ahead
TRANSFER_RANGE_BYTES_MIN: Final = 512 * KIB  # a block is not cut smaller
TRANSFER_LINKS_MAX: Final = 8  # of one peer, used by one fetch
TRANSFER_HOLD_S: Final = 0.25  # how long a slice waits at most while more urgent ones are sent
TRANSFER_SILENCE_S: Final = 1.0  # without a byte, while another link moves: this one is dead
TRANSFER_SILENCE_ALONE_S: Final = 8.0  # without a byte, while no other moves
TRANSFER_IDLE_S: Final = 20.0  # how long a proven connection is kept for the next fetch
TRANSFER_IDLE_MAX: Final = 16  # of those
TRANSFER_TIMEOUT_S: Final = 30.0
OFFER_LIFE_MAX_S: Final = 4 * 3600.0  # of an offer that is fetched from all the time
TRANSFER_WAKES_MAX: Final = 64
TRANSFER_WRONG_MAX: Final = 2  # a block that arrives wrong is fetched once more, from its start
OFFERS_MAX: Final = 1_024

# Copies of agents
PREFETCHES_MAX: Final = 2  # per node, at once: they compete with turns for the disk
ABORTED_MOVES_MAX: Final = 1_024  # remembered; the epoch catches a commit of one that is not

# Links
SKETCH_LENGTHS_MAX: Final = 8  # of one agent: changes after which a list needs its last pieces only
VIEWS_KEPT_MAX: Final = 8  # as sent to routers, which get the changes since theirs
LINK_AGAIN_S: Final = 60.0  # before an unchanged link is sent again, with its age
LINK_RATE_NEWS: Final = 0.1  # share by which a link's rate must change to be sent again
LINK_RTT_NEWS: Final = 0.5  # likewise, of its round trip, which varies more
LINKS_REPORTED_MAX: Final = 256  # in one heartbeat, those used last
LISTENERS_MAX: Final = 32  # addresses at which a node listens for others
DEVICES_TRIED_MAX: Final = 3  # each takes its time

# Hibernation: one agent as one file
HIBERNATIONS_MAX: Final = 4  # files under way per node, either way; one tenant: half
