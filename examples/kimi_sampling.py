"""Tokenize as the Kimi K2 models do, and sample from one if the server has it.

You will see the rules of the Kimi tokenizer on a vocabulary in Kimi's format: Chinese apart from other text,
numbers in groups of three digits, special tokens and the chat template, and a round trip; then an answer. Set
KIMI_TOKENIZER to a directory with the model's own tiktoken.model and tokenizer_config.json to use the real
vocabulary. Without a Kimi model the example stops after the list of models; set TINKER_BASE_URL to a server with one.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path

import tinkex
from tinkex import types
from tinkex.tokenizers import get_tokenizer

TEXT = "Kimi counts 12345 stars; 月亮很亮."
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_assistant|>"


def write_vocabulary(folder: Path) -> Path:
    """Writes the files that a Kimi model comes with, for a small vocabulary: all bytes and a few merges."""
    merges = ["Ki", "mi", "Kimi", " c", "ou", "nt", "12", "123", "45", "st", "ar", " st", "月亮"]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in merges]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"]
    added = {str(len(tokens) + place): {"content": name} for place, name in enumerate(names)}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service,
    ):
        own = os.environ.get("KIMI_TOKENIZER")
        tokenizer = get_tokenizer(Path(own) if own else write_vocabulary(Path(folder)))
        tokens = tokenizer.encode(TEXT)
        print(f"{type(tokenizer).__name__} with {len(tokenizer)} tokens, 256 of them special")
        print("pieces:", *(repr(tokenizer.decode([token])) for token in tokenizer.encode("ar月亮 12345")))
        print(f"{len(tokens)} tokens, unchanged by the round trip: {tokenizer.decode(tokens) == TEXT}")
        chat = [{"role": "user", "content": "Say hi."}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        print(f"a chat: {tokenizer.decode(prompt)!r}, {len(prompt)} tokens")
        plain = tokenizer.encode("<|im_end|>", allow_special_tokens=False)
        print(f"<|im_end|>: {len(tokenizer.encode('<|im_end|>'))} token, as plain text {len(plain)}")

        names = service.get_server_capabilities().model_names()
        print("models:", ", ".join(names))
        kimi = next((name for name in names if name.startswith("moonshotai/Kimi-K2")), None)
        if kimi is None:
            print("this server has no Kimi K2 model")
            return
        sampler = service.create_sampling_client(base_model=kimi)
        params = types.SamplingParams(max_tokens=12, temperature=0.6, seed=1)
        answer = sampler.sample(types.ModelInput.from_text(TEXT, tokenizer), 1, params).result()
        print(f"answer of {kimi}: {tokenizer.decode(answer.sequences[0].tokens)!r}")


if __name__ == "__main__":
    main()
