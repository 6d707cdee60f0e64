"""A small OpenAI-compatible server in this process: it answers from a function, as vLLM or llama.cpp would."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""From the request's JSON to a choice of the response; its "response" holds fields beside the choices."""


class RefusedError(Exception):
    """Answer with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@contextlib.contextmanager
def served(
    answer: Answer, models: Sequence[str] = (), status_of_models: Callable[[], int] = lambda: 200
) -> Iterator[str]:
    """The base URL of a server that runs within the context, and lists these models, with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked["path"] = self.path
            try:
                choice = dict(answer(asked))
                beside = choice.pop("response", {})
                status, said = 200, {"id": "a", "model": asked["model"], "choices": [{"index": 0, **choice}], **beside}
            except RefusedError as error:
                status, said = error.status, {"error": {"message": str(error)}}
            self.say(status, said)

        def do_GET(self) -> None:
            if (status := status_of_models()) != 200:
                self.say(status, {"error": {"message": "no backend"}})
                return
            self.say(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in models]})

        def say(self, status: int, said: dict[str, Any]) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200:
                self.send_header("retry-after-ms", "1")  # clients would pause for half a second
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # of a client that ended meanwhile
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
