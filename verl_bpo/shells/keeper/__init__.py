"""The process that holds a local shell's files and runs its commands; started by :mod:`verl_bpo.shells.local`.

It lives in a mount namespace of its own and keeps every layer on a tmpfs there, so that the kernel takes back mounts,
files and processes when it ends, however it ends. It has one thread and imports nothing but the standard library and this
package, whose modules are one idea each: it starts in milliseconds, and forks cheaply.
"""
