"""A chat: its models, its messages and its commands."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.chat_display import ChatDisplay, display_for
from tinkex.cli.chat_input import ChatInput
from tinkex.cli.failures import failure_of
from tinkex.cli.prompt_file import as_messages, read_prompt_file
from tinkex.errors import BadRequestError, SetupError, TinkexError
from tinkex.tokenizers.conversation import end_of_turn, has_chat_template, render_conversation, visible_text
from tinkex.types import ModelInput, SampledToken, SampleStreamDone

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import SamplingParams, StopReason

__all__ = ["Answer", "ChatSession"]

Message = dict[str, Any]

HELP = """\
/system TEXT   set the system message; without TEXT remove it
/model NAME    continue with another base model or checkpoint; without NAME say which one answers
/compare NAME  show the answers of NAME too, side by side; without NAME those of the base model, or none again
/undo          remove the last message and its answer
/clear         remove all messages but the system message
/save FILE     write the conversation to a file, as {"messages": […]}
/load FILE     continue the conversation in a file
/quit          quit, like Ctrl-D
Ctrl-C stops an answer. A line that ends with \\ continues on the next one; // at its start sends a message that starts with /."""

MAKE_ROOM = "make room with /undo or /clear (/save FILE keeps the conversation)"


class ContextFull(SetupError):
    """The conversation leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class ChatModel:
    """A model that answers."""

    name: str
    """A base model or the path of a checkpoint."""
    base_model: str
    sampler: SamplingClient
    tokenizer: Tokenizer
    max_context: int | None
    """The tokens that its context holds, if the server reports it."""


@dataclass
class Answer:
    """An answer as it grows."""

    model: str
    text: str = ""
    stop_reason: StopReason | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the answer as a message with what is known about it."""
        return {
            "role": "assistant",
            "content": self.text,
            "model": self.model,
            "stop_reason": self.stop_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
        }


@dataclass
class Participant:
    """A model with its view of the conversation: all messages, and its own answers."""

    model: ChatModel
    messages: list[Message] = field(default_factory=list)


class ChatSession:
    """Reads messages and commands, and prints answers, until the input ends."""

    def __init__(
        self, invocation: Invocation, service: ServiceClient, params: SamplingParams, name: str
    ) -> None:
        self._invocation = invocation
        self._service = service
        self._params = params
        self._system: str | None = None
        self._participants = [Participant(self._open(name))]
        """Those who answer: the chosen model is the last one, the one that it is compared with precedes it."""
        self._own_files: set[Path] = set()
        """Files that this session may overwrite, because it wrote them."""
        self._input = ChatInput()
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/system": self.set_system,
            "/model": self._switch_model,
            "/compare": self.compare,
            "/undo": lambda _: self._undo(),
            "/clear": lambda _: self._clear(),
            "/save": self._save,
            "/load": self._load_file,
        }

    @property
    def _chosen(self) -> Participant:
        return self._participants[-1]

    def run(self) -> None:
        """Reads and answers until the input ends or ``/quit``."""
        self._invocation.status(
            f"Chatting with {self._chosen.model.name}. /help lists commands, Ctrl-C stops an answer, Ctrl-D quits."
        )
        if self._chosen.messages and self._chosen.messages[-1]["role"] == "user":
            self._attempt(self._respond)
        while True:
            try:
                line = self._input.read()
            except KeyboardInterrupt:
                self._say("(Ctrl-D or /quit quits)", before="\n")
                continue
            if line is None or line.split(maxsplit=1)[:1] in (["/quit"], ["/exit"]):
                return
            self._attempt(self._handle, line)

    def _attempt(self, action: Callable[..., None], *arguments: str) -> None:
        """Runs an action; in a terminal its failure is shown, and the chat continues."""
        if not self._input.is_terminal:
            action(*arguments)
            return
        try:
            action(*arguments)
        except (TinkexError, click.ClickException, OSError) as error:
            options = self._invocation.server_options
            failure = failure_of(error, is_local=self._invocation.is_local, server_options=options)
            failure.show(as_json=self._invocation.as_json)
        except KeyboardInterrupt:
            self._say("(stopped)", before="\n")

    def _handle(self, line: str) -> None:
        text = line.strip()
        if not text:
            return
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text.partition(" ")
            command = self._commands.get(name)
            if command is None:
                raise SetupError(
                    f"there is no command {name}; /help lists them, and // at its start sends a message that starts with /"
                )
            command(argument.strip())
            return
        message = line.lstrip().removeprefix("/") if text.startswith("//") else line
        for participant in self._participants:
            participant.messages.append({"role": "user", "content": message})
        self._respond()

    # ---- answers ----

    def _respond(self) -> None:
        """Answers the last message; it is removed again if there is no answer."""
        answers = [Answer(participant.model.name) for participant in self._participants]
        try:
            prompts = [self._prompt(participant) for participant in self._participants]
            with display_for(self._invocation, answers) as display:
                asyncio.run(self._stream(answers, prompts, display))
        except KeyboardInterrupt:
            if not any(answer.text for answer in answers) or not self._input.is_terminal:
                self._drop_message()
                raise
            self._say(
                "(stopped; the answer so far is part of the conversation, /undo removes it)", before="\n"
            )
        except BadRequestError as error:
            self._drop_message()
            if all(participant.model.max_context is not None for participant in self._participants):
                raise
            raise ContextFull(f"{error}; if the conversation is too long, {MAKE_ROOM}") from error
        except BaseException:
            self._drop_message()
            raise
        for participant, answer in zip(self._participants, answers, strict=True):
            participant.messages.append({"role": "assistant", "content": answer.text})
            self._note_length(participant.model, answer)

    async def _stream(
        self, answers: Sequence[Answer], prompts: Sequence[list[int]], display: ChatDisplay
    ) -> None:
        """Samples all answers simultaneously; Ctrl-C cancels them, here and on the server."""
        try:
            async with asyncio.TaskGroup() as group:
                for participant, answer, prompt in zip(self._participants, answers, prompts, strict=True):
                    group.create_task(self._stream_one(participant.model, answer, prompt, display))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _stream_one(
        self, model: ChatModel, answer: Answer, prompt: list[int], display: ChatDisplay
    ) -> None:
        stream = await model.sampler.sample_stream_async(
            ModelInput.from_ints(prompt), 1, self._params_for(model, len(prompt))
        )
        without_text: list[int] = []  # tokens of a server that does not stream
        async with stream:
            async for event in stream:
                if isinstance(event, SampleStreamDone):
                    answer.stop_reason = event.stop_reasons[0]
                    answer.num_tokens, answer.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
                elif isinstance(event, SampledToken) and event.text is None:
                    without_text.append(event.token)
                elif isinstance(event, SampledToken):
                    ends = event.stop_reason == "stop"
                    shown = visible_text(model.tokenizer, event.token, event.text or "", ends=ends)
                    answer.text += shown
                    display.add(answer, shown)
        if without_text:
            answer.text = model.tokenizer.decode(without_text, skip_special_tokens=True)
            display.add(answer, answer.text)

    def _prompt(self, participant: Participant) -> list[int]:
        """The tokens of the conversation; raises if they leave no room for an answer."""
        model = participant.model
        prompt = render_conversation(model.tokenizer, self._messages(participant))
        if model.max_context is not None and len(prompt) >= model.max_context:
            raise ContextFull(
                f"the conversation has {len(prompt):,} tokens, and the context of {model.name} holds {model.max_context:,}; "
                f"this message was not sent: {MAKE_ROOM}"
            )
        return prompt

    def _params_for(self, model: ChatModel, num_prompt_tokens: int) -> SamplingParams:
        update: dict[str, Any] = {}
        if self._params.stop is None and (ends := end_of_turn(model.tokenizer)):
            update["stop"] = ends
        if model.max_context is not None and self._params.max_tokens is not None:
            update["max_tokens"] = min(self._params.max_tokens, model.max_context - num_prompt_tokens)
        return self._params.model_copy(update=update)

    def _note_length(self, model: ChatModel, answer: Answer) -> None:
        if answer.stop_reason != "length":
            return
        if self._params.max_tokens is not None and answer.num_tokens >= self._params.max_tokens:
            self._invocation.status(f"(stopped after {answer.num_tokens} tokens; --max-tokens allows more)")
        else:
            self._invocation.status(f"(the context of {model.name} is full; {MAKE_ROOM})")

    def _messages(self, participant: Participant) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *participant.messages]

    def _drop_message(self) -> None:
        for participant in self._participants:
            if participant.messages and participant.messages[-1]["role"] == "user":
                participant.messages.pop()

    # ---- commands ----

    def set_system(self, text: str) -> None:
        """Sets the system message; an empty one removes it."""
        self._system = text or None
        self._say("system message set" if text else "no system message")

    def compare(self, name: str = "") -> None:
        """Compares with another model, or ends the comparison."""
        if not name and len(self._participants) > 1:
            self._participants = [self._chosen]
            self._say(f"only {self._chosen.model.name} answers now")
            return
        chosen = self._chosen.model
        if not name and chosen.name == chosen.base_model:
            raise SetupError(
                f"{chosen.name} is a base model; name a checkpoint or another model: /compare NAME"
            )
        other = Participant(self._open(name or chosen.base_model), list(self._chosen.messages))
        self._participants = [other, self._chosen]
        self._say(f"comparing {other.model.name} with {chosen.name}; /compare ends it")

    def load(self, messages: Sequence[Message]) -> None:
        """Replaces the conversation."""
        chat = [dict(message) for message in messages]
        self._system = str(chat.pop(0)["content"]) if chat[0]["role"] == "system" else None
        for participant in self._participants:
            participant.messages = list(chat)

    def _switch_model(self, name: str) -> None:
        if name:
            self._chosen.model = self._open(name)
        self._say(", ".join(participant.model.name for participant in self._participants))

    def _undo(self) -> None:
        for participant in self._participants:
            questions = [
                place for place, message in enumerate(participant.messages) if message["role"] == "user"
            ]
            del participant.messages[questions[-1] if questions else 0 :]
        self._say(f"{len(self._chosen.messages)} messages left")

    def _clear(self) -> None:
        for participant in self._participants:
            participant.messages.clear()
        self._say("no messages left")

    def _save(self, name: str) -> None:
        if not name:
            raise SetupError("name the file: /save FILE")
        file = Path(name).expanduser()
        if file.exists() and file.resolve() not in self._own_files:
            raise SetupError(f"{file} exists and was not written by this chat; choose another name")
        messages = self._messages(self._chosen)
        file.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8")
        self._own_files.add(file.resolve())
        self._say(f"wrote {len(messages)} messages to {file}; use them with: tinkex chat --file {file}")

    def _load_file(self, name: str) -> None:
        if not name:
            raise SetupError("name the file: /load FILE")
        file = Path(name).expanduser()
        messages = as_messages(read_prompt_file(file))
        if messages is None:
            raise SetupError(f'{file} holds no conversation; it must be {{"messages": […]}}')
        self.load(messages)
        self._say(f"read {len(messages)} messages")
        if messages[-1]["role"] == "user":
            self._respond()

    def _open(self, name: str) -> ChatModel:
        """Opens a base model, or a checkpoint by its path or a short name."""
        from tinkex.checkpoints.references import is_run_directory, resolve_checkpoint

        if name.startswith("tinker://") or "@" in name or is_run_directory(Path(name)):
            path = resolve_checkpoint(name, self._service.create_rest_client())
            sampler = self._service.create_sampling_client(model_path=path).result()
            name = path
        else:
            sampler = self._service.create_sampling_client(base_model=name).result()
        base_model = str(sampler.get_base_model())
        tokenizer = sampler.get_tokenizer().result()
        if not has_chat_template(tokenizer):
            raise SetupError(
                f"{base_model} has no chat template, so it cannot chat; continue a text with: tinkex sample --raw"
            )
        supported = self._service.get_server_capabilities().supported_models
        contexts = {model.model_name: model.max_context_length for model in supported}
        return ChatModel(name, base_model, sampler, tokenizer, contexts.get(base_model))

    def _say(self, text: str, *, before: str = "") -> None:
        if not (self._invocation.quiet or self._invocation.as_json):
            sys.stdout.flush()
            click.echo(before + text, err=True)
