// The playground: one prompt to one or two models, streamed, with the probability of every token.
import { send } from "./common.js";

const form = document.getElementById("playground"), stop = document.getElementById("stop"), go = document.getElementById("send"), tip = document.getElementById("tip");
const TOP = 5;
let running = null;

function requestOf(model) {
  const fields = Object.fromEntries(new FormData(form));
  const body = { model, stream: true, max_tokens: Number(fields.max_tokens), temperature: Number(fields.temperature), top_p: Number(fields.top_p) };
  if (fields.seed !== "") body.seed = Number(fields.seed);
  if (fields.stop !== "") body.stop = [fields.stop];
  if (fields.mode === "completion") return ["/dashboard/oai/api/v1/completions", { ...body, prompt: fields.prompt, logprobs: TOP }];
  const messages = [...(fields.system ? [{ role: "system", content: fields.system }] : []), { role: "user", content: fields.prompt }];
  return ["/dashboard/oai/api/v1/chat/completions", { ...body, messages, logprobs: true, top_logprobs: TOP }];
}

// Yields the chunks of a stream of server-sent events.
async function* chunks(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// The tokens of a chunk: text, logprob, and the most likely ones of its place.
function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (logprobs?.content) return logprobs.content.map((each) => ({ text: each.token, bytes: each.bytes, logprob: each.logprob, top: each.top_logprobs.map((other) => [other.token, other.logprob]) }));
  if (logprobs?.tokens) return logprobs.tokens.map((text, place) => ({ text, logprob: logprobs.token_logprobs[place], top: Object.entries(logprobs.top_logprobs[place] ?? {}).slice(0, TOP) }));
  return [];
}

async function answer(side, model, signal) {
  const place = side.querySelector("[data-answer]"), state = side.querySelector("[data-state]");
  place.replaceChildren();
  if (!model) { state.textContent = ""; return; }
  state.textContent = "waiting";
  const started = performance.now();
  const decoder = new TextDecoder();
  let count = 0, sum = 0, reason = "";
  try {
    const [url, body] = requestOf(model);
    for await (const chunk of chunks(await send(url, { method: "POST", body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      for (const choice of chunk.choices ?? []) {
        for (const token of tokensOf(choice)) {
          place.append(spanOf(token, decoder));
          count += 1;
          sum += token.logprob ?? 0;
        }
        reason = choice.finish_reason ?? reason;
      }
      state.textContent = `${count} tokens`;
    }
    const seconds = (performance.now() - started) / 1000;
    state.textContent = `${count} tokens in ${seconds.toFixed(1)} s (${(count / seconds).toFixed(1)} per second), mean logprob ${count ? (sum / count).toFixed(3) : "–"}, ended by ${reason || "the server"}`;
  } catch (error) {
    state.textContent = error.name === "AbortError" ? `${count} tokens, stopped` : error.message;
  }
}

// The bytes of a token: a character may be spelled by several tokens.
function bytesOf(token) {
  if (token.bytes) return new Uint8Array(token.bytes);
  if (token.text.startsWith("bytes:")) return new Uint8Array(token.text.slice(6).match(/[0-9a-f]{2}/g)?.map((pair) => parseInt(pair, 16)) ?? []);
  return new TextEncoder().encode(token.text);
}

function spanOf(token, decoder) {
  const span = document.createElement("span");
  // The first bytes of a character have no text yet; a mark keeps the place of their token.
  span.textContent = decoder.decode(bytesOf(token), { stream: true }) || "▯";
  span.tabIndex = -1;
  span.className = `l${Math.round((10 * Math.min(Math.max(-(token.logprob ?? 0), 0), 8)) / 8)}`;
  span.token = token;
  return span;
}

function showTip(span) {
  const { token } = span;
  const table = document.createElement("table");
  const rows = token.top.some(([text, logprob]) => text === token.text && logprob === token.logprob) ? token.top : [...token.top, [token.text, token.logprob]];
  for (const [text, logprob] of rows) {
    const row = table.insertRow();
    row.classList.toggle("chosen", text === token.text && logprob === token.logprob); // several tokens may have one text
    row.insertCell().textContent = text.startsWith("bytes:") ? text : JSON.stringify(text);
    row.insertCell().textContent = logprob == null ? "–" : `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    row.insertCell().textContent = logprob == null ? "" : logprob.toFixed(3);
  }
  tip.replaceChildren(table);
  tip.hidden = false;
  const at = span.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - own.width - 8))}px`;
  tip.style.top = `${at.bottom + own.height + 8 > innerHeight ? at.top - own.height - 6 : at.bottom + 6}px`;
}

form.addEventListener("mouseover", (event) => { if (event.target.token) showTip(event.target); else tip.hidden = true; });
form.addEventListener("focusin", (event) => { if (event.target.token) showTip(event.target); else tip.hidden = true; });
// Within an answer the arrow keys go from token to token.
form.addEventListener("keydown", (event) => {
  const span = event.target;
  if (span.token && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    (event.key === "ArrowRight" ? span.nextSibling : span.previousSibling)?.focus();
    event.preventDefault();
  }
});
form.addEventListener("change", () => { for (const each of form.querySelectorAll("[data-chat]")) each.hidden = form.elements.mode.value !== "chat"; });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  running?.abort();
  const own = (running = new AbortController());
  stop.disabled = false;
  go.disabled = true;
  const sides = [...form.querySelectorAll("[data-side]")];
  await Promise.all(sides.map((side) => answer(side, form.elements[`model_${side.dataset.side}`].value, own.signal)));
  for (const side of sides) { const first = side.querySelector("[data-answer] span"); if (first) first.tabIndex = 0; }
  stop.disabled = true;
  go.disabled = false;
});
stop.addEventListener("click", () => running?.abort());
