"""The system calls that commands may not make."""

from __future__ import annotations

import struct

# Kernel interfaces that reach past namespaces or have often been a way out. Numbers: the kernel's unistd_64.h files.
_DENIED = {
    "x86_64": (0xC000003E, (248, 249, 250, 298, 321, 323, 425, 426, 427)),
    "aarch64": (0xC00000B7, (217, 218, 219, 241, 280, 282, 425, 426, 427)),
}  # add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_{setup,enter,register}


def seccomp_filter(machine: str) -> bytes | None:
    """A classic BPF program that answers the denied system calls with EPERM; None for an unknown machine."""
    if machine not in _DENIED:
        return None
    arch, denied = _DENIED[machine]
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    body = [(load, 0, 0, 4), (equal, 0, len(denied) + 3, arch), (load, 0, 0, 0)]
    body.append((at_least, len(denied) + 1, 0, 0x40000000))  # the x32 numbers
    body += [(equal, len(denied) - i, 0, number) for i, number in enumerate(denied)]
    body += [(back, 0, 0, 0x7FFF0000), (back, 0, 0, 0x00050000 | 1)]  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
    return b"".join(struct.pack("=HBBI", *line) for line in body)
