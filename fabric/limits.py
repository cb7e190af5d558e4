"""Every bound of the fabric in one place: name, unit last, and the reason.

Those of HTTP connections are in `fabric/connection_limits.py`.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Blocks and files
BLOCK_TOKENS: Final = 256  # mlx-lm grows caches by 256; 9.4 MB for an 8B model at 4 bits
ROOM_TOKENS: Final = 512  # capacity of a cache for what comes next; more grows by copying
FILE_ALIGN_BYTES: Final = 16 * KIB  # page of Apple Silicon: lets Metal wrap a mapped file
HEADER_BYTES_MAX: Final = 1 * MIB  # 192 tensors need 20 KiB
BLOCK_BYTES_MAX: Final = 1 * GIB  # the state of Nemotron-H 56B is 864 MiB
MANIFEST_BYTES_MAX: Final = 64 * MIB
AGENT_TOKENS_MAX: Final = 1 << 20
TOKEN_TEXT_BYTES_MAX: Final = 1 * KIB  # of a record's text per token; the longest have 512 spaces
TEXT_SLACK_BYTES: Final = 64 * KIB  # beyond that: white space that a special token swallowed
WALL_S_MAX: Final = 253_402_300_799.0  # of any time in a record: the end of the year 9999
PIECES_MAX: Final = 1 << 14  # of one cache: four times those of the longest unedited one
EDITED_PIECES_MAX: Final = 1 << 10  # of one edited head: then an edit is computed anew instead
DIRECTIVES_MAX: Final = 256  # of one agent
DIRECTIVE_BYTES_MAX: Final = 16 * KIB  # of text in the place of a message
DIRECTIVES_BYTES_MAX: Final = 256 * KIB  # and of all of one agent's, as they lie in memory
DIRECTED_ID_CHARS_MAX: Final = 256  # of the tool call whose result one is about
DIRECTED_TEXT_CHARS_MAX: Final = 64 * KIB  # of a text that one is to find
CALL_IDS_KNOWN_MAX: Final = 1 << 14  # of one record; with more, it knows none
DECAY_S_MAX: Final = 1e9  # after which an agent is worth less; 31 years
UNDONE_SHOWN_MAX: Final = 64  # directives of one agent that were taken back, the newest
SAID_BEHIND_BYTES_MAX: Final = 64 * KIB  # after a message: where the next is looked for
EDITS_NOTED_MAX: Final = 64  # of one agent, the newest
LENDERS_MAX: Final = 512  # noted in one record: two for each agent whose rows it holds
EDITS_SHOWN_MAX: Final = 8  # of those, in an agent's view, which heartbeats carry
EDIT_CHUNKS_MAX: Final = 1 << 14  # special tokens of one prompt that is compared for edits
EDIT_KEPT_TOKENS_MIN: Final = 16  # fewer are computed sooner than they are moved
EDIT_MOVES_MAX: Final = 256  # of one prompt, the longest: attention turns the query for each
EDIT_WINDOWS_MAX: Final = 32  # holes of one prompt, each with a window's rows in memory beside it
SPAN_CHUNK_TOKENS_MIN: Final = 16  # shorter ones are in too many texts
SPAN_CHUNK_TOKENS_MAX: Final = 128  # a run that two prompts share is found by one whole chunk of it
SPAN_CHUNKS_MAX: Final = 1 << 17  # known by a node, of about 6M tokens and in some 40 MB
SPAN_INDEXED_TOKENS_MAX: Final = 1 << 20  # of records read for one turn: a tenth of a second
SPAN_PLACES_MAX: Final = 4  # of one chunk, in the records of the last turns
SPAN_KEPT_TOKENS_MIN: Final = 32  # a run moved is one more distance in every later step
SPANS_MAX: Final = 64  # of other contexts in one prompt, the longest
EDIT_SINK_TOKENS: Final = 4  # at the start, which all others attend to: no edit before their end
RECORD_WRITES_MAX: Final = 4  # of one record; each but the last met a block that the drive lost
TILE_PLANS_MAX: Final = 64  # remembered, of sequences with many moved runs; more than one batch has
PACKED_PIECES_MAX: Final = 1 << 14  # remembered in their packed form, 8 MB; 4M tokens' worth
AGENTS_PER_NODE_MAX: Final = 10_000
ANSWERS_BYTES_MAX: Final = 128 * KIB  # of one agent, remembered for clients that change them
ANSWERS_READ_MAX: Final = 16  # agents whose remembered answers are kept as they were read
ALIKE_AGENTS_MAX: Final = 16  # compared with a new prompt, token by token
LAYERS_MAX: Final = 512
BLOCK_TENSORS_MAX: Final = 4_096  # 512 layers of eight; their header stays under its limit
SPEC_BYTES_MAX: Final = 4 * MIB  # a cache spec; 512 layers with all frequencies take 1 MiB
STATE_EVERY_TOKENS: Final = 4_096  # 77 MB for a large hybrid model, as much as 10k of its tokens
STATES_PER_AGENT_MAX: Final = 8
STATE_GAP_TOKENS_MIN: Final = 16  # fewer are computed sooner than a state is written
ANSWER_END_CHARS_MAX: Final = 64  # that a template writes behind an answer, and the model as well
ANSWER_OPENINGS_MAX: Final = 16  # ways of a template to open answers that are remembered
UNSAVED_BYTES_MAX: Final = 128 * MIB  # of one prompt, before it waits for the disk
STATES_HOT_MAX: Final = 4  # of one agent: behind its answer's beginning, prompt, text, turn
QUARANTINE_FILES_MAX: Final = 32  # enough to inspect; a failing drive must not fill itself
QUARANTINE_REASON_CHARS_MAX: Final = 40  # of a file's name there
DRAIN_FLAG_BYTES_MAX: Final = 64
INCARNATION_BYTES_MAX: Final = 32
SERVED_FILE_BYTES_MAX: Final = 64 * KIB
FLUSH_IDLE_S: Final = 15.0  # how long an agent may be in memory only before it is tried again
FLUSH_RETRY_S: Final = 1.0  # rest for a disk that refused, however much memory is wanted
SELF_TEST_RETRY_MAX_S: Final = 240.0  # between two self-tests that the disk let tell nothing
NODE_STOP_WAIT_S: Final = 10.0  # for turns that run when a node is told to stop
FLUSH_WAIT_S: Final = 90.0  # for turns that run when a flush is asked for; callers wait for 120
FLUSH_FAILURES_MAX: Final = 3  # in one pass; the disk, not the agent, is then at fault
LOOP_RETRY_S: Final = 15.0  # rest after a round that failed; longer than what fails for a moment

# Integrity
SCRUB_IDLE_S: Final = 5.0  # no turn for so long before stored blocks are read again
SCRUB_STEP_S: Final = 1.0  # a step's bytes, so that an arriving turn waits for one block at most
WARM_START_BYTES_MAX: Final = 4 * GIB  # read behind a start of what several records share
WARM_START_BYTES_PER_S: Final = 256 * MIB  # of it, while no turn runs
WARM_START_STEP_S: Final = 0.25  # a step's bytes, so that an arriving turn waits for few blocks
SPAN_SHARERS_MIN: Final = 2  # agents that begin with a block before it counts as popular
SPAN_LENDERS_MAX: Final = 1_024  # agents that are looked through for it, those used last
SPAN_TRIES_MAX: Final = 4  # agents tried for one: their windows and states there may be gone
SPAN_OFFERS_MAX: Final = 32  # beginnings that one node offers another, the most shared first
SPAN_RETURNS_MAX: Final = 1_024  # agents that lent something and are for themselves since, by node
SPAN_LEASE_S: Final = 900.0  # a borrowed beginning that nobody has gone on with, unless renewed
FSCK_FINDINGS_MAX: Final = 10_000  # listed for one folder; the rest is counted

# Encryption at rest
SEAL_STEP_BYTES: Final = 64 * MIB  # of other models' folders, encrypted between two looks around
SEAL_RETRY_S: Final = 300.0  # before a folder that could not be encrypted is tried again

# Retention
PIN_SHARE_MAX: Final = 0.25  # of a tenant's floor: pins that keep everybody else out are no favour
FREE_SHARE: Final = 0.05  # freed beyond need, so that a full tier is not sorted for every block
RECLAIM_EVERY_S: Final = 60.0  # how late an expired agent may go
SERVED_EVERY_S: Final = 600.0  # how much idle time a crash may lose
FOLDERS_EVERY_S: Final = 3_600.0  # how often the folders of other models are measured
TRIM_ROUNDS_MAX: Final = 8  # records made smaller before agents are evicted after all
EVICTIONS_MAX: Final = 64  # agents that one step removes; turns of others run in between
# Left free of a drive, whatever the budget says: systems swap and update there.
DISK_RESERVE_SHARE: Final = 0.1
DISK_RESERVE_BYTES_MIN: Final = 10 * GIB
DISK_RESERVE_BYTES_MAX: Final = 64 * GIB
WEIGHTS_INDEX_BYTES_MAX: Final = 64 * MIB  # of a model's list of weights, read before a start
TENANT_SHARES_MAX: Final = 1_024
RETAIN_S_MAX: Final = 86_400.0  # for which a client may say that it will come back
REUSE_TENANTS_MAX: Final = 5_120  # five classes of agents each
REUSE_COUNTS_MAX: Final = 1_024  # then halved: habits change

# HTTP
BODY_BYTES_MAX: Final = 32 * MIB  # a million tokens of text with room left over
PROMPT_ESCAPES: Final = 6  # bytes of JSON that one of text may take, as \u0061 does
PROMPT_FRAME_BYTES: Final = 1 * MIB  # of a body, beside a prompt's text: names, numbers, brackets
CALL_BODY_BYTES_MAX: Final = 1 * MIB  # of requests that bring no prompt
MESSAGES_MAX: Final = 10_000
BLOCKS_PER_MESSAGE_MAX: Final = 10_000  # of content, in dialects that have such
TOOLS_MAX: Final = 512
STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 512
NAME_CHARS_TOLD: Final = 100  # of a name that a client gave, in an error about it
JSON_DEPTH_MAX: Final = 64
JSON_ITEMS_MAX: Final = 200_000  # values in one body; they take 0.2 s and 30 MB
INTEGER_CHARS_MAX: Final = 400  # of one integer in a long body; their cost grows with the square
TURN_ITEMS_MAX: Final = 1_000_000  # and on its way to a node, with tokens and parsed arguments
COMPLETION_TOKENS_MAX: Final = 131_072
TOP_LOGPROBS_MAX: Final = 20
ANSWERS_PER_PROMPT_MAX: Final = 32
PROMPTS_MAX: Final = 256  # of one request for completions
ANSWERS_MAX: Final = 512  # of one request, to all its prompts
ANSWERS_AT_ONCE_MAX: Final = 8  # of those: the others wait, as if they were sent one by one
ANSWER_PLACE_S: Final = 30.0  # for a full node, while no other answer of the request runs
ANSWER_PARTS_WAITING_MAX: Final = 256  # of all, until the client reads on
LOGIT_BIAS_MAX: Final = 1_024
KEY_CHARS_MAX: Final = 512  # prompt_cache_key, user
MODEL_ALIASES_MAX: Final = 256
INCLUDED_MAX: Final = 64  # of what an answer may bring beside itself
RESPONSES_STORED_MAX: Final = 4_096  # of all tenants, in the router's memory
RESPONSES_BYTES_MAX: Final = 128 * MIB  # they take together; each holds its whole conversation
BODIES_BYTES_MAX: Final = 16 * BODY_BYTES_MAX  # of all requests being served; one tenant: half
BODIES_ARRIVING_BYTES_MAX: Final = 3 * BODY_BYTES_MAX  # not complete yet; one tenant: half
BODY_GRACE_S: Final = 10.0  # for a body's first bytes; then
BODY_BYTES_PER_S_MIN: Final = 32 * KIB  # of waiting for it
RETRY_AFTER_S_MAX: Final = 60.0  # clients of today take no longer one for their own back-off
STREAM_SILENCE_S: Final = 4.0  # before a stream says that it lives: clients give up after 5
REQUESTS_MAX: Final = 2_048  # being served at once; one tenant: half
TURN_BODY_BYTES_MAX: Final = BODY_BYTES_MAX + 2 * MIB  # the client's, and what the router adds
CHARACTER_TOKENS_MAX: Final = 16  # that one is waited for; it has four bytes
TOKEN_ID_MAX: Final = (1 << 31) - 1  # of a prompt in tokens; the model has far fewer
TOKEN_DIGITS_MAX: Final = 10  # of a token's id in a logit bias
POLICIES_MAX: Final = 16  # that rewrite conversations: of a fabric, and of one request
POLICY_NAME_CHARS_MAX: Final = 64
POLICY_S: Final = 2.0  # for one of an operator's own, after which the turn goes on unedited
POLICY_CALLS_MAX: Final = 4  # of one such policy at a time; each has a thread
CUT_RESULT_CHARS_MIN: Final = 100  # of a tool's result that was cut: its notice takes 60
CONTEXT_EDITS_MAX: Final = 16  # of one request's context_management
EDIT_VALUE_MAX: Final = 1 << 31  # tokens or calls that one of those names
TRUNCATION_COUNTS_MAX: Final = 12  # prompts counted to find the longest that fits; mostly three
MESSAGE_NAME_CHARS_MAX: Final = 256  # of a name or an id within a message
MATCH_REASON_CHARS_MAX: Final = 200  # in an answer's header

# Prompts
ENCODERS: Final = 4  # threads of a node that render and encode prompts
ENCODING_BYTES_MAX: Final = 4 * MIB  # of text, encoded at once; takes some 100 bytes each
ENCODING_SMALL_BYTES: Final = 64 * KIB  # a thread's tenth of a second: not counted

# Structured output
GRAMMAR_BYTES_MAX: Final = 64 * KIB  # of a schema's text; what is let in compiles in 0.3 s
CALL_SCHEMAS_BYTES_MAX: Final = 256 * KIB  # of all tools whose calls are enforced
CALL_TEXT_COUNTED_CHARS_MAX: Final = 4_096  # between tags, where compilers have 250,000 states
CALL_ITEMS_COUNTED_MAX: Final = 32  # of a list that no schema's compiler writes
CALL_VALUES_DEPTH_MAX: Final = 8  # of what Gemma's are to write; a schema may refer to itself
RULES_CHARS_MAX: Final = 8 * KIB  # of a regular expression or grammar that the client wrote
TEXT_RULES_CHARS_MAX: Final = 32 * KIB  # of such a grammar as rules of regular expressions
PATTERN_CHARS_MAX: Final = 1_024  # of one pattern, or one name, within a schema
SCHEMA_DEPTH_MAX: Final = 48  # levels of JSON; half as many of objects in objects
SCHEMA_PROPERTIES_MAX: Final = 512  # of one object; their cost grows with the square
SCHEMA_BRANCHES_MAX: Final = 128  # in one anyOf, oneOf, allOf; likewise
SCHEMA_PATTERNS_MAX: Final = 16  # whose patterns are compared with each other
SCHEMA_TEXT_CHARS_MAX: Final = 4_096  # of one text that is prescribed: 10 ms for each mask
CHOICES_MAX: Final = 1_000  # values of one enum, or texts to choose from
JSON_INDENT_MAX: Final = 32  # spaces that begin a line; without a bound, a model may write no more
GRAMMAR_WORKERS: Final = 2  # threads that compile, and as many that compute masks
GRAMMARS_COMPILING_MAX: Final = 32  # at once, of one node; most of them wait
GRAMMAR_COMPILE_S: Final = 5.0  # then it is refused
GRAMMARS_KEPT_MAX: Final = 64  # compiled, of one node; a few MB each at most
GRAMMAR_MASK_S: Final = 2.0  # for one token's mask, after which its answer fails
LINE_ENDS_BEHIND_THOUGHT_MAX: Final = 2  # before what a format prescribes: as models write them
FORMAT_REASON_CHARS_MAX: Final = 400  # of a compiler's words about what it does not take
THOUGHT_TAIL_CHARS: Final = 256  # looked through for the marker that ends a thought

# Engine
WAITING_REQUESTS_MAX: Final = 256
AGENT_TURNS_WAITING_MAX: Final = 16  # for one agent, each behind the one before
ACTIVE_SEQUENCES_MAX: Final = 32
STREAM_EVENTS_MAX: Final = 4_096  # a client that reads slower than this is dropped
PREFILL_CHUNK_TOKENS_MAX: Final = 4_096
PREFILL_CHUNK_TOKENS_MIN: Final = 512
PREFILL_CHUNK_TOKENS_BUSY_MIN: Final = 128  # shorter chunks cost more than they compute
PREFILL_CHUNK_S: Final = 1.0  # what a request that arrives now may have to wait for
PREFILL_CHUNK_BUSY_S: Final = 0.25  # the longest pause that a reader of a stream overlooks
PREFILL_HOLD_S: Final = 0.5  # of prompts, at a stretch, while a stream that moves is silent
SCORED_CHUNK_TOKENS: Final = 256  # whose logits are held at once: 156 MB with 152k tokens
PREFILL_WARM_TOKENS: Final = 512  # a prompt with no more than this left goes before long ones
PREFILL_WARM_STREAK_MAX: Final = 8  # chunks of warm prompts in a row while a long one waits
ENGINE_CALLS_MAX: Final = 4_096  # 32 turns have a handful each; more means that a step hangs
FETCHES_MAX: Final = 4  # agents copied at a time; more share the same links
FETCHES_WAITING_MAX: Final = 32  # and those that wait; each holds a control call
LOW_LATENCY_WORKERS: Final = 2  # threads for what a silent stream waits for, of either kind
WARM_UPS_MAX: Final = 8  # moves whose memory is read back while they copy
DEVICE_FAILURES_MAX: Final = 3  # within the next limit, after which the process ends
DEVICE_FAILURES_WITHIN_S: Final = 60.0
DEVICE_POOL_BYTES: Final = 512 * MIB  # of freed arrays that MLX keeps for later ones, on a GPU
DEVICE_POOL_IDLE_S: Final = 2.0  # without work, after which the pool is returned to the system
DEVICE_POOL_STEPS: Final = 256  # decode steps after which it is returned while others go on
DEVICE_POOL_PREFILL_TOKENS: Final = 1_024  # of a chunk behind which it is returned
DEVICE_RESERVE_BYTES: Final = 256 * MIB  # of a node's share: kernels, graphs, staging
DEVICE_BUFFERS_PART: Final = 0.8  # of the arrays that a GPU can hold; the rest are temporary
WORKING_SET_PART: Final = 0.75  # of the RAM, for models and caches where no GPU says
PREFILL_PART: Final = 8  # of a node's share, for the attention scores of one chunk of a prompt
PREFILL_BYTES_MIN: Final = 256 * MIB
PREFILL_BYTES_MAX: Final = 4 * GIB
SCORES_COPIES: Final = 4  # of a chunk's scores, of layers whose buffers a GPU has not freed yet
HOT_BYTES_MIN: Final = 256 * MIB  # for agents' caches; with less a node does not start
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
CONTROL_BYTES_MAX: Final = MANIFEST_BYTES_MAX + 16 * MIB  # one travels with a ticket, also by HTTP
CONTROL_TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 1.0
LIST_BYTES_MAX: Final = 4 * MIB  # about, of agents in one answer; the rest is asked for
LIST_PAGES_MAX: Final = 1_024  # more than 10,000 agents with the longest sketches take
GONE_AGENTS_MAX: Final = 16_384  # removed ones that a node can still name; 2 MB
WHOLE_LIST_S: Final = 600.0  # how old the last whole list of a node may get
SUSPECT_S: Final = 3.0
LEASE_S: Final = 6.0
OWNER_WAIT_S_MAX: Final = 60.0  # of a turn, for a node that joins or restarts with its agent
EPOCH_LEAP: Final = 1_024  # more moves and takeovers than an agent sees between two restarts
EPOCH_LEAP_BITS: Final = 20  # of chance on top of it
CONTROL_CALLS_MAX: Final = 64  # long copies among them; heartbeats must not wait for those,
WAITING_CALLS_MAX: Final = 32  # nor for these, which tenants ask for; one tenant: half
START_REASON_CHARS_MAX: Final = 200  # of why a node did not start
LOG_BYTES_MAX: Final = 16 * MIB  # of one file; there are two per process
CHILD_LINE_BYTES_MAX: Final = 1 * MIB  # of what the supervisor tells the keeper
STOP_LINE_CHARS_MAX: Final = 4_096  # of what another Mac says while it stops
STOPS_AT_ONCE_MAX: Final = 16  # Macs on which Ray is stopped at a time

# Erasures
TOMBSTONES_MAX: Final = 16_384  # 3 MB in memory and 1.6 MB on their way to a node that was away
ERASED_S_MAX: Final = float(1 << 53)  # beyond every calendar
ERASURE_EPOCHS: Final = 1 << 24  # above what is known: claims unheard of, sixteen leaps among them
EPOCH_ERASED_MAX: Final = (1 << 53) - 1  # exact in JSON; 2^28 erasures of one name above EPOCH_MAX
EPOCHS_ISSUED_MAX: Final = 100_000  # agents whose last claim nobody has confirmed yet
TOMBSTONE_BYTES_MAX: Final = 4 * KIB  # of one file
RECORD_WRITE_POLLS_MAX: Final = 3_000  # of an agent whose record is being written: 30 s
ERASE_CALLS_MAX: Final = 1_024  # answered alike when one comes twice
ERASURE_DIGESTS_MAX: Final = 1 << 16  # of agents that lists name, remembered by the router

# Data plane
FRAME_BYTES_MAX: Final = 1 * MIB
TICKET_BLOCKS_MAX: Final = 1 << 16
TRANSFER_STREAMS: Final = 4
TRANSFER_CONNECTIONS_MAX: Final = 64
TRANSFER_SLICE_BYTES_MIN: Final = 256 * KIB  # in 30 s: 9 kB/s is the slowest link served
TRANSFER_SLICE_BYTES_MAX: Final = 2 * MIB  # lost where a connection breaks, as its MAC is last
TRANSFER_REQUEST_BYTES: Final = 8 * MIB  # asked for at once by one stream; and as much ahead
TRANSFER_RANGE_BYTES_MIN: Final = 512 * KIB  # a block is not cut smaller
TRANSFER_LINKS_MAX: Final = 8  # of one peer, used by one fetch
TRANSFER_HOLD_S: Final = 0.25  # how long a slice waits at most while more urgent ones are sent
TRANSFER_SILENCE_S: Final = 1.0  # without a byte, while another link moves: this one is dead
TRANSFER_SILENCE_ALONE_S: Final = 8.0  # without a byte, while no other moves
TRANSFER_IDLE_S: Final = 20.0  # how long a proven connection is kept for the next fetch
TRANSFER_IDLE_MAX: Final = 16  # of those
TRANSFER_TIMEOUT_S: Final = 30.0
HANDSHAKE_TIMEOUT_S: Final = 5.0
OFFER_LIFE_MAX_S: Final = 4 * 3600.0  # of an offer that is fetched from all the time
TRANSFER_WAKES_MAX: Final = 64
TRANSFER_WRONG_MAX: Final = 2  # a block that arrives wrong is fetched once more, from its start
OFFERS_MAX: Final = 1_024

# Copies of agents
COPY_TIMEOUT_S: Final = 3_600.0  # one agent's; 50 GB over Wi-Fi take half of it
DRAIN_AT_ONCE_MAX: Final = 3  # agents on their way off one node; more only share its links
DRAIN_ROUNDS_MAX: Final = 3  # in a row without a move, before a drain rests
DRAIN_ROUND_REST_S: Final = 1.0
DRAIN_AGAIN_S: Final = 30.0  # a drain that rested is tried again
DRAIN_STUCK_MAX: Final = 100  # named in an answer; the rest is counted
COPY_TRIES_MAX: Final = 3  # a turn that ends may replace the last block under the copy
REPLICAS_MAX: Final = 7  # of one agent; a fabric is two to eight Macs
NODES_MAX: Final = 16  # of one fabric
NODE_REMEMBERED_S: Final = 14 * 86_400.0  # without a report, while others report
ROSTER_BYTES_MAX: Final = 16 * KIB  # of its file
REPLICAS_WAITING_MAX: Final = 1_024  # agents noted for copying; the next sweep finds the rest
REPLICA_REST_S: Final = 30.0  # before a copy that failed is tried again
REPLICA_AGAIN_S: Final = 600.0  # before a copy that its node has evicted is made again
NEWCOMER_AGENTS_MAX: Final = 4  # a node that has no more is to be given what others share
NEWCOMER_AGAIN_S: Final = 300.0  # before it is given that again, while it stays so
NEWCOMER_REST_S: Final = 30.0  # before that is tried again where it failed, or a move went first
NEWCOMER_TIMEOUT_S: Final = 300.0  # all of it, from all its peers
PREFETCHES_MAX: Final = 2  # per node, at once: they compete with turns for the disk
PREFETCH_TIMEOUT_S: Final = 120.0
PREFETCH_HINTS_MAX: Final = 4  # agents that one request may name
PREFETCH_TASKS_MAX: Final = 32  # hints under way in the router; more are dropped
ABORTED_MOVES_MAX: Final = 1_024  # remembered; the epoch catches a commit of one that is not
COPY_ROUNDS_MAX: Final = 8  # of a move, before it seals

# Links
PEERS_MAX: Final = 64  # a node measures; fabrics have two to eight
ADDRESSES_MAX: Final = 16  # of one node
LINKS_TOLD_MAX: Final = 128  # in one heartbeat
PROBE_BYTES_MAX: Final = 8 * MIB
LISTENERS_MAX: Final = 32  # addresses at which a node listens for others
DEVICES_TRIED_MAX: Final = 3  # each takes its time

# Router, and the fleet's events as dashboards follow them
SKETCH_PIECE_BYTES: Final = 512
SKETCH_PIECES_MAX: Final = 8_192
SKETCH_AGENTS_MAX: Final = 100_000
FLEET_FOLLOWERS_MAX: Final = 64  # at once; one tenant: half
FLEET_EVENTS_MAX: Final = 512  # kept for each, and for who comes back; some 300 bytes each
FLEET_SNAPSHOT_AGENTS_MAX: Final = 1_000  # shown in one, those used last; some 700 bytes each
FLEET_SNAPSHOT_EVERY_S: Final = 5.0  # for one follower that does not keep up
FLEET_LINE_BYTES_MAX: Final = 64 * MIB  # of what the command line reads; a snapshot is one line
LINK_RATE_NEWS: Final = 0.1  # share by which a link's rate differs from the one told last

# Hibernation: one agent as one file
HIBERNATION_BYTES_MAX: Final = 64 * GIB  # a million tokens of an 8B model are 38 GB
HIBERNATION_FRAME_BYTES_MAX: Final = 1 * MIB  # what is held before its signature is checked
HIBERNATION_HEADER_BYTES_MAX: Final = 4 * KIB
HIBERNATIONS_MAX: Final = 4  # files under way per node, either way; one tenant: half
HIBERNATION_STALL_S: Final = 60.0  # without a byte, after which the command line gives up
HIBERNATION_GRACE_S: Final = 30.0  # for a file's first bytes, either way; then
HIBERNATION_BYTES_PER_S_MIN: Final = 128 * KIB  # of waiting for the client
HIBERNATION_KEY_FILE_BYTES_MIN: Final = 16
HIBERNATION_KEY_FILE_BYTES_MAX: Final = 64 * KIB
MODEL_NAME_CHARS_MAX: Final = 512
EPOCH_MAX: Final = 1 << 48  # of a record from outside: above it, it could outlive every later owner

# Scenarios
SCENARIO_BYTES_MAX: Final = 1 * MIB  # of one YAML file; those shipped have 10 KiB
SCENARIO_DEPTH_MAX: Final = 16  # of what is nested; a phase's own parts go 6 deep
SCENARIO_NODES_MAX: Final = 20_000  # values in one file; they take half a second and 20 MB
SCENARIO_TEXT_CHARS_MAX: Final = 64 * KIB  # of one text: 16,000 tokens
SCENARIO_ERRORS_MAX: Final = 20  # told at once; who wrote more reads no further
SCENARIO_FILES_MAX: Final = 64  # of texts beside the YAML
SCENARIO_FILE_BYTES_MAX: Final = 256 * KIB  # of one of those
SCENARIO_NAME_CHARS_MAX: Final = 48  # with an agent's and a run's it makes an agent's id
SCENARIO_KEY_CHARS_MAX: Final = 32  # of agents, phases, tools, variables and runs, likewise
SCENARIO_PATH_CHARS_MAX: Final = 256  # of a text's file
SCENARIO_AGENTS_MAX: Final = 64
SCENARIO_PHASES_MAX: Final = 64
SCENARIO_ROUNDS_MAX: Final = 100  # of one phase
SCENARIO_TURNS_MAX: Final = 4_096  # of all phases together
SCENARIO_VARIABLES_MAX: Final = 64
SCENARIO_TOOLS_MAX: Final = 64
SCENARIO_ITEMS_MAX: Final = 64  # answers of a tool, directives and expectations of a phase
SCENARIO_STEPS_MAX: Final = 8  # answers of one turn that call tools, before it ends
SCENARIO_ASKING_MAX: Final = 16  # agents of one run that answer at once
SCENARIO_PREFETCHED_MAX: Final = 4  # turns to come whose agents are got ready
SCENARIO_TRIES_MAX: Final = 30  # of one thing that the fabric cannot do yet: minutes
SCENARIO_LOST_TRIES_MAX: Final = 3  # of what an agent's node, or else its next turn, brings back
SCENARIO_LINE_BYTES_MAX: Final = 4 * MIB  # of a run's journal; an answer with its calls
SCENARIO_EXPANDED_CHARS_MAX: Final = 4 * MIB  # of one text, with all that agents said before
SCENARIO_REQUEST_BYTES_MAX: Final = 8 * MIB  # of one POST: a file, and texts beside it, as JSON
SCENARIO_REPEATS_MAX: Final = 16  # of one run
SCENARIO_RUN_TURNS_MAX: Final = 8_192  # of one run in the router, with repeats and cold arms
SCENARIO_RUNS_MAX: Final = 12  # in the router at once, 16 agents each; one tenant: half
SCENARIO_LEASE_S: Final = 30.0  # of agents that a run of the command line uses, unless renewed
SCENARIO_LEASES_MAX: Final = 256  # of such runs at once; one tenant: half
SCENARIO_LEASED_MAX: Final = 2 * SCENARIO_AGENTS_MAX  # agents of one lease, those of both arms
SCENARIO_ENDED_MAX: Final = 64  # runs on the router's disk that have ended; the oldest go
SCENARIO_EVENTS_MAX: Final = 16_384  # of one run kept for who follows it: all of most
SCENARIO_EVENTS_BYTES_MAX: Final = 2 * MIB  # and their bytes; 4,000 answers of 500 characters
SCENARIO_FOLLOWERS_MAX: Final = 16  # of one run at once
SCENARIO_LAG_EVENTS_MAX: Final = 1_024  # that come while a follower reads nothing, before its end
SCENARIO_FRAMES_MAX: Final = 64  # events sent to a follower at a time
SCENARIO_NODES_WAIT_S: Final = 600.0  # of a run that goes on, until nodes have loaded its model
