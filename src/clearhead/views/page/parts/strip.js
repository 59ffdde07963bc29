// The tokens as text, coloured by what the chosen query reads, with lines to its largest sources.
// Only the paragraphs near the visible part are in the document.

import { atNextFrame, element, fill, marked, whenNear } from "../base/dom.js";
import { ALLOWED, colourAt, css, palette, place, takesDarkText } from "../base/palette.js";
import { isAllowed } from "../base/rows.js";
import { sentence, visible } from "../base/text.js";
import { contextOf, inkOf } from "./paint.js";

const PARAGRAPH = 100;
const LINES = 12;

/**
 * @typedef {{axis: number, role: "query" | "source" | "both", root: HTMLElement,
 *   chips: Map<number, HTMLElement>, from: number, length: number}} Text
 */

export class StripView {
  /**
   * @param {import("../base/state.js").Model} model
   * @param {() => boolean} dark
   */
  constructor(model, dark) {
    this.model = model;
    this.dark = dark;
    this.lines = element("canvas", { class: "lines", "aria-hidden": "true" });
    this.texts = element("div", { class: "texts" });
    this.root = element("div", { class: "strip" }, this.texts, this.lines);
    /** @type {Text[]} */
    this.shown = [];
    /** @type {import("../base/data.js").Row | null} */
    this.row = null;
    /** @type {[number, number][] | null} */
    this.allowed = null;
    this.built = "";
    /** @type {WeakMap<HTMLElement, string>} */
    this.looks = new WeakMap();
    this.drawLines = atNextFrame(() => this.paintLines());
    this.near = whenNear((target) => this.enter(target), (target) => this.leave(target));
    new ResizeObserver(() => this.drawLines()).observe(this.root);
  }

  /** Build the paragraphs anew where the layer, the sample or the axis has other tokens. */
  build() {
    const { model } = this;
    const { header, labelled: entry } = model;
    const built = [model.state.sample, entry.query_axis, entry.source_axis, entry.queries, entry.sources].join();
    if (built === this.built) return;
    this.built = built;
    this.near.disconnect();
    const same = entry.query_axis === entry.source_axis;
    this.shown = same
      ? [this.text(entry.source_axis, "both", 0, Math.max(entry.sources, entry.queries))]
      : [this.text(entry.query_axis, "query", 0, entry.queries), this.text(entry.source_axis, "source", 0, entry.sources)];
    fill(
      this.texts,
      this.shown.map((text) => [
        same ? null : element("h3", null, `${text.role === "query" ? "Queries" : "Sources"}: ${header.axes[text.axis].name}`),
        text.root,
      ]),
    );
    this.colour();
  }

  /**
   * @param {number} axis
   * @param {Text["role"]} role
   * @param {number} from
   * @param {number} length
   * @returns {Text}
   */
  text(axis, role, from, length) {
    const { grid, name } = this.model.header.axes[axis];
    const root = element("div", {
      class: grid ? "tokens grid" : "tokens", role: "listbox", tabindex: "0",
      "aria-label": `${name}: ${length} ${role === "source" ? "sources" : "positions"}. Arrow keys move, Enter locks, Escape frees.`,
    });
    /** @type {Text} */
    const text = { axis, role, root, chips: new Map(), from, length };
    if (grid) {
      root.style.setProperty("--columns", String(grid[1]));
      root.style.setProperty("--cell", `${Math.max(10, Math.min(30, Math.floor(480 / grid[1])))}px`);
    }
    const lead = grid ? Math.max(0, length - grid[0] * grid[1]) : 0;
    if (lead) root.append(this.paragraph(0, lead));
    for (let start = lead; start < length; start += grid ? length : PARAGRAPH) {
      root.append(this.paragraph(start, Math.min(length, grid ? length : start + PARAGRAPH)));
    }
    listenToText(this, text);
    return text;
  }

  /**
   * @param {number} start
   * @param {number} stop
   */
  paragraph(start, stop) {
    const made = element("div", { class: "paragraph", role: "group", "aria-label": `positions ${start} to ${stop - 1}` });
    made.dataset.start = String(start);
    made.dataset.stop = String(stop);
    made.style.minHeight = `${Math.ceil((stop - start) / 14) * 28}px`;
    this.near.observe(made);
    return made;
  }

  /** @param {Element} target */
  enter(target) {
    const text = this.shown.find(({ root }) => root.contains(target));
    const { start, stop } = /** @type {HTMLElement} */ (target).dataset;
    if (!text || target.childElementCount) return;
    for (let at = Number(start); at < Number(stop); at++) target.append(this.chip(text, at));
    /** @type {HTMLElement} */ (target).style.minHeight = "";
    this.colour();
  }

  /** @param {Element} target */
  leave(target) {
    const text = this.shown.find(({ root }) => root.contains(target));
    if (!text || !target.childElementCount || text.length <= 20 * PARAGRAPH) return;
    /** @type {HTMLElement} */ (target).style.minHeight = `${target.getBoundingClientRect().height}px`;
    const { start, stop } = /** @type {HTMLElement} */ (target).dataset;
    for (let at = Number(start); at < Number(stop); at++) text.chips.delete(at);
    fill(target);
  }

  /**
   * @param {Text} text
   * @param {number} at
   */
  chip(text, at) {
    const { header } = this.model;
    const axis = header.axes[text.axis];
    const raw = this.model.rawLabel(text.axis, at);
    const inGrid = axis.grid && at >= text.length - axis.grid[0] * axis.grid[1];
    const shown = inGrid ? "" : raw === null ? `#${at}` : visible(raw, 32);
    const chip = element(
      "span",
      { class: "chip", role: "option", "aria-selected": "false", title: this.titleOf(text, at) },
      element("bdi", { dir: "auto" }, marked(shown)),
    );
    chip.dataset.at = String(at);
    if (axis.prompt !== undefined && at >= axis.prompt) chip.classList.add("new");
    if (axis.prompt === at) chip.classList.add("first-new");
    if (axis.segments?.some(([start]) => start === at && start > 0)) chip.classList.add("segment-start");
    if (shown === "⏎" || shown.endsWith("⏎")) chip.classList.add("line-end");
    text.chips.set(at, chip);
    return chip;
  }

  /**
   * @param {Text} text
   * @param {number} at
   */
  titleOf(text, at) {
    const { header, state } = this.model;
    const axis = header.axes[text.axis];
    const id = axis.ids?.[state.sample]?.[at];
    const bytes = axis.raw?.[state.sample]?.[at];
    const segment = axis.segments?.find(([start, stop]) => start <= at && at < stop);
    return [
      `position ${at}`, id === undefined ? "" : `id ${id}`, bytes ? `bytes ${bytes.slice(0, 60)}` : "",
      segment ? sentence(segment[2], 60) : "",
    ].filter(Boolean).join(" · ");
  }

  /**
   * @param {import("../base/data.js").Row} row
   * @param {[number, number][] | null} allowed
   */
  show(row, allowed) {
    this.row = row;
    this.allowed = allowed;
    this.colour();
  }

  colour() {
    const { row, model } = this;
    if (!row) return;
    const colours = palette(this.dark());
    const two = model.sides().length > 1;
    const table = two ? colours.diverging : colours.sequential;
    const hidden = model.hidden();
    let largest = model.header.kind === "mask" ? 1 / ALLOWED : 0;
    row.values.forEach((v, s) => { if (!hidden.has(s) && Math.abs(v) > largest) largest = Math.abs(v); });
    for (const text of this.shown) {
      for (const [at, chip] of text.chips) {
        const coloured = text.role !== "query" && at < row.values.length;
        const value = coloured ? row.values[at] : NaN;
        const open = coloured && isAllowed(this.allowed, at);
        const held = row.held === "all" || Boolean(row.known?.[at]);
        const drawn = open && held && !Number.isNaN(value) && !hidden.has(at);
        const colour = drawn ? colourAt(table, place(value, largest, model.state.scale, two)) : -1;
        const closed = coloured && !open;
        const away = hidden.has(at) && text.role !== "query";
        this.look(chip, colour, closed, away);
        this.mark(text, at, chip);
      }
    }
    this.drawLines();
  }

  /** Touch the document only where something changes.
   * @param {HTMLElement} chip
   * @param {number} colour or -1
   * @param {boolean} closed
   * @param {boolean} away
   */
  look(chip, colour, closed, away) {
    const look = `${colour}${closed}${away}`;
    if (this.looks.get(chip) === look) return;
    this.looks.set(chip, look);
    chip.style.backgroundColor = colour < 0 ? "" : css(colour);
    chip.style.color = colour < 0 ? "" : takesDarkText(colour) ? "#000" : "#fff";
    chip.classList.toggle("blocked", closed);
    chip.classList.toggle("hidden", away);
  }

  /**
   * @param {Text} text
   * @param {number} at
   * @param {HTMLElement} chip
   */
  mark(text, at, chip) {
    const { model } = this;
    const { query, source } = model.pair;
    const isQuery = text.role !== "source" && at === (text.role === "both" ? model.positionOf(query) : query);
    const isSource = text.role !== "query" && at === source;
    if (isQuery === chip.classList.contains("query") && isSource === chip.classList.contains("source")) return;
    chip.classList.toggle("query", isQuery);
    chip.classList.toggle("source", isSource);
    chip.setAttribute("aria-selected", String(isQuery));
    if (isQuery) {
      chip.id = `chip-${text.axis}-${at}`;
      text.root.setAttribute("aria-activedescendant", chip.id);
    } else if (chip.id) chip.removeAttribute("id");
  }

  paintLines() {
    const box = this.root.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    const { lines, row, model } = this;
    const width = Math.round(box.width * ratio);
    const height = Math.round(box.height * ratio);
    if (lines.width !== width || lines.height !== height) Object.assign(lines, { width, height });
    const context = contextOf(lines);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, width, height);
    // Every edge of a mask is alike: lines would say nothing that the colours do not.
    if (!row || !box.width || model.header.kind === "mask") return;
    const queryText = this.shown.find(({ role }) => role !== "source");
    const sourceText = this.shown.find(({ role }) => role !== "query");
    const { query } = model.pair;
    const start = queryText?.chips.get(queryText.role === "both" ? model.positionOf(query) : query);
    if (!start || !sourceText) return;
    context.scale(ratio, ratio);
    context.strokeStyle = inkOf(this.root).accent;
    const hidden = model.hidden();
    const largest = strongest(row, LINES).filter((s) => !hidden.has(s));
    const most = Math.abs(row.values[largest[0]] ?? 1);
    for (const source of largest) {
      const end = sourceText.chips.get(source);
      if (!end || end === start) continue;
      line(context, start, end, box, Math.abs(row.values[source]) / most);
    }
  }

  /** Bring the chosen query into view. */
  revealQuery() {
    const { entry, pair } = this.model;
    this.reveal(0, entry.query_axis === entry.source_axis ? this.model.positionOf(pair.query) : pair.query);
  }

  /** Bring a position into view. @param {number} index of the text @param {number} at */
  reveal(index, at) {
    const text = this.shown[index];
    if (!text) return;
    const paragraph = [...text.root.children].find(
      (child) => Number(/** @type {HTMLElement} */ (child).dataset.stop) > at,
    );
    if (paragraph) this.enter(paragraph);
    scrollWithin(text.root, text.chips.get(at));
  }
}

/**
 * @param {HTMLElement} root
 * @param {HTMLElement | undefined} chip
 */
function scrollWithin(root, chip) {
  if (!chip) return;
  const box = root.getBoundingClientRect();
  const own = chip.getBoundingClientRect();
  if (own.top < box.top) root.scrollTop -= box.top - own.top + 8;
  else if (own.bottom > box.bottom) root.scrollTop += own.bottom - box.bottom + 8;
}

/**
 * The sources with the largest weights, largest first.
 * @param {import("../base/data.js").Row} row
 * @param {number} most
 */
export function strongest(row, most) {
  /** @type {number[]} */
  const found = [];
  row.values.forEach((value, source) => {
    if (value !== 0 || row.known?.[source]) found.push(source);
  });
  const size = (/** @type {number} */ s) => (Number.isNaN(row.values[s]) ? Infinity : Math.abs(row.values[s]));
  return found.sort((a, b) => size(b) - size(a) || a - b).slice(0, most);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {HTMLElement} start
 * @param {HTMLElement} end
 * @param {DOMRect} box
 * @param {number} share
 */
function line(context, start, end, box, share) {
  const a = start.getBoundingClientRect();
  const b = end.getBoundingClientRect();
  const x0 = a.left + a.width / 2 - box.left;
  const x1 = b.left + b.width / 2 - box.left;
  const below = b.top > a.bottom - 4;
  const y0 = (below ? a.bottom : a.top) - box.top;
  const y1 = (Math.abs(a.top - b.top) < 4 || below ? b.top : b.bottom) - box.top;
  const lift = Math.abs(a.top - b.top) < 4 ? Math.min(26, 8 + Math.abs(x1 - x0) / 8) : 0;
  context.globalAlpha = 0.2 + 0.7 * share;
  context.lineWidth = 0.75 + 2.25 * share;
  context.beginPath();
  context.moveTo(x0, y0);
  if (lift) context.quadraticCurveTo((x0 + x1) / 2, y0 - lift, x1, y1);
  else context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
  context.stroke();
}

/**
 * @param {StripView} strip
 * @param {Text} text
 */
function listenToText(strip, text) {
  const { model } = strip;
  const pairOf = (/** @type {number} */ at) => {
    if (text.role === "source") return { query: model.state.query, source: at };
    const query = text.role === "both" ? at - model.positionOf(0) : at;
    return query < 0 || query >= model.entry.queries ? null : { query, source: null };
  };
  /** With Shift, a token of a text that is both is chosen as the source. @param {number} at @param {boolean} shift */
  const wanted = (at, shift) => (shift && text.role === "both" ? { query: model.state.query, source: at } : pairOf(at));
  const positionAt = (/** @type {Event} */ event) => {
    const chip = /** @type {Element} */ (event.target).closest?.(".chip");
    return chip ? Number(/** @type {HTMLElement} */ (chip).dataset.at) : null;
  };
  text.root.addEventListener("pointerover", (event) => {
    const at = positionAt(event);
    if (at !== null && pairOf(at)) model.show(pairOf(at));
  });
  text.root.addEventListener("pointerleave", () => model.show(null));
  text.root.addEventListener("click", (event) => {
    const at = positionAt(event);
    const pair = at === null ? null : wanted(at, event.shiftKey);
    if (pair) model.lock(pair);
  });
  text.root.addEventListener("scroll", () => strip.drawLines());
  text.root.addEventListener("keydown", (event) => {
    const { query, source } = model.pair;
    const now = text.role === "source" ? source ?? 0 : text.role === "both" ? model.positionOf(query) : query;
    const moves = /** @type {Record<string, number>} */ ({
      ArrowLeft: now - 1, ArrowRight: now + 1, ArrowUp: now - 10, ArrowDown: now + 10, Home: 0, End: text.length - 1,
    });
    const isChoice = event.key === "Enter" || event.key === " ";
    if (!isChoice && !(event.key in moves)) return;
    event.preventDefault();
    const at = isChoice ? now : Math.max(0, Math.min(text.length - 1, moves[event.key]));
    const pair = wanted(at, isChoice && event.shiftKey);
    if (!pair) return;
    if (isChoice || model.state.locked) model.lock(pair);
    else model.show(pair);
    strip.reveal(strip.shown.indexOf(text), at);
  });
}
