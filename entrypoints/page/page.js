// The built-in page: what the server does, every two seconds, and a chat with its models.
// Whatever a model says enters the document as text nodes and never as markup.

import { Refused, call, events, keepKey, key } from "./stream.js";

const POLL_MS = 2000;
const RATE_WINDOW_S = 10;

const by = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const samples = [];
const messages = [];
let stopper = null;

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// --- what the server does ---------------------------------------------------------------------------------------------

function duration(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${whole} s`;
}

function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Tokens per second over the last seconds, by the server's clock; a server that restarted begins anew. */
function rate(name) {
  const [first, last] = [samples[0], samples[samples.length - 1]];
  const seconds = last.uptime_s - first.uptime_s;
  return seconds > 0 ? `${((last[name] - first[name]) / seconds).toFixed(1)} tokens/s` : "–";
}

function show(status) {
  if (samples.length && samples[samples.length - 1].uptime_s > status.uptime_s) samples.length = 0;
  samples.push(status);
  while (samples.length > 2 && status.uptime_s - samples[0].uptime_s > RATE_WINDOW_S) samples.shift();
  const { prefix_cache: prefix, kv_cache: kv } = status;
  const used = Math.round(kv.usage * kv.num_tokens);
  const texts = {
    model: status.model,
    context: `${number.format(status.max_model_len)} tokens`,
    dtype: status.dtype,
    uptime: duration(status.uptime_s),
    version: status.version,
    running: number.format(status.num_running),
    waiting: number.format(status.num_waiting),
    generated: rate("generated_tokens"),
    computed: rate("computed_tokens"),
    hits: !prefix.enabled ? "off" : prefix.queries_tokens ? `${((100 * prefix.hits_tokens) / prefix.queries_tokens).toFixed(0)}%` : "–",
    "kv-used": `${(100 * kv.usage).toFixed(1)}% of ${bytes(kv.num_bytes)} used: ${number.format(used)} of ${number.format(kv.num_tokens)} tokens`,
  };
  for (const [id, text] of Object.entries(texts)) by(id).textContent = text;
  by("state").className = status.serving ? "dot on" : "dot off";
  by("kv-meter").value = kv.usage;
  by("kv-layers").replaceChildren(
    ...kv.layers.map((kind) => {
      const name = kind.sliding_window === null ? kind.format : `${kind.format}, window ${number.format(kind.sliding_window)}`;
      const cells = [name, number.format(kind.num_layers), number.format(kind.bytes_per_token)];
      return element("tr", "", ...cells.map((cell) => element("td", "", cell)));
    }),
  );
}

function notice(text) {
  by("notice").textContent = text;
  by("notice").hidden = !text;
}

async function refresh() {
  try {
    show(await (await call("status")).json());
    notice("");
    by("key-form").hidden = true;
    if (!by("models").options.length) await listModels();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else notice(error.message);
    by("state").className = "dot off";
  }
}

function askForKey(message) {
  notice(key() ? `The key was refused: ${message}` : "This server needs an API key.");
  by("key-form").hidden = false;
}

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  by("models").replaceChildren(...data.map((card) => new Option(card.id)));
  by("docs").hidden = !(await fetch("docs", { method: "GET" })).ok;
}

/** One after the other, and none while nobody looks. */
async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, POLL_MS);
}

// --- the chat ---------------------------------------------------------------------------------------------------------

function say(turn) {
  by("empty").hidden = true;
  by("log").append(turn);
  by("log").scrollTop = by("log").scrollHeight;
}

/** The parts of one answer on the page: thoughts, text and calls, each made when it is needed. */
class Answer {
  constructor() {
    this.turn = element("div", "turn assistant");
    this.calls = [];
    this.content = "";
    say(this.turn);
  }

  add({ reasoning, content, tool_calls: calls }) {
    if (reasoning) (this.thoughts ??= this.part("div", "thoughts")).append(reasoning);
    if (content) {
      this.content += content;
      (this.text ??= this.part("div", "text")).append(content);
    }
    for (const { index, function: called } of calls ?? []) {
      const shown = (this.calls[index] ??= this.part("pre", "call"));
      if (called.name) shown.append(`${called.name} `);
      shown.append(called.arguments);
    }
    const log = by("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }

  part(tag, className) {
    const made = element(tag, className);
    this.turn.append(made);
    return made;
  }

  end(text) {
    this.turn.append(element("span", "end", text));
  }
}

function request() {
  const system = by("system").value.trim();
  const body = {
    model: by("models").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
  };
  if (by("temperature").value) body.temperature = Number(by("temperature").value);
  if (by("max-tokens").value) body.max_tokens = Number(by("max-tokens").value);
  return body;
}

function working(isWorking) {
  by("send").disabled = by("clear").disabled = isWorking;
  by("stop").disabled = !isWorking;
  by("log").setAttribute("aria-busy", String(isWorking));
}

/** Ask, and show the answer as it comes. What failed is not part of the conversation that the model sees. */
async function ask(question) {
  messages.push({ role: "user", content: question });
  say(element("div", "turn user", question));
  working(true);
  stopper = new AbortController();
  const answer = new Answer();
  try {
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: stopper.signal,
    };
    let reason = null;
    for await (const chunk of events(await call("v1/chat/completions", options))) {
      for (const choice of chunk.choices) {
        answer.add(choice.delta);
        reason = choice.finish_reason ?? reason;
      }
    }
    if (reason === "length") answer.end("The answer ended because it reached its longest length.");
    messages.push({ role: "assistant", content: answer.content });
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end("Stopped.");
      messages.push({ role: "assistant", content: answer.content });
    } else {
      messages.pop();
      by("question").value ||= question;
      if (!answer.turn.childNodes.length) answer.turn.remove();
      if (error.status === 401) askForKey(error.message);
      const wrong = element("div", "turn wrong", error instanceof Refused ? error.message : String(error));
      wrong.setAttribute("role", "alert");
      say(wrong);
    }
  } finally {
    working(false);
    by("question").focus();
  }
}

// --- what the reader does ---------------------------------------------------------------------------------------------

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = by("question").value.trim();
  if (!question || by("send").disabled) return;
  by("question").value = "";
  ask(question);
});
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("ask").requestSubmit();
  }
});
by("stop").addEventListener("click", () => stopper?.abort());
by("clear").addEventListener("click", () => {
  messages.length = 0;
  for (const turn of by("log").querySelectorAll(".turn")) turn.remove();
  by("empty").hidden = false;
  by("question").focus();
});
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(by("key").value);
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
poll();
