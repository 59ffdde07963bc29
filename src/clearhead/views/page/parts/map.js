// The map: rows are queries, columns are sources; the pointer and the keys move in it.

import { atNextFrame, element } from "../base/dom.js";
import { contextOf, fit, inkOf, paintMap, paintMarks } from "./paint.js";
import { rasterOf } from "./raster.js";

/** @typedef {import("../base/state.js").Region} Region */
/** @typedef {{left: number, top: number, width: number, height: number, region: Region,
 *   labelled: boolean}} Frame */

const LARGEST_CELL = 40;
const LABELS_FROM = 13;
const TALLEST = 620;
const NUMBERS = 52; // pixels beside a map whose axes have numbers
const SMALLEST_REGION = 4;

export class MapView {
  /**
   * @param {import("../base/state.js").Model} model
   * @param {() => boolean} dark
   */
  constructor(model, dark) {
    this.model = model;
    this.dark = dark;
    this.base = element("canvas", { "aria-hidden": "true" });
    this.over = element("canvas", { class: "over", tabindex: "0", role: "application" });
    this.over.setAttribute("aria-roledescription", "attention map");
    this.root = element("div", { class: "plot" }, this.base, this.over);
    /** @type {Frame | null} */
    this.frame = null;
    /** @type {import("./raster.js").Raster | null} */
    this.raster = null;
    this.turn = 0;
    /** @type {(() => void)[]} */
    this.painted = [];
    this.drawOver = atNextFrame(() => this.paintOver());
    this.redraw = atNextFrame(() => void this.draw().catch(this.model.report));
    new ResizeObserver(() => this.redraw()).observe(this.root);
    listenToPointer(this);
    this.over.addEventListener("keydown", (event) => onKey(this, event));
  }

  /** @returns {Region} */
  get region() {
    const { queries, sources } = this.model.entry;
    return this.model.state.zoom ?? [0, queries, 0, sources];
  }

  /** @returns {Frame} */
  layout() {
    const region = this.region;
    const [q0, q1, s0, s1] = region;
    const across = s1 - s0;
    const down = q1 - q0;
    const room = Math.max(120, this.root.clientWidth - 22);
    const fits = (/** @type {number} */ beside) => Math.min((room - beside) / across, TALLEST / down) >= LABELS_FROM;
    // Labels are measured only where they may fit.
    const beside = fits(NUMBERS) ? this.labelRoom(q0, q1, (query) => this.model.queryLabel(query, 14)) : 0;
    const labelled = fits(NUMBERS) && fits(beside);
    const left = labelled ? beside : NUMBERS;
    const top = labelled ? this.labelRoom(s0, s1, (source) => this.model.sourceLabel(source, 14)) : 40;
    const cell = Math.min(LARGEST_CELL, (room - left) / across, TALLEST / down);
    const width = Math.min(room - left, Math.max(cell * across, Math.min(across * 20, 220)));
    const height = Math.max(cell * down, Math.min(down * 20, 180));
    return { left, top, width, height, region, labelled };
  }

  /** Pixels for the longest label, and for the word beside the axis.
   * @param {number} start
   * @param {number} stop
   * @param {(position: number) => string} labelOf
   */
  labelRoom(start, stop, labelOf) {
    const context = contextOf(this.base);
    context.font = `12px ${inkOf(this.root).font}`;
    let longest = 0;
    for (let at = start; at < stop; at++) longest = Math.max(longest, context.measureText(labelOf(at)).width);
    return Math.round(Math.min(108, 32 + longest));
  }

  async draw() {
    if (!this.root.clientWidth) return;
    const turn = ++this.turn;
    if (!this.model.drawn) return this.clear();
    const frame = this.layout();
    const ratio = devicePixelRatio || 1;
    const alive = () => turn === this.turn;
    const raster = await rasterOf(this.model, frame.region, frame.width * ratio, frame.height * ratio, { alive });
    if (!raster || !alive()) return;
    this.frame = frame;
    this.raster = raster;
    this.paintBase(ratio);
    this.paintOver();
    this.describe();
    for (const listener of this.painted) listener();
  }

  /** Where the chosen call has no map. */
  clear() {
    this.frame = this.raster = null;
    for (const canvas of [this.base, this.over]) canvas.width = canvas.height = 0;
  }

  /** @param {number} ratio */
  paintBase(ratio) {
    const frame = /** @type {Frame} */ (this.frame);
    for (const canvas of [this.base, this.over]) fit(canvas, frame, ratio);
    const context = contextOf(this.base);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintMap(context, frame, /** @type {any} */ (this.raster), this.model, this.dark(), inkOf(this.root));
  }

  describe() {
    const { entry, state } = this.model;
    const [q0, q1, s0, s1] = this.region;
    const { left, top, width, height } = /** @type {Frame} */ (this.frame);
    this.over.dataset.frame = [left, top, width, height].join(" ");
    this.over.setAttribute(
      "aria-label",
      `Map of ${this.model.headName(state.entry, state.head)}: rows are queries ${q0} to ${q1 - 1} ` +
        `of ${entry.queries}, columns are sources ${s0} to ${s1 - 1} of ${entry.sources}. ` +
        "Arrow keys move, Enter locks, Escape frees, plus and minus zoom.",
    );
  }

  paintOver() {
    const { frame } = this;
    if (!frame) return;
    const ratio = devicePixelRatio || 1;
    const context = contextOf(this.over);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.over.width, this.over.height);
    paintMarks(context, frame, this.model, inkOf(this.root));
  }

  /** @param {PointerEvent | MouseEvent} event */
  cellAt(event) {
    const { frame } = this;
    if (!frame) return null;
    const box = this.over.getBoundingClientRect();
    const [q0, q1, s0, s1] = frame.region;
    const x = (event.clientX - box.left - frame.left) / frame.width;
    const y = (event.clientY - box.top - frame.top) / frame.height;
    if (!(x < 1 && y < 1 && (x >= 0 || y >= 0))) return null;
    const query = Math.floor(q0 + Math.max(0, y) * (q1 - q0));
    const source = Math.floor(s0 + Math.max(0, x) * (s1 - s0));
    return { query: y < 0 ? this.model.pair.query : query, source: x < 0 ? null : source };
  }

  /**
   * @param {number} factor above 1 shows more
   * @param {{query: number, source: number | null}} [around]
   */
  zoom(factor, around = this.model.pair) {
    const { queries, sources } = this.model.entry;
    const [q0, q1, s0, s1] = this.region;
    const [top, bottom] = scaled(q0, q1, queries, factor, around.query);
    const [left, right] = scaled(s0, s1, sources, factor, around.source ?? (s0 + s1) / 2);
    this.go([top, bottom, left, right]);
  }

  /**
   * @param {number} down
   * @param {number} across
   */
  pan(down, across) {
    const { queries, sources } = this.model.entry;
    const [q0, q1, s0, s1] = this.region;
    const y = Math.max(-q0, Math.min(queries - q1, Math.round(down)));
    const x = Math.max(-s0, Math.min(sources - s1, Math.round(across)));
    if (x || y) this.go([q0 + y, q1 + y, s0 + x, s1 + x]);
  }

  /** @param {Region} region */
  go(region) {
    const { queries, sources } = this.model.entry;
    const whole = region[0] === 0 && region[1] === queries && region[2] === 0 && region[3] === sources;
    this.model.set({ zoom: whole ? null : region });
  }

  /** Bring a cell into the region. @param {import("../base/state.js").Pair} pair */
  reveal({ query, source }) {
    const [q0, q1, s0, s1] = this.region;
    const past = (/** @type {number} */ at, /** @type {number} */ start, /** @type {number} */ stop) =>
      at < start ? at - start : at >= stop ? at - stop + 1 : 0;
    this.pan(past(query, q0, q1), source === null ? 0 : past(source, s0, s1));
  }
}

/**
 * @param {number} start
 * @param {number} stop
 * @param {number} length
 * @param {number} factor
 * @param {number} around
 * @returns {[number, number]}
 */
function scaled(start, stop, length, factor, around) {
  const many = Math.min(length, Math.max(Math.min(SMALLEST_REGION, length), Math.round((stop - start) * factor)));
  const share = Math.min(1, Math.max(0, (around - start) / (stop - start)));
  const first = Math.max(0, Math.min(length - many, Math.round(around - share * many)));
  return [first, first + many];
}

/** @param {MapView} map */
function listenToPointer(map) {
  const { over, model } = map;
  /** @type {{x: number, y: number, moved: boolean} | null} */
  let drag = null;
  over.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: false };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (drag && model.state.zoom && map.frame && event.buttons) {
      const [q0, q1, s0, s1] = map.frame.region;
      const across = ((drag.x - event.clientX) / map.frame.width) * (s1 - s0);
      const down = ((drag.y - event.clientY) / map.frame.height) * (q1 - q0);
      if (Math.abs(across) < 1 && Math.abs(down) < 1) return;
      drag = { x: event.clientX, y: event.clientY, moved: true };
      return map.pan(down, across);
    }
    model.show(map.cellAt(event));
  });
  over.addEventListener("pointerup", (event) => {
    const cell = map.cellAt(event);
    if (drag && !drag.moved && cell) model.lock(cell);
    drag = null;
  });
  over.addEventListener("pointerleave", () => model.show(null));
  over.addEventListener("dblclick", (event) => map.zoom(0.5, map.cellAt(event) ?? undefined));
  over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    map.zoom(event.deltaY > 0 ? 1.25 : 0.8, map.cellAt(event) ?? undefined);
  }, { passive: false });
}

/**
 * @param {MapView} map
 * @param {KeyboardEvent} event
 */
function onKey(map, event) {
  const { model } = map;
  const { query, source } = model.pair;
  const { queries, sources } = model.entry;
  const step = event.shiftKey ? 10 : 1;
  const at = { query, source: source ?? model.watchedSource() };
  const moves = /** @type {Record<string, [number, number]>} */ ({
    ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step],
    PageUp: [-20, 0], PageDown: [20, 0], Home: [0, -sources], End: [0, sources],
  });
  const move = moves[event.key];
  if (move) {
    at.query = Math.max(0, Math.min(queries - 1, query + move[0]));
    at.source = Math.max(0, Math.min(sources - 1, at.source + move[1]));
    if (model.state.locked) model.lock(at);
    else model.show(at);
    map.reveal(at);
  } else if (event.key === "Enter" || event.key === " ") model.lock(at);
  else if (event.key === "+" || event.key === "=") map.zoom(0.5, at);
  else if (event.key === "-") map.zoom(2, at);
  else if (event.key === "0") model.set({ zoom: null });
  else return;
  event.preventDefault();
  event.stopPropagation();
}
