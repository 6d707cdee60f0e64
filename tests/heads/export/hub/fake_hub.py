"""A hub in this process: the routes of the real one that repositories, branches, commits and downloads take.

Files of `lfs_from` bytes and more take Git LFS's: batch, upload in one part or several, verify; a commit names them by
their sha256. Sources: git-lfs `docs/api/batch.md`, and huggingface_hub `lfs.py` for the parts.
"""

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
    """What it holds: files by repository and branch, large files by their sha256, and whether it lets anybody write."""

    def __init__(self) -> None:
        self.lfs_from: int | None = None
        self.part_bytes: int | None = None
        self.large: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.verified: list[str] = []
        self.stores = True
        self.branches: dict[str, dict[str, Files]] = {}
        self.visibility: dict[str, str | None] = {}
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
            self.hub.visibility.setdefault(name, asked.get("visibility"))
            self.hub.branches.setdefault(name, {"main": {}})
            self.reply_json({"url": f"{self.hub.address}/{name}"}, 409 if known else 200)
            return
        if path.endswith("/lfs/objects/batch"):
            self.reply_json({"objects": [self.lfs_actions(one) for one in json.loads(body)["objects"]]})
            return
        if path.startswith("/lfs/"):
            self.end_lfs(path.removeprefix("/lfs/"), json.loads(body))
            return
        _, _, _, owner, name, what, revision = path.split("/", 6)
        branches = self.hub.branches[f"{owner}/{name}"]
        if what == "branch":
            known = revision in branches
            branches.setdefault(revision, dict(branches["main"]))
            self.reply_json({}, 409 if known else 200)
        elif what == "preupload":
            files = [
                {"path": file["path"], "uploadMode": self.mode(file["size"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.reply_json({"files": files})
        elif what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.hub.messages.append(line["value"]["summary"])
                elif line["key"] == "lfsFile":
                    assert line["value"]["oid"] in self.hub.verified
                    branches[revision][line["value"]["path"]] = self.hub.large[line["value"]["oid"]]
                else:
                    branches[revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = commit_of(branches[revision])
            self.reply_json({"commitUrl": f"{self.hub.address}/{owner}/{name}/commit/{commit}", "commitOid": commit})

    def mode(self, size: int) -> str:
        return "lfs" if self.hub.lfs_from is not None and size >= self.hub.lfs_from else "regular"

    def lfs_actions(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Where an object goes; no actions where it is there already."""
        oid, size, at = wanted["oid"], wanted["size"], f"{self.hub.address}/lfs"
        if oid in self.hub.large:
            return wanted
        upload: dict[str, Any] = {"href": f"{at}/{oid}"}
        if self.hub.part_bytes is not None:
            parts = range(1, -(-size // self.hub.part_bytes) + 1)
            urls = {str(i): f"{at}/{oid}/{i}" for i in parts}
            upload = {"href": f"{at}/join", "header": {"chunk_size": str(self.hub.part_bytes), **urls}}
        return wanted | {"actions": {"upload": upload, "verify": {"href": f"{at}/verify"}}}

    def do_PUT(self) -> None:
        body, (oid, *part) = self.read(), self.path.removeprefix("/lfs/").split("/")
        if not self.hub.stores:
            self.reply_json({"error": "The storage is full"}, 403)
        elif part:
            self.hub.parts.setdefault(oid, {})[int(part[0])] = body
            self.reply(200, ETag=f'"{sha1(body)}"')
        else:
            self.hub.large[oid] = body
            self.reply(200)

    def end_lfs(self, what: str, asked: dict[str, Any]) -> None:
        """All parts were sent, or the object is to be verified."""
        oid = asked["oid"]
        if what == "join":
            parts = self.hub.parts.pop(oid)
            assert [part["partNumber"] for part in asked["parts"]] == sorted(parts)
            self.hub.large[oid] = b"".join(parts[i] for i in sorted(parts))
        else:
            content = self.hub.large[oid]
            assert (hashlib.sha256(content).hexdigest(), len(content)) == (oid, asked["size"])
            self.hub.verified.append(oid)
        self.reply_json({})

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
