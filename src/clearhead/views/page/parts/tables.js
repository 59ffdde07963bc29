// Tables beside the map: weight between segments, and the atlas of all heads by statistic.

import { button, choice, element, fill } from "../base/dom.js";
import { colourAt, css, palette, place, takesDarkText } from "../base/palette.js";
import { count, number, sentence } from "../base/text.js";
import { headWords } from "./question.js";

const LISTED = 100;
const LEADING = 8;
const BY_PLACE = ""; // the order of layers and heads

/**
 * The mean weight that the queries of a segment put on each segment of sources.
 * @param {import("../base/state.js").Model} model
 * @param {() => boolean} dark
 */
export async function segmentTable(model, dark) {
  const { entry, header } = model;
  const across = header.axes[entry.source_axis].segments;
  const down = header.axes[entry.query_axis].segments;
  if (!across?.length || !down?.length || model.sides().length > 1) return null;
  const atLeast = !model.wholeRows;
  const rows = [];
  for (const [start, stop, name] of down) {
    const sums = across.map(() => 0);
    let many = 0;
    for (let at = start; at < stop; at++) {
      const query = at - model.positionOf(0);
      if (query < 0 || query >= entry.queries || model.data.rowOf(entry, query) < 0) continue;
      const row = await model.row(query);
      if (row.left === 0) continue;
      many += 1;
      across.forEach(([from, to], i) => { for (let s = from; s < to && s < row.values.length; s++) sums[i] += row.values[s]; });
    }
    rows.push({ name, many, means: sums.map((sum) => sum / many) });
  }
  const colours = palette(dark()).sequential;
  const words = `The mean weight that a query of one segment (rows) puts on each segment of sources (columns), by ${headWords(model)}${atLeast ? "; at least, because only the largest weights of a row are held" : ""}.`;
  return [element("p", { class: "under", id: "segments-words" }, words), element("table", { class: "matrix", "aria-describedby": "segments-words" },
    element("thead", null, element("tr", null, element("th", { scope: "col" }, "from \\ to"), across.map(([, , name]) => element("th", { scope: "col" }, element("bdi", null, sentence(name, 40)))))),
    element("tbody", null, rows.map(({ name, many, means }) => element("tr", null,
      element("th", { scope: "row" }, element("bdi", null, sentence(name, 40)), " ", element("span", { class: "position" }, count(many, "query", "queries"))),
      means.map((mean) => heatCell(number(mean, atLeast), colourAt(colours, place(mean, 1, "linear", false)), Number.isFinite(mean)))))))];
}

/**
 * @param {string} text
 * @param {number} colour
 * @param {boolean} coloured
 */
function heatCell(text, colour, coloured) {
  const cell = element("td", { class: "heat" }, text);
  if (coloured) {
    cell.style.backgroundColor = css(colour);
    cell.style.color = takesDarkText(colour) ? "#000" : "#fff";
  }
  return cell;
}

/** All layers and heads by one statistic; the first of them; a table of all; definitions. */
export class AtlasView {
  /**
   * @param {import("../base/state.js").Model} model
   * @param {import("./heads.js").HeadsView} heads
   * @param {() => boolean} dark
   */
  constructor(model, heads, dark) {
    this.model = model;
    this.heads = heads;
    this.dark = dark;
    this.name = model.header.statistics[0]?.name ?? "";
    this.order = this.name;
    this.descending = true;
    this.many = LISTED;
    const region = (/** @type {string} */ label) => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label });
    this.map = region("Layers and heads by statistic");
    this.list = region("All heads and statistics");
    this.side = element("div", { class: "atlas-side" });
    this.hasRoles = model.header.layers.some(({ roles }) => roles?.some((some) => some.length));
    this.isAtlas = model.header.kind === "atlas";
    const options = /** @type {[string, string][]} */ (model.header.statistics.map(({ name, label }) => [name, sentence(label, 60)]));
    this.root = element("section", { class: "card", "aria-labelledby": "atlas-title" },
      element("h2", { id: "atlas-title" }, "Atlas of heads"),
      element("div", { class: "tools" }, choice("Statistic", options, this.name, (name) => {
        this.name = this.order = name;
        this.descending = true;
        this.build();
      })),
      element("div", { class: "atlas" }, this.map, this.side),
      element("details", { open: this.isAtlas }, element("summary", null, "All statistics as a table"), this.list),
      element("details", null, element("summary", null, "Definitions and papers"), this.definitions()));
  }

  definitions() {
    return element("dl", null, this.model.header.statistics.map(({ label, unit, definition, paper }) => [
      element("dt", null, element("bdi", null, sentence(label, 60)), unit ? ` (${unit})` : ""),
      element("dd", null, sentence(definition), paper ? element("span", { class: "paper" }, ` ${paper}`) : null),
    ]));
  }

  build() {
    const { header } = this.model;
    const statistic = header.statistics.find(({ name }) => name === this.name);
    const values = header.layers.map((entry, e) => entry.heads.map((_, h) => this.heads.statistic(this.name, e, h)));
    const finite = values.flat().filter(Number.isFinite);
    const low = Math.min(0, ...finite);
    const high = Math.max(low + 1e-12, ...finite);
    const colours = palette(this.dark()).sequential;
    const numbers = [...new Set(header.layers.flatMap(({ heads }) => heads))].sort((a, b) => a - b);
    const names = header.layers.map(({ layer, call }) => (call > 0 ? `${layer} (${call})` : String(layer)));
    fill(this.map, element("table", { class: "matrix", "aria-label": `${sentence(statistic?.label ?? "", 60)}: rows are layers, columns are heads` },
      element("thead", null, element("tr", null, element("th", { scope: "col" }, "layer \\ head"), numbers.map((n) => element("th", { scope: "col" }, n)))),
      element("tbody", null, header.layers.map((entry, e) => element("tr", null, element("th", { scope: "row", title: sentence(entry.module, 120) }, names[e]),
        numbers.map((n) => this.cell(e, entry.heads.indexOf(n), values[e], low, high, colours)))))));
    fill(this.side, statistic ? this.sideOf(statistic, values, low, high) : null);
    this.buildList();
    this.mark();
  }

  /** What the statistic is, and the heads with the most of it.
   * @param {import("../base/data.js").Statistic} statistic
   * @param {number[][]} values
   * @param {number} low
   * @param {number} high
   */
  sideOf(statistic, values, low, high) {
    const heads = values.flatMap((row, e) => row.map((value, h) => ({ e, h, value }))).filter(({ value }) => Number.isFinite(value));
    heads.sort((a, b) => b.value - a.value);
    const bar = (/** @type {number} */ value) => {
      const made = element("span", { class: "bar" });
      made.style.width = `${(100 * (value - low)) / (high - low)}%`;
      return element("span", { class: "track" }, made);
    };
    return [
      element("p", null, sentence(statistic.definition)),
      statistic.paper ? element("p", { class: "paper" }, sentence(statistic.paper)) : null,
      element("p", { class: "under" }, `Colours from ${number(low)} to ${number(high)}${statistic.unit ? `, ${statistic.unit}` : ""}.`),
      element("table", { class: "lines-table" },
        element("thead", null, element("tr", null, element("th", { scope: "col" }, "rank"), element("th", { scope: "col" }, "head"), element("th", { scope: "col" }, sentence(statistic.label, 30)))),
        element("tbody", null, heads.slice(0, LEADING).map(({ e, h, value }, rank) => element("tr", null,
          element("td", { class: "rank" }, rank + 1),
          element("td", null, element("div", { class: "named" }, this.link(e, h, this.model.headName(e, h)), element("span", { class: "position" }, this.rolesOf(e, h)))),
          element("td", { class: "weight" }, bar(value), element("span", { class: "number" }, number(value))))))),
    ];
  }

  /** @param {number} e @param {number} h */
  rolesOf(e, h) {
    const roles = this.model.header.layers[e].roles?.[h] ?? [];
    return roles.length ? sentence(roles.join(", "), 80) : "";
  }

  /**
   * @param {number} e
   * @param {number} h
   * @param {number[]} values
   * @param {number} low
   * @param {number} high
   * @param {Uint32Array} colours
   */
  cell(e, h, values, low, high, colours) {
    if (h < 0) return element("td", { class: "heat" }, "");
    const value = values[h];
    const words = Number.isNaN(value) ? "–" : number(value);
    const made = heatCell("", colourAt(colours, (value - low) / (high - low)), Number.isFinite(value));
    made.append(this.link(e, h, words));
    made.dataset.head = `${e}/${h}`;
    const roles = this.rolesOf(e, h);
    if (roles) made.title = roles;
    return made;
  }

  /** Show which head is chosen. */
  mark() {
    const { entry, head } = this.model.state;
    for (const cell of this.root.querySelectorAll("[data-head]")) {
      cell.classList.toggle("chosen", /** @type {HTMLElement} */ (cell).dataset.head === `${entry}/${head}`);
    }
  }

  /**
   * @param {number} e
   * @param {number} h
   * @param {string} words
   */
  link(e, h, words) {
    const { model } = this;
    const go = () => {
      model.set({ entry: e, head: h });
      this.root.dispatchEvent(new CustomEvent("chosen"));
    };
    const name = model.headName(e, h);
    return button(words, go, { class: "pick", "aria-label": words === name ? `Head ${name}` : `Head ${name}: ${words}` });
  }

  buildList() {
    const { model } = this;
    const { statistics, layers } = model.header;
    const all = layers.flatMap((entry, e) => entry.heads.map((_, h) => ({ e, h, value: this.heads.statistic(this.order, e, h) })));
    const last = this.descending ? -Infinity : Infinity;
    const order = (/** @type {number} */ value) => (Number.isNaN(value) ? last : value);
    if (this.order !== BY_PLACE) all.sort((a, b) => (this.descending ? 1 : -1) * (order(b.value) - order(a.value)));
    const sort = (/** @type {string} */ name) => () => {
      this.descending = this.order === name ? !this.descending : true;
      this.order = name;
      this.buildList();
      /** @type {HTMLElement | null} */ (this.list.querySelector("[aria-sort=ascending] button, [aria-sort=descending] button"))?.focus();
    };
    const heading = (/** @type {string} */ name, /** @type {string} */ label) => {
      const way = this.descending && name !== BY_PLACE ? "descending" : "ascending";
      const sorted = name === this.order;
      return element("th", { scope: "col", "aria-sort": sorted ? way : "none" },
        button(sentence(label, 40) + (sorted ? (way === "descending" ? " ↓" : " ↑") : ""), sort(name), { class: "pick" }));
    };
    fill(this.list, element("table", { class: "matrix" },
      element("thead", null, element("tr", null, heading(BY_PLACE, "head"), this.hasRoles ? element("th", { scope: "col" }, "role") : null,
        statistics.map(({ name, label }) => heading(name, label)))),
      element("tbody", null, all.slice(0, this.many).map(({ e, h }) => element("tr", { "data-head": `${e}/${h}` },
        element("th", { scope: "row" }, this.link(e, h, model.headName(e, h))),
        this.hasRoles ? element("td", { class: "role" }, this.rolesOf(e, h)) : null,
        statistics.map(({ name }) => {
          const value = this.heads.statistic(name, e, h);
          return element("td", { class: "number" }, Number.isNaN(value) ? "–" : number(value));
        }))))),
    all.length > this.many ? button("Show all", () => { this.many = all.length; this.buildList(); }, { class: "quiet" }) : null);
    this.mark();
  }
}
