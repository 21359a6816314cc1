"""What programs do with the ``openai`` package."""

import asyncio
import json
import os
import sys

import openai
from pydantic import BaseModel

SERVER, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
client = openai.OpenAI(base_url=f"{SERVER}/oai/api/v1", api_key=KEY)
plain = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY)
checkpoint = sys.argv[1]
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
found = {}


class Forecast(BaseModel):
    warm: bool
    days: int


found["models"] = [model.id for model in client.models.list()]
found["retrieved"] = client.models.retrieve(checkpoint).id

asked = {"model": "hermes", "prompt": "The quick", "max_tokens": 12, "seed": 5}
whole = client.completions.create(**asked, logprobs=2, extra_body={"return_token_ids": True, "top_k": 50})
found["completion"] = whole.choices[0].text
found["tokens"] = whole.choices[0].token_ids
found["usage"] = whole.usage.model_dump()
assert len(whole.choices[0].logprobs.token_logprobs) == len(found["tokens"])
pieces = list(
    plain.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 50}, logprobs=2
    )
)
tops = [top for piece in pieces if piece.choices for top in piece.choices[0].logprobs.top_logprobs]
assert tops == whole.choices[0].logprobs.top_logprobs
found["streamed completion"] = "".join(piece.choices[0].text for piece in pieces if piece.choices)
assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
found["batch"] = len(
    client.completions.create(model="hermes", prompt=["a", "b"], n=2, max_tokens=2, seed=5).choices
)

talk = {"messages": MESSAGES, "max_completion_tokens": 12, "seed": 5}
answer = client.chat.completions.create(model=checkpoint, **talk, logprobs=True, top_logprobs=2)
found["chat"] = answer.choices[0].message.content
assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
chunks = [
    chunk.choices[0]
    for chunk in plain.chat.completions.create(
        model=checkpoint, **talk, stream=True, logprobs=True, top_logprobs=2
    )
    if chunk.choices
]
found["streamed chat"] = "".join(chunk.delta.content or "" for chunk in chunks)
entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
assert entries == answer.choices[0].logprobs.content
with client.chat.completions.stream(model=checkpoint, **talk) as events:
    found["streamed by helper"] = "".join(event.delta for event in events if event.type == "content.delta")
follow_up = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "Again"}]
assert client.chat.completions.create(model="hermes", messages=follow_up, max_tokens=2, seed=5).choices

forced = client.chat.completions.create(
    model="hermes", messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200, seed=1
)
call = forced.choices[0].message.tool_calls[0]
found["call"] = [call.function.name, json.loads(call.function.arguments), forced.choices[0].finish_reason]
result = [*MESSAGES, forced.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert client.chat.completions.create(
    model="hermes", messages=result, tools=[TOOL], max_tokens=2, seed=5
).choices
strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
assert client.chat.completions.create(
    model="hermes", messages=MESSAGES, tools=[strict], max_tokens=4, seed=5
).choices
parsed = client.chat.completions.parse(
    model="hermes", messages=MESSAGES, response_format=Forecast, max_tokens=300, seed=5
)
found["parsed"] = parsed.choices[0].message.parsed.model_dump()

errors = {}
for name, wrong in {
    "unknown model": {"model": "gpt-4", "prompt": "a"},
    "best_of": {"model": "hermes", "prompt": "a", "best_of": 3},
    "too long": {"model": "hermes", "prompt": [5] * 5000},
}.items():
    try:
        client.completions.create(**wrong)
    except openai.APIStatusError as error:
        errors[name] = [type(error).__name__, error.param]
try:
    openai.OpenAI(base_url=f"{SERVER}/v1", api_key="tml-wrong", max_retries=0).models.list()
except openai.AuthenticationError as error:
    errors["wrong key"] = error.code
found["errors"] = errors
raw = client.chat.completions.with_raw_response.create(model="hermes", **talk, user="me", store=False)
found["ignored"] = raw.headers["x-tinkex-ignored-fields"]


async def several():
    async with openai.AsyncOpenAI(base_url=f"{SERVER}/v1", api_key=KEY) as client:
        answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(4)))
        return len({answer.choices[0].text for answer in answers})


found["concurrent"] = asyncio.run(several())
print(json.dumps(found))
