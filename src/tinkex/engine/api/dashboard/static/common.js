// What every page does: the theme, copying, and actions on checkpoints. Requests carry the form token of the page.
const byId = (id) => document.getElementById(id);
export const token = document.querySelector("meta[name=form-token]").content;

export async function send(url, { method = "GET", body, signal } = {}) {
  const headers = { "x-tinkex-form": token };
  if (body !== undefined) headers["content-type"] = "application/json";
  const reply = await fetch(url, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (reply.status === 401) location.reload(); // the page says why, and asks to sign in
  if (!reply.ok) throw new Error(await problemOf(reply));
  return reply;
}

async function problemOf(reply) {
  try {
    const content = await reply.json();
    return content.detail ?? content.error?.message ?? `status ${reply.status}`;
  } catch { return `the server replied with status ${reply.status}`; }
}

let hiding;
export function notify(text, isProblem = false) {
  const notice = byId("notice");
  notice.textContent = text;
  notice.classList.toggle("bad", isProblem);
  notice.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { notice.hidden = true; }, isProblem ? 10000 : 3000);
}

// Follows a stream of events while the page is visible; shows whether it is connected. A browser has few connections to a server,
// and tabs in the background would use them up.
export function follow(url, handlers) {
  const mark = document.querySelector("[data-live]");
  const show = (text) => { if (mark) { mark.hidden = false; mark.textContent = text; mark.classList.toggle("off", text !== "live"); } };
  let source = null;
  const connect = () => {
    source = new EventSource(url);
    source.onopen = () => show("live");
    source.onerror = ({ target }) => {
      if (target !== source) return;
      show("connecting");
      if (target.readyState === EventSource.CLOSED) checkSignIn();
    };
    for (const [name, handle] of Object.entries(handlers)) source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    source.addEventListener("ended", ({ target }) => { target.close(); show("connecting"); checkSignIn(); });
  };
  const update = () => {
    if (!document.hidden && !source) connect();
    else if (document.hidden && source) { source.close(); source = null; show("paused"); }
  };
  document.addEventListener("visibilitychange", update);
  update();
}

// A stream ends when the sign-in does, and when the server restarts: in both cases the page says which.
async function checkSignIn() {
  try {
    const reply = await fetch(location.href, { headers: { "x-tinkex-form": token } });
    if (reply.status !== 503) location.reload();
    else setTimeout(checkSignIn, 2000);
  } catch { setTimeout(checkSignIn, 2000); }
}

function ask(title, text, yes, withTtl = false) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-yes").textContent = yes;
  byId("ask-field").hidden = !withTtl;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

const ACTIONS = {
  delete: { method: "DELETE", title: "Delete this checkpoint?", yes: "Delete", done: "Deleted" },
  publish: { method: "POST", title: "Publish this checkpoint to all users of the server?", yes: "Publish", done: "Published" },
  unpublish: { method: "DELETE", title: "Unpublish this checkpoint?", yes: "Unpublish", done: "Unpublished" },
  ttl: { method: "PUT", title: "When does this checkpoint expire?", yes: "Set", done: "Expiry set", withTtl: true },
};

async function act(button) {
  const action = ACTIONS[button.dataset.action];
  if (!(await ask(action.title, button.dataset.name, action.yes, action.withTtl))) return;
  button.disabled = true;
  try {
    const ttl = byId("ask").querySelector("[name=ttl]").value;
    const body = action.withTtl ? { ttl_seconds: ttl === "" ? null : Number(ttl) } : undefined;
    await send(button.dataset.url, { method: action.method, body });
    sessionStorage.setItem("tinkex-notice", `${action.done}: ${button.dataset.name}`);
    location.reload();
  } catch (error) { button.disabled = false; notify(error.message, true); }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notify("Copied");
  } catch { notify(text); } // a browser that does not allow it: the text can be selected
}

// A file that a browser would otherwise open instead of the page. The address is that of this server, also behind a proxy.
function download(url, kind) {
  const link = document.createElement("a");
  link.href = new URL(url).pathname;
  link.download = `${kind}-${link.href.split("/").pop()}`;
  link.click();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button.dataset.copy);
  else if (button.dataset.action) act(button);
  else if (button.dataset.trace) {
    try { download((await (await send(button.dataset.trace)).json()).url, "trace"); } catch (error) { notify(error.message, true); }
  } else if ("themeButton" in button.dataset) {
    const root = document.documentElement;
    const next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
    if (next) { root.dataset.theme = next; localStorage.setItem("tinkex-theme", next); } else { delete root.dataset.theme; localStorage.removeItem("tinkex-theme"); }
    labelTheme(button);
    document.dispatchEvent(new Event("themechange"));
  }
});

function labelTheme(button) { button.textContent = `Theme: ${document.documentElement.dataset.theme ?? "auto"}`; }
document.querySelectorAll("[data-theme-button]").forEach(labelTheme);

const kept = sessionStorage.getItem("tinkex-notice");
if (kept) { sessionStorage.removeItem("tinkex-notice"); notify(kept); }
