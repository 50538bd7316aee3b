"use strict";
// Draws the blocks of the page's JSON (reporting/page.py). Texts are set as text, never as HTML.
const shown = JSON.parse(document.getElementById("data").textContent);
const several = shown.runs.length > 1;
const SVG = "http://www.w3.org/2000/svg";

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

function bars(block) {
  return el("div", "bars", ...block.bars.map((bar) => {
    const need = bar.parts.reduce((sum, part) => sum + part[1], 0);
    const whole = Math.max(need, bar.have, 1);
    const track = el("div", "track"), names = el("div", "names");
    const mark = (value, className, words) => {
      const made = el("b", className);
      made.style.left = `${(100 * value) / whole}%`;
      made.title = words;
      track.append(made);
    };
    bar.parts.forEach(([name, size], at) => {
      const part = el("span", "");
      part.style.width = `${(100 * size) / whole}%`;
      part.style.background = color(at);
      part.title = `${name}: ${bytes(size)}`;
      track.append(part);
      names.append(el("span", "", dot(at), `${name} ${bytes(size)}`));
    });
    let words = `${bytes(need)} of ${bytes(bar.have)}`;
    if (need > bar.have) mark(bar.have, "limit", `to be had: ${bytes(bar.have)}`);
    if (bar.measured != null) {
      words += `; measured at the peak: ${bytes(bar.measured)}`;
      mark(Math.min(bar.measured, whole), "measured", `measured: ${bytes(bar.measured)}`);
    }
    const title = el("div", need > bar.have ? "bad" : "", el("strong", "", bar.name), ` ${words}`);
    return el("div", "bar", title, track, names);
  }));
}

function timeline(block) {
  const scroll = el("div", "scroll"), zoom = el("input", "");
  Object.assign(zoom, { type: "range", min: 1, max: 40, step: 0.5, value: 1, title: "zoom" });
  const lanes = block.lanes.map((lane) => {
    const svg = document.createElementNS(SVG, "svg");
    for (const [begin, end, kind, words] of lane.tasks) {
      const rect = document.createElementNS(SVG, "rect"), title = document.createElementNS(SVG, "title");
      rect.setAttribute("x", `${(100 * begin) / block.seconds}%`);
      // at least a pixel or so: a lane of short tasks is not idle
      rect.setAttribute("width", `${Math.max(0.08, (100 * (end - begin)) / block.seconds)}%`);
      rect.setAttribute("height", "100%");
      const hue = block.kinds.indexOf(kind);
      rect.style.fill = hue < 0 ? ink("--bad") : color(hue);
      title.textContent = `${words}: ${figure(begin)} s to ${figure(end)} s (${figure(end - begin)} s)`;
      rect.append(title);
      svg.append(rect);
    }
    return el("div", "lane", el("span", "", lane.name), svg);
  });
  const inner = el("div", "lanes", ...lanes);
  zoom.oninput = () => (inner.style.width = `${100 * zoom.value}%`);
  scroll.append(inner);
  const kinds = block.kinds.map((kind, at) => el("span", "", dot(at), kind));
  const waits = el("i", "dot");
  waits.style.background = ink("--bad");
  const names = el("div", "names", ...kinds, el("span", "", waits, "waits"));
  return el("div", "", names, scroll, el("label", "zoom", "zoom ", zoom), el("p", "", block.note));
}

function samples(block) {
  return el("div", "", ...block.prompts.map(({ prompt, answers }) =>
    el("div", "sample", el("pre", "prompt", prompt), ...answers.map(([when, answer]) =>
      el("div", "answer", el("small", "", when), el("pre", "", answer))))));
}

const text = (block) =>
  el("details", "", el("summary", "", block.title), el("pre", "", block.text));

const KINDS = { cards, chart, table, bars, timeline, samples, text };

function draw() {
  const main = document.querySelector("main");
  const hint = shown.blocks.some((block) => block.kind === "chart")
    ? "; drag in a chart to zoom, double-click to see all"
    : "";
  main.replaceChildren(el("h1", "", shown.title), el("p", "written", shown.written + hint));
  if (several)
    main.append(el("p", "names", ...shown.runs.map((run, at) => el("span", "", dot(at), run))));
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
