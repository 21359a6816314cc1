"""Checks structured outputs in a process of its own: a schema of 40 bytes can take minutes and gigabytes to compile.

The process has the vocabulary in memory and compiles each grammar in a fork of itself, with limits on CPU time and memory.
What passes is compiled again where it is sampled, which then takes no more than that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from tinkex._wire import json as wire_json
from tinkex.engine.sampler.grammar import GrammarCompiler, grammar_key
from tinkex.errors import EngineFailure, InvalidInput, Unsupported
from tinkex.types import StructuredOutput

__all__ = ["MAX_COMPILE_BYTES", "MAX_COMPILE_S", "GrammarChecker"]

MAX_COMPILE_S = 0.5
"""CPU time for compiling a grammar; others' samples wait for as long."""
MAX_COMPILE_BYTES = 32 * 1024 * 1024
"""Memory that a compiled grammar may take."""
MAX_WAIT_S = 60.0
"""Time until a fork is ended that does not compute."""
MAX_CHECKED = 1024
"""Grammars that are known to be valid."""


class _Verdict(msgspec.Struct):
    """What is wrong with a grammar; the error is empty if nothing is."""

    error: str = ""
    is_unsupported: bool = False


class GrammarChecker:
    """Checks structured outputs of one model. Safe on any thread.

    Example:
        >>> checker = GrammarChecker(Path("/models/tiny"), vocab_size=49152)
        >>> checker.check(StructuredOutput(regex="yes|no"))
        >>> checker.close()
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", __name__, str(directory), str(vocab_size)]
        self._process: subprocess.Popen[bytes] | None = None
        self._checked: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def is_compiled(self, wanted: StructuredOutput) -> bool:
        """Whether a structured output is known to be valid, so that checking it takes no time."""
        return grammar_key(wanted) in self._checked

    def check(self, wanted: StructuredOutput) -> None:
        """Raises ``InvalidInput`` that says what is wrong with a structured output; the first time, this may take long."""
        key = grammar_key(wanted)
        if key in self._checked:
            return
        with self._asking:
            verdict = self._ask(wanted)
        if verdict.error:
            raise (Unsupported if verdict.is_unsupported else InvalidInput)(verdict.error)
        with self._lock:
            self._checked[key] = None
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)

    def close(self) -> None:
        """End the process."""
        with self._asking:
            self._end()

    def _ask(self, wanted: StructuredOutput) -> _Verdict:
        for _ in range(2):  # once more if the process was killed
            process = self._process
            if process is None:
                process = self._process = subprocess.Popen(  # noqa: S603 -- this module
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.write(wire_json.encode(wanted) + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if answer.endswith(b"\n"):
                    return msgspec.json.decode(answer, type=_Verdict)
            self._end()
        raise EngineFailure("the process that checks structured outputs does not run; see the server's log.")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def main(directory: str, vocab_size: str) -> None:
    """Answers each structured output that is read with a verdict, until the other end is closed."""
    import resource

    from tinkex.engine.model.tokenizer import EngineTokenizer

    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)  # the server decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = GrammarCompiler(EngineTokenizer(Path(directory)), int(vocab_size))
    try:
        compiler.check(StructuredOutput(regex="a"))  # reads the vocabulary, which all forks then have
        problem = None
    except Unsupported as error:
        problem = _Verdict(str(error), is_unsupported=True)
    for line in sys.stdin.buffer:
        verdict = problem or _check_in_fork(compiler, wire_json.decode(line, StructuredOutput))
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _check_in_fork(compiler: GrammarCompiler, wanted: StructuredOutput) -> _Verdict:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, msgspec.json.encode(_check_within_limits(compiler, wanted)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    if content:
        return msgspec.json.decode(content, type=_Verdict)
    return _Verdict(
        f"structured_output.{wanted.kind} is too complex: compiling it takes more than {MAX_COMPILE_S:g} s or "
        f"{MAX_COMPILE_BYTES:,} bytes; simplify it"
    )


def _check_within_limits(compiler: GrammarCompiler, wanted: StructuredOutput) -> _Verdict:
    import resource

    # Libraries write to stderr when memory runs out, which is expected here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(
        OSError
    ):  # where the size of a process cannot be read, the time is the only limit
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MAX_COMPILE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_S)
    try:
        compiler.check(wanted)
    except Unsupported as error:
        return _Verdict(str(error), is_unsupported=True)
    except InvalidInput as error:
        return _Verdict(str(error))
    return _Verdict()


if __name__ == "__main__":
    main(*sys.argv[1:])
