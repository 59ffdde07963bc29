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
  if (row < 0) return noRow(entry.sources);
  if (entry.live) return liveRow({ data, s, e, h }, query);
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

/** @param {Uint8Array} bytes */
function decodeNumbers(bytes) {
  return new Float32Array(bytes.slice().buffer);
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
  const rows = await Promise.all(
    heads.map((head) => data.chunk(`row/${s}/${e}/${head}/${query}`, decodeNumbers, (v) => v.byteLength)),
  );
  const values = new Float32Array(data.entries[e].sources);
  for (const row of rows) row.forEach((value, i) => { values[i] += value / heads.length; });
  return { values, known: null, sum: total(values), about: false, held: "all" };
}

/**
 * A row without some sources, the others scaled so that they sum to 1 again; where nothing is left
 * of it, a row of zeros.
 * @param {Row} row
 * @param {Set<number>} hidden
 * @returns {Row}
 */
export function withoutSources(row, hidden) {
  if (!hidden.size || row.held !== "all") return row;
  const values = row.values.slice();
  for (const source of hidden) values[source] = 0;
  const left = total(values);
  if (left > 0) values.forEach((value, i) => { values[i] = value / left; });
  return { ...row, values, left, sum: left > 0 ? 1 : left };
}

/**
 * The same for all rows of a map: the scaled weights, and what was left of each row.
 * @param {Float32Array} all
 * @param {number} sources
 * @param {Set<number>} hidden
 */
export function matrixWithout(all, sources, hidden) {
  const values = all.slice();
  const left = new Float32Array(sources ? all.length / sources : 0);
  for (let row = 0; row < left.length; row++) {
    const cells = values.subarray(row * sources, (row + 1) * sources);
    for (const source of hidden) cells[source] = 0;
    left[row] = total(cells);
    if (left[row] > 0) for (let i = 0; i < sources; i++) cells[i] /= left[row];
  }
  return { values, left };
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
 * @param {Set<number>} without sources that are left out of the rows, which sum to 1 again
 * @returns {Promise<Column | null>} null where the record holds no single weights
 */
export async function columnAt({ data, s, e, h }, source, without) {
  const entry = data.entries[e];
  const rows = entry.rows ? entry.rows.length : entry.queries;
  const values = new Float32Array(rows);
  if (entry.live) return liveColumn({ data, s, e, h }, source, without);
  if (entry.encoding) {
    const all = await mapOf({ data, s, e, h }, without);
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
 * All weights of what is chosen.
 * @param {Place} place
 * @param {Set<number>} without
 */
export async function mapOf({ data, s, e, h }, without) {
  const all = await data.matrix(s, e, h);
  if (!without.size) return all;
  const { sources } = data.entries[e];
  const make = async () => matrixWithout(all, sources, without);
  const name = `without/${[...without].join("-")}/${s}/${e}/${h}`;
  return (await data.kept.get(name, make, (v) => v.values.byteLength)).values;
}

/**
 * A column that the server or the kernel is asked for.
 * @param {Place} place
 * @param {number} source
 * @param {Set<number>} without
 * @returns {Promise<Column>}
 */
async function liveColumn({ data, s, e, h }, source, without) {
  const heads = h >= 0 ? [h] : data.entries[e].heads.map((_, i) => i);
  const ask = async (/** @type {number} */ at) => {
    const names = heads.map((head) => `column/${s}/${e}/${head}/${at}`);
    const all = await Promise.all(names.map((name) => data.chunk(name, decodeNumbers, (v) => v.byteLength)));
    return all[0].map((_, i) => all.reduce((sum, one) => sum + one[i], 0) / heads.length);
  };
  const values = await ask(source);
  if (!without.size) return { values, known: null, about: false };
  if (without.has(source)) return { values: values.fill(0), known: null, about: false };
  const left = new Float32Array(values.length);
  for (let row = 0; row < left.length; row++) left[row] = await meanSum({ data, s, e, h }, row);
  for (const column of await Promise.all([...without].map(ask))) column.forEach((value, row) => { left[row] -= value; });
  return { values: values.map((value, row) => (left[row] > 0 ? value / left[row] : 0)), known: null, about: true };
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
 * The runs of both.
 * @param {[number, number][] | null} one
 * @param {[number, number][] | null} other
 * @returns {[number, number][] | null}
 */
export function union(one, other) {
  if (!one || !other) return null;
  /** @type {[number, number][]} */
  const found = [];
  for (const [start, stop] of [...one, ...other].sort((a, b) => a[0] - b[0])) {
    const last = found[found.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], stop);
    else found.push([start, stop]);
  }
  return found;
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
