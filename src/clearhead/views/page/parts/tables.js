// Tables beside the map: weight between segments, and the atlas of all heads by statistic.

import { button, choice, element, fill } from "../base/dom.js";
import { colourAt, css, palette, place, takesDarkText } from "../base/palette.js";
import { count, number, sentence } from "../base/text.js";

const LISTED = 100;

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
  const atLeast = !entry.encoding;
  const rows = [];
  for (const [start, stop, name] of down) {
    const sums = across.map(() => 0);
    let many = 0;
    for (let at = start; at < stop; at++) {
      const query = at - model.positionOf(0);
      if (query < 0 || query >= entry.queries || model.data.rowOf(entry, query) < 0) continue;
      const row = await model.row(query);
      many += 1;
      across.forEach(([from, to], i) => { for (let s = from; s < to && s < row.values.length; s++) sums[i] += row.values[s]; });
    }
    rows.push({ name, many, means: sums.map((sum) => sum / many) });
  }
  const colours = palette(dark()).sequential;
  return element("table", { class: "matrix" },
    element("caption", null, `Mean weight from the queries of a segment (rows) to the sources of a segment (columns)${atLeast ? ", at least: only the largest weights of each row are held" : ""}.`),
    element("thead", null, element("tr", null, element("th", { scope: "col" }, "from \\ to"), across.map(([, , name]) => element("th", { scope: "col" }, element("bdi", null, sentence(name, 40)))))),
    element("tbody", null, rows.map(({ name, many, means }) => element("tr", null,
      element("th", { scope: "row" }, element("bdi", null, sentence(name, 40)), " ", element("span", { class: "position" }, count(many, "query", "queries"))),
      means.map((mean) => heatCell(number(mean, atLeast), colourAt(colours, place(mean, 1, "linear", false)), Number.isFinite(mean)))))));
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
    cell.style.color = takesDarkText(colour) ? "#10131a" : "#fff";
  }
  return cell;
}

/** All layers and heads by one statistic; a list of all statistics; their definitions. */
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
    this.many = LISTED;
    this.map = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers and heads by statistic" });
    this.list = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All heads and statistics" });
    this.meaning = element("p", { class: "under" });
    this.root = element("section", { class: "card", "aria-labelledby": "atlas-title" },
      element("h2", { id: "atlas-title" }, "Atlas of heads"),
      element("div", { class: "tools" }, choice("Statistic", model.header.statistics.map(({ name, label }) => [name, label]), this.name, (name) => {
        this.name = this.order = name;
        this.build();
      })),
      this.meaning, this.map,
      element("details", null, element("summary", null, "All statistics as a table"), this.list),
      element("details", null, element("summary", null, "Definitions and papers"), this.definitions()));
  }

  definitions() {
    return element("dl", null, this.model.header.statistics.map(({ label, unit, definition, paper }) => [
      element("dt", null, `${label}${unit ? ` (${unit})` : ""}`),
      element("dd", null, definition, paper ? element("span", { class: "paper" }, ` ${paper}`) : null),
    ]));
  }

  build() {
    const { model } = this;
    const { header } = model;
    const statistic = header.statistics.find(({ name }) => name === this.name);
    this.meaning.textContent = statistic ? `${statistic.definition} ${statistic.paper ?? ""}` : "";
    const values = header.layers.map((entry, e) => entry.heads.map((_, h) => this.heads.statistic(this.name, e, h)));
    const finite = values.flat().filter(Number.isFinite);
    const low = Math.min(0, ...finite);
    const high = Math.max(low + 1e-12, ...finite);
    const colours = palette(this.dark()).sequential;
    const numbers = [...new Set(header.layers.flatMap(({ heads }) => heads))].sort((a, b) => a - b);
    fill(this.map, element("table", { class: "matrix" },
      element("caption", null, `${statistic?.label ?? ""}: rows are layers, columns are heads; colours from ${number(low)} to ${number(high)}.`),
      element("thead", null, element("tr", null, element("th", { scope: "col" }, "layer"), numbers.map((n) => element("th", { scope: "col" }, n)))),
      element("tbody", null, header.layers.map((entry, e) => element("tr", null, element("th", { scope: "row", title: entry.module }, entry.layer),
        numbers.map((n) => this.cell(e, entry.heads.indexOf(n), values[e], low, high, colours)))))));
    this.buildList();
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
    return made;
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
    return button(words, go, { class: "pick", "aria-label": `Head ${model.headName(e, h)}: ${words}` });
  }

  buildList() {
    const { model } = this;
    const { statistics, layers } = model.header;
    const all = layers.flatMap((entry, e) => entry.heads.map((_, h) => ({ e, h, value: this.heads.statistic(this.order, e, h) })));
    const order = (/** @type {number} */ value) => (Number.isNaN(value) ? -Infinity : value);
    all.sort((a, b) => order(b.value) - order(a.value));
    const heading = statistics.map(({ name, label }) => element("th", { scope: "col", "aria-sort": name === this.order ? "descending" : "none" },
      button(label, () => { this.order = name; this.buildList(); }, { class: "pick" })));
    fill(this.list, element("table", { class: "matrix" },
      element("thead", null, element("tr", null, element("th", { scope: "col" }, "head"), heading)),
      element("tbody", null, all.slice(0, this.many).map(({ e, h }) => element("tr", null,
        element("th", { scope: "row" }, this.link(e, h, model.headName(e, h))),
        statistics.map(({ name }) => element("td", { class: "number" }, number(this.heads.statistic(name, e, h)))))))),
    all.length > this.many ? button("Show all", () => { this.many = all.length; this.buildList(); }, { class: "quiet" }) : null);
  }
}
