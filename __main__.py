"""The command line: one word chooses the role, and only that role is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.lifecycle import StatusPipe

_ROLES = {
    "serve": ("kvferry.gateway.serve.supervisor", "all roles on this host, supervised"),
    "gateway": ("kvferry.gateway.server", "the HTTP API, for nodes that run elsewhere"),
    "prefill": ("kvferry.prefill_node.main", "a node that computes prompts"),
    "decode": ("kvferry.decode_node.main", "a node that generates tokens"),
    "store": ("kvferry.kvstore.store.main", "keeps KV blocks in shared memory and on disk"),
    "cache": ("kvferry.gateway.cli.cache", "shows, keeps and clears what a running server has"),
    "keys": ("kvferry.kvstore.wire.curve", "makes keys for connections between hosts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    word = arguments[0] if arguments else "--help"
    if word in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if word in ("-V", "--version", "version"):
        print(f"kvferry {importlib.metadata.version('kvferry')}")
        return 0
    if word not in _ROLES:
        return _complain("kvferry", f"no command {word!r}: choose {', '.join(_ROLES)}")
    try:
        return _role(word)(arguments[1:])
    except ConfigError as error:
        return _fail(word, arguments, " ".join(str(error).split()))
    except KeyboardInterrupt:
        return 130


def _role(word: str) -> Callable[[Sequence[str]], int]:
    run: Callable[[Sequence[str]], int] = import_module(_ROLES[word][0]).run
    return run


def _fail(word: str, arguments: Sequence[str], message: str) -> int:
    """Tells the supervisor, if there is one, so that one line is shown and not one a role."""
    fds = [text.partition("=")[2] for text in arguments if text.startswith("--status-fd=")]
    if not fds:
        return _complain(f"kvferry {word}", message)
    StatusPipe(int(fds[-1])).report(error=message)
    return 2


def _complain(prog: str, message: str) -> int:
    print(f"{prog}: error: {message}", file=sys.stderr)
    return 2


def _usage() -> str:
    roles = "\n".join(f"  {word:<9}{about}" for word, (_, about) in _ROLES.items())
    return (
        "usage: kvferry COMMAND [MODEL] [flags]\n\n"
        "Serves a language model behind an OpenAI-compatible API, prefill and decode apart.\n\n"
        f"commands:\n{roles}\n\n"
        "`kvferry serve` alone serves the default model. `kvferry COMMAND --help` lists its flags."
    )


if __name__ == "__main__":
    sys.exit(main())
