"use strict";
// Draws the blocks of the page's JSON (reporting/page.py). Texts are set as text, never as HTML.
const shown = JSON.parse(document.getElementById("data").textContent);
const several = shown.runs.length > 1;

function el(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const color = (number) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--c${number % 8}`).trim();
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dot = (number) => {
  const made = el("i", "dot");
  made.style.background = color(number);
  return made;
};

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < 4; unit++) value /= 1024;
  return `${value.toFixed(unit < 2 ? 0 : 1)} ${units[unit]}`;
}

function figure(value, unit) {
  if (value == null) return "–";
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return `${Number((100 * value).toPrecision(3))}%`;
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// The line's own value at a step, or its last one before; at no step its newest.
function valueAt(values, index) {
  for (let at = index ?? values.length - 1; at >= 0; at--) if (values[at] != null) return values[at];
  return null;
}

// Runs have a colour each, and their lines dashes; the lines of one run have colours.
function series(block, line, raw) {
  const { style, run } = line;
  const own = block.lines.filter((other) => other.run === run && !["trend", "limit"].includes(other.style));
  const among = style === "trend" ? own.findIndex((other) => line.label.startsWith(other.label)) : own.indexOf(line);
  const paint = { limit: ink("--dim"), points: ink("--bad") }[style] ?? color(several ? run : among);
  return {
    label: line.label,
    stroke: style === "faint" ? `${paint}50` : paint,
    width: { points: 0, limit: 1, faint: 1, trend: 2 }[style] ?? 1.5,
    spanGaps: true,
    dash: style === "limit" || (several && among > 0) ? [[6, 4], [2, 3]][Math.max(0, among - 1) % 2] : undefined,
    points: { show: style === "marked" || style === "points", fill: ink("--paper"), size: style === "points" ? 10 : 6 },
    value: (_, __, ___, index) => figure(valueAt(raw, index), block.unit),
    fill: block.stacked ? paint : undefined,
  };
}

// A stacked chart draws the sums, the largest first, each over the one before.
function stack(data) {
  const sums = [];
  data.slice(1).forEach((values, at) =>
    sums.push(values.map((value, i) => value + (at ? sums[at - 1][i] : 0))));
  return [data[0], ...sums.reverse()];
}

function chart(block) {
  const holder = el("div", "chart");
  const data = uPlot.join(block.lines.map((line) => [line.x, line.y]));
  const made = block.lines.map((line, at) => series(block, line, data[at + 1]));
  const axis = { stroke: ink("--dim"), grid: { stroke: ink("--line") }, ticks: { show: false } };
  const options = {
    width: 300,
    height: 220,
    cursor: { y: false, drag: { y: true, uni: 30 }, sync: { key: "step", scales: ["x", null] } },
    scales: { x: { time: false }, y: block.stacked ? { range: [0, 1] } : {} },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 64, values: (_, all) => all.map((v) => figure(v, block.unit)) }],
    series: [{ label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) }, ...(block.stacked ? made.reverse() : made)],
  };
  const plot = new uPlot(options, block.stacked ? stack(data) : data, holder);
  new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: 220 })).observe(holder);
  return holder;
}

function cards(block) {
  const value = (text, run) =>
    el("div", "value", ...(several ? [dot(run), el("small", "", shown.runs[run])] : []), text || "–");
  return el("div", "cards", ...block.cards.map((card) =>
    el("div", "card", el("div", "name", card.name), ...card.values.map(value))));
}

function table(block) {
  const row = (tag) => (cells) => el("tr", "", ...cells.map((cell) => el(tag, "", cell)));
  const head = el("thead", "", row("th")(block.head));
  return el("div", "scroll", el("table", "", head, el("tbody", "", ...block.rows.map(row("td")))));
}

function samples(block) {
  return el("div", "", ...block.prompts.map(({ prompt, answers }) =>
    el("div", "sample", el("pre", "prompt", prompt), ...answers.map(([when, answer]) =>
      el("div", "answer", el("small", "", when), el("pre", "", answer))))));
}

const text = (block) =>
  el("details", "", el("summary", "", block.title), el("pre", "", block.text));

const KINDS = { cards, chart, table, samples, text };

function draw() {
  const main = document.querySelector("main");
  const hint = shown.blocks.some((block) => block.kind === "chart")
    ? "; drag in a chart to zoom, double-click to see all"
    : "";
  const about = shown.about.map((words, at) =>
    el("p", "about", ...(several ? [dot(at), el("small", "", shown.runs[at])] : []), words));
  main.replaceChildren(el("h1", "", shown.title), ...about, el("p", "written", shown.written + hint));
  let charts = null; // charts that follow each other share a grid
  for (const block of shown.blocks) {
    const drawn = KINDS[block.kind](block);
    const titled = block.title && block.kind !== "text" ? [el("h2", "", block.title), drawn] : [drawn];
    const section = el("section", block.kind, ...titled);
    if (block.kind !== "chart") charts = null;
    else if (!charts) main.append((charts = el("div", "charts")));
    (charts ?? main).append(section);
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
