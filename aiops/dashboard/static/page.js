// The live page of an aiops server. It reads server-sent events: first the whole document, then what
// changes of it (aiops/dashboard/board.py). Every text of the server goes through textContent.
"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const SPARE = 3000;          // points that a series has before its older half is thinned
const FRAME = 8;             // milliseconds of a frame that drawing takes; the rest comes in the next
const ROW = 28;              // pixels of a row (1.75rem at the page's font)
const VIEW = 384;            // pixels of the list of workers that are in view (24rem)
const PADDING = 26;          // pixels beside a chart in its section (twice 0.8rem)
const FEW = 13;              // workers whose list needs no scrolling
const QUIET = 15000;         // milliseconds without an event after which the connection is made anew
const LINES = 8;             // workers of which each has a line of what it logs
const TURN = 256;            // rows that come at a time (CHANGED of board.py)
const OVERDUE = 3;           // times its usual interval after which a worker's rate falls

let about = {}, state = {}, sections = {}, clock = 0;
let turns = 0;               // seconds in which each row that has changed has come
let series = {t: []}, events = [];
let rows = new Map();        // by number: a worker as `Row` has it
let span = 0, shownName = "", logScale = false;

// ---------------------------------------------------------------- numbers as text

const whole = new Intl.NumberFormat("en");
function count(n) { return n == null ? "–" : whole.format(n); }
function short(n) {
  if (n == null) return "–";
  const size = Math.abs(n);
  if (size !== 0 && (size < 0.001 || size >= 1e15)) return n.toExponential(2);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return (n / (unit === "k" ? 1e3 : limit)).toPrecision(3) + " " + unit;
  return String(Number(n.toPrecision(4)));
}
function bytes(n) {
  if (n == null) return "–";
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (n >= limit) return (n / limit).toPrecision(3) + " " + unit;
  return Math.round(n) + " B";
}
function percent(x) { return x == null ? "–" : (100 * x).toFixed(x < 0.1 ? 1 : 0) + " %"; }
function seconds(s) {
  if (s == null) return "–";
  if (s < 60) return Math.round(s) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor(s / 60 % 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor(s / 3600 % 24) + " h";
}
function tickTime(t, gap) {
  const two = (n) => String(n).padStart(2, "0"), date = new Date(1000 * t);
  if (gap >= 86400) return date.toLocaleDateString([], {month: "short", day: "numeric"});
  const minutes = two(date.getHours()) + ":" + two(date.getMinutes());
  return gap >= 60 ? minutes : minutes + ":" + two(date.getSeconds());
}
// Pixels between labels: those of whole minutes are short.
function tickSpace(plot, index, low, high) {
  return 46 * devicePixelRatio * (high - low) / plot.bbox.width > 30 ? 46 : 70;
}
function clockTime(t) { return tickTime(t, 0); }

// ---------------------------------------------------------------- elements

function element(kind, text, name) {
  const made = document.createElement(kind);
  if (text != null) made.textContent = text;
  if (name) made.className = name;
  return made;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

// Lines of a label, a bar and a number, which are made once and then only changed.
function drawBars(id, lines) {
  const home = $(id);
  while (home.children.length > 3 * lines.length) home.lastChild.remove();
  while (home.children.length < 3 * lines.length)
    home.append(element("span"), element("progress"), element("span"));
  lines.forEach(([label, share, text], index) => {
    const [name, bar, number] = [0, 1, 2].map((k) => home.children[3 * index + k]);
    setText(name, label);
    name.title = label;
    bar.value = share;
    bar.setAttribute("aria-label", label);
    setText(number, text);
  });
}

// ---------------------------------------------------------------- charts

const charts = new Map();
const widths = new Map();    // of the charts, measured before any of them changes
function measure() {
  for (const home of document.querySelectorAll(".chart"))
    widths.set(home.id, Math.max(200, home.parentNode.clientWidth - PADDING));
}
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// A chart: `lines` are [name in the series, label, colour's variable, kind], `format` its numbers'.
function makeChart(id, lines, format, options) {
  const home = $(id);
  const old = charts.get(id);
  if (old) old.plot.destroy();
  const ink = colour("--dim"), rule = colour("--line");
  const times = (u, ticks, index, space, gap) => ticks.map((t) => tickTime(t, gap));
  const axis = {stroke: ink, grid: {stroke: rule, width: 1}, ticks: {stroke: rule, width: 1}, font: "11px system-ui, sans-serif"};
  const plotted = lines.map(([, label, variable, kind]) => ({
    label, value: (u, v) => format(v), spanGaps: true,
    stroke: kind === "edge" ? "transparent" : kind === "one" ? variable : colour(variable),
    width: kind === "edge" ? 0 : kind === "one" ? 0.8 : 1.6, dash: kind === "limit" ? [6, 4] : undefined,
    points: {show: false},
  }));
  const bands = lines[0][3] === "edge" ? [{series: [2, 1], fill: colour(lines[0][2]) + "2e"}] : undefined;
  const plot = new uPlot({
    width: widths.get(id), height: 170, series: [{value: (u, v) => v == null ? "–" : clockTime(v)}, ...plotted], bands,
    axes: [{...axis, values: times, space: tickSpace}, {...axis, size: 64, values: (u, ticks) => ticks.map(format)}],
    scales: {
      x: {range: (u, low, high) => [span ? Math.max(low, high - span) : low, Math.max(high, low + 1)]},
      y: options.log ? {distr: 3} : {range: (u, low, high) => yRange(low, high, options.zero)},
    },
    cursor: {sync: {key: "time"}, drag: {setScale: false, x: false, y: false}, points: {size: 6}},
    legend: {live: true},
  }, [[], ...lines.map(() => [])], home);
  charts.set(id, {plot, lines, format, options, home, remake: () => makeChart(id, lines, format, options)});
  drawChart(id);
}
function yRange(low, high, zero) {
  if (low == null) return [0, 1];
  const bottom = zero ? 0 : low, room = (high - bottom) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [zero ? 0 : bottom - room, high + room];
}
function drawChart(id) {
  const chart = charts.get(id);
  if (!chart) return;
  const {plot, lines, format, home, options} = chart;
  const empty = series.t.map(() => null);
  const data = [series.t];
  for (const [name] of lines) {
    const given = options.limits && name in options.limits ? series.t.map(() => options.limits[name]()) : series[name] || empty;
    data.push(options.log ? given.map((v) => v > 0 ? v : null) : given);
  }
  plot.setData(data);
  if (plot.cursor.left == null || plot.cursor.left < 0) plot.setLegend({idx: data[0].length - 1});
  const said = lines.filter(([, , , kind]) => kind !== "edge").map(([name, label]) => label + " " + format(last(name)));
  home.setAttribute("role", "img");
  home.setAttribute("aria-label", "Chart: " + said.join(", "));
}
function last(name) {
  const values = series[name] || [];
  for (let k = values.length - 1; k >= 0; k--) if (values[k] != null) return values[k];
  return null;
}
function makeUpdates() { makeChart("c-updates", [["updates", "updates/s", "--a"]], short, {zero: true}); }
function makeStaleness() { makeChart("c-staleness", [["staleness", "mean", "--a"]], short, {zero: true}); }
function makeTraffic() {
  const traffic = [["received", "received", "--a"], ["sent", "sent", "--b"]];
  const limits = {budget: () => (sections.traffic || {budget: {}}).budget.bytes_per_second};
  if (limits.budget()) traffic.push(["budget", "budget", "--bad", "limit"]);
  makeChart("c-traffic", traffic, bytes, {zero: true, limits});
}
function makeTime() {
  makeChart("c-time", [["loop", "event loop", "--a"], ["updating", "updates", "--b"]], percent, {zero: true});
}
function makeLogged() {
  const known = loggedNames();
  if (!known.includes(shownName)) shownName = known.includes("loss") ? "loss" : known[0] || "";
  const choices = $("names");
  choices.replaceChildren(...(known.length > 1 ? known : []).map((name) => {
    const button = element("button", name);
    button.type = "button";
    button.setAttribute("aria-pressed", String(name === shownName));
    button.addEventListener("click", () => { shownName = name; makeLogged(); });
    return button;
  }));
  setText($("h-logged"), shownName ? shownName[0].toUpperCase() + shownName.slice(1) : "Loss");
  $("n-logged").hidden = Boolean(shownName);
  $("c-logged").hidden = $("log").parentNode.hidden = !shownName;
  if (!shownName) return;
  const each = lined().map((row) => [lineOf(row, shownName), row.name, "hsl(" + row.number * 67 % 360 + " 55% 50%)", "one"]);
  makeChart("c-logged", [["min " + shownName, "least", "--a", "edge"], ["max " + shownName, "most", "--a", "edge"],
    ...each, ["log " + shownName, "mean of workers", "--a"]], short, {log: logScale});
}
// Where there are few workers, each has a line, from the moment on at which this page sees it.
function lined() {
  const found = [...rows.values()].filter((row) => row.state !== "observer");
  return found.length > 1 && found.length <= LINES ? found.sort((a, b) => a.number - b.number) : [];
}
function lineOf(row, name) { return "of " + row.number + " " + name; }
// Add to a point what each of few workers has logged, and forget the lines of those that have none any more.
function addLines(values, names) {
  const here = lined();
  for (const name of Object.keys(series))
    if (name.startsWith("of ") && !here.some((row) => names.some((each) => name === lineOf(row, each)))) delete series[name];
  for (const row of here)
    names.forEach((name, index) => { if (row.logged[index] != null) values[lineOf(row, name)] = row.logged[index]; });
}
function charted() { return [...loggedNames(), ...lined().map((row) => row.number)].join(); }
function loggedNames() { return Object.keys(series).filter((name) => name.startsWith("log ")).map((name) => name.slice(4)); }

// ---------------------------------------------------------------- the parts of the page

function drawHead() {
  setText($("policy"), state.policy || "");
  const ready = $("ready");
  setText(ready, state.ready || "takes pushes");
  ready.classList.toggle("bad", Boolean(state.ready));
  setText($("since"), "for " + seconds(Math.max(0, (series.t[series.t.length - 1] ?? about.since) - about.since)));
  document.title = "aiops " + (state.policy || "") + " · " + count(state.version);
  const warnings = sections.warnings || [];
  $("warnings").hidden = !warnings.length;
  if ($("warnings").dataset.given !== JSON.stringify(warnings)) {
    $("warnings").dataset.given = JSON.stringify(warnings);
    $("warnings").replaceChildren(...warnings.map((text) => element("li", text)));
  }
  const settings = Object.entries(sections.settings || {}).map(([name, value]) => name + "=" + value);
  setText($("footer"), ["aiops " + (about.version || ""), ...settings].join(" · "));
}
function drawFacts() {
  const counts = sections.counts || {}, budget = (sections.traffic || {}).budget || {};
  const idle = median([...rows.values()].map((row) => row.idle).filter((x) => x != null));
  const facts = [
    ["workers", count(counts.workers) + (counts.silent ? ", " + counts.silent + " silent" : "")],
    ["updates/s", short(last("updates"))],
    ["version", count(state.version)],
    ["staleness", state.mean_staleness == null ? "–" : state.mean_staleness.toFixed(2)],
    ...loggedNames().slice(0, 3).map((name) => [name, short(last("log " + name))]),
    ["workers idle", percent(idle)],
    ["received/s", bytes(last("received"))],
    ["sent/s", bytes(last("sent"))],
    ...(budget.bytes_per_second ? [["of budget", percent(budget.used / budget.bytes_per_second)]] : []),
    ["refused", count(state.refused)],
    ["memory", bytes(state.resident)],
    ["parameters", short(state.parameters)],
    ...(state.waiting ? [["at the barrier", count(state.waiting) + " of " + count(state.awaited)]] : []),
    ...(state.rate_gain && state.rate_gain !== 1 ? [["rate raised", "×" + short(state.rate_gain)]] : []),
  ];
  const home = $("facts");
  while (home.children.length > facts.length) home.lastChild.remove();
  while (home.children.length < facts.length) {
    const box = element("div");
    box.append(element("dt"), element("dd"));
    home.append(box);
  }
  facts.forEach(([name, text], index) => {
    setText(home.children[index].firstChild, name);
    setText(home.children[index].lastChild, text);
  });
}
function median(values) {
  if (!values.length) return null;
  values.sort((a, b) => a - b);
  return values[values.length >> 1];
}
function drawStaleness() {
  const counts = sections.staleness || [], bounds = about.staleness || [];
  const total = counts.reduce((sum, n) => sum + n, 0), most = Math.max(1, ...counts);
  const lines = counts.map((n, index) => {
    const low = index ? bounds[index - 1] + 1 : 0, high = bounds[index];
    const label = high == null ? "over " + (low - 1) : low === high ? String(low) : low + "–" + high;
    return [label, n / most, total ? percent(n / total) : "–", n];
  });
  while (lines.length > 1 && !lines[lines.length - 1][3]) lines.pop();
  drawBars("b-staleness", total ? lines : []);
}
function drawTraffic() {
  const {pushed = {}, fetched = {}, budget = {}} = sections.traffic || {};
  const saved = (way) => way.raw > way.payload ? ", " + percent(1 - way.payload / way.raw) + " saved by the codec" : "";
  const kept = (way) => way.avoided ? ", " + bytes(way.avoided) + " not sent" : "";
  const lines = [["received", bytes(pushed.bytes) + saved(pushed) + kept(pushed)], ["sent", bytes(fetched.bytes) + saved(fetched) + kept(fetched)]];
  if (budget.bytes_per_second) lines.push(["budget", bytes(budget.used) + " of " + bytes(budget.bytes_per_second) + " in the last second, " + bytes(budget.backlog) + " wait"]);
  if (budget.worker_bytes_per_second) lines.push(["each worker", bytes(budget.worker_bytes_per_second) + "/s at most"]);
  if (budget.c_push != null) lines.push(["gate", "c_push " + short(budget.c_push) + ", c_fetch " + short(budget.c_fetch)]);
  $("f-traffic").replaceChildren(...lines.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}
function drawTime() {
  const threads = Object.entries(sections.threads || {}).sort((a, b) => b[1] - a[1]);
  drawBars("b-threads", threads.map(([name, share]) => [name, Math.min(1, share), percent(share)]));
  const purposes = Object.entries(sections.profile || {});
  $("h-profile").hidden = !purposes.length;
  drawBars("b-profile", purposes.map(([name, share]) => [name, Math.min(1, share), percent(share)]));
}
const NORMS = [[2, "gradients"], [4, "parameters"], [3, "v̄"]];
let norm = 0, chosenNorm = 0;
function drawTensors() {
  const given = sections.tensors || [];
  const known = NORMS.filter(([kind]) => given.some((line) => line[kind] != null));
  norm = known.some(([kind]) => kind === chosenNorm) ? chosenNorm : known.length ? known[0][0] : 1;
  const title = {1: "Tensors: parameters", 2: "Norms of gradients", 3: "The rule’s statistic v̄", 4: "Norms of parameters"}[norm];
  setText($("h-tensors"), title);
  $("tensors").hidden = !given.length;
  const choices = $("norms"), wanted = known.map(([kind]) => kind).join() + ":" + norm;
  if (choices.dataset.made !== wanted) {
    choices.dataset.made = wanted;
    choices.replaceChildren(...(known.length > 1 ? known : []).map(([kind, label]) => {
      const button = element("button", label);
      button.type = "button";
      button.setAttribute("aria-pressed", String(kind === norm));
      button.addEventListener("click", () => { chosenNorm = kind; drawTensors(); });
      return button;
    }));
  }
  const sorted = given.map((line) => line[norm]).filter((x) => x > 0);
  const high = Math.log10(Math.max(...sorted, 1e-30)), low = Math.log10(Math.min(...sorted, 1e30)) - 0.3;
  drawBars("b-tensors", given.map((line) => {
    const value = line[norm];
    return [line[0], value > 0 ? Math.max(0, (Math.log10(value) - low) / (high - low || 1)) : 0, short(value)];
  }));
}
function drawParts() {
  const lines = [
    ...(sections.shards || []).map((s) => ["shard " + s.shard, s.gone || bytes(s.bytes) + ", version " + count(s.version) + ", " + count(s.behind) + " behind"]),
    ...(sections.standbys || []).map((s) => ["standby " + s.name, count(s.behind_rows) + " rows, " + short(s.behind_seconds) + " s behind"]),
    ...(sections.tables || []).map((t) => ["table " + t.name, count(t.made) + " of " + count(t.rows) + " rows, " + bytes(t.bytes)]),
  ];
  $("parts").hidden = !lines.length;
  $("t-parts").replaceChildren(...lines.map(([name, text]) => {
    const line = element("tr");
    line.append(element("td", name), element("td", text));
    return line;
  }));
}
function drawEvents() {
  const home = $("events"), shown = events.slice(-200).reverse();
  home.replaceChildren(...shown.map(([time, kind, text]) => {
    const line = element("li", null, kind.split(" ")[0]), stamp = element("time", clockTime(time));
    stamp.dateTime = new Date(1000 * time).toISOString();
    line.append(stamp, text);
    return line;
  }));
  if (!shown.length) home.append(element("li", "None since this page was first shown.", "dim"));
}

// ---------------------------------------------------------------- the list of workers

const COLUMNS = [
  // title, the value to sort by, its text, whether a narrow screen lacks it
  ["name", (r) => r.key, (r) => r.name],
  ["state", (r) => r.state, (r) => r.state],
  ["rate", (r) => rateOf(r), (r) => short(rateOf(r) && Number(rateOf(r).toPrecision(3)))],
  ["idle", (r) => r.idle ?? -1, (r) => percent(r.idle)],
  ["stale", (r) => r.staleness, (r) => count(r.staleness)],
  ["pushes", (r) => r.pushes, (r) => count(r.pushes), true],
  ["unused", (r) => r.refused + r.ignored, (r) => count(r.refused + r.ignored), true],
  ["received", (r) => r.received, (r) => bytes(r.received), true],
  ["sent", (r) => r.sent, (r) => bytes(r.sent), true],
  ["last push", (r) => clock - r.answered, (r) => seconds(Math.max(0, clock - r.answered)), true],
];
let scrolled = 0;            // pixels above the view
let columns = COLUMNS, sortBy = "name", descending = false, listed = [];
// A key by which numbers in names count as numbers, cheaper to compare than by a collator.
function keyOf(name) { return name.toLowerCase().replace(/[0-9]+/g, (digits) => digits.padStart(12, "0")); }

// From answer to answer, whatever the time between samples; it falls with the time of silence.
function rateOf(row) {
  const silence = clock - row.counted.answered - turns;
  return row.rate && silence > 0 ? Math.min(row.rate, OVERDUE / silence) : row.rate;
}
function rateOn(row, before) {
  const first = before && before.counted, now = {pushes: row.pushes, answered: row.answered};
  if (!first || now.pushes < first.pushes) return [null, now];
  if (now.pushes === first.pushes || now.answered <= first.answered) return [before.rate, first];
  return [(now.pushes - first.pushes) / (now.answered - first.answered), now];
}
function takeRow(given) {
  const [number, name, state, pushes, refused, ignored, staleness, received, sent, answered, compute, idle, logged] = given;
  const before = rows.get(number), row = {number, name, state, pushes, refused, ignored, staleness, received, sent, answered, compute, logged};
  row.waited = idle;
  row.key = before && before.name === name ? before.key : keyOf(name);
  [row.rate, row.counted] = rateOn(row, before);
  row.idle = before ? before.idle : null;
  if (compute != null) {
    const since = before && before.compute != null ? before : {compute: 0, waited: 0};
    const worked = compute - since.compute, waited = idle - since.waited;
    if (worked + waited > 0 && worked >= 0 && waited >= 0) row.idle = waited / (worked + waited);
  }
  rows.set(number, row);
}
function makeHead() {
  const logged = (sections.names || []).slice(0, 3).map((name, index) =>
    [name, (r) => r.logged[index] ?? -Infinity, (r) => short(r.logged[index]), true]);
  columns = [...COLUMNS.slice(0, 5), ...logged, ...COLUMNS.slice(5)];
  $("grid").style.setProperty("--columns", columns.length - 2);
  $("head").replaceChildren(...columns.map(([title, , , extra]) => {
    const cell = element("div", null, extra ? "extra" : ""), button = element("button", title);
    cell.setAttribute("role", "columnheader");
    button.type = "button";
    cell.setAttribute("aria-sort", title !== sortBy ? "none" : descending ? "descending" : "ascending");
    if (title === sortBy) button.textContent += descending ? " ▾" : " ▴";
    button.addEventListener("click", () => {
      descending = title === sortBy ? !descending : title !== "name" && title !== "state";
      sortBy = title;
      makeHead();
      listWorkers();
      [...$("head").children].find((other) => other.textContent.startsWith(title)).firstChild.focus();
    });
    cell.append(button);
    return cell;
  }));
  $("space").replaceChildren();
}
function listWorkers() {
  const wanted = $("filter").value.trim().toLowerCase();
  const value = (columns.find(([title]) => title === sortBy) || columns[0])[1];
  listed = [...rows.values()].filter((row) => !wanted || row.name.toLowerCase().includes(wanted) || row.state === wanted);
  const keyed = listed.map((row) => [value(row), row]);
  keyed.sort(([a, x], [b, y]) => {
    const order = a < b ? -1 : a > b ? 1 : 0;
    return (descending ? -order : order) || x.number - y.number;
  });
  listed = keyed.map(([, row]) => row);
  const all = (sections.counts || {}).workers || 0;
  const more = all > rows.size ? "; the first " + count(rows.size) + " have rows" : "";
  setText($("shown"), count(listed.length) + " shown of " + count(Math.max(all, rows.size)) + more);
  $("grid").setAttribute("aria-rowcount", listed.length + 1);
  $("view").classList.toggle("few", listed.length <= FEW);
  $("space").style.height = listed.length * ROW + "px";
  drawWorkers();
}
// Only the rows in view exist as elements, whatever the number of workers. Nothing is read of the
// layout here: it would be computed in the midst of the changes.
function drawWorkers() {
  const home = $("space"), first = Math.max(0, Math.floor(scrolled / ROW) - 4);
  const height = listed.length <= FEW ? listed.length * ROW : VIEW;
  const seen = listed.slice(first, first + Math.ceil(height / ROW) + 8);
  while (home.children.length > seen.length) home.lastChild.remove();
  while (home.children.length < seen.length) {
    const made = element("div", null, "row");
    made.setAttribute("role", "row");
    for (const [, , , extra] of columns) {
      const cell = element("div", null, extra ? "extra" : "");
      cell.setAttribute("role", "cell");
      made.append(cell);
    }
    home.append(made);
  }
  seen.forEach((row, index) => {
    const made = home.children[index], top = (first + index) * ROW + "px";
    if (made.style.top !== top) made.style.top = top;
    made.className = "row " + row.state;
    made.setAttribute("aria-rowindex", first + index + 2);
    columns.forEach(([, , text], column) => setText(made.children[column], text(row)));
    made.dataset.number = row.number;
    made.children[0].title = row.name + " (#" + row.number + ")";
  });
}

// ---------------------------------------------------------------- drawing, a few milliseconds a frame

const jobs = new Map();
let asked = false;
const times = [];            // milliseconds of script of the last events and frames, for tests
function draw(...names) {
  for (const name of names) jobs.set(name, JOBS[name]);
  if (!asked) { asked = true; requestAnimationFrame(frame); }
}
function frame() {
  const begun = performance.now();
  asked = false;
  for (const [name, job] of jobs) {
    jobs.delete(name);
    job();
    if (performance.now() - begun > FRAME) break;
  }
  note(begun);
  if (jobs.size) draw();
}
function note(begun) {
  times.push(performance.now() - begun);
  if (times.length > 1000) times.shift();
}
const JOBS = {
  head: drawHead, facts: drawFacts, logged: () => drawChart("c-logged"), updates: () => drawChart("c-updates"),
  staleness: () => drawChart("c-staleness"), traffic: () => drawChart("c-traffic"), time: () => drawChart("c-time"),
  bars: drawStaleness, bytes: drawTraffic, shares: drawTime, tensors: drawTensors, parts: drawParts,
  workers: listWorkers, scrolled: drawWorkers, events: drawEvents,
  "make logged": makeLogged, "make updates": makeUpdates, "make staleness": makeStaleness,
  "make traffic": makeTraffic, "make time": makeTime,
};
const CHARTS = ["logged", "updates", "staleness", "traffic", "time"];
function remake() { draw(...CHARTS.map((name) => "make " + name)); }

// ---------------------------------------------------------------- what the server sends

const APART = new Set(["tick", "clock", "about", "rows", "gone", "series", "point", "forgotten", "events"]);
const DRAWN_BY = {traffic: "bytes", staleness: "bars", threads: "shares", profile: "shares", tensors: "tensors",
  shards: "parts", standbys: "parts", tables: "parts"};

function takeSections(given) {
  for (const [name, value] of Object.entries(given)) if (!APART.has(name)) sections[name] = value;
  state = sections.state || {};
  if (given.names && JSON.stringify(given.names) !== $("head").dataset.names) {
    $("head").dataset.names = JSON.stringify(given.names);
    makeHead();
  }
  draw(...new Set(Object.keys(given).map((name) => DRAWN_BY[name]).filter(Boolean)));
}
function takeWhole(given) {
  measure();
  about = given.about;
  $("admin").hidden = !about.administered;
  clock = given.clock;
  rows = new Map();
  given.rows.forEach(takeRow);
  // A server that was started again has no points of before: the page keeps those that it has.
  const old = series, from = given.series.t.length ? given.series.t[0] : Infinity;
  series = given.series;
  const kept = old.t.findIndex((t) => t >= from), before = kept < 0 ? old.t.length : kept;
  if (before) {
    for (const name of new Set([...Object.keys(old), ...Object.keys(series)])) {
      const now = series[name] || series.t.map(() => null);
      series[name] = [...(old[name] || old.t.map(() => null)).slice(0, before), ...(name === "t" ? given.series.t : now)];
    }
  }
  events = given.events;
  if (!$("head").children.length) makeHead();
  takeSections(given);
  draw("head", "facts", "workers", "events");
  remake();
}
function takeTick(given) {
  turns = Math.max(0, given.clock - clock) * Math.ceil(rows.size / TURN);
  clock = given.clock;
  const known = charted(), {t, ...values} = given.point;
  for (const number of given.gone || []) rows.delete(number);
  if (given.names) for (const row of rows.values()) row.logged = [];  // they come again
  (given.rows || []).forEach(takeRow);
  for (const name of given.forgotten || []) delete series[name];
  addLines(values, given.names || sections.names || []);
  for (const name of Object.keys(values)) series[name] = series[name] || series.t.map(() => null);
  for (const name of Object.keys(series)) series[name].push(name === "t" ? t : values[name] ?? null);
  if (series.t.length > SPARE) thin();
  if (given.events) { events = [...events, ...given.events].slice(-200); draw("events"); }
  takeSections(given);
  draw("head", "facts", ...CHARTS, "workers");
  if (charted() !== known) draw("make logged");
}
function thin() {
  const half = SPARE >> 1;
  for (const name of Object.keys(series)) series[name] = series[name].filter((_, index) => index > half || index % 2);
}

let source = null, heard = 0, connected = false, tries = 0;
function connect() {
  if (source) source.close();
  heard = Date.now();
  source = new EventSource("events");
  const take = (handler) => (event) => {
    const begun = performance.now();
    heard = Date.now();
    connected = true;
    tries = 0;
    $("connection").hidden = true;
    handler(JSON.parse(event.data));
    note(begun);
  };
  source.addEventListener("whole", take(takeWhole));
  source.addEventListener("tick", take(takeTick));
  // The browser would try again by itself, but not after an answer that is no stream.
  source.addEventListener("error", () => {
    lost();
    source.close();
    tries += 1;
    setTimeout(connect, Math.min(500 * 2 ** tries, 8000));
  });
}
function lost() {
  const banner = $("connection");
  const told = connected ? "What you see is of " + clockTime(heard / 1000) + "." : "";
  setText(banner, "The server does not answer, or has enough viewers. " + told + " Trying again …");
  banner.hidden = false;
}
setInterval(() => {
  if (Date.now() - heard < QUIET || source.readyState === EventSource.CLOSED) return;
  lost();
  connect();
}, 2000);

// ---------------------------------------------------------------- what the viewer does

for (const button of document.querySelectorAll("[data-span]"))
  button.addEventListener("click", () => {
    span = Number(button.dataset.span);
    for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", String(other === button));
    draw(...CHARTS);
  });
$("log").addEventListener("change", () => { logScale = $("log").checked; makeLogged(); });
$("filter").addEventListener("input", () => draw("workers"));
$("view").addEventListener("scroll", () => { scrolled = $("view").scrollTop; draw("scrolled"); }, {passive: true});
async function act(path, body) {
  let text;
  try {
    const headers = {Authorization: "Bearer " + $("token").value};
    text = await (await fetch(path, {method: "POST", headers, body})).text();
  } catch (error) {
    text = "The server does not answer: " + error.message;
  }
  $("said").textContent = text.trim();
}
$("direct").addEventListener("submit", (event) => event.preventDefault());
$("snapshot").addEventListener("click", () => act("snapshot", ""));
// The name of a client may be cut, and others may have it: its number is its own.
$("space").addEventListener("click", (event) => {
  const made = event.target.closest(".row");
  if (made && about.administered) $("unwanted").value = "#" + made.dataset.number;
});
$("remove").addEventListener("click", () => {
  const name = $("unwanted").value.trim(), same = [...rows.values()].filter((row) => row.name === name).length;
  const row = name.startsWith("#") && rows.get(Number(name.slice(1)));
  const whom = row ? name + ", " + row.name : same > 1 ? "all " + same + " clients named " + name : name;
  if (name && confirm("Remove " + whom + "? It is not admitted again.")) act("remove", name);
});
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    measure();
    for (const [id, {plot}] of charts) plot.setSize({width: widths.get(id), height: 170});
    draw("scrolled");
  }, 100);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", remake);
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw("head", "facts", "workers"); });

globalThis.aiopsPage = {times, rows: () => rows, take: takeRow, rateOf, series: () => series, drawn: () => !jobs.size};  // for tests
connect();
})();
