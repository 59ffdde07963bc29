// The mask page's words: whom may a query attend to, who may attend to a source, and why.

import { element, fill, marked } from "../base/dom.js";
import { allowedOf, allows, countAllowed } from "../base/rows.js";
import { count } from "../base/text.js";

const RUNS_LISTED = 12;

export class WhyView {
  /** @param {import("../base/state.js").Model} model */
  constructor(model) {
    this.model = model;
    this.where = element("section", { class: "card question", "aria-label": "Whom may the query attend to" });
    this.who = element("section", { class: "card question", "aria-label": "Who may attend to the source" });
    this.why = element("section", { class: "card question", "aria-label": "Why" });
    this.root = element("div", { class: "questions" }, this.where, this.why, this.who);
    this.turn = 0;
  }

  async show() {
    const turn = ++this.turn;
    const { model } = this;
    const { query } = model.pair;
    const source = model.watchedSource();
    const { sample, entry: e } = model.state;
    const runs = await model.data.runs(sample, e);
    const reasons = await model.reasons(query, source);
    if (turn !== this.turn) return;
    const allowed = allowedOf(runs, model.data, e, query);
    const readers = [];
    for (let q = 0; q < model.entry.queries; q++) {
      if (allows(runs, model.data, e, q, source)) readers.push(q);
    }
    const open = allows(runs, model.data, e, query, source);
    fill(this.where, element("h2", null, "Whom may ", asked(model.queryLabel(query, 40)), " attend to?"),
      element("p", { class: "under" }, `query ${query} · ${count(countAllowed(allowed, model.entry.sources), "source")} of ${model.entry.sources}`),
      element("p", null, inRuns(allowed ?? [[0, model.entry.sources]])));
    fill(this.why, element("h2", null, `Why is ${query} → ${source} ${open ? "allowed" : "blocked"}?`),
      element("p", { class: "under" }, `${open ? "✓" : "✕"} query `, asked(model.queryLabel(query, 24)), ` may ${open ? "" : "not "}read source `, asked(model.sourceLabel(source, 24))),
      reasons.length ? element("ul", { class: "reasons" }, reasons.map((reason) => element("li", null, reason))) : element("p", { class: "under" }, "The mask does not say."));
    fill(this.who, element("h2", null, "Who may attend to ", asked(model.sourceLabel(source, 40)), "?"),
      element("p", { class: "under" }, `source ${source} · ${count(readers.length, "query", "queries")} of ${model.entry.queries}`),
      element("p", null, inRuns(runsOf(readers))));
  }
}

/** @param {string} text */
function asked(text) {
  return element("bdi", { class: "asked", dir: "auto" }, marked(text));
}

/** @param {number[]} positions in ascending order @returns {[number, number][]} */
function runsOf(positions) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const position of positions) {
    const last = runs[runs.length - 1];
    if (last && last[1] === position) last[1] += 1;
    else runs.push([position, position + 1]);
  }
  return runs;
}

/** @param {[number, number][]} runs */
function inRuns(runs) {
  if (!runs.length) return "None: an empty row.";
  const words = runs.slice(0, RUNS_LISTED).map(([start, stop]) => (stop === start + 1 ? `${start}` : `${start}–${stop - 1}`));
  return words.join(", ") + (runs.length > RUNS_LISTED ? `, and ${runs.length - RUNS_LISTED} more runs` : "");
}
