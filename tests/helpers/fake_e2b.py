"""A fake server that speaks what E2B's SDK sends: sandboxes are folders, and commands run under bubblewrap.

The SDK's own generated code reads and writes the messages. Nothing here shows how the service itself behaves.
"""

import asyncio
import itertools
import shutil
import socket
import threading
import time
from pathlib import Path

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import ProcessEvent, StartResponse
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from verl_bpo.shells.local import find_bwrap


class FakeE2B(Process):
    """Usable as a context; ``url`` is its address. ``created``, ``snapshots`` and ``calls`` are for tests to look at."""

    def __init__(self, folder: Path, templates=("base",)):
        self.folder, self.templates = folder, {name: None for name in templates}
        self.sandboxes, self.created, self.calls = {}, [], []
        self._numbers = itertools.count(1)
        app = Starlette(
            routes=[
                Route("/v2/sandboxes", self._create, methods=["POST"]),
                Route("/sandboxes/{name}", self._kill, methods=["DELETE"]),
                Route("/sandboxes/{name}/snapshots", self._snapshot, methods=["POST"]),
                Route("/templates/{name}", self._delete, methods=["DELETE"]),
                Route("/files", self._write, methods=["POST"]),
                Route("/health", lambda request: Response(status_code=204)),
                Mount("/", ProcessASGIApplication(self)),
            ]
        )
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *exc):
        self._server.should_exit = True
        self._thread.join(20)

    @property
    def snapshots(self):
        return [name for name, folder in self.templates.items() if folder is not None]

    async def _create(self, request):
        body = await request.json()
        self.calls.append(body)
        template = body["templateID"]
        if template not in self.templates:
            return JSONResponse({"code": 404, "message": f"template {template} not found"}, 404)
        name, folder = f"box{next(self._numbers)}", self.templates[template]
        root = self.folder / name
        if folder is None:
            (root / "testbed").mkdir(parents=True)
        else:
            shutil.copytree(folder, root, symlinks=True)
        self.sandboxes[name] = root
        self.created.append(template)
        made = {"templateID": template, "sandboxID": name, "clientID": "fake", "envdVersion": "0.6.0", "domain": "fake"}
        return JSONResponse({**made, "envdAccessToken": f"token-{name}"}, 201)

    async def _kill(self, request):
        found = self.sandboxes.pop(request.path_params["name"], None)
        return Response(status_code=204 if found else 404)

    async def _snapshot(self, request):
        root = self.sandboxes.get(request.path_params["name"])
        if root is None:
            return JSONResponse({"code": 404, "message": "no sandbox"}, 404)
        name = f"snapshot{next(self._numbers)}"
        self.templates[name] = shutil.copytree(root, self.folder / name, symlinks=True)
        return JSONResponse({"snapshotID": name, "names": [name]}, 201)

    async def _delete(self, request):
        folder = self.templates.pop(request.path_params["name"], None)
        if folder is not None:
            shutil.rmtree(folder)
        return Response(status_code=204 if folder else 404)

    async def _write(self, request):
        root = self._root(request.headers)
        path = request.query_params["path"]
        end = b"\r\n--" + request.headers["content-type"].partition("boundary=")[2].encode()
        data = (await request.body()).partition(b"\r\n\r\n")[2].rpartition(end)[0]
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / path.lstrip("/")).write_bytes(data)
        return JSONResponse([{"name": Path(path).name, "type": "file", "path": path}])

    def _root(self, headers):
        name = headers.get("e2b-sandbox-id")
        if name not in self.sandboxes or headers.get("x-access-token") != f"token-{name}":
            raise ConnectError(Code.UNAVAILABLE, f"the sandbox {name} was not found")
        return self.sandboxes[name]

    async def start(self, request, ctx):
        root = self._root(ctx.request_headers)
        for folder in ("testbed", "dev/shm", "tmp"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        process = request.process
        program = [find_bwrap(), "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--proc", "/proc"]
        for link in ("bin", "lib", "lib64", "sbin"):
            program += ["--symlink", f"usr/{link}", f"/{link}"]
        program += [
            "--dev",
            "/dev",
            "--ro-bind-try",
            "/etc/passwd",
            "/etc/passwd",
            "--ro-bind-try",
            "/etc/group",
            "/etc/group",
        ]
        for folder in ("testbed", "dev/shm", "tmp"):
            program += ["--bind", str(root / folder), f"/{folder}"]
        program += ["--chdir", process.cwd or "/", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        if "chown" in process.args[-1]:  # there is one user here, and the folder is there
            program += ["true"]
        else:
            program += [process.cmd, *process.args]
        started = await asyncio.create_subprocess_exec(
            *program, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        yield _said(Oneof("start", ProcessEvent.StartEvent(pid=started.pid)))
        out, problems = await started.communicate()
        for begin in range(0, len(out), 1 << 15):
            yield _said(Oneof("data", ProcessEvent.DataEvent(output=Oneof("stdout", out[begin : begin + (1 << 15)]))))
        if problems:
            yield _said(Oneof("data", ProcessEvent.DataEvent(output=Oneof("stderr", problems))))
        code = started.returncode
        yield _said(Oneof("end", ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")))


def _said(event):
    return StartResponse(event=ProcessEvent(event=event))
