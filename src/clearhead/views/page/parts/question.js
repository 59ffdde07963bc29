// The questions first: where does this query look, and who looks at this source?

import { button, element, fill, isolated, marked } from "../base/dom.js";
import { allows, countAllowed } from "../base/rows.js";
import { count, number, sentence, signed } from "../base/text.js";
import { strongest } from "./strip.js";

const FIRST = 10;
const MORE = 40;

/** @typedef {{position: number, value: number, label: string, about: boolean, rank?: number, effect?: import("../base/data.js").Effect}} Line */

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
    const left = model.leftOut();
    const first = strongest(row, this.many);
    // A cut that was made is listed, whatever the weight.
    const cut = model.header.effects.flatMap((e) => (e.query === query && e.source !== null && effectAt(model, query, e.source) === e ? [e.source] : []));
    const others = cut.filter((source) => !first.includes(source) && !left.has(source) && (row.held === "all" || row.known?.[source]));
    const lines = [...first, ...new Set(others)].map((source) => this.lineOf(row, query, source))
      .sort((a, b) => (a.rank ?? -1) - (b.rank ?? -1));
    const more = () => { this.many += MORE; this.showRow(row, allowed); };
    const all = row.held === "all" ? possible : (row.known ?? new Uint8Array()).reduce((n, k) => n + k, 0);
    fill(
      this.where,
      element("h2", null, "Where does ", this.token(model.queryLabel(query, 40)), " look?"),
      element("p", { class: "under" }, `query ${query} · ${headWords(model)} · may attend to ${count(possible, "source")}`),
      possible === 0 ? element("p", { class: "said" }, "An empty row: this query may attend to no source, so its weights and its context are 0.") : null,
      row.held === "none" ? element("p", { class: "said" }, "The record holds no weights of this row.") : null,
      lines.length ? this.table("source", lines, (position) => ({ query, source: position })) : null,
      lines.length < Math.min(all, row.values.length) && first.length >= this.many ? button("Show more", more, { class: "quiet" }) : null,
      left.size && row.left === 0 ? element("p", { class: "said" }, "Nothing is left of this row without the hidden sources.") : null,
      possible && row.held !== "none" ? element("p", { class: "rest" }, remainder(row, lines, model)) : null,
      left.size ? element("p", { class: "rest" }, `Without ${left.size === 1 ? "source" : "sources"} ${[...left].join(", ")}; the other weights are scaled so that the row sums to 1.`) : null,
      lines.length ? this.effectWords(query, lines) : null,
    );
  }

  /** What the effects are, or how to get them.
   * @param {number} query
   * @param {Line[]} lines
   */
  effectWords(query, lines) {
    const { model } = this;
    const { effects } = model.header;
    const effect = lines.find((line) => line.effect)?.effect;
    const head = model.state.head < 0 ? undefined : effects.find((e) => e.query === null && e.source === null && ofHead(model, e) && e.head !== null);
    const words = [];
    if (effect) words.push(`Effect: the change of the ${sentence(effect.metric || "metric", 160)} when the edge is cut${effect.where ? ` ${sentence(effect.where, 160)}` : ""}.`);
    if (head) words.push(`Without this whole head: ${signed(head.effect)}${effect ? "" : ` (${sentence(head.metric || "metric", 160)})`}.`);
    if (effect || model.sides().length > 1) return words.map((text) => element("p", { class: "rest" }, text));
    const held = [...new Set(effects.flatMap((e) => (e.query === null || e.source === null ? [] : [e.query])))].sort((a, b) => a - b);
    const jump = held.slice(0, 8).map((q) => button(String(q), () => model.lock({ query: q, source: null }), { class: "quiet inline", "aria-label": `Go to query ${q}` }));
    const at = model.positionOf(query);
    const pairs = lines.slice(0, 3).map(({ position }) => `(${at}, ${position})`).join(", ");
    return [
      ...words.map((text) => element("p", { class: "rest" }, text)),
      held.length
        ? element("p", { class: "rest" }, "Effects of cuts are held for ", held.length === 1 ? "query " : "queries ", jump, held.length > 8 ? " and more." : "")
        : element("p", { class: "rest" }, "This page holds no effects. ", element("code", null, `ch.effects(model, inputs, edges=[${pairs}])`), " measures what these edges change; ", element("code", null, "ch.view(…, effects=…)"), " shows it here."),
    ];
  }

  /**
   * @param {import("../base/data.js").Row} row
   * @param {number} query
   * @param {number} source
   * @returns {Line}
   */
  lineOf(row, query, source) {
    const { model } = this;
    const effect = effectAt(model, query, source);
    const value = row.values[source];
    const rank = row.values.reduce((n, v, at) => n + (Math.abs(v) > Math.abs(value) || (Math.abs(v) === Math.abs(value) && at < source) ? 1 : 0), 0);
    return { position: source, value, label: model.sourceLabel(source), about: row.about, effect, rank: Number.isNaN(value) ? undefined : rank };
  }

  /** @param {number} source */
  async showColumn(source) {
    const turn = ++this.turn;
    const { model } = this;
    const { entry, state } = model;
    const [column, runs] = await Promise.all([
      model.column(source), Promise.all(model.sides().map(([data]) => data.runs(state.sample, state.entry))),
    ]);
    if (turn !== this.turn) return;
    const cut = model.header.effects.find((e) => e.query === null && e.source === source && ofHead(model, e));
    /** @type {Line[]} */
    const lines = [];
    let allowed = 0;
    column?.values.forEach((value, row) => {
      const query = entry.rows ? entry.rows[row] : row;
      if (!runs.some((one, i) => allows(one, model.sides()[i][0], state.entry, query, source))) return;
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
      cut ? element("p", { class: "rest" }, `Cut from every query but its own ${sentence(cut.where ?? "", 160)}: ${signed(cut.effect)} (${sentence(cut.metric || "metric", 160)}).`) : null,
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
    const rows = lines.map((line, at) => this.tableRow(line, line.rank ?? at, most, effects, pairOf(line.position)));
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

/** Whether an effect is of what is chosen: the head, its layer, or all of the model.
 * @param {import("../base/state.js").Model} model
 * @param {import("../base/data.js").Effect} effect
 */
function ofHead(model, effect) {
  const { sample, head } = model.state;
  const { layer, heads } = model.entry;
  return (effect.sample === null || effect.sample === sample) &&
    (effect.layer === null || effect.layer === layer) && (effect.head === null || effect.head === heads[head]);
}

/** The effect of cutting an edge, the narrowest cut first.
 * @param {import("../base/state.js").Model} model
 * @param {number} query
 * @param {number} source
 */
function effectAt(model, query, source) {
  const found = model.header.effects.filter((e) => e.query === query && e.source === source && ofHead(model, e));
  const wide = (/** @type {import("../base/data.js").Effect} */ e) => Number(e.layer === null) + Number(e.head === null);
  return found.sort((a, b) => wide(a) - wide(b))[0];
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
  // A row sums to 1, or to less where sink logits take a share.
  if (Number.isNaN(row.sum)) return `The remaining sources together: at most ${number(Math.max(0, 1 - listed), true)} (these are ${number(listed, row.about)} of at most 1).`;
  const possible = row.values.reduce((n, v) => n + (v ? 1 : 0), 0);
  if (row.held === "all" && lines.length === possible) return `These are all sources with a weight; together ${number(row.sum, row.about)}.`;
  const rest = Math.max(0, row.sum - listed);
  const missing = 1 - row.sum;
  const sink = missing > 0.002 && row.sum > 0 ? ` The row sums to ${number(row.sum, row.about)}: the remainder went to sink logits, or the weights are not a softmax.` : "";
  return `The remaining sources together: ${rest < 1e-6 ? "0" : number(rest, row.about)}.${sink}`;
}
