"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let model = null;
let asking = null; // what stops the answer under way

// what the server is

async function connect() {
  for (;;) {
    const state = $("state");
    try {
      const health = await (await fetch("health")).json();
      if (health.status === "ready") {
        const served = (await (await fetch("v1/models")).json()).data[0];
        if (model === null && !served.has_chat_template) $("mode").value = "text";
        model = served;
        $("model").textContent = document.title = served.id;
        show();
      }
      state.textContent = health.status;
      state.className = health.status === "ready" ? "ready" : "";
    } catch {
      state.textContent = "not reached";
      state.className = "bad";
    }
    await new Promise((resolve) => setTimeout(resolve, model && state.className === "ready" ? 10000 : 1000));
  }
}

function show() {
  const isText = $("mode").value === "text";
  $("input").placeholder = isText ? "Begin a text" : "Write a message";
  $("empty").lastElementChild.textContent = isText ? "Begin a text, and the model goes on." : "Ask something.";
  $("system").parentElement.hidden = isText;
  $("send").textContent = asking ? "Stop" : "Send";
  $("send").classList.toggle("stop", asking !== null);
  $("send").disabled = !asking && (model === null || $("input").value.trim() === "");
  $("empty").hidden = messages.length > 0;
}

// asking

function settings() {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  return body;
}

async function* events(path, body, signal) {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}


async function ask(text) {
  const isText = $("mode").value === "text";
  if (text !== null) messages.push({ role: "user", content: text, element: add("user", text, isText) });
  const answer = { role: "assistant", content: "", element: add("assistant", "", isText) };
  asking = new AbortController();
  const body = settings();
  if (isText) {
    body.prompt = messages[messages.length - 1].content;
  } else {
    const system = $("system").value.trim();
    body.messages = messages.map(({ role, content }) => ({ role, content }));
    if (system) body.messages.unshift({ role: "system", content: system });
  }
  answer.element.classList.add("writing");
  show();
  const began = performance.now();
  let first = null;
  let usage = null;
  try {
    await fit(body, asking.signal);
    for await (const event of events(isText ? "v1/completions" : "v1/chat/completions", body, asking.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      const piece = choice && (isText ? choice.text : choice.delta.content);
      if (!piece) continue;
      first ??= performance.now();
      answer.content += piece;
      write(answer, isText);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.element.classList.add("failed");
      answer.failed = true;
      answer.content += (answer.content && "\n\n") + error.message;
      write(answer, isText);
    }
  }
  asking = null;
  answer.element.classList.remove("writing");
  note(answer, isText, usage, began, first);
  if (!answer.failed && answer.content) messages.push(answer);
  show();
  $("input").focus();
}

async function fit(body, signal) {
  // what was said leaves so much room for the answer
  const said = body.prompt === undefined ? { messages: body.messages } : { prompt: body.prompt };
  const answer = await fetch("tokenize", { method: "POST", body: JSON.stringify(said), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const left = model.max_model_len - (await answer.json()).count;
  body.max_tokens = Math.max(1, Math.min(body.max_tokens ?? left, left));
}

// showing

function add(role, text, isText) {
  const element = document.createElement("article");
  element.className = `message ${role}${isText ? " text" : ""}`;
  const body = document.createElement("div");
  body.className = "body";
  body.textContent = text;
  element.append(body);
  const isNear = nearEnd();
  $("messages").append(element);
  if (isNear) follow();
  return element;
}

const nearEnd = () => $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 120;
const follow = () => { $("messages").scrollTop = $("messages").scrollHeight; };

function write(answer, isText) {
  const isNear = nearEnd();
  const body = answer.element.firstElementChild;
  if (isText) {
    body.textContent = answer.content;
  } else {
    body.replaceChildren(...blocks(answer.content));
  }
  if (isNear) follow();
}

function note(answer, isText, usage, began, first) {
  const parts = [];
  if (usage && first) {
    const seconds = (performance.now() - first) / 1000;
    const rate = seconds > 0 && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / seconds : 0;
    parts.push(`${usage.completion_tokens} tokens`, `first after ${((first - began) / 1000).toFixed(2)} s`);
    if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  }
  const line = document.createElement("div");
  line.className = "note";
  line.append(parts.join(" \u00b7 "));
  const again = document.createElement("button");
  again.textContent = "Again";
  again.onclick = () => {
    if (asking) return;
    const place = messages.indexOf(answer);
    const last = place < 0 ? messages.length : place;
    for (const later of messages.splice(last)) later.element.remove();
    answer.element.remove();
    ask(null);
  };
  line.append(again);
  answer.element.append(line);
}

// Markdown, as much of it as models write: built of nodes, so that no text becomes markup

function blocks(text) {
  const nodes = [];
  const lines = text.split("\n");
  let place = 0;
  while (place < lines.length) {
    const line = lines[place];
    const fence = line.match(/^\s*```(\S*)\s*$/);
    if (fence) {
      const code = [];
      for (place += 1; place < lines.length && !/^\s*```\s*$/.test(lines[place]); place += 1) code.push(lines[place]);
      place += 1;
      nodes.push(codeBlock(code.join("\n")));
    } else if (line.trim() === "") {
      place += 1;
    } else if (/^#{1,6} /.test(line)) {
      nodes.push(node("h3", ...inline(line.replace(/^#+ /, ""))));
      place += 1;
    } else if (/^\s*([-*+]|\d+[.)]) /.test(line)) {
      const isNumbered = /^\s*\d/.test(line);
      const list = node(isNumbered ? "ol" : "ul");
      if (isNumbered) list.start = Number(line.trim().match(/^\d+/)[0]);
      const item = isNumbered ? /^\s*\d+[.)] / : /^\s*[-*+] /;
      for (; place < lines.length && item.test(lines[place]); place += 1) {
        list.append(node("li", ...inline(lines[place].replace(item, ""))));
      }
      nodes.push(list);
    } else {
      const paragraph = [];
      for (; place < lines.length && lines[place].trim() !== "" && !/^\s*(```|#{1,6} |[-*+] |\d+[.)] )/.test(lines[place]); place += 1) {
        paragraph.push(lines[place]);
      }
      if (paragraph.length === 0) paragraph.push(lines[place++]);
      const element = node("p");
      paragraph.forEach((words, number) => element.append(...(number ? [node("br")] : []), ...inline(words)));
      nodes.push(element);
    }
  }
  return nodes;
}

function inline(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*|\*[^*\s][^*]*\*)/).filter(Boolean).map((part) => {
    if (/^`[^`]+`$/.test(part)) return node("code", part.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(part)) return node("strong", part.slice(2, -2));
    if (/^\*[^*]+\*$/.test(part)) return node("em", part.slice(1, -1));
    return document.createTextNode(part);
  });
}

function codeBlock(code) {
  const copy = node("button", "Copy");
  copy.type = "button";
  copy.onclick = async () => {
    await navigator.clipboard.writeText(code);
    copy.textContent = "Copied";
  };
  return node("pre", node("code", code), copy);
}

function node(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

// what is pressed

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

$("input").addEventListener("input", () => { grow(); show(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!asking) $("form").requestSubmit();
  }
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) {
    asking.abort();
    return;
  }
  const text = $("input").value;
  if (model === null || text.trim() === "") return;
  $("input").value = "";
  grow();
  ask(text);
});
$("new").addEventListener("click", () => {
  if (asking) asking.abort();
  messages.length = 0;
  for (const element of document.querySelectorAll(".message")) element.remove();
  show();
  $("input").focus();
});
$("toggle").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("toggle").setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("mode").addEventListener("change", () => { $("new").click(); });
show();
connect();
