"use strict";
// The list of runs (/), one run (/?run=A) or several (/?run=A&run=B), updated from the server.
// Text from runs is inserted only as text nodes and attributes, never as markup.

const EVERY = 2000; // milliseconds between two updates
const COLORS = ["#3b82c4", "#e0812b", "#3f9e5a", "#a06bd0", "#d9453d", "#8a8a8a"];
const PHASES = {
  data: "#d4a017", forward: "#3b82c4", backward: "#7db3e0", comm_exposed: "#d9453d",
  optimizer: "#3f9e5a", eval: "#a06bd0", checkpoint: "#8c6d5a", other: "#8a8a8a",
};
const UNKNOWN = "–";
const CAUSES = {
  launch: "the program was restarted", failure: "a rank failed", hosts: "processes joined or left",
  spike: "a loss spike",
};

// --- elements and number formats ---------------------------------

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function draw(parent, tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const known = (value) => value !== null && value !== undefined;

function number(value, digits = 4) {
  if (!known(value)) return UNKNOWN;
  if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

const count = (value) => (known(value) ? value.toLocaleString("en") : UNKNOWN);
const plural = (value, thing) => `${count(value)} ${thing}${value === 1 ? "" : "s"}`;

function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 1) return `${number(value * 1e3, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  for (const [size, name, small, smallName] of
    [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    const whole = Math.round(value);
    if (whole >= size) return `${Math.floor(whole / size)} ${name} ${Math.floor((whole % size) / small)} ${smallName}`;
  }
}

function bytes(value) {
  if (!value) return UNKNOWN;
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const steps = (run) => count(run.step) + (known(run.total_steps) ? ` of ${count(run.total_steps)}` : "");
const link = (names) => "?" + names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
const stateClass = (state) =>
  state === "running" || state === "finished" ? "good" : /^(failed|not finite|killed|cannot)/.test(state) ? "bad" : "";

function table(head, rows, words = 1) {
  const row = (tag) => (cells) => el("tr", {}, ...cells.map((cell, at) =>
    el(tag, at < words ? { class: "words" } : {}, cell)));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, row("th")(head)), el("tbody", {}, ...rows.map(row("td")))));
}

// --- charts -------------------------------------------------------------------

const WIDTH = 1048, LEFT = 70, RIGHT = 30, TOP = 20, BOTTOM = 36;

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) {
    found.push(Number((at * size).toPrecision(12)));
  }
  return found;
}

function sample(stroke, dashed) {
  const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  swatch.setAttribute("viewBox", "0 0 26 10");
  draw(swatch, "path", { d: "M0 5H26", stroke, "stroke-width": 3, "stroke-dasharray": dashed ? "5 3" : "none" });
  return swatch;
}

// Plot of lines over steps, redrawn with each update. The caption shows the values under the
// pointer.
function chart(title, ylabel, fromZero, height = 220) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const legend = el("div", { class: "legend" }), caption = el("figcaption");
  const node = el("figure", { hidden: "" }, el("h3", {}, title), legend, svg, caption);
  const bottom = height - BOTTOM;
  let lines = [], marks = [], pointer = null, toX, fromX;

  function range() {
    const xs = lines.flatMap(({ points }) => [points.x[0], points.x[points.x.length - 1]]);
    const ys = lines.flatMap(({ points }) => [...points.mean, ...(points.low ?? []), ...(points.high ?? [])]);
    let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
    if (fromZero) low = Math.min(0, low);
    if (low === high) high = low + (Math.abs(low) || 1);
    const room = (high - low) * 0.05;
    const first = Math.min(...xs), last = Math.max(...xs);
    return [first, Math.max(last, first + 1), fromZero && low === 0 ? 0 : low - room, high + room];
  }

  function axes(first, last, low, high, toY) {
    for (const y of ticks(low, high, 5)) {
      draw(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: toY(y), y2: toY(y) });
      draw(svg, "text", { x: LEFT - 8, y: toY(y) + 4, "text-anchor": "end" }, number(y, 10));
    }
    for (const x of ticks(first, last, 8).filter(Number.isInteger)) {
      draw(svg, "line", { class: "grid", x1: toX(x), x2: toX(x), y1: TOP, y2: bottom });
      draw(svg, "text", { x: toX(x), y: bottom + 16, "text-anchor": "middle" }, count(x));
    }
    draw(svg, "path", { class: "axis", fill: "none", d: `M${LEFT} ${TOP}V${bottom}H${WIDTH - RIGHT}` });
    draw(svg, "text", { x: WIDTH - RIGHT, y: bottom + 32, "text-anchor": "end", class: "soft" }, "step");
    const middle = (TOP + bottom) / 2;
    draw(svg, "text", { x: 12, y: middle, "text-anchor": "middle", class: "soft",
      transform: `rotate(-90 12 ${middle})` }, ylabel);
  }

  function curve({ points, color, dashed }, toY) {
    const at = (values) => points.x.map((x, i) => `${toX(x).toFixed(1)} ${toY(values[i]).toFixed(1)}`);
    if (points.low) {
      const band = [...at(points.high), ...at(points.low).reverse()];
      draw(svg, "path", { d: `M${band.join("L")}Z`, fill: color, opacity: 0.25 });
    }
    draw(svg, "path", { d: `M${at(points.mean).join("L")}`, fill: "none", stroke: color,
      "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": dashed ? "6 4" : "none" });
    if (points.x.length < 40) {
      points.x.forEach((x, i) => draw(svg, "circle", { cx: toX(x), cy: toY(points.mean[i]), r: 2.5, fill: color }));
    }
  }

  // Restarts that are too close for two labels share one.
  function restarts(first, last) {
    const groups = [];
    for (const { number: name, step } of marks) {
      if (step < first || step > last) continue;
      draw(svg, "line", { class: "mark", x1: toX(step), x2: toX(step), y1: TOP, y2: bottom });
      const near = groups[groups.length - 1];
      if (near && toX(step) - near.x < 34) near.names.push(name);
      else groups.push({ x: toX(step), names: [name] });
    }
    for (const { x, names } of groups) {
      const text = names.length === 1 ? names[0] : `${names[0]}–${names[names.length - 1]}`;
      draw(svg, "text", { class: "number", x, y: TOP - 6, "text-anchor": "middle" }, text);
    }
  }

  function readout() {
    svg.querySelector(".readout")?.remove();
    if (pointer === null || !toX) return;
    const group = draw(svg, "g", { class: "readout" });
    const wanted = fromX(pointer);
    const found = lines.map((line) => {
      const at = line.points.x.reduce((best, x, i, all) =>
        (Math.abs(x - wanted) < Math.abs(all[best] - wanted) ? i : best), 0);
      return { ...line, step: line.points.x[at], value: line.points.mean[at] };
    });
    const step = found[0].step;
    draw(group, "line", { class: "at", x1: toX(step), x2: toX(step), y1: TOP, y2: bottom });
    setText(caption, `Step ${number(step)}: ${found.map((f) => `${f.name} ${number(f.value)}`).join(", ")}`);
  }

  function renew() {
    svg.replaceChildren();
    const [first, last, low, high] = range();
    toX = (x) => LEFT + ((x - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
    fromX = (x) => first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
    const toY = (y) => bottom - ((y - low) / (high - low)) * (bottom - TOP);
    axes(first, last, low, high, toY);
    for (const line of lines) curve(line, toY);
    restarts(first, last);
    const thin = lines.some(({ points }) => points.low);
    setText(caption, thin ? "Line: mean of equal intervals of steps; band: smallest to largest." : "");
    readout();
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    pointer = Math.min(WIDTH - RIGHT, Math.max(LEFT, ((event.clientX - box.left) / box.width) * WIDTH));
    readout();
  });
  svg.addEventListener("pointerleave", () => { pointer = null; if (lines.length) renew(); });

  return {
    node,
    show(newLines, newMarks = []) {
      lines = newLines.filter(({ points }) => points.x.length);
      marks = newMarks;
      node.hidden = !lines.length;
      legend.replaceChildren(...(lines.length < 2 ? [] : lines.map(({ name, color, dashed }) =>
        el("span", {}, sample(color, dashed), name))));
      if (lines.length) renew();
    },
  };
}

// Time of each rank by phase, as bars.
function phaseBars() {
  const heading = el("h3"), legend = el("div", { class: "legend" }), caption = el("figcaption");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const node = el("figure", { hidden: "" }, heading, legend, svg, caption);
  return {
    node,
    show(window) {
      node.hidden = !window;
      if (!window) return;
      const row = 26, left = 150, right = 190, top = 4, bottom = top + row * window.ranks.length;
      setText(heading, `Time per rank and phase (steps ${count(window.step - window.steps + 1)} to ${count(window.step)})`);
      setText(caption, window.all_ranks > window.ranks.length
        ? `The ${window.ranks.length} with the lowest scores of ${count(window.all_ranks)} ranks.`
        : "Score: shortest compute time of all ranks / this rank's compute time; 1 is the fastest.");
      const longest = Math.max(...window.ranks.map(({ milliseconds }) => milliseconds.reduce((a, b) => a + b, 0)), 1e-9);
      const toX = (ms) => left + (ms / longest) * (WIDTH - left - right);
      svg.setAttribute("viewBox", `0 0 ${WIDTH} ${bottom + 36}`);
      svg.replaceChildren();
      const used = window.phases.filter((_, at) => window.ranks.some((r) => r.milliseconds[at] > longest * 1e-3));
      legend.replaceChildren(...used.map((name) => el("span", {}, sample(PHASES[name] ?? "#8a8a8a"), name)));
      for (const x of ticks(0, longest, 6)) {
        draw(svg, "line", { class: "grid", x1: toX(x), x2: toX(x), y1: top, y2: bottom });
        draw(svg, "text", { x: toX(x), y: bottom + 16, "text-anchor": "middle" }, number(x, 10));
      }
      draw(svg, "text", { x: WIDTH - right, y: bottom + 32, "text-anchor": "end", class: "soft" }, "ms/step");
      window.ranks.forEach((rank, at) => {
        const y = top + at * row, host = rank.host.length > 12 ? rank.host.slice(0, 11) + "…" : rank.host;
        draw(svg, "text", { x: left - 8, y: y + 17, "text-anchor": "end" }, `${host}  rank ${rank.rank}`);
        let sum = 0;
        rank.milliseconds.forEach((ms, phase) => {
          const bar = draw(svg, "rect", { x: toX(sum), y: y + 3, height: row - 7, width: toX(sum + ms) - toX(sum),
            fill: PHASES[window.phases[phase]] ?? "#8a8a8a" });
          draw(bar, "title", {}, `${window.phases[phase]}: ${number(ms)} ms`);
          sum += ms;
        });
        const memory = rank.device_memory_bytes || rank.host_memory_bytes;
        draw(svg, "text", { x: WIDTH - right + 12, y: y + 17 }, `score ${rank.score.toFixed(2)}   ${memory ? bytes(memory) : ""}`);
      });
    },
  };
}

// --- views: each has a node, the addresses that it requests, and a handler of the responses ---------

function listView() {
  const COLUMNS = [
    ["run", (run) => run.name, "words"], ["state", (run) => run.state, "words"],
    ["task", (run) => run.task ?? UNKNOWN, "words"], ["step", (run) => run.step, "", steps],
    ["loss", (run) => run.loss], ["samples/s", (run) => run.samples_per_second],
    ["ranks", (run) => run.ranks], ["restarts", (run) => run.restarts],
    ["last step", (run) => run.age_seconds, "", (run) => (known(run.age_seconds) ? `${seconds(run.age_seconds)} ago` : UNKNOWN)],
  ];
  const filter = el("input", { type: "search", placeholder: "filter: name, state, task", "aria-label": "filter" });
  const compare = el("a", { class: "off" }, "compare"), shown = el("span", { class: "note" });
  const body = el("tbody"), heads = COLUMNS.map(([name, , kind]) => {
    const button = el("button", { type: "button" }, name);
    return el("th", kind ? { class: kind } : {}, button);
  });
  const node = el("div", {}, el("h1", {}, "Runs"), el("div", { class: "tools" }, filter, compare, shown),
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, el("th"), ...heads)), body)));
  const rows = new Map(), marked = new Set();
  let runs = [], by = 8, falling = false;

  function makeRow(run) {
    const box = el("input", { type: "checkbox", "aria-label": `compare ${run.name}` });
    box.addEventListener("change", () => { marked[box.checked ? "add" : "delete"](run.name); renew(); });
    const cells = COLUMNS.map(([name, , kind]) => el("td", kind ? { class: name === "run" ? "words name" : kind } : {}));
    cells[0].append(el("a", { href: link([run.name]) }, run.name));
    return { row: el("tr", {}, el("td", {}, box), ...cells), cells };
  }

  function order(a, b) {
    const [x, y] = [COLUMNS[by][1](a), COLUMNS[by][1](b)];
    if (!known(x) || !known(y)) return known(y) - known(x);
    const found = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (falling ? -found : found) || a.name.localeCompare(b.name);
  }

  function renew() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = runs.filter((run) => {
      const text = `${run.name} ${run.state} ${run.task ?? ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    }).sort(order);
    for (const name of [...rows.keys()]) if (!runs.some((run) => run.name === name)) { rows.delete(name); marked.delete(name); }
    const sorted = wanted.map((run) => {
      if (!rows.has(run.name)) rows.set(run.name, makeRow(run));
      const { row, cells } = rows.get(run.name);
      COLUMNS.forEach(([, value, , text], at) => {
        if (at === 0) return;
        setText(cells[at], text ? text(run) : typeof value(run) === "string" ? value(run) : number(value(run)));
      });
      cells[1].className = `words ${stateClass(run.state)}`;
      return row;
    });
    // Only if the order has changed: a row that moves loses the keyboard focus.
    if (sorted.length !== body.children.length || sorted.some((row, at) => row !== body.children[at])) {
      const focused = document.activeElement;
      body.replaceChildren(...sorted);
      if (body.contains(focused)) focused.focus();
    }
    heads.forEach((head, at) => {
      if (at === by) head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    setText(shown, wanted.length === runs.length ? plural(runs.length, "run") : `${wanted.length} of ${plural(runs.length, "run")}`);
    setText(compare, marked.size > 1 ? `compare ${marked.size} runs` : "select two or more to compare them");
    compare.className = marked.size > 1 ? "" : "off";
    if (marked.size > 1) compare.href = link([...marked]); else compare.removeAttribute("href");
  }

  heads.forEach((head, at) => head.firstChild.addEventListener("click", () => {
    falling = at === by ? !falling : false;
    by = at;
    renew();
  }));
  filter.addEventListener("input", renew);
  return { node, title: "Runs", paths: ["api/runs"], show([found]) { runs = found.runs ?? runs; renew(); } };
}

function runView(name) {
  const headline = el("p", { class: "headline" }), tiles = el("div", { class: "tiles" });
  const notes = el("ul", { class: "notes" }), restarts = el("section");
  const charts = {
    loss: chart("Loss", "loss", false), speed: chart("Throughput", "samples per second", true, 180),
    time: chart("Step time", "ms/step", true, 180),
    exposed: chart("Exposed communication", "% of the ranks' time", true, 180),
    score: chart("Straggler score of the slowest rank", "score", true, 180),
  };
  const bars = phaseBars();
  const node = el("div", {}, el("nav", {}, el("a", { href: "./" }, "all runs"),
    el("a", { href: `report?name=${encodeURIComponent(name)}`, target: "_blank" }, "full report")),
  el("h1", {}, name), headline, tiles, notes, restarts, charts.loss.node, charts.speed.node, charts.time.node,
  bars.node, charts.exposed.node, charts.score.node);
  const scaled = (points, by) => Object.fromEntries(Object.entries(points).map(([key, values]) =>
    [key, key === "x" || key === "width" ? values : values.map((value) => value * by)]));

  function tile(label, value, note = "") {
    return el("div", { class: "tile" }, el("div", { class: "label" }, label),
      el("div", { class: "value" }, value), el("div", { class: "note" }, note));
  }

  function showTiles(run) {
    const { loss: validation, ...others } = run.validation;
    const measured = Object.entries(others).map(([key, value]) => `${key.replaceAll("_", " ")} ${number(value)}`);
    const lost = run.restarted.filter(({ cause }) => cause === "failure").length;
    tiles.replaceChildren(
      tile("Step", steps(run), known(run.age_seconds) ? `last one ${seconds(run.age_seconds)} ago` : ""),
      tile("Loss", number(run.loss), known(validation) ? [`validation ${number(validation)}`, ...measured].join(", ") : "no validation"),
      tile("Throughput", known(run.samples_per_second) ? `${number(run.samples_per_second)} samples/s` : UNKNOWN, "last step"),
      tile("Ranks", number(run.ranks), run.hosts ? `on ${plural(run.hosts, "host")}` : ""),
      tile("Restarts", count(run.restarts), lost ? `${lost} after a failure` : ""),
      tile("Checkpoints", count(run.checkpoints), known(run.saved_step) ? `last after step ${count(run.saved_step)}` : ""),
    );
  }

  function showNotes(run) {
    const messages = run.named_slow.map(({ rank, host, phase, step }) =>
      el("li", { class: "warning" }, `Rank ${number(rank)} on ${host} is slow in ${phase} since step ${count(step)}.`));
    if (run.unread_bytes) messages.push(el("li", {}, `Reading the files of the run: ${bytes(run.unread_bytes)} left.`));
    if (run.torn) messages.push(el("li", {}, `${plural(run.torn, "incomplete line")} skipped in metrics.jsonl (left by a crash).`));
    if (!run.window) messages.push(el("li", {}, "ranks.jsonl has no lines yet: the times of the phases are unknown."));
    notes.replaceChildren(...messages);
  }

  function showRestarts(run) {
    const rows = run.restarted.map((r) => [String(r.number), `${CAUSES[r.cause] ?? r.cause} (state from ${r.source})`,
      count(r.step), `${number(r.ranks_before)} → ${number(r.ranks_after)}`, seconds(r.seconds),
      known(r.time) ? new Date(r.time * 1e3).toISOString().slice(0, 19).replace("T", " ") : UNKNOWN]).reverse();
    restarts.replaceChildren(...(rows.length ? [el("h2", {}, "Restarts"),
      table(["restart", "cause", "after step", "ranks", "start took", "at (UTC)"], rows, 2)] : []));
  }

  function show([run]) {
    if (run.problem) return;
    headline.replaceChildren(el("strong", { class: stateClass(run.state) }, run.state), run.task ? `, ${run.task}` : "",
      run.state === "killed" ? ", or its host is gone." : "");
    showTiles(run);
    showNotes(run);
    showRestarts(run);
    const { series } = run, marks = run.restarted.filter(({ step }) => known(step));
    const line = (label, points, color) => ({ name: label, points, color });
    charts.loss.show([line("training", series.loss, COLORS[0]), line("validation", series.validation_loss, COLORS[1])], marks);
    charts.speed.show([line("samples/s", series.samples_per_second, COLORS[2])], marks);
    charts.time.show([line("ms", scaled(series.step_seconds, 1e3), COLORS[0])], marks);
    charts.exposed.show([line("%", scaled(series.exposed, 100), COLORS[4])], marks);
    charts.score.show([line("score", series.score, COLORS[3])], marks);
    bars.show(run.window);
  }
  return { node, title: name, paths: [`api/run?name=${encodeURIComponent(name)}`], show };
}

function compareView(names) {
  const charts = {
    loss: chart("Training loss", "loss", false, 300), validation_loss: chart("Validation loss", "loss", false),
    samples_per_second: chart("Throughput", "samples per second", true),
  };
  const summary = el("section", { class: "compare" });
  const node = el("div", {}, el("nav", {}, el("a", { href: "./" }, "all runs")), el("h1", {}, `${names.length} runs`),
    summary, ...Object.values(charts).map((one) => one.node));
  const last = new Map();

  function show(answers) {
    answers.forEach((run, at) => { if (!run.problem) last.set(names[at], run); });
    const known_ = names.filter((name) => last.has(name)).map((name) => last.get(name));
    const style = (name) => {
      const at = names.indexOf(name);
      return { color: COLORS[at % COLORS.length], dashed: at >= COLORS.length };
    };
    summary.replaceChildren(table(["run", "state", "step", "loss", "validation loss", "samples/s", "ranks", "restarts"],
      known_.map((run) => [
        el("span", {}, el("span", { class: "legend" }, el("span", {}, sample(style(run.name).color, style(run.name).dashed),
          el("a", { href: link([run.name]) }, run.name)))),
        el("span", { class: stateClass(run.state) }, run.state), steps(run), number(run.loss),
        number(run.validation.loss), number(run.samples_per_second), number(run.ranks), count(run.restarts),
      ]), 2));
    for (const [key, one] of Object.entries(charts)) {
      one.show(known_.map((run) => ({ name: run.name, points: run.series[key], ...style(run.name) })));
    }
  }
  return { node, title: `${names.length} runs`, paths: names.map((name) => `api/run?name=${encodeURIComponent(name)}`), show };
}

// --- the clock ------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10000), cache: "no-store" });
  if (!answer.headers.get("Content-Type")?.startsWith("application/json")) throw new Error(await answer.text());
  return answer.json();
}

async function watch(view) {
  const problem = document.getElementById("problem");
  let before = "", unread = 0;
  try {
    const answers = await Promise.all(view.paths.map(ask));
    const problems = [...new Set(answers.map((found) => found.problem).filter(Boolean))];
    setText(problem, problems.length ? `${problems.join("; ")}; the page shows earlier data.` : "");
    before = JSON.stringify(answers);
    unread = Math.max(0, ...answers.map((found) => found.unread_bytes ?? 0));
    if (before !== view.before) view.show(answers);
    view.before = before;
  } catch (error) {
    const why = error instanceof TypeError || error.name === "TimeoutError" ? "the server does not respond" : error.message.trim();
    setText(problem, `${why}; the page shows earlier data and retries.`);
  }
  problem.hidden = !problem.textContent;
  setTimeout(() => watch(view), unread ? 50 : EVERY);
}

const chosen = new URLSearchParams(location.search).getAll("run");
const view = chosen.length === 0 ? listView() : chosen.length === 1 ? runView(chosen[0]) : compareView([...new Set(chosen)]);
document.title = `${view.title} – hvdtrain`;
document.getElementById("view").append(view.node);
watch(view);
