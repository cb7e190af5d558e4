"""Tool results classified as failures or successes, look-alikes included."""

import pytest

from router.policies.drop_failed_tool_calls import DropFailedToolCalls, is_failure_text
from tests.router.policies.strategies import TURN, answer, call, result, user

FAILURES = [
    # Shells
    "bash: x: command not found",
    "bash: line 1: pytset: command not found",
    "zsh: command not found: brew",
    "/bin/sh: 1: foo: not found",
    "ls: cannot access 'x': No such file or directory",
    "cat: notes.txt: No such file or directory\ncat: more.txt: No such file or directory",
    "bash: ./run.sh: Permission denied",
    "\x1b[31mbash: x: command not found\x1b[0m\n",
    # Wrappers of coding agents
    "Exit code 1",
    "Exit code 127\n/bin/bash: line 1: foo: command not found",
    "Error: Exit code 2\nsomething",
    "<error>Exit code 1</error>",
    "<tool_use_error>File has not been read yet.</tool_use_error>",
    "<error>the path is outside of the workspace</error>",
    "Exit code: 1\nWall time: 0.1 seconds\nOutput:\ncollected 3 items",
    "Chunk ID: 4f2\nWall time: 0.05 seconds\nProcess exited with code 1\nOutput:\nx",
    "Command: make\nDirectory: (root)\nOutput: x\nError: (none)\nExit Code: 2\nSignal: (none)",
    "<returncode>1</returncode>\n<output>\n</output>",
    "Command timed out after 2m 0.0s",
    "x.go:3:2: undefined: y\nexit status 1",
    "Command failed with exit code 1",
    "Process finished with exit code 137",
    '{"output": "x", "metadata": {"exit_code": 1, "duration_seconds": 0.1}}',
    '{"stdout": "", "stderr": "x", "returncode": 2}',
    # Objects
    '{"error": "no"}',
    '{"error": {"code": -32602, "message": "Invalid params"}}',
    '{"isError": true, "content": []}',
    '{"is_error": true}',
    # Test runners
    "F.\n=== FAILURES ===\n====== 1 failed, 2 passed in 0.10s ======",
    "--- FAIL: TestX (0.00s)\nFAIL\tacme/x\t0.003s\nFAIL",
    "running 2 tests\ntest result: FAILED. 1 passed; 1 failed; 0 ignored",
    "FAILED",
    # Package managers and builds
    "npm ERR! code ENOENT\nnpm ERR! syscall open",
    "npm error code E404\nnpm error 404 Not Found",
    "Collecting nosuch\nERROR: No matching distribution found for nosuch",
    "ERROR: Could not find a version that satisfies the requirement x",
    "gcc -c a.c\nmake: *** [Makefile:3: all] Error 2",
    "make[1]: *** No rule to make target 'x'.  Stop.",
    "a.c:3:5: error: expected ';' before 'return'",
    "error[E0308]: mismatched types\n --> src/main.rs:2:18",
    '   Compiling x v0.1.0\nerror: could not compile `x` (bin "x") due to 1 previous error',
    "BUILD FAILED",
    # Version control
    "fatal: not a git repository (or any of the parent directories): .git",
    "error: pathspec 'x' did not match any file(s) known to git",
    "To x.example:a/b\n ! [rejected]  main -> main\nerror: failed to push some refs to 'x'",
    "CONFLICT (content): Merge conflict in a\nAutomatic merge failed; fix conflicts first.",
    # Languages
    'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x',
    "ValueError: x",
    "json.decoder.JSONDecodeError: Expecting value",
    "node:internal/modules/cjs/loader:1228\n  throw err;\n  ^\n\nError: Cannot find module 'x'",
    "/app/a.js:3\n  throw Error('x')\n  ^\nError: x\n    at m (/app/a.js:3)\n\nNode.js v20.11.0",
    "TypeError: Cannot read properties of undefined (reading 'x')\n    at f (a.js:1:1)",
    "Uncaught ReferenceError: x is not defined",
    "panic: runtime error: index out of range [3]\n\ngoroutine 1 [running]:",
    "thread 'main' panicked at src/main.rs:2:5:\nx",
    'Exception in thread "main" java.lang.IllegalStateException: x',
    # Tools' own words
    "Error: no such file",
    "Error: None of the files exist",
    "Error: 404 Not Found",
    "Error: 2 validation errors for Args",
    "Error:\nthe file is gone",
    "Error executing tool read: x",
    "An error occurred while running the tool. Please try again.",
    "Error (exit 3): x",
    "Failed to connect to api.example: timed out",
]  # fmt: skip

SUCCESSES = [
    "",
    # Counts and empty fields
    "failed: 0\npassed: 212",
    "Failed: 0, Passed: 212",
    "failed: 3\npassed: 209",
    "Failed (0)",
    "Error: none",
    "Error: (none)",
    "error: null",
    "Error: N/A",
    "Error: no errors found.",
    "Error: 0",
    "error: 0.03",
    "Error: 12.5%",
    "Failure: 0 of 20 tests",
    "Failures: none",
    "Errors: 0",
    "Exception: None",
    "failed: false",
    "failed: []",
    "error:",
    "errors: 0, warnings: 2",
    # Wrappers that report success, with any output
    "Exit code: 0\nWall time: 0.1 seconds\nOutput:\nError: x",
    "Chunk ID: 4f2\nProcess exited with code 0\nOutput:\nTraceback (most recent call last):",
    "Command: ls\nDirectory: (root)\nOutput: x\nError: (none)\nExit Code: 0\nSignal: (none)",
    "<returncode>0</returncode>\n<output>\nfatal: x\n</output>",
    '{"output": "Error: x", "metadata": {"exit_code": 0}}',
    # Objects
    '{"error": null, "rows": []}',
    '{"error": ""}',
    '{"error": "none"}',
    '{"error": false}',
    '{"error": 0.03, "mean": 1.2}',
    '{"errors": []}',
    '{"is_error": false, "content": "Error: x"}',
    '[{"error": "x"}]',
    "{not json: error}",
    # Test runners
    "....\n====== 212 passed in 3.10s ======",
    "====== 212 passed, 2 xfailed, 1 warning in 3.10s ======",
    "ok  \tacme/x\t0.003s",
    "test result: ok. 3 passed; 0 failed; 0 ignored",
    "Tests:       0 failed, 12 passed, 12 total",
    # Package managers, builds, version control
    "added 12 packages, and audited 13 packages in 2s\n\nfound 0 vulnerabilities",
    "npm warn deprecated x@1.0.0: use y",
    "Successfully installed x-1.0",
    "make: Nothing to be done for 'all'.",
    "make: 'all' is up to date.",
    "warning: unused variable: `x`\n    Finished dev profile in 0.1s",
    "Already up to date.",
    "nothing to commit, working tree clean",
    # Files and listings that speak of errors
    "Error handling in Go is explicit.",
    "Error-free builds are the goal.",
    "error rate: 0.1",
    "no error: all is well",
    "The Exception class",
    "def f():\n    raise ValueError",
    "class ConfigError(Exception):\n    pass",
    "except ValueError:\n    pass",
    "1\ttry:\n2\t    x()\n3\texcept KeyError:\n4\t    raise",
    "src/a.py:3:raise ValueError('x')",
    "12: error: x\n80: error: y",
    "error.log\nfailed.txt",
    "find: ‘/root’: Permission denied\n./a\n./b",
    "2026-01-01 INFO start\n2026-01-01 ERROR: x\n2026-01-01 INFO end",
    "How to fix `command not found`\nInstall it.",
    "Exit codes: 1 means failure",
    "failed\nsucceeded\nfailed",
]  # fmt: skip


@pytest.mark.parametrize("text", FAILURES)
def test_failures_are_recognized(text):
    assert is_failure_text(text)


@pytest.mark.parametrize("text", SUCCESSES)
def test_successes_are_not_taken_for_failures(text):
    assert not is_failure_text(text)


@pytest.mark.parametrize("text", [FAILURES[0], FAILURES[8], "a" * 3_000])
def test_middle_of_long_result_is_ignored(text):
    lines = "line\n" * 2_000
    assert not is_failure_text(lines + text + "\n" + lines)


def test_parallel_calls_of_one_answer_are_unordered():
    both = answer("", call("a"), call("b"))
    messages = [
        user("go"),
        both,
        result("a", "Error: x"),
        result("b"),
        answer("done"),
        user("more"),
    ]
    assert DropFailedToolCalls().transform(messages, TURN) == messages
    again = [*messages, answer("", call("c")), result("c")]
    kept = answer("", call("b"))
    assert DropFailedToolCalls().transform(again, TURN) == [messages[0], kept, *again[3:]]
