"""The part of the Hub's HTTP surface that pushing and loading a model touch, over a dict, on a local port.

Every file is taken as "regular" (inline in the commit); the Hub itself sends large ones through its storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

TOKEN = "hf_writer"


class StandIn:
    """`with StandIn() as hub:` serves at `hub.url`; `hub.repos[name][branch][path]` are the bytes it was given."""

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []

    def __enter__(self) -> StandIn:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, value=None, body: bytes | None = None, **headers: str) -> None:
        body = json.dumps(value).encode() if body is None else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "someone", asked["name"])))
            known = name in self.hub.repos
            self.hub.repos.setdefault(name, {"main": {}})
            self.hub.private.setdefault(name, asked.get("visibility") == "private")
            return self.answer(409 if known else 200, {"url": f"{self.hub.url}/{name}", "name": name})
        name, action, branch = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path).groups()
        branches = self.hub.repos[name]
        if action == "branch":
            known = branch in branches
            branches.setdefault(branch, dict(branches["main"]))
            return self.answer(409 if known else 200, {"error": "Reference already exists"} if known else {})
        if branch not in branches:
            return self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        if action == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                branches[branch][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = commit_of(branches[branch])
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        match = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)/?(resolve|revision|tree)?/?([^/]+)?/?(.*)", path)
        name, action, revision, file = match.groups() if match else (None, None, None, "")
        if name not in self.hub.repos or self.hub.private[name] and not self.headers.get("Authorization"):
            return self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        branches = self.hub.repos[name]
        files = branches.get(revision or "main")
        if files is None:
            files = next((f for f in branches.values() if commit_of(f) == revision), None)
        if files is None:
            return self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        commit = commit_of(files)
        if action == "tree":
            return self.answer(200, [{"type": "file", "path": f, "size": len(files[f]), "oid": "0"} for f in files])
        if action != "resolve":
            siblings = [{"rfilename": f} for f in files]
            return self.answer(200, {"id": name, "sha": commit, "private": False, "siblings": siblings, "tags": []})
        if file not in files:
            return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
        self.answer(200, body=files[file], ETag=etag, X_Repo_Commit=commit, Accept_Ranges="none")

    do_HEAD = do_GET
