"""Prints a body for every field of a protocol's requests, also nested ones, as the types of its package declare them."""

import collections.abc
import importlib
import json
import sys
import typing

import typing_extensions

ROUTES = {
    "openai": {
        "completions": ("openai.types.completion_create_params", "CompletionCreateParamsStreaming"),
        "chat/completions": (
            "openai.types.chat.completion_create_params",
            "CompletionCreateParamsStreaming",
        ),
    },
    "anthropic": {
        "messages": ("anthropic.types.message_create_params", "MessageCreateParamsStreaming"),
        "messages/count_tokens": (
            "anthropic.types.message_count_tokens_params",
            "MessageCountTokensParams",
        ),
    },
}
LISTS = (list, set, tuple, collections.abc.Iterable, collections.abc.Sequence)
QUALIFIERS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)
PLAIN = {str: "{}", int: 1, float: 0.5, bool: True, object: "a", type(None): None}


def unwrap(kind):
    while typing.get_origin(kind) in QUALIFIERS:
        kind = typing.get_args(kind)[0]
    return kind


def alternatives(kind):
    """The kinds of a union that can be written as JSON, without None."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) is typing.Union else [kind]
    return [each for each in map(unwrap, kinds) if each is not type(None) and is_json(each)] or [str]


def is_json(kind):
    known = (typing.Literal, typing.Union, dict, *LISTS)
    return kind in PLAIN or typing_extensions.is_typeddict(kind) or typing.get_origin(kind) in known


def is_list(kind):
    return typing.get_origin(kind) in LISTS


def fields(kind):
    return typing_extensions.get_type_hints(kind, include_extras=True)


def is_required(kind, name):
    qualifier = typing.get_origin(fields(kind)[name])
    if qualifier is None or qualifier not in QUALIFIERS[:2]:
        return name in kind.__required_keys__  # which does not know qualifiers that are written as text
    return qualifier is typing_extensions.Required


def smallest(kind):
    """A value of a type, with nothing that may be left out."""
    kind = alternatives(unwrap(kind))[0]
    if typing_extensions.is_typeddict(kind):
        return {name: smallest(hint) for name, hint in fields(kind).items() if is_required(kind, name)}
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    if is_list(kind):
        return [smallest(typing.get_args(kind)[0])]
    return {} if typing.get_origin(kind) is dict or kind is dict else PLAIN[kind]


def values(kind, path, seen, owner=None):
    """Values of a type, each with the path of what it shows: alternatives, words, and fields that may be left out."""
    for each in alternatives(unwrap(kind)):
        yield path, smallest(each)
        if typing.get_origin(each) is typing.Literal:
            yield from ((path, word) for word in typing.get_args(each)[1:])
        elif is_list(each):
            inner = values(typing.get_args(each)[0], path, seen, owner)
            yield from ((found, [value]) for found, value in inner)
        elif typing_extensions.is_typeddict(each) and (path.partition(".")[0], owner, each) not in seen:
            seen.add((path.partition(".")[0], owner, each))
            whole = smallest(each)
            for name, hint in fields(each).items():
                inner = values(hint, f"{path}.{name}" if path else name, seen, each)
                yield from ((found, {**whole, name: value}) for found, value in inner if found != "model")


found = []
for route, (module, name) in ROUTES[sys.argv[1]].items():
    for field, body in values(getattr(importlib.import_module(module), name), "", set()):
        body.pop("stream", None)
        if field and body:
            found.append({"route": route, "field": field, "body": body})
print(json.dumps(found))
