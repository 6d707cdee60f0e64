"""A hub in this process: the routes of the real one that repositories, branches, commits and downloads take."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Hub:
    """What it holds: files by repository and branch, and whether it lets anybody write."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, Files]] = {}
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.writable = True
        self.address = ""

    def find(self, repository: str, revision: str) -> Files | None:
        branches = self.branches.get(repository, {})
        by_commit = {commit_of(files): files for files in branches.values()}
        return branches.get(revision, by_commit.get(revision))


@functools.cache  # every request asks for the commit, and models have megabytes
def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def commit_of(files: Files) -> str:
    return sha1(repr(sorted((name, sha1(content)) for name, content in files.items())).encode())


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("size", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, content: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(content).encode(), Content_Type="application/json")

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        body, path = self.read(), unquote(urlsplit(self.path).path)
        if not self.hub.writable:
            self.reply_json({"error": "You have no right to write here"}, 403)
            return
        if path == "/api/validate-yaml":  # of model cards
            self.reply_json({"errors": [], "warnings": []})
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in self.hub.branches
            self.hub.branches.setdefault(name, {"main": {}})
            self.reply_json({"url": f"{self.hub.address}/{name}"}, 409 if known else 200)
            return
        _, _, _, owner, name, what, revision = path.split("/", 6)
        branches = self.hub.branches[f"{owner}/{name}"]
        if what == "branch":
            known = revision in branches
            branches.setdefault(revision, dict(branches["main"]))
            self.reply_json({}, 409 if known else 200)
        elif what == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.reply_json({"files": files})
        elif what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.hub.messages.append(line["value"]["summary"])
                else:
                    branches[revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = commit_of(branches[revision])
            self.reply_json({"commitUrl": f"{self.hub.address}/{owner}/{name}/commit/{commit}", "commitOid": commit})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(path)
        if path.startswith("/api/models/"):
            owner, name, *about = path.removeprefix("/api/models/").split("/")
            kind, revision = about[:2] if about else ("revision", "main")
            self.describe(kind, f"{owner}/{name}", revision)
            return
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        files = self.hub.find(repository, revision)
        if files is None or name not in files:
            self.reply(404, X_Error_Code="EntryNotFound")
            return
        self.reply(200, files[name], ETag=f'"{sha1(files[name])}"', X_Repo_Commit=commit_of(files))

    do_HEAD = do_GET

    def describe(self, kind: str, repository: str, revision: str) -> None:
        """A revision's commit and names of files, or its tree."""
        files = self.hub.find(repository, revision)
        if files is None:
            missing = "RevisionNotFound" if repository in self.hub.branches else "RepoNotFound"
            self.reply(404, X_Error_Code=missing, X_Error_Message="not found")
        elif kind == "tree":
            self.reply_json(
                [{"type": "file", "path": name, "size": len(text), "oid": sha1(text)} for name, text in files.items()]
            )
        else:
            listed = [{"rfilename": name} for name in files]
            self.reply_json({"id": repository, "sha": commit_of(files), "siblings": listed})

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
