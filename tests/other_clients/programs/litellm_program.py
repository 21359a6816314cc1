"""What programs do with ``litellm``."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download

import litellm

litellm.telemetry = False
SERVER, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
MESSAGES = [{"role": "user", "content": "Hello"}]
found = {}

openai = {"api_base": f"{SERVER}/v1", "api_key": KEY}
answer = litellm.completion(model="openai/hermes", messages=MESSAGES, max_tokens=8, seed=5, **openai)
found["chat"] = answer.choices[0].message.content
stream = litellm.completion(
    model="openai/hermes", messages=MESSAGES, max_tokens=8, seed=5, stream=True, **openai
)
found["streamed chat"] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
found["usage"] = answer.usage.completion_tokens
text = litellm.text_completion(
    model=f"text-completion-openai/{sys.argv[1]}", prompt="The", max_tokens=4, seed=5, **openai
)
found["text"] = isinstance(text.choices[0].text, str)
message = litellm.completion(
    model="anthropic/hermes",
    messages=MESSAGES,
    max_tokens=5,
    temperature=0,
    api_base=f"{SERVER}/v1/messages",
    api_key=KEY,
)
found["anthropic"] = message.usage.completion_tokens
try:
    litellm.completion(model="openai/gpt-4", messages=MESSAGES, max_tokens=2, **openai)
except litellm.NotFoundError as error:
    found["error"] = "does not serve a model" in str(error)
print(json.dumps(found))
