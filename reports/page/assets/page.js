"use strict";
// Text of captures only ever becomes the text of a node or an attribute's value: nothing here builds markup of it.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const cells = read("cells"), figures = read("figures"), meanings = read("meanings"), charts = read("charts");
  const siteMeanings = read("site-meanings");
  const byId = (id) => document.getElementById(id);
  const nodes = new Map([...document.querySelectorAll("td.cell")].map((node) => [Number(node.dataset.cell), node]));
  const details = byId("details");
  let chosen = null;

  // The map: another figure, and a chosen cell.
  function show(figure) {
    byId("meaning").textContent = meanings[figure];
    for (const [number, node] of nodes) {
      const cell = cells[number], shade = cell.shades[figure];
      if (shade === null) node.style.removeProperty("--shade");
      else node.style.setProperty("--shade", shade);
      node.classList.toggle("deep", (shade ?? 0) >= 0.5);
      node.querySelector("span").textContent = cell.words[figure];
      node.setAttribute("aria-label", `${cell.place}, ${cell.status}, ${cell.told[figure]}`);
    }
  }

  function fill(list, facts) {
    list.replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      pair.append(term, text);
      if (value.length > 60) pair.className = "long";
      return pair;
    }));
  }

  function open(node) {
    const cell = cells[Number(node.dataset.cell)];
    chosen?.removeAttribute("aria-selected");
    chosen = node;
    node.setAttribute("aria-selected", "true");
    byId("details-place").textContent = `${cell.place}: ${cell.status}`;
    byId("details-meaning").textContent = siteMeanings[cell.site] ?? "";
    byId("details-reason").textContent = cell.reason;
    const errors = byId(`errors-${cell.anchor}`);
    byId("details-errors").parentElement.hidden = !errors;
    if (errors) byId("details-errors").href = `#errors-${cell.anchor}`;
    fill(byId("details-facts"), [...figures.map((title, place) => [title, cell.words[place]]), ...cell.facts]);
    details.hidden = false;
    // The panel sticks to the lower end of the window: a cell behind it moves up.
    const covered = node.getBoundingClientRect().bottom + 8 - details.getBoundingClientRect().top;
    if (covered > 0) scrollBy(0, covered);
  }

  function close() {
    details.hidden = true;
    chosen?.removeAttribute("aria-selected");
    chosen?.focus();
    chosen = null;
  }

  function move(node, key) {
    const row = node.parentElement, rows = [...row.parentElement.rows];
    const tables = [...document.querySelectorAll("table.map")];
    const rowOf = (offset) => {
      const next = rows[rows.indexOf(row) + offset];
      if (next) return next;
      const table = tables[tables.indexOf(row.closest("table")) + Math.sign(offset)];
      return table && (offset > 0 ? table.tBodies[0].rows[0] : [...table.tBodies[0].rows].at(-1));
    };
    const along = [...row.querySelectorAll("td.cell")], place = along.indexOf(node);
    const at = (target) => {
      const there = target ? [...target.querySelectorAll("td.cell")] : [];
      return there.find((one) => one.cellIndex >= node.cellIndex) ?? there.at(-1);
    };
    const next = {
      ArrowRight: () => along[place + 1], ArrowLeft: () => along[place - 1],
      ArrowDown: () => at(rowOf(1)), ArrowUp: () => at(rowOf(-1)),
      Home: () => along[0], End: () => along.at(-1),
      PageDown: () => at(rows.at(-1)), PageUp: () => at(rows[0]),
    }[key]?.();
    if (!next) return;
    for (const one of nodes.values()) one.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    if (!details.hidden) open(next);
  }

  const begin = document.querySelector("td.cell.blamed") ?? document.querySelector("td.cell");
  if (begin) begin.tabIndex = 0;
  for (const node of nodes.values()) {
    node.addEventListener("click", () => { node.focus(); open(node); });
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") open(node);
      else if (/^(Arrow|Home|End|Page)/.test(event.key)) move(node, event.key);
      else return;
      event.preventDefault();
    });
  }
  byId("figure").addEventListener("change", (event) => show(Number(event.target.value)));
  byId("close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !details.hidden) close(); });
  for (const link of document.querySelectorAll("a.to-cell")) {
    link.addEventListener("click", (event) => {
      const node = byId(link.getAttribute("href").slice(1));
      if (!node) return;
      event.preventDefault();
      node.scrollIntoView({ block: "center" });
      node.focus();
      open(node);
    });
  }

  // The meaning of a word, on hover and on focus: below it, or above it at the lower end, and never beyond the window.
  const tip = byId("tip");
  let told = null;
  function explain(node) {
    if (node === told) return;
    told?.removeAttribute("aria-describedby");
    told = node;
    tip.hidden = !node;
    if (!node) return;
    tip.textContent = node.dataset.tip;
    node.setAttribute("aria-describedby", "tip");
    const word = node.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const below = word.bottom + 4 + box.height <= innerHeight;
    tip.style.left = `${Math.max(8, Math.min(word.left, document.documentElement.clientWidth - box.width - 8))}px`;
    tip.style.top = `${below ? word.bottom + 4 : Math.max(8, word.top - box.height - 4)}px`;
  }
  const explained = (event) => explain(event.target.closest?.("[data-tip]") ?? null);
  document.addEventListener("mouseover", explained);
  document.addEventListener("focusin", explained);
  document.addEventListener("focusout", () => explain(null));
  document.addEventListener("scroll", () => explain(null), { capture: true, passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") explain(null); });

  // Commands to copy. Without the clipboard (an old browser, a file of a foreign origin) the command is selected.
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.parentElement.querySelector("code"));
        button.textContent = "Press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // Charts: those in view first, then the others one by one, so that the page answers from the start.
  const waiting = new Set(document.querySelectorAll("[data-chart]"));
  const options = { actions: false, renderer: "svg", ast: true, hover: false, tooltip: { theme: "mm2" } };
  async function draw(node) {
    if (!waiting.delete(node)) return;
    try {
      await vegaEmbed(node, charts[node.dataset.chart], options);
    } catch (error) {
      node.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  }
  async function drawAll() {
    for (const node of [...waiting]) {
      await draw(node);
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.drawn = "all";
  }
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); draw(entry.target); }
  });
  for (const node of waiting) watch.observe(node);
  requestAnimationFrame(() => setTimeout(drawAll));
})();
