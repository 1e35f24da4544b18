"use strict";
// Shows a page of report/page.py: texts, tables, and charts drawn by uPlot.
// Text is inserted only as text nodes and attributes, never as markup: runs may contain any text.

const NARROW = 600; // pixels
const FEW = 40; // points: drawn as dots
const theme = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (index) => css(`--color-${index}`);
const known = (value) => value !== null && value !== undefined;

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9 || (size && size < 1e-4)) return String(Number(value.toPrecision(3)).toExponential());
  return (size >= 1e4 ? Math.round(value) : Number(value.toPrecision(digits))).toLocaleString("en", { maximumFractionDigits: 10 });
}

function duration(seconds) {
  const whole = Math.round(seconds), pad = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (whole < 60) return `${Number(seconds.toPrecision(3))} s`;
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

function size(bytes) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(bytes) / 10)));
  return `${number(bytes / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// y at x, on the line through points in order of x.
function interpolate(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  const width = xs[high] - xs[low];
  return width > 0 ? ys[low] + ((x - xs[low]) / width) * (ys[high] - ys[low]) : ys[high];
}

// Moving average whose weights fall exponentially; the first values are not biased.
function smoothed(values, weight) {
  let sum = 0, whole = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    sum = sum * weight + value * (1 - weight);
    whole = whole * weight + 1 - weight;
    return sum / whole;
  });
}

// --- charts ---------------------------------------------------------------------

// A plot of uPlot in a box. `shared` is the state of the page: time, smoothing, clocks, marks. A plot
// below another is small and has its x axis.
function makePlot(shared, above) {
  const box = el("div", { class: "plot" });
  const small = Boolean(above);
  let spec = null, plot = null, shape = "", log = null, time = false;
  const kind = () => (spec.labels ? bars : spec.cells ? heat : curves);
  const overSteps = () => (spec.x ?? "step") === "step" && !spec.labels;
  const inTime = () => spec.x === "seconds" || (shared.time && overSteps());
  const toX = (run, step) => {
    const clock = shared.clocks[run];
    return shared.time && overSteps() && clock?.step.length ? interpolate(clock.step, clock.seconds, step) : step;
  };
  const isLog = (axis) => (axis === "y" && log !== null ? log : (spec.log ?? "").includes(axis));

  function axis(text, values, more = {}) {
    return {
      stroke: () => css("--soft"), font: "12px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: () => css("--line"), width: 1 }, values: (u, found) => found.map((v) => (known(v) ? values(v) : "")),
      ...(text ? { label: text, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" } : {}), ...more,
    };
  }

  const xText = (x) => (inTime() ? duration(x) : spec.x === "bytes" ? size(x) : number(overSteps() ? Math.round(x) : x, 10));

  function xAxis() {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    const incrs = inTime() ? { incrs: [0.1, 0.2, 0.5, ...steps, ...[2, 7, 14, 30, 90].map((days) => days * 86400)] }
      : overSteps() ? { incrs: [1, 2, 5].flatMap((d) => [...Array(16).keys()].map((p) => d * 10 ** p)).sort((a, b) => a - b) } : {};
    return axis(inTime() || overSteps() ? "" : spec.x, xText, { space: 60, size: 26, ...incrs });
  }

  // Restarts: a line at each; those that are too close share a label.
  function drawMarks(u) {
    if (!overSteps() && spec.x !== "seconds") return;
    const { ctx, bbox } = u, unit = uPlot.pxRatio, groups = [];
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("mark");
    ctx.lineWidth = 1.2 * unit;
    ctx.setLineDash([4 * unit, 3 * unit]);
    ctx.font = `600 ${11 * unit}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    for (const mark of shared.marks) {
      const at = u.valToPos(inTime() ? mark.at_seconds : mark.step, "x", true);
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      const near = groups[groups.length - 1];
      if (near && at - near.at < 26 * unit) near.last = mark.number;
      else groups.push({ at, first: mark.number, last: mark.number });
    }
    for (const { at, first, last } of small ? [] : groups) {
      ctx.fillText(first === last ? first : `${first}–${last}`, at, bbox.top - 2 * unit);
    }
    ctx.restore();
  }

  function curves() {
    const tables = [], series = [{ label: inTime() ? "time" : overSteps() ? "step" : spec.x,
      value: (u, v) => (known(v) ? xText(v) : "last") }];
    const bands = [], most = Math.max(...spec.series.map(({ x }) => x.length));
    for (const line of spec.series) {
      const stroke = color(line.color), soft = shared.smooth > 0 && Boolean(line.noisy) && overSteps();
      const few = line.x.length < (soft ? 2 : FEW);
      // Each line is averaged over about the same steps, so the one with fewer points over fewer of them.
      const columns = [soft ? smoothed(line.y, shared.smooth ** (most / line.x.length)) : line.y];
      series.push({ label: line.name, stroke, width: line.dots ? 0 : 1.75, dash: line.dash ? [6, 4] : [],
        points: { show: few || Boolean(line.dots), size: 5, fill: stroke, width: 0 },
        // Without a cursor the legend shows the last values.
        value: (u, v, at, i) => number(i === null ? u.data[at].findLast(known) : v) });
      const helper = (more) => series.push({ label: "", class: "helper", points: { show: false }, width: 0, ...more });
      if (soft) { columns.push(line.y); helper({ stroke: `${stroke}59`, width: 1 }); }
      if (line.low) {
        columns.push(line.high, line.low);
        helper({});
        helper({});
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}33` });
      }
      tables.push([line.x.map((x) => toX(line.run, x)), ...columns]);
    }
    if (above?.plot) {
      const xs = above.plot.data[0];
      tables.push([[xs[0], xs[xs.length - 1]], [null, null]]);
      series.push({ label: "", class: "helper", points: { show: false } });
    }
    return { data: uPlot.join(tables), series, bands };
  }

  // One bar for each rank, of its phases.
  function bars() {
    const ends = [], rows = spec.labels.map((_, at) => at), mean = (ys) => ys.reduce((a, b) => a + b, 0) / ys.length;
    const drawn = spec.series.map(({ name, color: index, y }, phase) => {
      const begin = phase ? ends[phase - 1] : rows.map(() => 0), end = begin.map((x, at) => x + y[at]);
      ends.push(end);
      const disp = { y0: { unit: 1, values: () => begin }, y1: { unit: 1, values: () => end } };
      return { label: name, fill: color(index), stroke: color(index), width: 0, points: { show: false },
        paths: uPlot.paths.bars({ size: [0.72, 26], disp }), value: (u, v, _, i) => `${number(i === null ? mean(y) : y[i], 3)} ms` };
    });
    return { data: [rows, ...spec.series.map(({ y }) => y)], bands: [], most: Math.max(...(ends.pop() ?? [1])),
      series: [{ label: "rank", value: (u, v) => (known(v) ? spec.labels[v] : "mean") }, ...drawn] };
  }

  // Cells are drawn by a hook; the legend shows the lowest value under the cursor.
  function heat() {
    const { cells, left, right } = spec, count = cells[0].length, width = (right - left) / count;
    const lowest = cells[0].map((_, at) => cells.reduce((low, row) => (known(row[at]) ? Math.min(low, row[at]) : low), 100));
    const where = (at) => cells.findIndex((row) => row[at] === lowest[at]) * spec.per_row;
    return { data: [lowest.map((_, at) => toX(0, left + (at + 0.5) * width)), lowest.map((v) => v / 100)], bands: [],
      series: [{ label: inTime() ? "time" : "step", value: (u, v) => (known(v) ? xText(v) : "all") },
        { label: "lowest score", scale: "score", width: 0, points: { show: false }, stroke: color(3),
          value: (u, v, _, i) => (i === null ? number(Math.min(...lowest) / 100) : `${number(v)} (rank ${where(i)})`) }] };
  }

  function drawCells(u) {
    const { cells, left, right } = spec, width = (right - left) / cells[0].length, base = css("--heat");
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    const edge = (at) => Math.round(u.valToPos(toX(0, left + at * width), "x", true));
    const row = (at) => Math.round(u.valToPos(at * spec.per_row - 0.5, "y", true));
    cells.forEach((values, y) => values.forEach((value, x) => {
      if (!known(value)) return;
      u.ctx.fillStyle = `rgb(${base} / ${Math.min(1, 0.04 + 1.5 * (1 - value / 100)).toFixed(2)})`;
      u.ctx.fillRect(edge(x), row(y), Math.max(1, edge(x + 1) - edge(x)), Math.max(1, row(y + 1) - row(y)));
    }));
    u.ctx.restore();
  }

  // The point of a line whose value the legend shows: its last one up to the cursor's step. None (an unknown
  // value) before the first point of the line and after its last one.
  function shownPoint(u, at, index) {
    const ys = u.data[at];
    let [earlier, later] = [index, index];
    while (earlier > 0 && ys[earlier] === undefined) earlier--;
    while (later < ys.length && ys[later] === undefined) later++;
    return later < ys.length ? earlier : index;
  }

  function options(series, bands, most) {
    const make = kind(), count = spec.labels?.length ?? (spec.cells?.length ?? 0) * (spec.per_row ?? 1);
    const height = make === bars ? 44 + Math.max(1, count) * Math.max(12, Math.min(34, 600 / count))
      : make === heat ? Math.max(130, Math.min(360, 60 + 12 * spec.cells.length)) : small ? 110 : innerWidth < NARROW ? 210 : 250;
    const onRanks = { range: (u, low, high) => [-0.5, count - 0.5] };
    const digit = (value, round) => {
      const unit = 10 ** Math.floor(Math.log10(value));
      return Number((round(value / unit) * unit).toPrecision(1));
    };
    const yRange = (u, low, high) => {
      if (!known(low)) return [0, 1];
      // Within a decade, uPlot's range up to the next power of ten would leave half of the plot empty.
      const narrow = low > 0 && low < high && high < 10 * low;
      if (isLog("y")) return narrow ? [digit(low, Math.floor), digit(high, Math.ceil)] : uPlot.rangeLog(low, high, 10, false);
      return uPlot.rangeNum(spec.zero ? Math.min(0, low) : low, high, 0.08, true);
    };
    const labels = (v) => (Number.isInteger(v) ? spec.labels?.[v] ?? String(v) : "");
    const wide = (u, texts) => {
      u.ctx.font = u.axes[1].font[0];
      return Math.max(58, ...(texts ?? []).map((text) => 10 + u.ctx.measureText(text).width / uPlot.pxRatio));
    };
    const shortened = (v) => (labels(v).length > 14 ? `${labels(v).slice(0, 13)}…` : labels(v));
    const common = { series, bands, width: box.clientWidth || 320, height, padding: [make === bars ? 4 : 18, 26, 0, 0],
      legend: { markers: { width: 2, stroke: (u, at) => series[at].stroke ?? null, fill: (u, at) => series[at].fill ?? null } },
      cursor: { y: false, points: { size: 7 }, dataIdx: shownPoint, ...(overSteps() ? { sync: { key: shared.key, scales: ["x", null] } } : {}) } };
    if (make === bars) {
      return { ...common, scales: { x: { time: false, ori: 1, dir: -1, ...onRanks }, y: { ori: 0, range: () => [0, most || 1] } },
        axes: [axis("", shortened, { side: 3, grid: { show: false }, incrs: [1, 2, 5, 10, 20], space: 14,
          size: 16 + 7 * Math.min(14, Math.max(4, ...spec.labels.map(({ length }) => length))) }),
          axis("", (v) => number(v, 10), { side: 2, size: 26, space: 60 })], cursor: { x: false, y: false, drag: { setScale: false } } };
    }
    // A line takes its band, and the recorded values below a smoothed line, with it.
    const follow = (u, at, { show }) => {
      for (let i = at + 1; known(show) && series[i]?.class === "helper"; i++) if (u.series[i].show !== show) u.setSeries(i, { show });
    };
    return { ...common, hooks: { drawClear: make === heat ? [drawCells] : [], draw: [drawMarks], setSeries: [follow] },
      scales: { x: { time: false, distr: isLog("x") ? 3 : 1, log: spec.x === "bytes" || spec.x === "ranks" ? 2 : 10 },
        y: make === heat ? { dir: -1, ...onRanks } : { distr: isLog("y") ? 3 : 1, range: yRange }, score: { range: [0, 1] } },
      axes: [xAxis(), axis("", make === heat ? labels : (v) => number(v, 10), { size: wide, space: make === heat || small ? 18 : 34,
        ...(make === heat ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000], grid: { show: false } } : {}) })] };
  }

  // A plot is made again only if its lines or axes have changed; its zoom is kept.
  function draw() {
    if (!spec || !box.offsetParent || box.closest("details:not([open])")) return;
    const { data, series, bands, most } = kind()();
    const now = JSON.stringify([series.map(({ label, stroke, class: name }) => [label, stroke, name]), log, spec.log, spec.labels]);
    const { min, max } = plot?.scales.x ?? {}, xs = plot?.data[0] ?? [];
    const zoomed = plot && inTime() === time && (min > xs[0] || max < xs[xs.length - 1]);
    if (plot && now === shape) {
      plot.setData(data, !zoomed);
    } else {
      destroy();
      shape = now;
      plot = new uPlot(options(series, bands, most), data, box);
    }
    time = inTime();
    if (zoomed) plot.setScale("x", { min, max });
  }

  function destroy() {
    plot?.destroy();
    plot = null;
  }

  new ResizeObserver(() => {
    if (plot && box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height });
    else if (!plot) draw();
  }).observe(box);

  function csv() {
    const cell = (value) => (/^[=+\-@]|[",\n]/.test(value) ? `"${/^[=+\-@]/.test(value) ? "'" : ""}${value.replaceAll('"', '""')}"` : value);
    const columns = spec.series.flatMap((line) => ["y", "low", "high"].filter((key) => line[key])
      .map((key) => ({ name: cell(key === "y" ? line.name : `${line.name}, ${key}`), run: line.run, x: line.x, y: line[key] })));
    const joined = uPlot.join(columns.map(({ x, y }) => [x, y]));
    return [[spec.x ?? "step", ...columns.map(({ name }) => name)], ...joined[0].map((x, at) =>
      [x, ...columns.map((_, column) => joined[column + 1][at] ?? "")])].map((row) => row.join(",")).join("\n") + "\n";
  }

  return {
    box, draw, csv,
    update(newSpec) { spec = newSpec; draw(); },
    redraw() { destroy(); draw(); },
    get log() { return isLog("y"); },
    toggleLog() { log = !isLog("y"); draw(); },
    get plot() { return plot; },
  };
}

// Whether a chart shows one value: it says nothing that its heading cannot say.
function constant({ series, labels }) {
  if (!series || labels) return null;
  const values = series.flatMap((line) => [line.y, line.low ?? [], line.high ?? []].flat()).filter(known);
  const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  return high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)) ? low : null;
}

function makeChart(shared) {
  const title = el("span", { class: "title" }), unit = el("span", { class: "note" });
  const note = el("p", { class: "result" }), caption = el("p", { class: "note" });
  const logs = el("button", { type: "button", "aria-pressed": "false", title: "logarithmic axis" }, "log");
  const save = el("button", { type: "button", title: "download the points of this chart" }, "CSV");
  const plots = [makePlot(shared, null)];
  plots.push(makePlot(shared, plots[0]));
  const below = el("p", { class: "note below" }, "difference");
  const node = el("details", { class: "chart" }, el("summary", {}, title, " ", unit),
    el("div", { class: "tools" }, logs, save), note, plots[0].box, below, plots[1].box, caption);
  let fold = null;
  logs.addEventListener("click", () => { plots[0].toggleLog(); logs.setAttribute("aria-pressed", plots[0].log); });
  save.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([plots[0].csv()], { type: "text/csv" }));
    const name = `${document.title.replace(" – hvdtrain", "")} ${title.textContent.toLowerCase()}.csv`;
    el("a", { href: url, download: name.replaceAll(" ", "-") }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
  node.addEventListener("toggle", () => plots.forEach((one) => one.draw()));
  return {
    node, plots,
    update(spec) {
      const value = constant(spec), folded = Boolean(spec.folded) || value !== null;
      title.textContent = spec.title;
      unit.textContent = [value === null ? "" : `constant: ${number(value)}`, spec.unit].filter(Boolean).join(" ");
      note.textContent = spec.note ?? "";
      caption.textContent = spec.caption ?? "";
      node.classList.toggle("wide", Boolean(spec.wide));
      if (fold !== folded) { node.open = !folded; fold = folded; }
      const least = spec.series?.flatMap((line) => line.low ?? line.y).reduce((a, b) => (known(b) ? Math.min(a, b) : a), Infinity);
      logs.hidden = Boolean(spec.labels || spec.cells) || !(least > 0);
      save.hidden = !spec.series || Boolean(spec.labels);
      const apart = spec.difference?.series.length ? spec.difference : null;
      const same = apart && constant(apart);
      const at = new Set(apart?.series.flatMap(({ x }) => x)), [only] = at.size === 1 ? at : [];
      below.textContent = `difference at ${known(only) ? `step ${number(only, 10)}` : "equal steps"}`
        + (known(same) ? `: ${known(only) ? "" : "constant "}${number(same)}` : "");
      below.hidden = !apart;
      plots[1].box.hidden = !apart || known(same);
      plots[0].update(spec);
      logs.setAttribute("aria-pressed", plots[0].log);
      if (apart) plots[1].update(apart);
    },
  };
}

// --- pages ----------------------------------------------------------------------

function table({ title, head, rows, note, words }) {
  const row = (tag) => (cells) => el("tr", {}, ...cells.map((cell, at) => el(tag, at < words ? { class: "words" } : {}, cell)));
  return el("section", {}, el("h2", {}, title),
    ...(rows.length ? [el("div", { class: "scroll" }, el("table", {},
      ...(head.length ? [el("thead", {}, row("th")(head))] : []), el("tbody", {}, ...rows.map(row("td")))))] : []),
    ...(note ? [el("p", { class: "note" }, note)] : []));
}

// A part of a page that is made anew only if its content has changed.
function part(tag, attributes, make) {
  const node = el(tag, attributes);
  let before = "";
  return { node, update(content) {
    const now = JSON.stringify(content);
    if (now === before) return;
    before = now;
    node.replaceChildren(...make(content));
  } };
}

function makePage() {
  const shared = { key: uPlot.sync("steps").key, time: false, smooth: 0, clocks: [], marks: [] };
  const charts = new Map(), texts = new Map();
  const links = part("nav", {}, (found) => found.map(([text, href]) => el("a", { href }, text)));
  const head = part("header", {}, ({ title, headline, state, mood }) => [el("h1", {}, title),
    ...(state ? [el("p", { class: "headline" }, el("strong", { class: mood }, state), headline && ` · ${headline}`)]
      : headline.split("\n").filter(Boolean).map((line) => el("p", { class: "headline" }, line)))]);
  const tiles = part("div", { class: "tiles" }, (found) => found.map(({ label, value, note }) => el("div", { class: "tile" },
    el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "note" }, note))));
  const notes = part("ul", { class: "notes" }, (found) => found.map(({ text, warning }) => el("li", warning ? { class: "warning" } : {}, text)));
  const [first, last] = ["first", "last"].map((name) => part("div", { class: name }, (found) => found.map(table)));
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0" });
  const axis = el("select", {}, el("option", { value: "step" }, "step"), el("option", { value: "time" }, "time"));
  const tools = el("div", { class: "tools bar" }, el("label", {}, "x axis ", axis), el("label", {}, "smoothing ", slider),
    el("span", { class: "note hint" }, "Drag to zoom, double-click to reset."));
  const grid = el("div", { class: "charts" }), folded = el("div", { class: "texts" });
  const charted = el("div", {}, tools, grid);
  const node = el("div", {}, links.node, head.node, tiles.node, notes.node, first.node, charted, last.node, folded);
  const redraw = () => [...charts.values()].forEach(({ plots }) => plots.forEach((one) => one.redraw()));
  const draw = () => [...charts.values()].forEach(({ plots }) => plots.forEach((one) => one.draw()));
  axis.addEventListener("change", () => { shared.time = axis.value === "time"; redraw(); });
  slider.addEventListener("input", () => { shared.smooth = Number(slider.value); draw(); });
  theme.addEventListener("change", redraw);

  function text({ title, text: content, open, from_end: fromEnd }) {
    if (!texts.has(title)) {
      const shown = el("pre");
      const made = el("details", open ? { open: "" } : {}, el("summary", {}, el("span", { class: "title" }, title)), shown);
      if (fromEnd) made.addEventListener("toggle", () => shown.scrollTo(0, shown.scrollHeight));
      texts.set(title, shown);
      folded.append(made);
    }
    const shown = texts.get(title);
    if (shown.textContent === content) return;
    const atEnd = shown.scrollTop + shown.clientHeight > shown.scrollHeight - 2;
    shown.textContent = content;
    if (fromEnd && atEnd) shown.scrollTo(0, shown.scrollHeight);
  }

  return { node, update(page) {
    document.title = `${page.title} – hvdtrain`;
    Object.assign(shared, { clocks: page.clocks, marks: page.marks });
    links.update(page.links);
    head.update({ title: page.title, headline: page.headline, state: page.state, mood: page.mood });
    tiles.update(page.tiles);
    notes.update(page.notes);
    first.update(page.first);
    last.update(page.last);
    page.texts.forEach(text);
    tools.hidden = !page.charts.some((spec) => (spec.x ?? "step") === "step" && !spec.labels);
    axis.parentNode.hidden = !page.clocks.some(({ step }) => step.length > 1);
    page.charts.forEach((spec, at) => {
      if (!charts.has(spec.title)) charts.set(spec.title, makeChart(shared));
      const chart = charts.get(spec.title);
      if (grid.children[at] !== chart.node) grid.insertBefore(chart.node, grid.children[at] ?? null);
      chart.update(spec);
    });
    for (const [title, { node: unused }] of charts) {
      if (!page.charts.some((spec) => spec.title === title)) { unused.remove(); charts.delete(title); }
    }
  } };
}

const written = JSON.parse(document.getElementById("page").textContent);
if (written) {
  const shown = makePage();
  document.getElementById("view").append(shown.node);
  shown.update(written);
}
