// A region of the map as a small picture: one value a pixel, and what there is to say about pixels
// without one. Made in slices, so that the page answers in between.

import { cellOf } from "../base/data.js";
import { pause } from "../base/dom.js";
import { rowAt, withoutSources } from "../base/rows.js";
import { ALLOWED, colourAt, place } from "../base/palette.js";

/** What a pixel shows. */
export const VALUE = 0;
export const BLOCKED = 1; // no edge of it is allowed
export const UNHELD = 2; // the record does not hold it
export const BROKEN = 3; // NaN
export const HIDDEN = 4; // by the reader's wish
export const BARE = 5; // nothing is left of the row without what is hidden

/**
 * @typedef {{region: import("../base/state.js").Region, columns: number, rows: number,
 *   values: Float32Array, states: Uint8Array, detail: "cells" | "groups" | "blocks",
 *   largest: number, difference: boolean}} Raster
 * @typedef {{alive: () => boolean}} Turn
 */

const SLICE_MS = 12;
const ASKED_TOGETHER = 16;
// Single weights of a record that holds few of them are drawn from this many pixels on.
const LEAST_CELL = 4;

/**
 * @param {import("../base/state.js").Model} model
 * @param {import("../base/state.js").Region} region
 * @param {number} width at most so many pixels
 * @param {number} height
 * @param {Turn} turn
 * @returns {Promise<Raster | null>} null when its turn is over
 */
export async function rasterOf(model, region, width, height, turn) {
  const [q0, q1, s0, s1] = region;
  const columns = Math.max(1, Math.min(Math.floor(width), s1 - s0));
  const rows = Math.max(1, Math.min(Math.floor(height), q1 - q0));
  const single = columns === s1 - s0 && rows === q1 - q0;
  const readable = Math.min(width / (s1 - s0), height / (q1 - q0)) >= LEAST_CELL;
  /** @type {Raster} */
  const raster = {
    region, columns, rows, values: new Float32Array(columns * rows),
    states: new Uint8Array(columns * rows), detail: single ? "cells" : "groups", largest: 0,
    difference: model.sides().length > 1,
  };
  for (const [data, sign] of model.sides()) {
    if (!(await addSide(model, raster, data, sign, single && readable, turn))) return null;
  }
  if (raster.difference) raster.largest = largestSize(raster.values);
  await markBlocked(model, raster);
  markHidden(model, raster);
  await markBare(model, raster);
  return turn.alive() ? raster : null;
}

/**
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {number} sign
 * @param {boolean} readable whether single cells are large enough to be seen
 * @param {Turn} turn
 */
async function addSide(model, raster, data, sign, readable, turn) {
  const entry = data.entries[model.state.entry];
  if (!entry) return true;
  if (model.header.kind === "mask") {
    raster.largest = 1 / ALLOWED;
    return true;
  }
  if (entry.encoding) {
    const all = await model.matrix(data);
    raster.largest = Math.max(raster.largest, largestOf(all, model.hidden(), entry.sources));
    return addMatrix(model, raster, data, all, sign, turn);
  }
  if (entry.live && readable) return addLive(model, raster, data, sign, turn);
  if (entry.top && (readable || !entry.cells)) return addTop(model, raster, data, sign);
  if (entry.cells) return addBlocks(model, raster, data, sign);
  raster.states.fill(UNHELD);
  return true;
}

/**
 * @param {Float32Array} values
 * @param {Set<number>} hidden
 * @param {number} sources
 */
function largestOf(values, hidden, sources) {
  let largest = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] > largest && !(hidden.size && hidden.has(i % sources))) largest = values[i];
  }
  return largest;
}

/** @param {Float32Array} values */
function largestSize(values) {
  return values.reduce((largest, value) => Math.max(largest, Math.abs(value) || 0), 0);
}

/** Where pixel `index` of `pixels` begins in [start, stop).
 * @param {number} index
 * @param {number} pixels
 * @param {number} start
 * @param {number} stop
 */
export function pixelStart(index, pixels, start, stop) {
  return start + Math.floor((index * (stop - start)) / pixels);
}

/** The pixel that `position` of [start, stop) lies in.
 * @param {number} position
 * @param {number} pixels
 * @param {number} start
 * @param {number} stop
 */
export function pixelOf(position, pixels, start, stop) {
  return Math.ceil(((position - start + 1) * pixels) / (stop - start)) - 1;
}

/**
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {Float32Array} all
 * @param {number} sign
 * @param {Turn} turn
 */
async function addMatrix(model, raster, data, all, sign, turn) {
  const { region: [q0, q1, s0, s1], columns, rows, values, states } = raster;
  const entry = data.entries[model.state.entry];
  const mean = model.state.overview === "mean" || raster.difference;
  const hidden = model.hidden();
  let slice = performance.now();
  for (let y = 0; y < rows; y++) {
    if (performance.now() - slice > SLICE_MS) {
      await pause();
      if (!turn.alive()) return false;
      slice = performance.now();
    }
    const top = pixelStart(y, rows, q0, q1);
    const bottom = Math.max(top + 1, pixelStart(y + 1, rows, q0, q1));
    for (let x = 0; x < columns; x++) {
      const left = pixelStart(x, columns, s0, s1);
      const right = Math.max(left + 1, pixelStart(x + 1, columns, s0, s1));
      let sum = 0;
      let largest = 0;
      let held = 0;
      for (let q = top; q < bottom; q++) {
        const row = data.rowOf(entry, q);
        if (row < 0) continue;
        for (let s = left; s < right; s++) {
          if (hidden.size && hidden.has(s)) continue;
          const value = all[row * entry.sources + s];
          held += 1;
          sum += value;
          if (!(value <= largest)) largest = value;
        }
      }
      const i = y * columns + x;
      values[i] += sign * (mean ? sum / held : largest);
      if (!held) states[i] = UNHELD;
      else if (Number.isNaN(sum)) states[i] = BROKEN;
    }
  }
  return true;
}

/** Single cells that are asked for, a row at a time.
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {number} sign
 * @param {Turn} turn
 */
async function addLive(model, raster, data, sign, turn) {
  const { region: [q0, q1, s0], columns, values, states } = raster;
  const without = model.leftOut();
  for (let start = q0; start < q1; start += ASKED_TOGETHER) {
    const queries = Array.from({ length: Math.min(ASKED_TOGETHER, q1 - start) }, (_, i) => start + i);
    const rows = await Promise.all(queries.map((query) => rowAt(model.at(data), query)));
    if (!turn.alive()) return false;
    rows.forEach((whole, i) => {
      const row = withoutSources(whole, without);
      for (let x = 0; x < columns; x++) {
        const at = (queries[i] - q0) * columns + x;
        const value = row.values[s0 + x];
        values[at] += sign * value;
        if (row.held === "none") states[at] = UNHELD;
        else if (Number.isNaN(value)) states[at] = BROKEN;
        else raster.largest = Math.max(raster.largest, value);
      }
    });
  }
  return true;
}

/** Single cells from the largest weights of each row; the others are not held.
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {number} sign
 */
async function addTop(model, raster, data, sign) {
  const { sample, entry: e, head } = model.state;
  const { region: [q0, q1, s0, s1], columns, rows, values, states } = raster;
  const entry = data.entries[e];
  const heads = head >= 0 ? [head] : entry.heads.map((_, i) => i);
  const seen = new Uint8Array(values.length);
  const hidden = model.hidden();
  for (const top of await Promise.all(heads.map((h) => data.top(sample, e, h)))) {
    for (let row = 0; row < top.rows; row++) {
      const query = entry.rows ? entry.rows[row] : row;
      for (let i = row * top.each; i < (row + 1) * top.each; i++) {
        const source = top.sources[i];
        if (top.weights[i] / heads.length > raster.largest && !hidden.has(source)) {
          raster.largest = top.weights[i] / heads.length;
        }
        if (query < q0 || query >= q1 || source < s0 || source >= s1) continue;
        const at = pixelOf(query, rows, q0, q1) * columns + pixelOf(source, columns, s0, s1);
        seen[at] = 1;
        if (Number.isNaN(top.weights[i])) states[at] = BROKEN;
        const value = (sign * top.weights[i]) / heads.length;
        if (raster.detail === "cells") values[at] += value;
        else if (Math.abs(value) > Math.abs(values[at])) values[at] = value;
      }
    }
  }
  for (let i = 0; i < seen.length; i++) if (!seen[i] && values[i] === 0) states[i] = UNHELD;
  return true;
}

/**
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {number} sign
 */
async function addBlocks(model, raster, data, sign) {
  const { sample, entry: e, head, overview } = model.state;
  const { region: [q0, q1, s0, s1], columns, rows, values, states } = raster;
  const entry = data.entries[e];
  const blocks = await data.blocks(sample, e, head);
  const plane = blocks[overview];
  raster.detail = "blocks";
  const hiddenBlocks = new Set([...model.hidden()].map((s) => cellOf(s, entry.sources, blocks.columns)));
  raster.largest = Math.max(raster.largest, largestOf(plane, hiddenBlocks, blocks.columns));
  const across = Array.from({ length: columns }, (_, x) => cellOf(pixelStart(x, columns, s0, s1), entry.sources, blocks.columns));
  for (let y = 0; y < rows; y++) {
    const row = cellOf(pixelStart(y, rows, q0, q1), entry.queries, blocks.rows);
    for (let x = 0; x < columns; x++) {
      const column = across[x];
      const at = y * columns + x;
      const value = plane[row * blocks.columns + column];
      values[at] += sign * value;
      if (Number.isNaN(value)) states[at] = BROKEN;
      else if (hiddenBlocks.has(column)) states[at] = HIDDEN;
    }
  }
  return true;
}

/**
 * Mark the pixels without an edge that is allowed, on any of the sides that are shown.
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 */
async function markBlocked(model, raster) {
  const { sample, entry: e } = model.state;
  const sides = await Promise.all(model.sides().map(async ([data]) => ({ data, runs: await data.runs(sample, e) })));
  if (sides.some(({ runs }) => !runs)) return;
  const { columns, rows, states } = raster;
  const open = new Uint8Array(columns);
  for (let y = 0; y < rows; y++) {
    open.fill(0);
    for (const { data, runs } of sides) openPixels(model, raster, data, /** @type {any} */ (runs), y, open);
    for (let x = 0; x < columns; x++) if (!open[x]) states[y * columns + x] = BLOCKED;
  }
}

/**
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 * @param {import("../base/data.js").Data} data
 * @param {import("../base/data.js").Runs} runs
 * @param {number} y
 * @param {Uint8Array} open
 */
function openPixels(model, raster, data, runs, y, open) {
  const { region: [q0, q1, s0, s1], columns, rows } = raster;
  const entry = data.entries[model.state.entry];
  const whole = runs.start.length - 1 === entry.queries;
  const isMask = model.header.kind === "mask";
  const bottom = Math.max(pixelStart(y, rows, q0, q1) + 1, pixelStart(y + 1, rows, q0, q1));
  for (let q = pixelStart(y, rows, q0, q1); q < bottom; q++) {
    const row = whole ? q : data.rowOf(entry, q);
    if (row < 0) continue;
    for (let i = runs.start[row]; i < runs.start[row + 1]; i += 2) {
      const start = Math.max(runs.runs[i], s0);
      const stop = Math.min(runs.runs[i + 1], s1);
      if (start >= stop) continue;
      const [left, right] = [pixelOf(start, columns, s0, s1), pixelOf(stop - 1, columns, s0, s1)];
      open.fill(1, left, right + 1);
      if (isMask) countEdges(raster, y, start, stop, left, right);
    }
  }
}

/** Add what a run of allowed sources is of each pixel: the pixels of a mask are shares of edges.
 * @param {Raster} raster
 * @param {number} y
 * @param {number} start
 * @param {number} stop
 * @param {number} left
 * @param {number} right
 */
function countEdges({ region: [q0, q1, s0, s1], columns, rows, values }, y, start, stop, left, right) {
  const tall = Math.max(1, pixelStart(y + 1, rows, q0, q1) - pixelStart(y, rows, q0, q1));
  for (let x = left; x <= right; x++) {
    const from = pixelStart(x, columns, s0, s1);
    const to = Math.max(from + 1, pixelStart(x + 1, columns, s0, s1));
    values[y * columns + x] += (Math.min(stop, to) - Math.max(start, from)) / (tall * (to - from));
  }
}

/**
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 */
function markHidden(model, raster) {
  const { region: [, , s0, s1], columns, rows, states } = raster;
  const hidden = model.hidden();
  if (!hidden.size || columns !== s1 - s0) return;
  for (const source of hidden) {
    if (source < s0 || source >= s1) continue;
    for (let y = 0; y < rows; y++) states[y * columns + source - s0] = HIDDEN;
  }
}

/**
 * Rows of which nothing is left without the hidden sources are blank.
 * @param {import("../base/state.js").Model} model
 * @param {Raster} raster
 */
async function markBare(model, raster) {
  const { region: [q0, q1], columns, rows, states } = raster;
  if (!model.leftOut().size || raster.difference || rows !== q1 - q0) return;
  for (let y = 0; y < rows; y++) {
    const row = await model.row(q0 + y);
    if (row.left !== 0) continue;
    for (let x = 0; x < columns; x++) if (states[y * columns + x] === VALUE) states[y * columns + x] = BARE;
  }
}

/**
 * Colours, transparent where a pixel has no value.
 * @param {Raster} raster
 * @param {import("../base/palette.js").Palette} colours
 * @param {import("../base/state.js").Scale} scale
 * @param {"row" | "map"} norm
 * @returns {ImageData}
 */
export function paint(raster, colours, scale, norm) {
  const { columns, rows, values, states, difference } = raster;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const table = difference ? colours.diverging : colours.sequential;
  for (let y = 0; y < rows; y++) {
    const start = y * columns;
    const largest = norm === "row" ? largestOfRow(raster, y) : raster.largest;
    for (let i = start; i < start + columns; i++) {
      if (states[i] !== VALUE) continue;
      pixels[i] = colourAt(table, place(values[i], largest, scale, difference));
    }
  }
  return image;
}

/**
 * @param {Raster} raster
 * @param {number} y
 */
export function largestOfRow({ columns, values, states }, y) {
  let largest = 0;
  for (let i = y * columns; i < (y + 1) * columns; i++) {
    if (states[i] === VALUE) largest = Math.max(largest, Math.abs(values[i]));
  }
  return largest;
}
