// All heads as small maps, by layer or by a statistic.

import { choice, element, fill, pause, whenNear } from "../base/dom.js";
import { colourAt, palette, place } from "../base/palette.js";
import { count, number } from "../base/text.js";
import { cellOf } from "../base/data.js";
import { canvasOf } from "./paint.js";

const SIDE = 56;

/** @typedef {{e: number, h: number, name: string, value: number}} Head */

export class HeadsView {
  /**
   * @param {import("../base/state.js").Model} model
   * @param {() => boolean} dark
   */
  constructor(model, dark) {
    this.model = model;
    this.dark = dark;
    /** @type {Float32Array | null} */
    this.statistics = null;
    this.grid = element("div", { class: "heads", role: "group", "aria-label": "All heads" });
    this.status = element("span", { class: "under", role: "status" });
    this.tools = element("div", { class: "tools" });
    this.root = element("section", { class: "card", "aria-labelledby": "heads-title" },
      element("h2", { id: "heads-title" }, "All heads"), this.tools, this.grid);
    /** @type {Map<Element, Head>} */
    this.shown = new Map();
    /** @type {Map<string, Promise<Uint8Array | null>>} */
    this.open = new Map();
    /** @type {Element[]} */
    this.queue = [];
    this.near = whenNear((target) => { this.near.unobserve(target); this.enqueue(target); });
    this.buildTools();
  }

  async load() {
    const { header, source } = this.model;
    if (header.statistics.length) {
      const bytes = await source.chunk("statistics");
      this.statistics = new Float32Array(bytes.slice().buffer);
      this.build();
    }
  }

  buildTools() {
    const { model } = this;
    const { statistics } = model.header;
    const least = element("input", {
      type: "number", disabled: model.state.sort === "layer", step: "any", value: model.state.least ?? "",
      onchange: () => model.set({ least: least.value === "" ? null : Number(least.value) }),
    });
    const options = /** @type {[string, string][]} */ ([["layer", "layer and head"], ...statistics.map(({ name, label }) => [name, label])]);
    fill(this.tools, choice("Sort by", options, model.state.sort, (sort) => model.set({ sort })),
      statistics.length ? element("label", { class: "field" }, element("span", null, "at least"), least) : null, this.status);
  }

  /** The value of a statistic. @param {string} name @param {number} e @param {number} h */
  statistic(name, e, h) {
    const { header, state } = this.model;
    const index = header.statistics.findIndex((s) => s.name === name);
    if (index < 0 || !this.statistics) return NaN;
    const most = Math.max(...header.layers.map(({ heads }) => heads.length));
    return this.statistics[((index * header.samples + state.sample) * header.layers.length + e) * most + h];
  }

  /** @returns {Head[]} */
  list() {
    const { model } = this;
    const { sort, least } = model.state;
    /** @type {Head[]} */
    const all = [];
    model.header.layers.forEach((entry, e) => entry.heads.forEach((_, h) =>
      all.push({ e, h, name: model.headName(e, h), value: this.statistic(sort, e, h) })));
    if (sort === "layer") return all;
    const kept = least === null ? all : all.filter(({ value }) => value >= least);
    const order = (/** @type {Head} */ head) => (Number.isNaN(head.value) ? -Infinity : head.value);
    return kept.sort((a, b) => order(b) - order(a));
  }

  build() {
    const { model } = this;
    const { sort } = model.state;
    const least = this.tools.querySelector("input");
    if (least) least.disabled = sort === "layer";
    const all = model.header.layers.reduce((sum, { heads }) => sum + heads.length, 0);
    const list = this.list();
    this.near.disconnect();
    this.shown.clear();
    fill(this.grid, list.map((head) => this.tile(head, sort)));
    this.status.textContent = list.length === all ? count(all, "head") : `${list.length} of ${count(all, "head")}`;
    this.mark();
  }

  /**
   * @param {Head} head
   * @param {string} sort
   */
  tile(head, sort) {
    const { model } = this;
    const value = sort === "layer" ? "" : number(head.value);
    // A picture, not a canvas: hundreds of canvases would each be a layer to compose.
    const picture = element("img", { width: SIDE, height: SIDE, alt: "" });
    const made = element("button", {
      type: "button", class: "head", "aria-pressed": "false",
      onclick: () => model.set({ entry: head.e, head: head.h }),
      "aria-label": `Head ${head.name}${value ? `, ${sort} ${value}` : ""}`,
    }, picture, element("span", { class: "head-name" }, head.name), value ? element("span", { class: "head-value" }, value) : null);
    this.shown.set(made, head);
    this.near.observe(made);
    return made;
  }

  mark() {
    const { entry, head } = this.model.state;
    for (const [made, { e, h }] of this.shown) {
      const pressed = String(e === entry && (h === head || head < 0));
      if (made.getAttribute("aria-pressed") !== pressed) made.setAttribute("aria-pressed", pressed);
    }
  }

  repaint() {
    for (const made of this.shown.keys()) this.near.observe(made);
  }

  /** Paint one after the other, so that the page answers in between. @param {Element} made */
  enqueue(made) {
    this.queue.push(made);
    if (this.queue.length === 1) void this.work();
  }

  async work() {
    while (this.queue.length) {
      await this.paint(this.queue[0]).catch(this.model.report);
      this.queue.shift();
      await pause();
    }
  }

  /** For a printer, which scrolls nowhere. */
  paintAll() {
    for (const made of this.shown.keys()) void this.paint(made);
  }

  /** @param {Element} made */
  async paint(made) {
    const head = this.shown.get(made);
    const picture = made.querySelector("img");
    if (!head || !picture) return;
    const small = await this.small(head);
    if (!small) return;
    const { scale } = this.model.state;
    const two = this.model.sides().length > 1;
    const colours = palette(this.dark());
    const image = new ImageData(small.columns, small.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const largest = small.values.reduce((most, v) => Math.max(most, Math.abs(v) || 0), 0);
    small.values.forEach((value, i) => {
      if (small.open && !small.open[i]) return;
      if (!Number.isNaN(value)) pixels[i] = colourAt(two ? colours.diverging : colours.sequential, place(value, largest, scale, two));
    });
    picture.src = canvasOf(image).toDataURL();
  }

  /** The same for all heads of a layer, and for layers with one mask.
   * @param {number} e
   * @param {number} rows
   * @param {number} columns
   */
  openCells(e, rows, columns) {
    const { layers } = this.model.header;
    const name = [this.model.state.sample, layers[e].mask, layers[e].queries, layers[e].sources].join();
    let open = this.open.get(name);
    if (!open) this.open.set(name, (open = openCells(this.model, e, rows, columns)));
    return open;
  }

  /** A map of at most SIDE cells a side. @param {Head} head */
  async small({ e, h }) {
    const { model } = this;
    const { sample } = model.state;
    const made = await Promise.all(model.sides().map(([data, sign]) => smallMap(data, sample, e, h, sign)));
    const [first, second] = made;
    if (!first) return null;
    if (second) second.values.forEach((value, i) => { first.values[i] += value; });
    return { ...first, open: await this.openCells(e, first.rows, first.columns) };
  }
}

/**
 * @param {import("../base/data.js").Data} data
 * @param {number} s
 * @param {number} e
 * @param {number} h
 * @param {number} sign
 */
async function smallMap(data, s, e, h, sign) {
  const entry = data.entries[e];
  if (!entry || !entry.queries || !entry.sources) return null;
  const rows = Math.min(SIDE, entry.queries);
  const columns = Math.min(SIDE, entry.sources);
  const values = new Float32Array(rows * columns);
  const put = (/** @type {number} */ query, /** @type {number} */ source, /** @type {number} */ value) => {
    const at = cellOf(query, entry.queries, rows) * columns + cellOf(source, entry.sources, columns);
    if (!(value <= Math.abs(values[at]))) values[at] = sign * value;
  };
  if (entry.cells) {
    const blocks = await data.blocks(s, e, h);
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) {
        const at = Math.floor((y * blocks.rows) / rows) * blocks.columns + Math.floor((x * blocks.columns) / columns);
        values[y * columns + x] = sign * blocks.max[at];
      }
    }
  } else if (entry.encoding) {
    const all = await data.full(s, e, h);
    all.forEach((value, i) => {
      const row = Math.floor(i / entry.sources);
      put(entry.rows ? entry.rows[row] : row, i % entry.sources, value);
    });
  } else if (entry.top) {
    const top = await data.top(s, e, h);
    top.sources.forEach((source, i) => {
      const row = Math.floor(i / top.each);
      if (source !== 0xffffffff) put(entry.rows ? entry.rows[row] : row, source, top.weights[i]);
    });
  } else return null;
  return { rows, columns, values };
}

/**
 * Which cells of a small map have an allowed edge; null where all have.
 * @param {import("../base/state.js").Model} model
 * @param {number} e
 * @param {number} rows
 * @param {number} columns
 */
async function openCells(model, e, rows, columns) {
  const runs = await model.data.runs(model.state.sample, e);
  if (!runs) return null;
  const entry = model.header.layers[e];
  const open = new Uint8Array(rows * columns);
  for (let row = 0; row < runs.start.length - 1; row++) {
    const query = entry.rows && runs.start.length - 1 !== entry.queries ? entry.rows[row] : row;
    const y = cellOf(query, entry.queries, rows);
    for (let i = runs.start[row]; i < runs.start[row + 1]; i += 2) {
      if (runs.runs[i] >= runs.runs[i + 1]) continue;
      const left = cellOf(runs.runs[i], entry.sources, columns);
      const right = cellOf(runs.runs[i + 1] - 1, entry.sources, columns);
      open.fill(1, y * columns + left, y * columns + right + 1);
    }
  }
  return open;
}
