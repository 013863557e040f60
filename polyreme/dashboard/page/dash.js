// Runs of polyreme: curves drawn as SVG, asked for again while runs go on. What comes from a run is only ever text.
"use strict";

const LIVE_MS = 2000, POINTS = 800, COLOURS = 8, HEIGHT = 210, LEFT = 52, RIGHT = 24, TOP = 10, BOTTOM = 22;
// a chart for each name, training and validation in one; those that every run has come first, by these titles
const TITLES = {
  loss: "Loss", tokens_per_second: "Tokens a second", memory_bytes: "Memory, GiB", grad_norm: "Gradient norm",
  learning_rate: "Learning rate", utilisation: "Utilisation", elapsed_seconds: "Seconds since the start",
  eta_seconds: "Seconds to go",
};
const FACTORS = { memory_bytes: 2 ** -30 };
const state = { runs: [], chosen: new Set(), known: new Set(), open: null, charts: new Map(), colours: new Map(), version: "" };
const at = (id) => document.getElementById(id);

function node(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function shape(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `status ${answer.status}`);
  return answer.json();
}

function number(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

const colour = (id) => `c${state.colours.get(id) % COLOURS}`;
const nameOf = (metric) => metric.slice(metric.indexOf("/") + 1);

// runs

function showRuns() {
  const wanted = at("filter").value.toLowerCase();
  const rows = state.runs.filter((run) => run.name.toLowerCase().includes(wanted)).map((run) => {
    const box = node("input", { type: "checkbox", checked: state.chosen.has(run.id) });
    box.setAttribute("aria-label", `Show ${run.name}`);
    box.addEventListener("change", () => {
      if (box.checked) state.chosen.add(run.id); else state.chosen.delete(run.id);
      refresh(true);
    });
    const step = run.step === null ? "no steps yet" : `step ${run.step.toLocaleString("en")}${run.steps ? ` of ${run.steps.toLocaleString("en")}` : ""}`;
    const loss = run.latest["train/loss"];
    const facts = node("small", {}, node("span", { className: run.state, textContent: run.state }), `, ${step}`,
      ...(loss === undefined ? [] : [", ", node("span", { className: loss === null ? "gone" : "", textContent: `loss ${number(loss)}` })]),
      run.num_bad ? `, ${run.num_bad} lines unreadable` : "");
    const open = node("button", { type: "button" }, run.name, facts);
    open.addEventListener("click", async () => {
      state.open = state.open === run.id ? null : run.id;
      showRuns();
      await showDetails();
      if (state.open) at("details").scrollIntoView();
    });
    const row = node("li", { className: state.open === run.id ? "open" : "" }, box,
      node("span", { className: `swatch ${colour(run.id)}` }), open);
    return row;
  });
  const focus = [...at("runs").querySelectorAll("button, input")].indexOf(document.activeElement);
  at("runs").replaceChildren(...rows);
  if (focus >= 0) at("runs").querySelectorAll("button, input")[focus]?.focus();
  if (!rows.length) at("runs").append(node("li", { className: "soft", textContent: state.runs.length ? "no run has such a name" : "no run here yet; one appears with its first step" }));
}

// charts

function chartOf(name) {
  if (state.charts.has(name)) return state.charts.get(name);
  const svg = shape("svg", { class: "chart", role: "img" });
  const values = node("div", { className: "values" });
  const count = node("span");
  const figure = node("figure", {}, node("figcaption", {}, TITLES[name] ?? name, count), svg, values);
  const chart = { name, svg, values, figure, count, series: [] };
  svg.setAttribute("aria-label", TITLES[name] ?? name);
  svg.addEventListener("pointermove", (event) => point(chart, event));
  svg.addEventListener("pointerleave", () => point(chart, null));
  new ResizeObserver(() => draw(chart)).observe(figure);
  state.charts.set(name, chart);
  return chart;
}

function smoothed(values) {
  const weight = Number(at("smoothing").value);
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value; total = total * weight + 1;
    return sum / total;  // as Adam corrects its averages: the beginning is not drawn to zero
  });
}

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function draw(chart) {
  const { svg } = chart, width = svg.clientWidth || 400, isLog = at("logarithmic").checked;
  const factor = FACTORS[chart.name] ?? 1;
  const isSmooth = Number(at("smoothing").value) > 0;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const put = (value) => (value === null || (isLog && value <= 0) ? null : isLog ? Math.log10(value * factor) : value * factor);
  const lines = chart.series.map((each) => {
    const raw = each.values.map(put);
    const isSmoothed = isSmooth && each.metric.startsWith("train/");
    return { ...each, raw: isSmoothed ? raw : null, shown: isSmoothed ? smoothed(raw) : raw };
  });
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of lines) {
    for (let i = 0; i < line.steps.length; i++) {
      left = Math.min(left, line.steps[i]); right = Math.max(right, line.steps[i]);
      const value = line.shown[i];
      if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (!(left <= right) || !(low <= high)) return;
  if (low === high) { const room = Math.abs(low) * 0.05 || 1; low -= room; high += room; }
  if (left === right) { left -= 1; right += 1; }
  const margin = (high - low) * 0.04; low -= margin; high += margin;
  const x = (step) => LEFT + ((step - left) / (right - left)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  for (const value of ticks(low, high, 4)) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(isLog ? 10 ** value : value)));
  }
  for (const step of ticks(left, right, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger)) {
    svg.append(shape("text", { x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  for (const line of lines) {
    const kind = line.metric.startsWith("validation/") ? " validation" : "";
    if (line.raw) svg.append(shape("path", { class: `${colour(line.run)} faint`, d: path(line.steps, line.raw, x, y) }));
    svg.append(shape("path", { class: `${colour(line.run)}${kind}`, d: path(line.steps, line.shown, x, y) }));
    if (line.steps.length < 60 && (kind || line.steps.length < 3)) {
      line.steps.forEach((step, i) => {
        if (line.shown[i] !== null) svg.append(shape("circle", { class: colour(line.run), cx: x(step), cy: y(line.shown[i]), r: 2.6 }));
      });
    }
  }
  chart.cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(chart.cursor);
  Object.assign(chart, { left, right, width, x });
}

function path(steps, values, x, y) {
  let text = "", isDown = false;
  for (let i = 0; i < steps.length; i++) {
    if (values[i] === null) { isDown = false; continue; }
    text += `${isDown ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    isDown = true;
  }
  return text;
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function point(chart, event) {
  if (!event || !chart.x || !chart.series.length) {
    chart.cursor?.setAttribute("visibility", "hidden");
    showLast(chart);
    return;
  }
  const inside = event.clientX - chart.svg.getBoundingClientRect().left;
  const step = chart.left + ((inside - LEFT) / (chart.width - LEFT - RIGHT)) * (chart.right - chart.left);
  const places = chart.series.map((each) => nearest(each.steps, step));
  const at = chart.x(chart.series[0].steps[places[0]]);
  for (const [name, value] of Object.entries({ x1: at, x2: at, visibility: "visible" })) chart.cursor.setAttribute(name, value);
  showValues(chart, places);
}

const MOST_VALUES = 6; // under a chart
const showLast = (chart) => showValues(chart, chart.series.map((each) => each.steps.length - 1));

function showValues(chart, places) {
  const factor = FACTORS[chart.name] ?? 1;
  const more = chart.series.length - MOST_VALUES;
  chart.values.replaceChildren(...chart.series.slice(0, MOST_VALUES).map((each, i) => {
    const value = each.values[places[i]];
    const kind = each.metric.startsWith("validation/") ? " validation" : "";
    const run = state.runs.find((found) => found.id === each.run);
    const label = chart.series.length > 1 ? `${state.chosen.size > 1 ? run?.name ?? "" : ""}${kind} ` : "";
    return node("span", { className: colour(each.run) }, label.trimStart(),
      node("b", { textContent: number(value === null ? null : value * factor) }), ` at ${each.steps[places[i]].toLocaleString("en")}`);
  }), more > 0 ? `and ${more} more` : "");
}

async function showCharts() {
  const runs = state.runs.filter((run) => state.chosen.has(run.id));
  const metrics = [...new Set(runs.flatMap((run) => run.curves))];
  const order = Object.keys(TITLES);
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const names = [...new Set(metrics.map(nameOf))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).slice(0, 60);
  const shown = metrics.filter((metric) => names.includes(nameOf(metric)));
  const series = [];
  // runs times metrics may be more than one answer holds
  const share = Math.max(1, Math.floor(200 / Math.max(1, runs.length)));
  for (let i = 0; i < shown.length; i += share) {
    const query = new URLSearchParams([...runs.map((run) => ["run", run.id]), ...shown.slice(i, i + share).map((metric) => ["metric", metric]), ["points", POINTS]]);
    series.push(...(await ask(`api/series?${query}`)).series);
  }
  for (const name of names) {
    const chart = chartOf(name);
    chart.series = series.filter((each) => nameOf(each.metric) === name && each.steps.length);
    const total = Math.max(0, ...chart.series.map((each) => each.total));
    const most = Math.max(0, ...chart.series.map((each) => each.steps.length));
    chart.count.textContent = total > most ? `${total.toLocaleString("en")} values, least and greatest of each stretch` : "";
    draw(chart);
    if (chart.cursor?.getAttribute("visibility") !== "visible") showLast(chart);
  }
  const figures = names.map((name) => state.charts.get(name).figure);
  const now = [...at("charts").children];
  if (figures.length !== now.length || figures.some((figure, i) => figure !== now[i])) {
    at("charts").replaceChildren(...(figures.length ? figures : [node("p", { className: "empty", textContent: state.runs.length ? "Choose a run." : "No run here yet; this page shows it when it begins." })]));
    figures.forEach((figure, i) => draw(state.charts.get(names[i])));
  }
}

// one run

function table(head, rows) {
  return node("div", { className: "scroll" }, node("table", {},
    node("thead", {}, node("tr", {}, ...head.map((text) => node("th", { textContent: text })))),
    node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((text) => node("td", { textContent: text })))))));
}

const words = (event) => Object.entries(event).filter(([name]) => !["kind", "step"].includes(name))
  .map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");

async function showDetails() {
  const box = at("details"), id = state.open;
  if (id === null) { box.hidden = true; state.detailed = null; return; }
  let run;
  try { run = await ask(`api/runs/${id}`); } catch (error) { run = null; }
  if (state.open !== id) return;
  if (run === null) { state.open = null; box.hidden = true; return; }
  const version = JSON.stringify([id, run.step, run.num_events, run.checkpoints, run.pictures, run.state]);
  if (state.detailed === version) return;
  state.detailed = version;
  const close = node("button", { type: "button", textContent: "Close" });
  close.addEventListener("click", () => { state.open = null; showRuns(); showDetails(); });
  const parts = [node("div", { className: "head" }, node("div", {}, node("h2", { textContent: run.name }),
    node("div", { className: "soft", textContent: `${run.state}, ${run.folder}` })), close)];
  const add = (title, ...nodes) => parts.push(node("h3", { textContent: title }), ...nodes);
  const faults = [...run.faults].reverse();
  add("Faults", faults.length ? table(["step", "what", "facts"], faults.map((fault) => [fault.step, fault.kind.replaceAll("_", " "), words(fault)]))
    : node("div", { className: "soft", textContent: "none" }));
  add("Samples", ...(run.samples.length ? [...run.samples].reverse().slice(0, 5).flatMap((sample) => [node("div", { className: "soft", textContent: `step ${sample.step.toLocaleString("en")}` }), node("pre", { textContent: sample.text })])
    : [node("div", { className: "soft", textContent: run.state === "running" ? "none yet" : "none" })]));
  add("Checkpoints", run.checkpoints.length ? table(["step", "MiB", "written"], run.checkpoints.map((each) => [each.step.toLocaleString("en"), (each.bytes / 2 ** 20).toFixed(1), new Date(each.written * 1000).toLocaleString()]))
    : node("div", { className: "soft", textContent: run.state === "running" ? "none yet" : "none" }));
  const pictures = run.pictures.map((name) => [name, `api/runs/${id}/picture?name=${encodeURIComponent(name)}&step=${run.step ?? 0}`]);
  if (run.config["plan.pp"] > 1) pictures.unshift(["pipeline schedule of the plan", `api/runs/${id}/schedule.svg`]);
  if (pictures.length) {
    const figures = pictures.map(([name, source]) => {
      const picture = node("img", { src: source, alt: name, loading: "lazy" });
      const figure = node("figure", {}, node("figcaption", { textContent: name }), picture);
      picture.addEventListener("error", () => figure.remove());
      return figure;
    });
    add("Pictures", node("div", { className: "pictures" }, ...figures));
  }
  const others = run.events.length ? [node("details", {}, node("summary", { textContent: `${run.events.length} other events` }), table(["step", "kind", "facts"], [...run.events].reverse().map((event) => [event.step, event.kind, words(event)])))] : [];
  parts.push(...others);
  const settings = Object.entries(run.config);
  if (settings.length) parts.push(node("details", {}, node("summary", { textContent: "Configuration" }), table(["setting", "value"], settings.map(([name, value]) => [name, JSON.stringify(value)]))));
  box.replaceChildren(...parts);
  box.hidden = false;
}

// live

let isAsking = false, isWanted = false;

async function refresh(isForced = false) {
  if (isAsking) { isWanted ||= isForced; return; }
  isAsking = true;
  try {
    const { runs } = await ask("api/runs");
    state.runs = runs;
    for (const run of runs) {
      if (!state.colours.has(run.id)) state.colours.set(run.id, state.colours.size);
      if (!state.known.has(run.id)) { state.known.add(run.id); if (state.known.size <= COLOURS) state.chosen.add(run.id); }
    }
    const version = JSON.stringify(runs.map((run) => [run.id, run.step, run.state, run.latest, run.num_events, run.steps]));
    if (isForced || version !== state.version) {
      state.version = version;
      showRuns();
      await showCharts();
      await showDetails();
    }
    const count = runs.filter((run) => run.state === "running").length;
    at("state").textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${count} running`;
    at("state").className = "";
  } catch (error) {
    at("state").textContent = `no answer: ${error.message}`;
    at("state").className = "bad";
  }
  isAsking = false;
  if (isWanted) { isWanted = false; refresh(true); }
}

at("filter").addEventListener("input", showRuns);
for (const id of ["smoothing", "logarithmic"]) at(id).addEventListener("input", () => state.charts.forEach(draw));
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden) refresh(); }, LIVE_MS);
refresh(true);
