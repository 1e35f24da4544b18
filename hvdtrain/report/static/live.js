"use strict";
// The web view: the list of runs (/), one run (/?run=A) or several (/?run=A&run=B), updated from the server.

const EVERY = 2000; // milliseconds between two updates
const plural = (value, thing) => `${value.toLocaleString("en")} ${thing}${value === 1 ? "" : "s"}`;
const link = (names) => "?" + names.map((name) => `run=${encodeURIComponent(name)}`).join("&");

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function makeList() {
  // The server sends a value to sort by and a text for each column.
  const filter = el("input", { type: "search", placeholder: "filter: name, state, task", "aria-label": "filter" });
  const compare = el("a", { class: "off" }), shown = el("span", { class: "note" });
  const head = el("tr"), body = el("tbody"), rows = new Map(), marked = new Set();
  const node = el("div", {}, el("h1", {}, "Runs"), el("div", { class: "tools bar" }, filter, compare, shown),
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, head), body)));
  let columns = [], runs = [], by = 0, falling = false;

  function makeHead() {
    head.replaceChildren(el("th"), ...columns.map(({ name, words }, at) => {
      const button = el("button", { type: "button" }, name);
      button.addEventListener("click", () => { falling = at === by ? !falling : false; by = at; renew(); });
      return el("th", words ? { class: "words" } : {}, button);
    }));
  }

  function makeRow(name) {
    const box = el("input", { type: "checkbox", "aria-label": `compare ${name}` });
    box.addEventListener("change", () => { marked[box.checked ? "add" : "delete"](name); renew(); });
    const cells = columns.map(({ words }) => el("td", words ? { class: "words" } : {}));
    cells[0].className = "words name";
    cells[0].append(el("a", { href: link([name]) }, name));
    return { row: el("tr", {}, el("td", {}, box), ...cells), cells };
  }

  function order({ cells: a }, { cells: b }) {
    const [x, y] = [a[by].value, b[by].value];
    if (!known(x) || !known(y)) return known(y) - known(x);
    const found = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (falling ? -found : found) || a[0].value.localeCompare(b[0].value);
  }

  function renew() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = runs.filter((run) => words.every((word) => run.words.includes(word))).sort(order);
    for (const name of [...rows.keys()]) if (!runs.some((run) => run.name === name)) { rows.delete(name); marked.delete(name); }
    const sorted = wanted.map((run) => {
      if (!rows.has(run.name)) rows.set(run.name, makeRow(run.name));
      const { row, cells } = rows.get(run.name);
      run.cells.forEach(({ text }, at) => { if (at) setText(cells[at], text); });
      cells[1].className = `words ${run.state}`;
      return row;
    });
    // Only if the order has changed: a row that moves loses the keyboard focus.
    if (sorted.length !== body.children.length || sorted.some((row, at) => row !== body.children[at])) {
      const focused = document.activeElement;
      body.replaceChildren(...sorted);
      if (body.contains(focused)) focused.focus();
    }
    [...head.children].slice(1).forEach((cell, at) => {
      if (at === by) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    setText(shown, wanted.length === runs.length ? plural(runs.length, "run") : `${wanted.length} of ${plural(runs.length, "run")}`);
    setText(compare, marked.size > 1 ? `compare ${marked.size} runs` : "select two or more to compare them");
    compare.className = marked.size > 1 ? "" : "off";
    if (marked.size > 1) compare.href = link([...marked]); else compare.removeAttribute("href");
  }

  filter.addEventListener("input", renew);
  return { node, update(found) {
    document.title = "Runs – hvdtrain";
    if (!columns.length) { [columns, by] = [found.columns, found.sort]; makeHead(); }
    runs = found.runs;
    renew();
  } };
}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10000), cache: "no-store" });
  if (!answer.headers.get("Content-Type")?.startsWith("application/json")) throw new Error(await answer.text());
  return answer.text();
}

async function watch(path, view) {
  const problem = el("p", { id: "problem", role: "alert", hidden: "" });
  document.body.prepend(problem);
  let before = "";
  for (;;) {
    let unread = 0;
    try {
      const now = await ask(path), found = JSON.parse(now);
      unread = found.unread_bytes ?? 0;
      setText(problem, found.problem ? `${found.problem}; the page shows earlier data.` : "");
      if (!found.problem && now !== before) view.update(found);
      before = now;
    } catch (error) {
      const why = error instanceof TypeError || error.name === "TimeoutError" ? "the server does not respond" : error.message.trim();
      setText(problem, `${why}; the page shows earlier data and retries.`);
    }
    problem.hidden = !problem.textContent;
    await new Promise((resume) => setTimeout(resume, unread ? 50 : EVERY));
  }
}

const names = [...new Set(new URLSearchParams(location.search).getAll("run"))];
const view = names.length ? makePage() : makeList();
document.getElementById("view").append(view.node);
watch(names.length ? `api/run?${names.map((name) => `name=${encodeURIComponent(name)}`).join("&")}` : "api/runs", view);
