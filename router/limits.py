"""Bounds of the router and the command line: name with its unit last, and what it bounds."""

from typing import Final

from fabric.limits import BODY_BYTES_MAX, KIB, MIB

WEIGHTS_INDEX_BYTES_MAX: Final = 64 * MIB  # size of a model's index of weights, read before a start

# Placement
COMING_FACTOR: Final = 2.0  # times a prompt's expected end; then it no longer counts as coming
COMING_S_MIN: Final = 10.0  # minimum of that time, as speeds may be unknown

DECISIONS_KEPT_MAX: Final = 2_048  # decisions and their outcomes in the router's memory
DECISION_PIECES_MAX: Final = 1 << 20  # pieces of their sketches together; 40 bytes each

# HTTP
PROMPT_ESCAPES: Final = 6  # bytes of JSON for one byte of text, as in \u0061
PROMPT_FRAME_BYTES: Final = 1 * MIB  # of a body besides a prompt's text: names, numbers, brackets
BASE64_BLOCK_BYTES: Final = 1 * KIB  # text without a space from which it counts as encoded
BASE64_CHARS_MIN: Final = 32  # different characters in such a block; repeated letters are text
CALL_BODY_BYTES_MAX: Final = 1 * MIB  # bodies of requests without a prompt
BLOCKS_PER_MESSAGE_MAX: Final = 10_000  # content blocks of one message
CHAT_INPUT_CHARS_MAX: Final = 1_000_000  # standard input as one message of `macfabric chat`
CHAT_TRIES_MAX: Final = 5  # tries of one message, while nodes start or are busy
CHAT_RETRY_S_MAX: Final = 10.0  # longest pause between two tries
PLACEHOLDER_NAME_CHARS_MAX: Final = 100  # name of a file or tool in its placeholder
PLACEHOLDER_INPUT_CHARS_MAX: Final = 400  # input of a hosted tool in its placeholder
IGNORED_NAME_CHARS_MAX: Final = 64  # one name in X-Macfabric-Ignored
IGNORED_HEADER_CHARS_MAX: Final = 1_024  # all names there; proxies limit headers to 4 to 8 KiB
TOOLS_MAX: Final = 512
CODEX_OUTPUT_BYTES_MAX: Final = 10_000  # of one tool output that Codex keeps, as for unknown models
STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 512
QUOTED_NAME_CHARS_MAX: Final = 100  # a name that the client sent, quoted in an error
TOP_LOGPROBS_MAX: Final = 20
ANSWERS_PER_PROMPT_MAX: Final = 32
PROMPTS_MAX: Final = 256  # of one request for completions
ANSWERS_MAX: Final = 512  # of one request, to all its prompts
ANSWERS_AT_ONCE_MAX: Final = 8  # of those at once; the others wait as if sent one by one
ANSWER_PLACE_S: Final = 30.0  # wait for a full node while no other answer of the request runs
ANSWER_PARTS_WAITING_MAX: Final = 256  # of all answers, until the client reads on
LOGIT_BIAS_MAX: Final = 1_024
KEY_CHARS_MAX: Final = 512  # prompt_cache_key, user
INCLUDED_MAX: Final = 64  # entries of `include`
RESPONSES_STORED_MAX: Final = 4_096  # of all tenants, in the router's memory
RESPONSES_BYTES_MAX: Final = 128 * MIB  # of all stored responses; each holds its whole conversation
BODIES_BYTES_MAX: Final = 16 * BODY_BYTES_MAX  # of all requests being served; one tenant: half
BODIES_ARRIVING_BYTES_MAX: Final = 3 * BODY_BYTES_MAX  # not complete yet; one tenant: half
BODY_GRACE_S: Final = 10.0  # until a body's first bytes; then
BODY_BYTES_PER_S_MIN: Final = 32 * KIB  # rate at which the client must send it
STREAM_SILENCE_S: Final = 4.0  # before a keep-alive on a stream: some clients time out after 5 s
REQUESTS_PER_ROUND_MAX: Final = 8  # taken on in a round of the event loop: some 20 ms of it
REQUESTS_MAX: Final = 2_048  # being served at once; one tenant: half
TOKEN_ID_MAX: Final = (1 << 31) - 1  # of a prompt in tokens; the model has far fewer
TOKEN_DIGITS_MAX: Final = 10  # of a token's id in a logit bias
POLICY_S: Final = 2.0  # time for an operator's own policy; beyond it, the turn runs unedited
POLICY_CALLS_MAX: Final = 4  # of one such policy at a time; each has a thread
CUT_RESULT_CHARS_MIN: Final = 100  # of a tool's result that was cut: its notice takes 60
CONTEXT_EDITS_MAX: Final = 16  # of one request's context_management
EDIT_VALUE_MAX: Final = 1 << 31  # tokens or calls in one of those edits
TRUNCATION_COUNTS_MAX: Final = 12  # counts to find the longest prompt that fits; usually three
MESSAGE_NAME_CHARS_MAX: Final = 256  # of a name or an id within a message
MATCH_REASON_CHARS_MAX: Final = 200  # in an answer's header
STOPPING_RETRY_S: Final = 5.0  # before a client of a stopping router retries
PREFLIGHT_CACHE_S: Final = 600  # time for which a browser caches a preflight

# Turns in front of nodes
SENT_TURNS_MAX: Final = 64  # turns sent to one node and not admitted yet; one tenant: half
SENT_BACKGROUND_TURNS_MAX: Final = 16  # the same for background turns, which have their own places
BACKGROUND_QUEUE_SHARE: Final = 0.5  # length of the background queue by the interactive one's
PACE_TURNS: Final = 16  # last admitted turns from which the pace of a queue is measured
TENANT_WAIT_S_MAX: Final = 3_600.0  # longest Retry-After of a tenant over its tokens a minute
USAGE_HOURS: Final = 48  # hours for which a tenant's usage is kept by hour
USAGE_DAYS: Final = 400  # days for which it is kept by day: a year and a month
USAGE_ROWS_MAX: Final = 12_000  # of all tenants, the oldest go first: JSON_ITEMS_MAX values
USAGE_BYTES_MAX: Final = 8 * MIB  # size of the usage file; rows have some 100 bytes
USAGE_SAVE_S: Final = 30.0  # between two writes: a crash of the router loses that much
USAGE_PAGE_MAX: Final = 1_000  # rows of one answer
TENANT_LABELS_MAX: Final = 64  # tenants named in metrics; the others share one label
REFUSAL_LABELS_MAX: Final = 64  # error codes that metrics name; nodes choose some of them

# Sessions, and the learnt order of turns
SESSIONS_MAX: Final = 16_384  # sessions whose last node is known; the oldest are forgotten
TURN_ORDERS_MAX: Final = 4_096  # groups; those without a turn for longest are forgotten
TURN_ORDER_AGENTS_MAX: Final = 64  # agents of one group; the oldest are forgotten
TURN_ORDER_SEEN_MIN: Final = 2  # times in a row that one agent followed another, before a guess
GUESSES_MAX: Final = 8  # agents loaded ahead at once without having been named

# The router's connections to nodes
TURNS_UNANSWERED_MAX: Final = 320  # turns sent to one node: more than it queues; others wait here
HANDSHAKES_PER_NODE_MAX: Final = 16  # handshakes at once; more would all time out
CONNECTION_IDLE_S: Final = 60.0  # idle time of a connection; nodes wait longer
CONNECTION_LIFE_S: Final = 600.0  # life of a connection; certificates are checked again on the next

# Control plane
LIST_PAGES_MAX: Final = 1 << 14  # enough for 10,000 agents with the longest sketches
AGENTS_PER_STEP: Final = 16  # agents of a list applied before other tasks run
COLLECTED_AGENTS_MAX: Final = 1_000  # newly listed, before collections are to skip them
ROWS_PER_STEP: Final = 8  # of a list decoded before other tasks run
WHOLE_LIST_S: Final = 600.0  # maximum age of a node's last whole list
HEARTBEATS_AT_ONCE_MAX: Final = 16  # begin together; others are spread over the period
PEERS_PER_NODE_MAX: Final = 16  # nearest peers listed to one node, which measures its links to them
PARTNERS_MAX: Final = 4  # of these, peers from which the node has fetched recently
NODES_PER_STEP: Final = 128  # nodes looked at before other tasks run
PEER_LISTS_PER_STEP: Final = 16  # nodes whose lists are built before other tasks run
SUSPECT_S: Final = 3.0  # silence after which a node is suspected
TERM_MARGIN: Final = 0.2  # share of a lease by which a router stops before its voters
TERM_CALL_BYTES_MAX: Final = 16 * KIB  # size of a call to a voter
SHADOW_WAIT_S: Final = 1.0  # longest wait of an answer for a standby's copy of what it stores
SHADOW_ABSENT_S: Final = 3.0  # time without a standby's request after which no answer waits for one
SHADOW_POLL_S: Final = 0.5  # wait of a standby's request; runs' files are compared as often
SHADOW_RETRY_S: Final = 0.25  # pause after a standby's failed request
SHADOW_BYTES_MAX: Final = 8 * MIB  # responses, and files, in one answer; or one larger item
SHADOW_REMOVALS_MAX: Final = (
    4_096  # removals that are remembered; then a standby compares all names
)
TERM_RENEW_S: Final = 0.6  # between two renewals; three may be lost
TERM_TRIAL_S: Final = 0.5  # longest time between two trials of a standby
TERM_RETRY_S: Final = 0.4  # longest random pause after a vote that no router won
LEASE_S: Final = 6.0  # silence after which a node's lease has expired
OWNER_WAIT_S_MAX: Final = 60.0  # wait of a turn for a node that joins or restarts with its agent
EPOCH_GAP: Final = 1_024  # more moves and takeovers than an agent has between two restarts
EPOCH_GAP_BITS: Final = 20  # random bits on top of it
LOG_BYTES_MAX: Final = 16 * MIB  # of one file; there are two per process
CHILD_LINE_BYTES_MAX: Final = 1 * MIB  # of one message from the supervisor to the keeper
FAILURE_CHARS_MAX: Final = 300  # reason for which a process ended
RAYLET_LOG_BYTES_MAX: Final = 65_536  # end of each raylet log that is searched for it
STOP_LINE_CHARS_MAX: Final = 4_096  # line that another Mac prints while it stops
STOPS_AT_ONCE_MAX: Final = 16  # Macs on which Ray is stopped at a time

# Erasures
ERASURE_EPOCHS: Final = 1 << 24  # above the highest known epoch, for unreported claims
EPOCHS_ISSUED_MAX: Final = 1 << 20  # agents whose last claim is unconfirmed; 100 bytes each
ERASURE_DIGESTS_MAX: Final = 1 << 16  # of listed agents, cached by the router

# Copies of agents
MOVE_COOLDOWN_S: Final = 30.0  # time after a move by placement during which the next one costs more
COOLING_AGENTS_MAX: Final = 10_000  # agents in that time; the oldest are forgotten
FIXED_AGENTS_MAX: Final = 10_000  # agents on nodes that clients chose; the oldest are forgotten
MOVE_START_S: Final = 1.0  # time for the calls of a move before a turn, besides that for its bytes
MOVE_TIMEOUT_FACTOR: Final = 3.0  # times the expected transfer; then the owner serves the turn
MOVES_PER_TURN: Final = 0.065  # moves by placement on average: each one loads a disk and a link
MOVE_PRICE_STEP: Final = 0.3  # rise of the next move's price after a move; turns lower it again
MOVE_PRICE_MAX: Final = 100.0  # times the usual price
HEAD_LOAN_TOKENS_MIN: Final = 512  # shortest beginning to borrow; fewer tokens are computed sooner
PREFIX_ROWS_MAX: Final = 64  # prefixes whose nodes in a large fleet are cached
LENDERS_MAX: Final = 4  # lenders compared for one turn's head, those with most of it
MOVE_TARGETS_MAX: Final = 8  # targets compared for one idle agent's turn
DRAIN_AT_ONCE_MAX: Final = 3  # moves off one node; more would share its links
DRAIN_ROUNDS_MAX: Final = 3  # rounds without a move before a drain pauses
DRAIN_ROUND_PAUSE_S: Final = 1.0
DRAIN_RETRY_S: Final = 30.0  # before a paused drain continues
DRAIN_STUCK_MAX: Final = 100  # listed in an answer; further ones are only counted
COPY_TRIES_MAX: Final = 3  # a turn that ends during the copy may replace the last block
NODE_REMEMBERED_S: Final = 14 * 86_400.0  # without a report, while others report
ROSTER_BYTES_MAX: Final = 256 * KIB  # size of its file, with all nodes of the largest fabric
LOCAL_NODES_MAX: Final = 16  # that `macfabric up` starts on one machine
REPLICAS_WAITING_MAX: Final = 1_024  # agents due for a copy; the next sweep finds the rest
REPLICAS_CHECKED_MAX: Final = 4_096  # changed agents that one sweep checks
REPLICAS_CHECKED_PER_STEP: Final = 4  # agents of a sweep checked before other tasks run
REPLICA_RETRY_S: Final = 30.0  # before a failed copy is retried
EVICTED_REPLICA_RETRY_S: Final = 600.0  # before an evicted copy is made again
PREFIX_SEEDING_AGENTS_MAX: Final = 4  # a node with more agents is not seeded with shared prefixes
SEEDING_PEERS_MAX: Final = 32  # peers from which one node is seeded
PREFIX_SEEDING_INTERVAL_S: Final = 300.0  # before it is seeded again
PREFIX_SEEDING_RETRY_S: Final = 30.0  # before a retry after a failure, or after a move
PREFETCH_HINTS_MAX: Final = 4  # agents that one request may name
PREFETCH_TASKS_MAX: Final = 32  # hints in progress; more are dropped
COPY_ROUNDS_MAX: Final = 8  # rounds of a move's copy before the agent is sealed

# Router, and the fleet's events as dashboards follow them
FORM_AGENTS_MAX: Final = 64  # agents with a form of one prompt; the first alive is used
SKETCH_AGENTS_MAX: Final = 400_000  # remembered agents; the oldest is dropped; 1 KB each
SKETCH_PIECES_KEPT_MAX: Final = 32 << 20  # of all their sketches; 256 MB
ALIKE_AGENTS_MAX: Final = 64  # agents of a node with identical sketches that are compared
CANDIDATES_MAX: Final = 16  # nodes among which a turn is placed; smaller fleets are compared whole
GROUP_NODES_MAX: Final = 4  # of those, nodes with other conversations of the group
CONTINUED_MAX: Final = 16  # nodes with an agent that a prompt may continue
HOMES_MAX: Final = 2  # nodes chosen by the hash of a conversation's beginning
FLEET_FOLLOWERS_MAX: Final = 64  # at once; one tenant: half
FLEET_EVENTS_MAX: Final = 512  # kept per follower, and for reconnects; about 300 bytes each
FLEET_SNAPSHOT_AGENTS_MAX: Final = 1_000  # in one snapshot, last used first; about 700 bytes each
FLEET_STREAM_EVENTS_MAX: Final = 100_000  # after which a stream may end
FLEET_SNAPSHOT_EVERY_S: Final = 5.0  # for a follower that does not keep up
AGENTS_PAGE_MAX: Final = 1_000  # rows of a list, and without a limit
PAGE_LIMIT_CHARS_MAX: Final = 6
PAGE_NAME_CHARS_MAX: Final = 256  # name of the row after which a page begins
COMPLETION_S: Final = 1.0  # wait of a shell's Tab key for names of agents and nodes
FLEET_LINE_BYTES_MAX: Final = 64 * MIB  # line that the command line reads; a snapshot is one line
TOP_AGENTS_MAX: Final = 2_000  # agents known to `macfabric top`; a snapshot has half of them
TOP_EVENTS_MAX: Final = 200  # last events, more than a screen has lines
TOP_MOVES_MAX: Final = 256  # moves in progress
TOP_TURNS_MAX: Final = 32  # last turns of a node, for the median time to the first token
TOP_NEWS_MAX: Final = 1_024  # events and answers waiting for a redraw; then no more are read
TOP_READS_MAX: Final = 8  # shown agents that each poll reads again
TOP_INTERVAL_S_MIN: Final = 0.5  # between two polls
TOP_INTERVAL_S_MAX: Final = 3_600.0
LINK_RATE_CHANGE_MIN: Final = 0.1  # share by which a link's rate must change to be published

# Hibernation: one agent as one file
HIBERNATION_STALL_S: Final = 60.0  # time without a byte after which the command line gives up
HIBERNATION_KEY_FILE_BYTES_MIN: Final = 16
HIBERNATION_KEY_FILE_BYTES_MAX: Final = 64 * KIB

# Scenarios
SCENARIO_BYTES_MAX: Final = 1 * MIB  # of one YAML file; those shipped have 10 KiB
SCENARIO_DEPTH_MAX: Final = 16  # nesting; the parts of a phase are nested 6 deep
SCENARIO_NODES_MAX: Final = 20_000  # values in one file; they take half a second and 20 MB
SCENARIO_TEXT_CHARS_MAX: Final = 64 * KIB  # of one text: 16,000 tokens
SCENARIO_ERRORS_MAX: Final = 20  # reported at a time
SCENARIO_FILES_MAX: Final = 64  # text files besides the YAML
SCENARIO_FILE_BYTES_MAX: Final = 256 * KIB  # of one of those
SCENARIO_NAME_CHARS_MAX: Final = 48  # part of agent ids, with the agent's and the run's name
SCENARIO_KEY_CHARS_MAX: Final = 32  # names of agents, phases, tools, variables and runs
SCENARIO_PATH_CHARS_MAX: Final = 256  # of a text's file
SCENARIO_AGENTS_MAX: Final = 64
SCENARIO_PHASES_MAX: Final = 64
SCENARIO_ROUNDS_MAX: Final = 100  # of one phase
SCENARIO_TURNS_MAX: Final = 4_096  # of all phases together
SCENARIO_VARIABLES_MAX: Final = 64
SCENARIO_TOOLS_MAX: Final = 64
SCENARIO_ITEMS_MAX: Final = 64  # answers of a tool, directives and expectations of a phase
SCENARIO_STEPS_MAX: Final = 8  # answers of one turn that call tools, before it ends
SCENARIO_CONCURRENT_TURNS_MAX: Final = 16  # agents of one run that answer at once
SCENARIO_PREFETCHED_MAX: Final = 4  # upcoming turns whose agents are prefetched
SCENARIO_TRIES_MAX: Final = 30  # tries of a step that the fabric refuses temporarily; takes minutes
SCENARIO_LOST_TRIES_MAX: Final = 3  # tries of a step on a lost agent
SCENARIO_LINE_BYTES_MAX: Final = 4 * MIB  # of a run's journal; an answer with its calls
SCENARIO_EXPANDED_CHARS_MAX: Final = 4 * MIB  # of one text, with all earlier messages of agents
SCENARIO_REQUEST_BYTES_MAX: Final = 8 * MIB  # of one POST: a file and its text files, as JSON
SCENARIO_REPEATS_MAX: Final = 16  # of one run
SCENARIO_RUN_TURNS_MAX: Final = 8_192  # of one run in the router, with repeats and cold arms
SCENARIO_RUNS_MAX: Final = 12  # in the router at once, 16 agents each; one tenant: half
SCENARIO_ENDED_MAX: Final = 64  # ended runs on the router's disk; the oldest are deleted
SCENARIO_EVENTS_MAX: Final = 16_384  # kept for followers of one run; enough for most runs
SCENARIO_EVENTS_BYTES_MAX: Final = 2 * MIB  # of those events: 4,000 answers of 500 characters
SCENARIO_FOLLOWERS_MAX: Final = 16  # of one run at once
SCENARIO_LAG_EVENTS_MAX: Final = 1_024  # events by which a follower may lag before it is dropped
SCENARIO_FRAMES_MAX: Final = 64  # events sent to a follower at a time
SCENARIO_NODES_WAIT_S: Final = 600.0  # wait of a resumed run until nodes have loaded its model

# Simulator
SIMULATED_NODES_MAX: Final = 4_096  # of one fleet; a snapshot of a thousand takes milliseconds
SIMULATED_FLEET_BYTES_MAX: Final = 256 * KIB  # of one YAML file
SIMULATED_PASSES_MAX: Final = 8  # prompts that may get memory before one that does not fit
SIMULATED_FETCHES_MAX: Final = 8  # beginnings of prompts being sent to one modelled node
SIMULATED_TRACE_LINE_BYTES_MAX: Final = 1 * MIB  # a row of 100,000 hash ids

# Support bundles
SUPPORT_BUNDLE_BYTES_MAX: Final = 128 * MIB  # of all entries, before they are compressed
SUPPORT_ENTRY_BYTES_MAX: Final = 16 * MIB  # of one entry that is no log
SUPPORT_LOG_MIB: Final = 4  # default part of one log: half of a file before it is rotated
SUPPORT_LOG_MIB_MAX: Final = 64  # largest part that the command line may request
SUPPORT_LOGS_MAX: Final = 64  # log files; sixteen nodes and their Rays have 50
SUPPORT_AGENTS_MAX: Final = 10_000  # rows of agents; 700 bytes each
SUPPORT_PACKAGES_MAX: Final = 1_000  # installed packages that are listed
SUPPORT_FOLDERS_MAX: Final = 256  # parts of the data folder whose sizes are listed
SUPPORT_NAME_PARTS_MAX: Final = 128  # of a name and its joints, as many as its characters
SUPPORT_SECRET_CHARS_MIN: Final = 8  # of a text that counts as a secret; keys have 16
SUPPORT_SECRET_BYTES_MAX: Final = 64 * KIB  # of one file of a key

# Backups
BACKUP_AGENTS_MAX: Final = 200_000  # twice the largest fabric's; 400 bytes each in the list
BACKUP_LIST_BYTES_MAX: Final = 128 * MIB  # size of a backup's list when it is read
BACKUP_KEYS_BYTES_MAX: Final = 256 * KIB  # size of its key material; usually 2 KiB
BACKUP_SAVE_S: Final = 5.0  # between two writes of the list: an interruption loses that much
BACKUP_TRIES_MAX: Final = 5  # tries of one agent that the fabric refuses temporarily
BACKUP_RETRY_S_MAX: Final = 10.0  # longest pause between two tries

# Units of launchd and systemd
UNIT_FILE_BYTES_MAX: Final = 64 * KIB  # size of a unit file that is read; ours have 2 KiB
SERVICE_COMMAND_S_MAX: Final = 3_900.0  # a run of launchctl or systemctl: a stop may wait an hour

# Sizes of folders
FILES_COUNTED_MAX: Final = 1_000_000  # files whose sizes are added up; takes seconds
