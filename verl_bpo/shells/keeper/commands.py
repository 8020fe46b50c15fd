"""Running one command, so that nothing of it lives when it has ended."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import select
import signal
import time

from verl_bpo.shells.keeper.bubblewrap import Bubblewrap
from verl_bpo.shells.keeper.line import read_all, write_all
from verl_bpo.shells.keeper.seccomp import seccomp_filter
from verl_bpo.shells.keeper.system import Refused


class Commands:
    """
    Args:
        specification: see :class:`verl_bpo.shells.keeper.server.Keeper`.
        sandbox: what commands are put behind; None: nothing.
        processes_by_rlimit, memory_by_rlimit: what no control group limits.
    """

    def __init__(
        self, specification: dict, sandbox: Bubblewrap | None, processes_by_rlimit: bool, memory_by_rlimit: bool
    ) -> None:
        self.spec, self.limits, self.sandbox = specification, specification["limits"], sandbox
        self.processes_by_rlimit, self.memory_by_rlimit = processes_by_rlimit, memory_by_rlimit
        self.seccomp = seccomp_filter(platform.machine()) if sandbox else None

    def run(
        self, roots: list[str], command: str, cwd: str, stdin: bytes, timeout: float, most: int
    ) -> tuple[bytes, int, bool, int]:
        """Output (its middle left out above ``most`` bytes), exit code, whether time ran out, and the bytes left out."""
        status, status_in = os.pipe()
        output, output_in = os.pipe()
        given = os.memfd_create("stdin")
        write_all(given, stdin)
        os.lseek(given, 0, 0)
        seccomp = None
        if self.seccomp is not None:
            seccomp = os.memfd_create("seccomp")
            os.write(seccomp, self.seccomp)
            os.lseek(seccomp, 0, 0)
        if self.sandbox:
            line = [*self.sandbox.arguments(roots, cwd, status_in, seccomp), "/bin/bash", "-c"]
            if self.processes_by_rlimit:  # counted within the sandbox's user namespace, so it must be set there
                line += [f'ulimit -u {self.limits["processes"]} && exec /bin/bash -c "$0"']
            line.append(command)
            env: dict[str, str] = {}
        else:
            places = {place: root for (place, _), root in zip(self.spec["trees"], roots)}
            line = ["/bin/bash", "-c", command]
            env = {**self.spec["env"], "TMPDIR": places.get("/tmp", roots[0])}
            place = max((p for p in places if cwd == p or cwd.startswith(p + "/")), key=len, default=None)
            cwd = cwd if place is None else places[place] + cwd[len(place) :]
        inherited = [status_in, *([seccomp] if seccomp is not None else [])]
        child = os.fork()
        if child == 0:
            self._become(line, env, None if self.sandbox else cwd, given, output_in, inherited)
        for descriptor in (status_in, output_in, given, *([seccomp] if seccomp is not None else [])):
            os.close(descriptor)
        try:
            text, code, late, left_out = self._attend(child, output, timeout, most)
            report = read_all(status)
        finally:
            os.close(output)
            os.close(status)
        if self.sandbox and b"exit-code" not in report and not late and code == 1 and text.startswith(b"bwrap:"):
            raise Refused(f"the sandbox didn't start: {text.decode(errors='replace').strip()[:300]}")
        return text, code, late, left_out

    def _become(self, line, env, cwd, given, output, inherited) -> None:
        """In the child: turn into the command."""
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # when memory runs out a command goes, not this process
            os.dup2(given, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            limits = self.limits
            caps = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits["file_size"], resource.RLIMIT_NOFILE: 1024}
            if self.memory_by_rlimit:
                caps[resource.RLIMIT_AS] = limits["memory"]
            if not self.sandbox:
                os.setsid()
                os.chdir(cwd)
            for name, value in caps.items():
                hard = resource.getrlimit(name)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(name, (value, value))
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execve(line[0], line, env)
        except BaseException as error:
            os.write(2, f"bwrap: {type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _attend(self, child: int, output: int, timeout: float, most: int) -> tuple[bytes, int, bool, int]:
        """Read what the command says until it ends or its time is up; afterwards nothing of it lives."""
        end = time.monotonic() + timeout
        watch = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (watch, output, self.spec["line"]):
            poll.register(descriptor, select.POLLIN)
        head, tail, total, late = bytearray(), bytearray(), 0, False
        os.set_blocking(output, False)

        def read() -> bool:
            nonlocal total, tail
            try:
                data = os.read(output, 1 << 16)
            except BlockingIOError:
                return False
            total += len(data)
            room = most // 2 - len(head)
            head.extend(data[:room])
            tail.extend(data[room:] if room > 0 else data)
            if len(tail) > most:
                tail = tail[-(most - most // 2) :]
            return bool(data)

        try:
            while True:
                left = end - time.monotonic()
                events = dict(poll.poll(max(0, left) * 1000)) if left > 0 else {}
                if self.spec["line"] in events:  # the other side is gone: it never sends before it has its answer
                    self._end(child)
                    raise SystemExit
                if watch in events:
                    break
                if output in events and not read():
                    poll.unregister(output)  # closed by the command, which goes on
                if not events:
                    late = True
                    break
        finally:
            os.close(watch)
        code = self._end(child)
        while read():
            pass
        tail = tail[-(most - most // 2) :] if total > most else tail
        left_out = total - len(head) - len(tail)
        middle = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out > 0 else b""
        return bytes(head) + middle + bytes(tail), code, late, left_out

    def _end(self, child: int) -> int:
        """Kill all that the command left and wait until it is gone; the child's exit code.

        Orphans become children of this process (it is their subreaper), and a PID namespace's first process can be
        waited for only when the namespace is empty: when no child is left, nothing can write any more.
        """
        code = None
        with contextlib.suppress(OSError):
            finished = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if finished is None:
                os.kill(child, signal.SIGKILL)
        while True:
            if not self.sandbox:
                _kill_children()
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
        code = 0 if code is None else code
        return code if code >= 0 else 128 - code


def _kill_children() -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in file.read().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
