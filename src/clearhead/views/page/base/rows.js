// One row (a query's weights) or one column (a source's weights) of what is chosen: a head or the
// mean of a layer, of this record, the other one, or their difference.

import { Data } from "./data.js";

/** @typedef {import("./data.js").Row} Row */
/** @typedef {{values: Float32Array, known: Uint8Array | null, about: boolean}} Column */
/** @typedef {{data: Data, s: number, e: number, h: number}} Place */

const NONE = 0xffffffff;

/**
 * The weights of one query.
 * @param {Place} place
 * @param {number} query
 * @returns {Promise<Row>}
 */
export async function rowAt({ data, s, e, h }, query) {
  const entry = data.entries[e];
  const row = data.rowOf(entry, query);
  if (data.source.header.live) return liveRow({ data, s, e, h }, query);
  if (row < 0) return noRow(entry.sources);
  if (entry.encoding) {
    const all = await data.matrix(s, e, h);
    const values = all.slice(row * entry.sources, (row + 1) * entry.sources);
    const sum = entry.sums ? await meanSum({ data, s, e, h }, row) : total(values);
    const about = entry.encoding === "log8";
    if (about && entry.top && h >= 0) refine(values, await data.top(s, e, h), row);
    return { values, known: null, sum, about, held: "all" };
  }
  if (entry.top) return topRow({ data, s, e, h }, row);
  return noRow(entry.sources);
}

/** @param {number} sources @returns {Row} */
function noRow(sources) {
  return { values: new Float32Array(sources), known: null, sum: NaN, about: false, held: "none" };
}

/**
 * A row that the server or the kernel is asked for.
 * @param {Place} place
 * @param {number} query
 * @returns {Promise<Row>}
 */
export async function liveRow({ data, s, e, h }, query) {
  const heads = h >= 0 ? [h] : data.entries[e].heads.map((_, i) => i);
  const decode = (/** @type {Uint8Array} */ bytes) => new Float32Array(bytes.slice().buffer);
  const rows = await Promise.all(
    heads.map((head) => data.chunk(`row/${s}/${e}/${head}/${query}`, decode, (v) => v.byteLength)),
  );
  const values = new Float32Array(data.entries[e].sources);
  for (const row of rows) row.forEach((value, i) => { values[i] += value / heads.length; });
  return { values, known: null, sum: total(values), about: false, held: "all" };
}

/** Put the exact largest weights where codes are coarse.
 * @param {Float32Array} values
 * @param {import("./data.js").Top} top
 * @param {number} row
 */
function refine(values, top, row) {
  for (let i = row * top.each; i < (row + 1) * top.each; i++) {
    if (top.sources[i] !== NONE) values[top.sources[i]] = top.weights[i];
  }
}

/**
 * @param {Place} place
 * @param {number} row
 * @returns {Promise<Row>}
 */
async function topRow({ data, s, e, h }, row) {
  const entry = data.entries[e];
  const heads = h >= 0 ? [h] : entry.heads.map((_, i) => i);
  const values = new Float32Array(entry.sources);
  const known = new Uint8Array(entry.sources);
  for (const top of await Promise.all(heads.map((head) => data.top(s, e, head)))) {
    for (let i = row * top.each; i < (row + 1) * top.each; i++) {
      if (top.sources[i] === NONE) continue;
      values[top.sources[i]] += top.weights[i] / heads.length;
      known[top.sources[i]] = 1;
    }
  }
  const sum = entry.sums ? await meanSum({ data, s, e, h }, row) : NaN;
  const about = heads.length > 1 || ["log8", "planes"].includes(entry.top_encoding ?? "f16");
  return { values, known, sum, about, held: "top" };
}

/**
 * @param {Place} place
 * @param {number} row
 */
async function meanSum({ data, s, e, h }, row) {
  const heads = h >= 0 ? [h] : data.entries[e].heads.map((_, i) => i);
  const sums = await Promise.all(heads.map((head) => data.sums(s, e, head)));
  return sums.reduce((sum, one) => sum + one[row], 0) / heads.length;
}

/** @param {Float32Array} values */
function total(values) {
  let sum = 0;
  for (const value of values) sum += value;
  return sum;
}

/**
 * The weights that every query puts on one source, by row of the record.
 * @param {Place} place
 * @param {number} source
 * @returns {Promise<Column | null>} null where the record holds no single weights
 */
export async function columnAt({ data, s, e, h }, source) {
  const entry = data.entries[e];
  const rows = entry.rows ? entry.rows.length : entry.queries;
  const values = new Float32Array(rows);
  if (entry.encoding) {
    const all = await data.matrix(s, e, h);
    for (let row = 0; row < rows; row++) values[row] = all[row * entry.sources + source];
    return { values, known: null, about: entry.encoding === "log8" };
  }
  if (!entry.top) return null;
  const known = new Uint8Array(rows);
  const heads = h >= 0 ? [h] : entry.heads.map((_, i) => i);
  for (const top of await Promise.all(heads.map((head) => data.top(s, e, head)))) {
    for (let i = 0; i < top.sources.length; i++) {
      if (top.sources[i] !== source) continue;
      const row = Math.floor(i / top.each);
      values[row] += top.weights[i] / heads.length;
      known[row] = 1;
    }
  }
  return { values, known, about: heads.length > 1 || entry.top_encoding !== "f16" };
}

/**
 * @template {{values: Float32Array, known: Uint8Array | null, about: boolean}} T
 * @param {T} one
 * @param {T} other
 * @returns {T}
 */
export function difference(one, other) {
  const values = one.values.map((value, i) => value - other.values[i]);
  const { known } = one;
  const others = other.known;
  const both = known && others ? known.map((k, i) => k | others[i]) : null;
  return { ...one, values, known: both, about: one.about || other.about };
}

/**
 * The runs of sources that a query may attend to, or null where these are all.
 * @param {import("./data.js").Runs | null} runs
 * @param {Data} data
 * @param {number} e
 * @param {number} query
 * @returns {[number, number][] | null}
 */
export function allowedOf(runs, data, e, query) {
  if (!runs) return null;
  const row = maskRowOf(runs, data, e, query);
  /** @type {[number, number][]} */
  const found = [];
  if (row < 0) return found;
  for (let i = runs.start[row]; i < runs.start[row + 1]; i += 2) {
    found.push([runs.runs[i], runs.runs[i + 1]]);
  }
  return found;
}

/** A mask holds every query, or those that the record has rows of.
 * @param {import("./data.js").Runs} runs
 * @param {Data} data
 * @param {number} e
 * @param {number} query
 */
function maskRowOf(runs, data, e, query) {
  const entry = data.entries[e];
  return runs.start.length - 1 === entry.queries ? query : data.rowOf(entry, query);
}

/**
 * Whether a query may attend to a source.
 * @param {import("./data.js").Runs | null} runs
 * @param {Data} data
 * @param {number} e
 * @param {number} query
 * @param {number} source
 */
export function allows(runs, data, e, query, source) {
  if (!runs) return true;
  const row = maskRowOf(runs, data, e, query);
  if (row < 0) return false;
  for (let i = runs.start[row]; i < runs.start[row + 1]; i += 2) {
    if (runs.runs[i] <= source && source < runs.runs[i + 1]) return true;
  }
  return false;
}

/**
 * @param {[number, number][] | null} allowed
 * @param {number} source
 */
export function isAllowed(allowed, source) {
  return !allowed || allowed.some(([start, stop]) => start <= source && source < stop);
}

/**
 * @param {[number, number][] | null} allowed
 * @param {number} sources
 */
export function countAllowed(allowed, sources) {
  return allowed ? allowed.reduce((sum, [start, stop]) => sum + stop - start, 0) : sources;
}
