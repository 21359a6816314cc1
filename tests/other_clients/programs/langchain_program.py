"""What programs do with ``langchain-openai``."""

import json
import os
import sys
from typing import Annotated

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import Field

SERVER, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
found = {}


@tool
def weather(days: Annotated[int, Field(ge=0, le=9)]) -> str:
    """The weather of the next days."""
    return f"sunny for {days} days"


def chat(**options):
    return ChatOpenAI(model="hermes", base_url=f"{SERVER}/v1", api_key=KEY, seed=5, **options)


messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
model = chat(max_tokens=8)
answer = model.invoke(messages)
found["chat"] = answer.content
found["streamed chat"] = "".join(chunk.content for chunk in model.stream(messages))
found["usage"] = answer.usage_metadata["output_tokens"]
found["text"] = OpenAI(
    model=sys.argv[1], base_url=f"{SERVER}/v1", api_key=KEY, max_tokens=6, seed=5, temperature=1
).invoke("The quick")
called = chat(max_tokens=300).bind_tools([weather], tool_choice="weather").invoke(messages)
(call,) = called.tool_calls
found["call"] = [call["name"], sorted(call["args"])]
follow_up = [*messages, called, ToolMessage("sunny", tool_call_id=call["id"])]
found["follow up"] = (
    chat(max_tokens=3).bind_tools([weather]).invoke(follow_up).usage_metadata["output_tokens"]
)
schema = {
    "title": "answer",
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
structured = chat(max_tokens=200).with_structured_output(schema, method="json_schema").invoke(messages)
found["structured"] = sorted(structured)
print(json.dumps(found))
