// The questions first: where does this query look, and who looks at this source?

import { button, element, fill, isolated, marked } from "../base/dom.js";
import { allows, countAllowed } from "../base/rows.js";
import { count, number, sentence, signed } from "../base/text.js";
import { strongest } from "./strip.js";

const FIRST = 10;
const MORE = 40;

/** @typedef {{position: number, value: number, label: string, about: boolean, effect?: import("../base/data.js").Effect}} Line */

export class QuestionView {
  /** @param {import("../base/state.js").Model} model */
  constructor(model) {
    this.model = model;
    this.where = element("section", { class: "card question", "aria-label": "Where does the query look" });
    this.who = element("section", { class: "card question", "aria-label": "Who looks at the source" });
    this.root = element("div", { class: "questions" }, this.where, this.who);
    this.many = FIRST;
    this.manyWho = FIRST;
    this.turn = 0;
  }

  /**
   * @param {import("../base/data.js").Row} row
   * @param {[number, number][] | null} allowed
   */
  showRow(row, allowed) {
    const { model } = this;
    const { query } = model.pair;
    const possible = countAllowed(allowed, model.entry.sources);
    const lines = strongest(row, this.many).map((source) => this.lineOf(row, query, source));
    const more = () => { this.many += MORE; this.showRow(row, allowed); };
    const all = row.held === "all" ? possible : (row.known ?? new Uint8Array()).reduce((n, k) => n + k, 0);
    fill(
      this.where,
      element("h2", null, "Where does ", this.token(model.queryLabel(query, 40)), " look?"),
      element("p", { class: "under" }, `query ${query} · ${headWords(model)} · may attend to ${count(possible, "source")}`),
      possible === 0 ? element("p", { class: "said" }, "An empty row: this query may attend to no source, so its weights and its context are 0.") : null,
      row.held === "none" ? element("p", { class: "said" }, "The record holds no weights of this row.") : null,
      lines.length ? this.table("source", lines, (position) => ({ query, source: position })) : null,
      lines.length < Math.min(all, row.values.length) && lines.length >= this.many ? button("Show more", more, { class: "quiet" }) : null,
      possible && row.held !== "none" ? element("p", { class: "rest" }, remainder(row, lines, model)) : null,
    );
  }

  /**
   * @param {import("../base/data.js").Row} row
   * @param {number} query
   * @param {number} source
   * @returns {Line}
   */
  lineOf(row, query, source) {
    const { model } = this;
    const { sample, head } = model.state;
    const { layer, heads } = model.entry;
    const effect = model.header.effects.find(
      (e) => e.sample === sample && e.query === query && e.source === source &&
        (e.layer === null || e.layer === layer) && (e.head === null || e.head === heads[head]),
    );
    return { position: source, value: row.values[source], label: model.sourceLabel(source), about: row.about, effect };
  }

  /** @param {number} source */
  async showColumn(source) {
    const turn = ++this.turn;
    const { model } = this;
    const [column, runs] = await Promise.all([
      model.column(source), model.data.runs(model.state.sample, model.state.entry),
    ]);
    if (turn !== this.turn) return;
    const { entry, state } = model;
    /** @type {Line[]} */
    const lines = [];
    let allowed = 0;
    column?.values.forEach((value, row) => {
      const query = entry.rows ? entry.rows[row] : row;
      if (!allows(runs, model.data, state.entry, query, source)) return;
      allowed += 1;
      if (value === 0 || (column.known && !column.known[row])) return;
      lines.push({ position: query, value, label: "", about: column.about });
    });
    const sizeOf = (/** @type {Line} */ l) => (Number.isNaN(l.value) ? Infinity : Math.abs(l.value));
    lines.sort((a, b) => sizeOf(b) - sizeOf(a) || a.position - b.position);
    const total = lines.reduce((sum, { value }) => sum + value, 0);
    const words = column
      ? `source ${source} · ${count(allowed, "query", "queries")} may read it` +
        (column.known ? ` · among the ${entry.top} largest weights of ${lines.length ? count(lines.length, "query", "queries") : "none"}` : ` · mean ${model.sides().length > 1 ? "difference" : "weight"} ${number(total / Math.max(1, allowed), column.about)}`)
      : "The record holds no single weights.";
    const named = lines.slice(0, this.manyWho).map((line) => ({ ...line, label: model.queryLabel(line.position) }));
    const more = () => { this.manyWho += MORE; void this.showColumn(source); };
    fill(
      this.who,
      element("h2", null, "Who looks at ", this.token(model.sourceLabel(source, 40)), "?"),
      element("p", { class: "under" }, words),
      lines.length ? this.table("query", named, (position) => ({ query: position, source })) : null,
      lines.length > this.manyWho ? button("Show more", more, { class: "quiet" }) : null,
    );
  }

  /** @param {string} text */
  token(text) {
    return element("bdi", { class: "asked", dir: "auto" }, marked(text));
  }

  /**
   * @param {string} what
   * @param {Line[]} lines
   * @param {(position: number) => import("../base/state.js").Pair} pairOf
   */
  table(what, lines, pairOf) {
    const effects = lines.some(({ effect }) => effect);
    const metric = lines.find(({ effect }) => effect)?.effect?.metric ?? "";
    const most = Math.max(...lines.map(({ value }) => Math.abs(value) || 0), 1e-30);
    const head = element("tr", null,
      element("th", { scope: "col" }, "rank"), element("th", { scope: "col" }, what),
      element("th", { scope: "col" }, this.model.sides().length > 1 ? "difference" : "weight"),
      effects ? element("th", { scope: "col", class: "number", title: sentence(metric, 200) }, "effect") : null);
    const rows = lines.map((line, rank) => this.tableRow(line, rank, most, effects, pairOf(line.position)));
    return element("table", { class: "lines-table" }, element("thead", null, head), element("tbody", null, rows));
  }

  /**
   * @param {Line} line
   * @param {number} rank
   * @param {number} most
   * @param {boolean} effects
   * @param {import("../base/state.js").Pair} pair
   */
  tableRow(line, rank, most, effects, pair) {
    const { model } = this;
    const difference = model.sides().length > 1;
    const bar = element("span", { class: difference ? (line.value < 0 ? "bar negative" : "bar positive") : "bar" });
    bar.style.width = `${(100 * (Math.abs(line.value) || 0)) / most}%`;
    const words = difference ? signed(line.value) : number(line.value, line.about);
    const pick = button("", () => model.lock(pair), { class: "pick", "aria-label": `${line.label}, position ${line.position}` });
    pick.append(isolated(line.label));
    const chosen = pair.source === model.state.source && pair.query === model.state.query && model.state.locked;
    return element("tr", { class: chosen ? "chosen" : null },
      element("td", { class: "rank" }, rank + 1),
      element("td", null, element("div", { class: "named" }, pick, element("span", { class: "position" }, line.position))),
      element("td", { class: "weight" }, element("span", { class: "track" }, bar), element("span", { class: "number" }, words)),
      effects ? element("td", { class: "number" }, line.effect ? signed(line.effect.effect) : "–") : null);
  }
}

/** @param {import("../base/state.js").Model} model */
export function headWords(model) {
  const { entry, state } = model;
  const name = entry.call > 0 ? `layer ${entry.layer} (call ${entry.call})` : `layer ${entry.layer}`;
  return state.head < 0 ? `${name}, mean of ${entry.heads.length} heads` : `${name}, head ${entry.heads[state.head]}`;
}

/**
 * What the listed lines leave out, in words.
 * @param {import("../base/data.js").Row} row
 * @param {Line[]} lines
 * @param {import("../base/state.js").Model} model
 */
function remainder(row, lines, model) {
  if (model.sides().length > 1) return `This record minus the other: ${model.header.other?.name ?? "this"} − ${model.header.other?.other_name ?? "other"}.`;
  const listed = lines.reduce((sum, { value }) => sum + value, 0);
  if (Number.isNaN(listed) || Number.isNaN(row.sum) && row.held === "all") return "This row holds NaN: the model computed it so.";
  if (Number.isNaN(row.sum)) return `These ${lines.length} together: ${number(listed, row.about)}; the record does not hold the sum of the row.`;
  const possible = row.values.reduce((n, v) => n + (v ? 1 : 0), 0);
  if (row.held === "all" && lines.length === possible) return `These are all sources with a weight; together ${number(row.sum, row.about)}.`;
  const rest = Math.max(0, row.sum - listed);
  const missing = 1 - row.sum;
  const sink = missing > 0.002 && row.sum > 0 ? ` The row sums to ${number(row.sum, row.about)}: the remainder went to sink logits, or the weights are not a softmax.` : "";
  return `The remaining sources together: ${rest < 1e-6 ? "0" : number(rest, row.about)}.${sink}`;
}
