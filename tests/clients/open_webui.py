"""Open WebUI as a server without a browser, driven by the requests of its own pages."""

import base64
import http.server
import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.clients.installed import python_of
from tests.clients.session_programs import MODEL, RUN_S

GROUP = "open-webui"
FOUND = [{"link": "http://lamps.example", "title": "Lamps", "snippet": "Lamps shine."}]


@dataclass(frozen=True)
class OpenWebUi:
    """The program; its search engine is the test's."""

    hosted: str | None = None
    rewrites: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return GROUP

    @contextmanager
    def home(self, url: str, folder: Path) -> Iterator["Chat"]:
        """Install and start it, and open a chat."""
        python = python_of(GROUP)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with _search_engine() as engine, (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [python.parent / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
                cwd=folder,
                env=_environment(url, engine, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=RUN_S) as client:
                    _await_start(client, process, folder / "log")
                    yield Chat.opened(client)
            finally:
                process.terminate()
                process.wait(RUN_S)


OPEN_WEBUI = OpenWebUi()


@dataclass
class Chat:
    """Chat of a user, as the page stores it."""

    client: httpx2.Client
    chat: str
    last: str | None = None  # the newest answer's id
    messages: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def opened(client: httpx2.Client) -> "Chat":
        signed = client.post("/api/v1/auths/signin", json={"email": "a@localhost", "password": "a"})
        client.headers["Authorization"] = f"Bearer {signed.json()['token']}"
        models = client.get("/api/models").json()["data"]
        assert [model["id"] for model in models] == [MODEL]
        empty = {
            "title": "New Chat",
            "models": [MODEL],
            "history": {"messages": {}},
            "messages": [],
        }
        new_chat = client.post("/api/v1/chats/new", json={"chat": empty})
        return Chat(client, new_chat.json()["id"])

    def ask(self, question: str, picture: Path | None = None) -> str:
        """Send a message; return the chat's new answer."""
        self._send(question, picture)
        end_s = time.monotonic() + RUN_S
        while not (answer := self._answer()).get("done"):
            assert time.monotonic() < end_s, answer
            time.sleep(0.2)
        assert not answer.get("error"), answer
        self.messages.append({"role": "assistant", "content": answer["content"]})
        return str(answer["content"])

    def interrupt(self, question: str, is_answered: Callable[[], bool]) -> None:
        """Send a message, and press the button that stops its answer."""
        (task,) = self._send(question, None)
        end_s = time.monotonic() + RUN_S
        while not is_answered():
            assert time.monotonic() < end_s, "no request reached the fabric"
            time.sleep(0.05)
        stopped = self.client.post(f"/api/tasks/stop/{task}")
        assert stopped.status_code == 200, stopped.text
        self.messages.append({"role": "assistant", "content": self._answer().get("content", "")})

    def _send(self, question: str, picture: Path | None) -> list[str]:
        """Send the page's request; return the ids of the tasks that it starts."""
        question_id, answer_id = str(uuid.uuid4()), str(uuid.uuid4())
        files = [] if picture is None else [_attached(picture)]
        user = {
            "id": question_id,
            "parentId": self.last,
            "childrenIds": [answer_id],
            "role": "user",
        }
        user |= {"content": question, "files": files, "models": [MODEL]}
        user |= {"timestamp": len(self.messages)}
        self.messages.append({"role": "user", "content": question})
        body = {
            "stream": True,
            "model": MODEL,
            "messages": self.messages,
            "params": {},
            "features": {"web_search": True},
            "session_id": "page",
            "chat_id": self.chat,
            "id": answer_id,
            "parent_id": self.last,
            "user_message": user,
            "background_tasks": {
                "title_generation": self.last is None,
                "tags_generation": self.last is None,
                "follow_up_generation": True,
            },
        }
        sent = self.client.post("/api/chat/completions", json=body)
        assert sent.status_code == 200, sent.text
        self.last = answer_id
        return list(sent.json()["task_ids"])

    def _answer(self) -> dict[str, Any]:
        shown = self.client.get(f"/api/v1/chats/{self.chat}").json()
        return dict(shown["chat"]["history"]["messages"].get(self.last, {}))


def _attached(picture: Path) -> dict[str, Any]:
    data = base64.b64encode(picture.read_bytes()).decode()
    return {"type": "image", "url": f"data:image/png;base64,{data}"}


def _environment(url: str, engine: str, folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder / "data"),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of these tests",
        "OFFLINE_MODE": "True",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "openai",  # its default model would have to be downloaded
        "ENABLE_WEB_SEARCH": "True",
        "WEB_SEARCH_ENGINE": "external",
        "EXTERNAL_WEB_SEARCH_URL": engine,
        "EXTERNAL_WEB_SEARCH_API_KEY": "none",
        "BYPASS_WEB_SEARCH_EMBEDDING_AND_RETRIEVAL": "True",
        "BYPASS_WEB_SEARCH_WEB_LOADER": "True",
        "NO_PROXY": "127.0.0.1",
    }


def _await_start(client: httpx2.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + RUN_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-2_000:]
        assert time.monotonic() < end_s, log.read_text(errors="replace")[-2_000:]
        try:
            if client.get("/health", timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)


@contextmanager
def _search_engine() -> Iterator[str]:
    """Serve a search engine that finds the same page for every query."""

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(FOUND).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
