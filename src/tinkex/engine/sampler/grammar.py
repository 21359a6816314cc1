"""Structured output: which tokens may come next, so that the text is JSON of a schema, matches a regex, or a grammar.

A sequence's state follows from its tokens alone, so a sequence that is decoded again has the same masks. Text is compared
byte by byte, so any tokenizer with exact token bytes works.

Shapes: V vocabulary of the model.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tinkex.engine.sampler.json_bounds import bound_values
from tinkex.engine.sampler.json_keywords import check_keywords
from tinkex.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.types import StructuredOutput

__all__ = ["MAX_GRAMMAR_BYTES", "GrammarCompiler", "GrammarState", "grammar_key"]

MAX_GRAMMAR_BYTES = 64 * 1024
"""The size of a schema, regex or grammar; what compiling it may take is limited in ``grammar_checks``."""

MAX_COMPILED = 64
"""Compiled grammars that stay in memory for the next request."""

MAX_LEXER_STATES = 20_000
"""States of the automaton that recognises words of a grammar; each takes about 2 kB."""

MAX_PROBLEM_CHARS = 1000
"""How much of an error is shown: some quote the whole grammar."""

JSON_WHITESPACE = r"(\n[ ]{0,16}|[ ])?"
"""One space, or a new line with its indentation: a model that may write any amount of space may never stop."""


_ATTRIBUTES = re.compile(r'^\s*[?!]*\w+\s*\[((?:"[^"]*"|[^]"])*)\]\s*:', re.MULTILINE)
"""The attributes of a rule: ``name[max_tokens=8]: …``."""


class GrammarCompiler:
    """Compiles what structured outputs of one model must be, and keeps the compiled forms. Safe on any thread.

    Example:
        >>> grammars = GrammarCompiler(tokenizer, vocab_size=49152)
        >>> state = grammars.start(StructuredOutput(regex="yes|no"))
        >>> state.allowed().nonzero()
    """

    def __init__(self, tokenizer: EngineTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def is_compiled(self, wanted: StructuredOutput) -> bool:
        """Whether a structured output is known to be valid, so that checking it takes no time."""
        return grammar_key(wanted) in self._compiled

    def check(self, wanted: StructuredOutput) -> None:
        """Raises ``InvalidInput`` that says what is wrong with a structured output; the first time, this may take long."""
        self._compile(wanted)

    def close(self) -> None:
        """Nothing to end: grammars are compiled in this process."""

    def start(self, wanted: StructuredOutput) -> GrammarState:
        """The state of a new sequence."""
        return GrammarState(
            self._compile(wanted).deep_copy(), frozenset(self._tokenizer.eos_token_ids), self._vocab_size
        )

    def _compile(self, wanted: StructuredOutput) -> LLMatcher:
        key = grammar_key(wanted)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known
        # Without the lock: the event loop looks up what is compiled, and must not wait for another grammar.
        compiled = self._new_matcher(wanted, key[1])
        with self._lock:
            known = self._compiled.setdefault(key, compiled)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return known

    def _new_matcher(self, wanted: StructuredOutput, text: str) -> LLMatcher:
        name = f"structured_output.{wanted.kind}"
        if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidInput(f"{name} is larger than {MAX_GRAMMAR_BYTES:,} bytes; make it smaller")
        if isinstance(wanted.json_schema, dict):
            check_keywords(wanted.json_schema)
            text = msgspec.json.encode(bound_values(wanted.json_schema)).decode()
        if any("temperature" in attributes for attributes in _ATTRIBUTES.findall(wanted.grammar or "")):
            raise InvalidInput(
                f"{name} sets the temperature of a rule; set SamplingParams.temperature instead"
            )
        with self._loading:
            vocabulary = self._load_vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        try:
            match wanted.kind:
                case "json_schema":
                    source = LLMatcher.grammar_from_json_schema(
                        text, overrides={"lenient": False, "whitespace_pattern": JSON_WHITESPACE}
                    )
                case "regex":
                    source = LLMatcher.grammar_from_regex(text)
                case "grammar":
                    source = LLMatcher.grammar_from_lark(text)
        except ValueError as error:
            raise InvalidInput(f"{name} cannot be read: {error}; correct it") from error
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()  # what cannot even start fails now
        problems = _problem(first) or "; ".join(matcher.get_grammar_warnings())
        if problems:
            raise InvalidInput(f"{name} is invalid or not supported: {problems}; remove or change that part")
        return matcher

    def _load_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is not None:
            return self._vocabulary
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError as error:
            raise Unsupported(
                "structured_output needs llguidance where the engine runs; install it there with: "
                "pip install 'tinkex[grammar]'"
            ) from error
        tokenizer = self._tokenizer
        if not tokenizer.eos_token_ids:
            raise Unsupported(
                "structured_output needs a model with an end-of-sequence token; state it as eos_token_id in the model's "
                "generation_config.json"
            )
        tokens = _Tokens(tokenizer, self._vocab_size)
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=list(tokenizer.eos_token_ids)
        )
        return self._vocabulary


class GrammarState:
    """How far one sequence has come in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self.complete = False
        """Whether the text is complete and its end-of-sequence token was added."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, (V,); raises ``InvalidInput`` if the grammar turns out to be too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        problem = _problem(self._matcher)
        if problem:
            raise InvalidInput(
                f"structured_output is too complex to follow: {problem}; simplify the schema or grammar"
            )
        allowed_V = np.zeros(self._vocab_size, np.bool_)
        known = np.unpackbits(bits, count=min(self._vocab_size, 8 * len(bits)), bitorder="little")
        allowed_V[: len(known)] = known
        return allowed_V

    def advance(self, token: int) -> None:
        """Adds the next token of the sequence."""
        # An error is kept, and raised by the next call of ``allowed``.
        self._matcher.consume_token(token)
        self.complete = token in self._eos_token_ids and self._matcher.is_stopped()


class _Tokens:
    """The vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: EngineTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokenizer.token_bytes[:vocab_size]
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [token for token in tokenizer.special_token_ids if token < len(self.tokens)]
        self._special = frozenset(self.special_token_ids)
        self._ids = {
            text: token for token, text in enumerate(self.tokens) if text and token not in self._special
        }
        self._max_bytes = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar prescribes, with exactly its bytes."""
        raw = text.encode() if isinstance(text, str) else text
        tokens = self._tokenizer.encode(raw.decode(), add_special_tokens=False)
        # A tokenizer may add a space in front, and read the name of a special token as that token.
        if b"".join(self._text_of(token) for token in tokens) == raw:
            return tokens
        return list(self._longest_first(raw))

    def _text_of(self, token: int) -> bytes:
        return b"" if token >= len(self.tokens) or token in self._special else self.tokens[token]

    def _longest_first(self, raw: bytes) -> Iterator[int]:
        """Splits a text into the longest tokens, from left to right."""
        start = 0
        while start < len(raw):
            sizes = range(min(self._max_bytes, len(raw) - start), 0, -1)
            size = next((size for size in sizes if raw[start : start + size] in self._ids), 0)
            if not size:
                return  # no token has this byte
            yield self._ids[raw[start : start + size]]
            start += size


def _problem(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, or with a sequence in it; empty if nothing is."""
    return matcher.get_error().replace("<non-verbose/>", "").strip()[:MAX_PROBLEM_CHARS]


def grammar_key(wanted: StructuredOutput) -> tuple[str, str]:
    """The kind and the text of a structured output."""
    if wanted.json_schema is None:
        return wanted.kind, wanted.regex if wanted.regex is not None else wanted.grammar or ""
    schema = {"type": "object"} if wanted.json_schema is True else wanted.json_schema
    return wanted.kind, msgspec.json.encode(schema).decode()
