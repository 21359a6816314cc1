"""What programs do with the ``anthropic`` package."""

import json
import os
import sys

import anthropic

SERVER, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
client = anthropic.Anthropic(base_url=f"{SERVER}/anthropic/api", api_key=KEY)
plain = anthropic.Anthropic(base_url=SERVER, auth_token=KEY, api_key=None)
checkpoint = sys.argv[1]
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}  # the protocol has no seed
found = {}

asked = {
    "model": checkpoint,
    "max_tokens": 12,
    "messages": MESSAGES,
    "extra_body": GREEDY,
    "system": "Be brief.",
}
answer = client.messages.create(**asked)
found["message"] = answer.content[0].text
found["usage"] = [answer.usage.input_tokens, answer.usage.output_tokens]
counted = plain.messages.count_tokens(model=checkpoint, messages=MESSAGES, system="Be brief.")
found["counted"] = counted.input_tokens
with plain.messages.stream(**asked) as stream:
    found["streamed"] = "".join(stream.text_stream)
    final = stream.get_final_message()
    assert final.stop_reason == answer.stop_reason == "max_tokens"
    assert final.usage.output_tokens == answer.usage.output_tokens
found["prefilled"] = client.messages.create(
    model="hermes",
    max_tokens=3,
    messages=[*MESSAGES, {"role": "assistant", "content": "I"}],
    extra_body=GREEDY,
).usage.output_tokens

forced = client.messages.create(
    model="hermes",
    max_tokens=200,
    messages=MESSAGES,
    tools=[TOOL],
    tool_choice={"type": "any"},
    extra_body=GREEDY,
)
use = forced.content[0]
found["use"] = [use.type, use.name, use.input, forced.stop_reason]
with client.messages.stream(
    model="hermes",
    max_tokens=200,
    messages=MESSAGES,
    tools=[TOOL],
    tool_choice={"type": "tool", "name": "weather"},
    extra_body=GREEDY,
) as stream:
    found["streamed use"] = stream.get_final_message().content[0].name
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
follow_up = [
    *MESSAGES,
    {"role": "assistant", "content": forced.content},
    {"role": "user", "content": [result]},
]
answered = client.messages.create(
    model="hermes", max_tokens=3, messages=follow_up, tools=[TOOL], extra_body=GREEDY
)
assert answered.content is not None

thoughts = client.messages.create(model="always-thinking", max_tokens=5, messages=MESSAGES, extra_body=GREEDY)
found["thoughts"] = thoughts.content[0].type
beta = client.beta.messages.create(
    model="thinking", max_tokens=3, messages=MESSAGES, thinking={"type": "disabled"}, extra_body=GREEDY
)
found["beta"] = beta.role

errors = {}
for name, wrong in {"unknown model": {"model": "claude"}, "tools": {"model": "base"}}.items():
    try:
        client.messages.create(max_tokens=3, messages=MESSAGES, **wrong)
    except anthropic.APIStatusError as error:
        errors[name] = [type(error).__name__, error.body["error"]["type"]]
found["errors"] = errors
print(json.dumps(found))
